"""The examples of the how-to pages for other frameworks, run as they stand in the environments of their extras."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from foreign import CHECKOUT, clean, delete_what_is_left, embedded, environment

pytestmark = [pytest.mark.index, pytest.mark.slow, pytest.mark.timeout(3600)]
EXAMPLE = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("plug", ["inspect-ai", "pydantic-ai"])
def test_the_example_prints_what_the_page_says_and_leaves_no_sandbox(plug: str, shared: Path, tmp_path: Path) -> None:
    [(program, said)] = EXAMPLE.findall((CHECKOUT / "docs" / "howto" / f"{plug}.md").read_text())
    (tmp_path / "example.py").write_text(program)
    python = environment(plug, shared)
    with embedded(shared / f"ecosystem-howto-{plug}", shared) as there:
        env = clean() | there
        done = subprocess.run([python, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
        left = delete_what_is_left(env)
    assert (done.stdout, done.returncode) == (said, 0), done.stderr[-3000:]
    assert left == []
