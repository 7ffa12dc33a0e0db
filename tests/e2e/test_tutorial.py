"""The tutorials in docs, followed literally: each page in one shell, from its first command to its last. `…` stands for anything."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from acceptance.conftest import REPOSITORY, holding
from furnished import furnish

PAGES = sorted((REPOSITORY / "docs" / "tutorial").glob("*.md"))


def steps(page: Path) -> list[tuple[str, str]]:
    """(command, output) in order; a line that begins with > goes on with the command before."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append((line[2:], ""))
                continue
            command, output = found[-1]
            if line.startswith(">") and not output:
                found[-1] = (command + line[1:].removeprefix(" "), "")
            else:
                found[-1] = (command, output + line)
    return found


def test_there_is_a_page_for_the_first_run_and_one_for_the_service() -> None:
    assert [page.name for page in PAGES] == ["first-run.md", "service.md"]
    assert all(len(steps(page)) > 8 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_true(page: Path, shared: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    furnish(state, shared)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    shell = subprocess.Popen(
        ["/bin/sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=REPOSITORY,
        env=environment | {"CORRAL_STATE_DIR": str(state), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    mark = "--end-of-command--"
    script = "".join(f"{command}status=$?; echo '{mark}'; (exit $status)\n" for command, _ in steps(page))
    try:
        printed, _ = shell.communicate(script.encode(), timeout=600)
    finally:
        shell.kill()
    outputs = printed.decode().split(f"{mark}\n")
    for (command, expected), output in zip(steps(page), outputs, strict=False):
        pattern = re.escape(expected).replace("…", "(?s:.*)")
        assert re.fullmatch(pattern, output), f"{command}\nexpected:\n{expected}\ngot:\n{output}"
    assert len(outputs) == len(steps(page)) + 1
    assert not holding(state), "something that the page started lives on"
