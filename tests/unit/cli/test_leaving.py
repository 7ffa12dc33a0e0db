"""Signals at every moment of a command's life: one document with `--json`, a shell's status, no traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from corral.cli import connection, leaving
from corral.errors import CorralError

from .conftest import RUN, Call, FakeTransport, ended, refusal

AT_IMPORT = """
import signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            signal.raise_signal(NUMBER)
            print("went on", file=sys.stderr)
sys.argv = ["corral", *ARGUMENTS]
from corral.cli import main
sys.modules.pop(MODULE, None)
sys.meta_path.insert(0, Hook())
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module", ["corral.cli.commands", "click", "corral.cli.terminal", "corral.cli.run", "corral.cli.words"]
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_signal_while_the_program_loads(module: str, number: signal.Signals, as_json: bool) -> None:
    arguments = ["run", *(["--json"] if as_json else []), "--", "x", "--json"]
    script = f"MODULE = {module!r}\nNUMBER = {int(number)}\nARGUMENTS = {arguments!r}\n{AT_IMPORT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number, b"")
    if as_json:
        assert json.loads(done.stdout)["error"]["code"] == "cancelled"
    else:
        assert done.stdout == b""


def test_the_document_that_a_handler_writes_is_the_problem_of_its_code() -> None:
    for number in leaving.SIGNALS:
        error = CorralError("cancelled", leaving.detail(number), hint=leaving.HINT)
        assert json.loads(leaving.document(number)) == {"error": error.to_problem()}


@pytest.mark.parametrize("command", [["run", "--", "x"], ["sandbox", "ls"], ["cp", "sbx_1:a", "/tmp/b"], ["doctor"]])
def test_a_signal_while_the_service_starts(corral: Call, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setattr(connection, "connect", lambda **_: signal.raise_signal(signal.SIGINT))
    told = corral(
        command[0], *command[1:2][: command[0] == "sandbox"], "--json", *command[1 + (command[0] == "sandbox") :]
    )
    assert (told.status, told.err, told.json["error"]["code"]) == (130, "", "cancelled")
    said = corral(*command)
    assert (said.status, said.out, said.err) == (130, b"", "")


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_follows_the_document(
    corral: Call, transport: FakeTransport, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    def close() -> None:
        if failing:
            raise refusal("infra_error", "did not close")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(transport, "close", close)
    transport.document = ended()
    told = corral("run", "--json", "--", "x")
    assert told.json["id"] == RUN
    assert (told.status, told.err) == ((125, "corral: infra_error: did not close\n") if failing else (0, ""))


@pytest.mark.parametrize("words", [["-c", "x", "a", "--json"], ["-c", "--json"], ["--shell", "--json"]])
def test_a_json_of_the_program_is_none_of_ours(corral: Call, transport: FakeTransport, words: list[str]) -> None:
    transport.document = refusal("not_found", "no")
    said = corral("run", *words)
    assert (said.status, said.out, said.err) == (125, b"", "corral: not_found: no\n")


def test_the_second_signal_leaves_at_once_and_still_with_a_document() -> None:
    script = """
import signal, sys
from corral.cli import connection
class Fake:
    def request(self, method, path, json=None, params=None, headers=None):
        if method == "GET" or path.endswith("/cancel"):
            signal.raise_signal(signal.SIGINT)
        return {"id": "run_1", "state": "running", "result": None}
    def close(self): pass
connection.connect = lambda **_: Fake()
sys.argv = ["corral", "run", "--json", "--", "x"]
from corral.cli import main
main.main()
"""
    done: Any = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")
    assert json.loads(done.stdout)["error"]["code"] == "cancelled"
