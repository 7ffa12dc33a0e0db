"""`./corral` until the command line has been loaded: signals, refusals, and the one document of `--json`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corral.errors import CorralError

REPOSITORY = Path(__file__).parents[3]
START = REPOSITORY / "deploy" / "start.py"

AT_SITE = """
import site, _signal, sys
number, start, sys.argv = int(sys.argv[1]), sys.argv[2], ["corral", *sys.argv[3:]]
site.main = lambda: _signal.raise_signal(number)
exec(compile(open(start).read(), start, "exec"), {"__name__": "__main__", "__file__": start})
"""


def words_of(as_json: bool) -> list[str]:
    return ["run", *(["--json"] if as_json else []), "--", "x", "--json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_guards_stand_before_the_packages_are_looked_for(number: signal.Signals, as_json: bool) -> None:
    command = [sys.executable, "-I", "-S", "-c", AT_SITE, str(int(number)), str(START), *words_of(as_json)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number, b"")
    if as_json:
        assert json.loads(done.stdout)["error"]["code"] == "cancelled"
    else:
        assert done.stdout == b""


def launched(tmp_path: Path, sha256sum: str, as_json: bool) -> subprocess.CompletedProcess[str]:
    """`./corral` with a `sha256sum` of ours, which it calls before it knows what there is."""
    (tmp_path / "sha256sum").write_text(f"#!/bin/sh\n{sha256sum}\n")
    (tmp_path / "sha256sum").chmod(0o755)
    return subprocess.run(
        [str(REPOSITORY / "corral"), *words_of(as_json)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals, as_json: bool) -> None:
    done = launched(tmp_path, f"kill -{number.name.removeprefix('SIG')} 0", as_json)
    assert done.returncode == 128 + number
    if number == signal.SIGINT:  # of the others a shell may tell who died
        assert done.stderr == ""
    if as_json:
        error = CorralError("cancelled", f"stopped by {number.name}", hint=None)
        assert json.loads(done.stdout) == {"error": error.to_problem()}
    else:
        assert done.stdout == ""


def test_a_refusal_of_the_launcher_is_the_document_too(tmp_path: Path) -> None:
    done = launched(tmp_path, "exit 1", True)
    assert (done.returncode, done.stderr) == (125, "")
    error = CorralError("infra_error", "sha256sum is needed: install coreutils", retryable=False)
    assert json.loads(done.stdout) == {"error": error.to_problem()}
    done = launched(tmp_path, "exit 1", False)
    assert (done.returncode, done.stdout, done.stderr) == (125, "", f"corral: {error.detail}\n")
