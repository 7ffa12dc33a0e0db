"""The SDK's reference page is true: every example runs and prints what stands below it, every name on it exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from corral.client import sdk
from furnished import furnish

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "sdk.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    made = tmp_path_factory.mktemp("above") / "state"
    furnish(made, shared)
    return made


def test_every_example_says_what_it_prints() -> None:
    assert len(EXAMPLES) == PAGE.count("```python\n") == 5


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=[str(n) for n in range(len(EXAMPLES))])
def test_an_example_prints_what_the_page_says(code: str, printed: str, state: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "CORRAL_STATE_DIR": str(state), "PYTHONIOENCODING": "utf-8"}
    environment.pop("CORRAL_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_the_page_names_every_public_member() -> None:
    names = {
        member
        for kind in (sdk.Corral, sdk.Run, sdk.RunHandle, sdk.Runs, sdk.Exec, sdk.Sandbox, sdk.Files, sdk.Archive)
        for member in vars(kind)
        if not member.startswith("_")
    }
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", PAGE)) == []
