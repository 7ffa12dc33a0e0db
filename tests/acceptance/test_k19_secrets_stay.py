"""K19: what the server knows is not inside, and what a caller passes as environment is nowhere but in the program that got it.

Values that are declared secret, and their masking, belong to a later step. Until then an environment is part of the recorded
request of a run or exec (it is what a restart and a repetition need), readable by the owner of the state directory and by nobody else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODES, RUNC, STRONG, _box_of, _empty, marked
from .serving import Server

SEARCH = r"""
import json, os, re, sys
words = [word.encode() for word in json.loads(sys.stdin.readline())]
found = []
def look(path):
    try:
        if os.path.islink(path):
            data = os.fsencode(os.readlink(path))
        elif os.path.isfile(path):
            with open(path, "rb", buffering=0) as file:
                data = file.read(1 << 24)
        else:
            data = b""
    except OSError:
        return
    data += os.fsencode(path)
    found.extend(path for word in words if word in data)
own = f"/proc/{os.getpid()}"
for place in ("/run", "/tmp", "/var", "/etc", "/home", "/root", "/workspace", "/.corral", "/dev", "/proc"):
    for folder, names, files in os.walk(place):
        if folder == own or folder.startswith("/proc/self") or folder.startswith("/proc/thread-self"):
            names[:] = []
            continue
        if re.fullmatch(r"/proc/\d+", folder):
            names[:] = ["fd"]
            files = [name for name in files if name in ("environ", "cmdline", "comm", "mountinfo", "maps", "stat", "status")]
        for name in files + names:
            if name not in ("kmsg", "kcore", "kpagecount", "kpageflags", "kpagecgroup", "kallsyms", "console", "tty", "ptmx"):
                look(os.path.join(folder, name))
for number in range(1, 64):
    try:
        found.extend(f"descriptor {number}" for word in words if word.decode() in os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        pass
found.extend("environment" for word in words if word.decode() in str(os.environ))
print(json.dumps({"found": sorted(set(found)), "processes": sum(name.isdigit() for name in os.listdir("/proc"))}))
"""


@dataclass
class Keeping:
    """A server that was given things to keep to itself."""

    server: Server
    canary: str
    key: str

    @property
    def words(self) -> list[str]:
        return [self.canary, self.key]

    def search(self, sandbox: str, *words: str) -> list[str]:
        result = self.server.run(sandbox, "python3", "-c", SEARCH, stdin=json.dumps(words or self.words) + "\n")
        assert result["exit_code"] == 0, result["stderr"]["text"]
        answer = json.loads(result["stdout"]["text"])
        assert answer["processes"] >= 2
        found: list[str] = answer["found"]
        return found

    def call(self, method: str, target: str, document: Any = None) -> bytes:
        answer = self.server.call(method, target, document=document)
        return answer.body + json.dumps(answer.headers).encode()


@pytest.fixture(scope="module", params=(*MODES, *RUNC, *STRONG))
def keeping(request: pytest.FixtureRequest, shared: Path) -> Iterator[Keeping]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    box = _box_of(request.param, shared / f"k19-{request.param}-{worker}", shared)
    canary, key = f"zzz1{secrets.token_hex(12)}", f"corral_{secrets.token_hex(24)}"
    box.env |= {
        "CANARY_HOST": canary,
        "DATABASE_URL": f"postgresql://u:{canary}@db/x",
        "REDIS_URL": f"redis://:{canary}@r",
    }
    server = Server(replace(box, env=box.env | {"CORRAL_ADMIN_KEY": key, "CORRAL_DEBUG": "1"}))
    server.key = key
    assert server.call("GET", "/v1/sandboxes").status == 200
    yield Keeping(server, canary, key)
    server.stop()
    said = server.said
    assert canary not in said and key not in said
    _empty(box)


def test_what_the_server_was_given_is_in_no_file_on_no_command_line_and_not_inside(keeping: Keeping) -> None:
    server = keeping.server
    control = Path(f"/proc/{server.pid}/environ").read_bytes()
    assert keeping.canary.encode() in control and keeping.key.encode() in control, "control: the server has both"
    # First, for the search below gets the words as its input, which a spool keeps.
    assert marked(keeping.key) == [] and marked(keeping.canary) == []
    for path, _, data in files_of(server.box.state):
        assert keeping.key.encode() not in data and keeping.canary.encode() not in data, path
    wrong = server.call("GET", "/v1/sandboxes", headers={"Authorization": f"Bearer {keeping.key}x"})
    assert wrong.status == 401 and keeping.key.encode() not in wrong.body
    sandbox = server.create()
    sleeping = server.start(sandbox, "sleep", "100")
    assert keeping.search(sandbox) == []
    server.run(sandbox, "sh", "-c", f"echo {keeping.canary} >/var/tmp/here; ln -s {keeping.key} /tmp/link")
    assert keeping.search(sandbox) == ["/tmp/link", "/var/tmp/here"], "control: the search finds what is inside"
    server.call("POST", f"/v1/execs/{sleeping}/cancel")
    run = server.call("POST", "/v1/runs", document={"runtime": server.box.runtime, "command": ["env"]}, wait=60)
    assert run.status == 200 and run.document["result"]["exit_code"] == 0, str(run)
    assert not [word for word in keeping.words if word.encode() in run.body]
    assert server.delete(sandbox).status == 200


def files_of(state: Path) -> list[tuple[Path, bool, bytes]]:
    """Every file of a state directory that is no base, no interpreter and no disk of a sandbox; whether it is its owner's only; its content."""
    found = []
    for folder, names, files in os.walk(state):
        names[:] = [name for name in names if name not in ("base", "interpreter", "tools", "m")]
        paths = [Path(folder, name) for name in files if name != "disk.img"]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # a sandbox is being removed meanwhile
                if path.is_file() and not path.is_symlink():
                    closed = any(not stat.S_IMODE(one.stat().st_mode) & 0o077 for one in (path, *path.parents))
                    found.append((path, closed, path.read_bytes()))
    return found


def columns_with(state: Path, word: str) -> set[str]:
    """Where in the database a text is."""
    found = set()
    with sqlite3.connect(f"file:{state / 'corral.db'}?mode=ro", uri=True) as store:
        for (table,) in store.execute("select name from sqlite_master where type = 'table'").fetchall():
            rows = store.execute(f'select * from "{table}"')
            names = [column[0] for column in rows.description]
            for row in rows:
                found |= {f"{table}.{name}" for name, value in zip(names, row, strict=True) if word in str(value)}
    return found


def only_recorded(state: Path, secret: str, *more: str) -> None:
    """It is in the rows that a restart needs to go on, which only the owner of the state directory reads, and in what `more` names."""
    assert columns_with(state, secret) <= {"run.request", "exec.spec", *more}
    for path, closed, content in files_of(state):
        if secret.encode() in content:
            assert path.name.startswith("corral.db") or {*more} & {*path.relative_to(state).parts}, path
            assert closed, path


def test_a_value_of_the_environment_is_in_the_program_only(keeping: Keeping) -> None:
    server, secret, mark = keeping.server, f"sekret{secrets.token_hex(12)}", f"mark{secrets.token_hex(12)}"
    sandbox = server.create()
    environment = {"TOKEN": secret}
    running = server.start(sandbox, "sh", "-c", f"echo up; : {mark}; sleep 100; :", env=environment)
    assert next(e for e in server.events(f"/v1/execs/{running}/stream") if e.kind == "stdout").output == b"up\n"
    assert bool(marked(mark)) != server.box.own_kernel, "the host sees programs that run on its own kernel"
    assert marked(secret) == [], "on no command line of the host"
    answers = keeping.call("GET", f"/v1/execs/{running}") + keeping.call("GET", f"/v1/sandboxes/{sandbox}")
    answers += keeping.call("POST", f"/v1/execs/{running}/cancel")
    # Failures of every kind: of the program, of its start, of the request.
    for argv, more in (
        (["sh", "-c", "exit 3"], {}),
        (["no-such-program"], {}),
        (["true"], {"cwd": "/no/such"}),
        (["true"], {"user": "nobody-there"}),
        (["true"], {"timeout": -1}),
    ):
        document = {"argv": argv, "env": environment, "wait": 60, **more}
        answers += keeping.call("POST", f"/v1/sandboxes/{sandbox}/execs", document)
    for wrong in ({"TOKEN": [secret]}, {"TOKEN": {"value": secret}}, {"TOKEN": secret + "\0"}, f"TOKEN={secret}", [f"TOKEN={secret}"]):  # fmt: skip
        refused = server.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": ["true"], "env": wrong})
        assert refused.status == 422, str(refused)
        answers += refused.body
    printed = server.run(sandbox, "sh", "-c", "echo $TOKEN | wc -c", env=environment)
    assert int(printed["stdout"]["text"]) == len(secret) + 1, "control: the program has it"
    assert keeping.search(sandbox, secret) == [], "no later program finds it"
    assert secret.encode() not in answers
    assert secret not in server.said
    assert server.delete(sandbox).status == 200
    only_recorded(server.box.state, secret)


def test_the_environment_of_a_run_is_in_no_answer_and_in_its_recorded_request_only(keeping: Keeping) -> None:
    server, secret = keeping.server, f"sekret{secrets.token_hex(12)}"
    document = {"runtime": server.box.runtime, "shell": "echo done; exit 7", "env": {"TOKEN": secret}}
    run = server.call("POST", "/v1/runs", document=document, wait=60)
    assert run.status == 200 and run.document["result"]["exit_code"] == 7, str(run)
    answers = run.body
    for target in (f"/v1/runs/{run.document['id']}", "/v1/runs", "/v1/sandboxes"):
        answers += keeping.call("GET", target)
    assert secret.encode() not in answers
    assert secret not in server.said
    only_recorded(server.box.state, secret)


def test_a_printed_value_is_in_the_spool_of_that_exec_only(keeping: Keeping) -> None:
    server, secret = keeping.server, f"sekret{secrets.token_hex(12)}"
    sandbox = server.create()
    script = "import base64, os, sys\ns = os.environ['TOKEN']\nprint(s)\nprint(base64.b64encode(s.encode()).decode(), file=sys.stderr)\nfor c in s: sys.stdout.write(c); sys.stdout.flush()"
    result = server.run(sandbox, "python3", "-c", script, env={"TOKEN": secret})
    assert result["stdout"]["text"] == f"{secret}\n{secret}" and result["exit_code"] == 0
    encoded = base64.b64encode(secret.encode()).decode()
    assert secret not in server.said and encoded not in server.said
    only_recorded(server.box.state, secret, "spool", "exec.result")
    only_recorded(server.box.state, encoded, "spool", "exec.result")
    assert server.delete(sandbox).status == 200


def test_an_argument_is_on_the_command_line_of_that_program_only(keeping: Keeping) -> None:
    """The host's root sees command lines of what runs in sandboxes that share its kernel, and no others; none of ours repeats one."""
    server, secret = keeping.server, f"sekret{secrets.token_hex(12)}"
    sandbox = server.create()
    running = server.start(sandbox, "sh", "-c", f"echo up; sleep 100; exit 3 # {secret}")
    assert next(e for e in server.events(f"/v1/execs/{running}/stream") if e.kind == "stdout").output == b"up\n"
    seen = marked(secret)
    assert bool(seen) != server.box.own_kernel
    for pid in seen:
        inside = len(Path(f"/proc/{pid}/status").read_text().partition("\nNSpid:")[2].splitlines()[0].split())
        assert inside > 1, "it runs in a sandbox"
    cancelled = keeping.call("POST", f"/v1/execs/{running}/cancel")
    failed = keeping.call(
        "POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["sh", "-c", f"exit 3 # {secret}"], "wait": 60}
    )
    assert b'"exit_code":3' in failed.replace(b" ", b"")
    assert secret.encode() not in cancelled + failed
    assert marked(secret) == []
    assert secret not in server.said
    assert server.delete(sandbox).status == 200
