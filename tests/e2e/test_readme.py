"""The console blocks of the README do what they show. `…` stands for anything."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from acceptance.conftest import REPOSITORY

BLOCKS = re.findall(r"^```console\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def steps(block: str) -> list[tuple[str, str]]:
    """(command, output) in order."""
    found: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].rstrip("\n"), ""))
        else:
            command, output = found[-1]
            found[-1] = (command, output + line)
    return found


def test_first_screen_shows_both_commands() -> None:
    first = "".join((REPOSITORY / "README.md").read_text().splitlines(keepends=True)[:40])
    assert "$ ./corral run " in first and "$ ./check\n" in first


@pytest.mark.parametrize("block", [b for b in BLOCKS if "./check" not in b], ids=lambda b: b.split("\n")[0][2:40])
def test_console_block_is_true(block: str, tmp_path: Path) -> None:
    shell = subprocess.Popen(
        ["/bin/sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        cwd=REPOSITORY, env=os.environ | {"CORRAL_STATE_DIR": str(tmp_path / "state")},
    )  # fmt: skip
    mark = "--end-of-command--"
    script = "".join(f"{command}\nstatus=$?; echo '{mark}'; (exit $status)\n" for command, _ in steps(block))
    printed, _ = shell.communicate(script.encode(), timeout=600)
    outputs = printed.decode().split(mark + "\n")
    for (command, expected), output in zip(steps(block), outputs, strict=False):
        if "--memory 64M" in command and os.geteuid() != 0:
            return  # as the README says below the block; what follows is this command's status
        pattern = re.escape(expected).replace("…", "(?s:.*)")
        assert re.fullmatch(pattern, output), f"{command}\nexpected:\n{expected}\ngot:\n{output}"
