"""Threat: something of the host's, the node's or the caller's secrets is visible inside, or to other users of the host.

The server is started with a canary in its environment, its arguments, its working directory and an open descriptor that is inherited.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.testing.hostile.prelude import PRELUDE, TELL

from .conftest import MODES, Box, Lab, eventually
from .probes import AS_USER, user_python

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/sandbox",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
    "PYTHONUNBUFFERED": "1",
}
"""What an exec has in its environment, all of it."""


class Planted:
    """A lab whose process holds canaries everywhere that a child could inherit."""

    def __init__(self, mode: str) -> None:
        self.word = f"canary{os.urandom(8).hex()}"
        self.place = Path(tempfile.mkdtemp(prefix="corral-canary-")) / self.word
        self.place.mkdir()
        for path in (self.place.parent, self.place):
            path.chmod(0o755)
        (self.place / "file").write_text(self.word)
        self.descriptor = os.open(self.place / "file", os.O_RDONLY)
        self.lab = Lab(
            mode,
            env={"CANARY_HOST": self.word, "DATABASE_URL": f"postgresql://u:{self.word}@db/x", "AWS_SECRET_ACCESS_KEY": self.word},
            arguments=[f"--token={self.word}"],
            cwd=str(self.place),
            pass_fds=(self.descriptor,),
        )  # fmt: skip

    def close(self) -> None:
        self.lab.close()
        os.close(self.descriptor)
        shutil.rmtree(self.place.parent)


@pytest.fixture(scope="module", params=MODES)
def planted(request: pytest.FixtureRequest) -> Iterator[Planted]:
    planted = Planted(request.param)
    yield planted
    planted.close()


SEARCH = (
    PRELUDE
    + r"""
word = sys.stdin.readline().strip().encode()
def has(path):
    try:
        if word in os.fsencode(path) or (os.path.islink(path) and word in os.fsencode(os.readlink(path))):
            return True
        if not os.path.isfile(path) or os.path.islink(path):
            return False
        with open(path, "rb", buffering=0) as file:
            data = b""
            while (part := file.read(1 << 20)) and len(data) < (1 << 26):
                data += part
            return word in data
    except OSError:
        return False
found = []
for place, names, files in os.walk("/", followlinks=False):
    if place.startswith("/proc/"):
        # Of processes: what they tell of themselves; not this one, which was told the word.
        names[:] = [n for n in names if n in ("fd", "task", "net") or place == "/proc"] if place.count("/") == 2 else []
    if place == f"/proc/{os.getpid()}":
        continue
    for name in files + names:
        path = os.path.join(place, name)
        if name not in ("kmsg", "kcore", "clear_refs", "mem", "trace_pipe") and has(path):
            found.append(path)
answers["found"] = found
answers["environ"] = sorted(os.environ)
answers["fds"] = sorted(int(n) for n in os.listdir("/proc/self/fd"))
"""
    + TELL
)


def search(box: Box, word: str, **spec: Any) -> list[str]:
    found: list[str] = box.ask(SEARCH, stdin=word.encode() + b"\n", **spec)["found"]
    return found


def test_nothing_of_the_server_s_is_inside(planted: Planted) -> None:
    lab = planted.lab
    with lab.box() as box:
        box.start("/bin/sleep", "1000")
        assert search(box, planted.word) == []
        # From the host, which may look where the sandbox may not: guest, supervisors and programs.
        looked_at = 0
        for pid in box.pids():
            try:
                shown = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):  # what stood by for the next program has just ended
                continue
            with contextlib.suppress(
                PermissionError, FileNotFoundError, ProcessLookupError
            ):  # root alone is told of what is not dumpable
                shown += Path(f"/proc/{pid}/environ").read_bytes()
            links = [
                Path(f"/proc/{pid}/cwd"),
                Path(f"/proc/{pid}/root"),
                *(Path(f"/proc/{pid}/fd/{n}") for n in range(64)),
            ]
            told = []
            for link in links:
                with contextlib.suppress(OSError):
                    told.append(os.readlink(link))
            looked_at += len(told) > 2
            assert planted.word.encode() not in shown, pid
            assert not [link for link in told if planted.word in link], (pid, told)
        assert os.geteuid() != 0 or looked_at > 1, "guest and program at least"
    server = Path(f"/proc/{lab.process.pid}")
    assert planted.word.encode() in (server / "environ").read_bytes(), "control: the server has it in its environment"
    assert planted.word.encode() in (server / "cmdline").read_bytes()
    assert os.readlink(server / "cwd") == str(planted.place)
    assert str(planted.place / "file") in [os.readlink(link) for link in (server / "fd").iterdir()]


def test_control_the_search_finds_what_is_inside(planted: Planted) -> None:
    with planted.lab.box() as box:
        box.sh(f"echo {planted.word} > /workspace/found; mkdir /var/tmp/{planted.word}; ln -s {planted.word} /tmp/link")
        assert sorted(search(box, planted.word)) == sorted(
            ["/workspace/found", f"/var/tmp/{planted.word}", "/tmp/link"]
        )
        exec_id = box.start("/bin/sleep", "1000", env={"TOKEN": planted.word})
        # Another exec of one sandbox and one user sees it, as on any machine; in one with a domain of its own it does not.
        found = [path for path in search(box, planted.word) if path.endswith("/environ")]
        assert len(found) <= 1
        planted.lab.call("end", exec_id=exec_id, why="cancelled")


def test_the_environment_of_an_exec_is_exactly_what_is_promised(planted: Planted) -> None:
    with planted.lab.box() as box:
        raw = box.python(PRELUDE + "sys.stdout.buffer.write(open('/proc/self/environ', 'rb').read())").stdout
        assert dict(item.split("=", 1) for item in raw.decode().split("\0") if item) == ENVIRONMENT
        more = box.python(
            PRELUDE + "sys.stdout.buffer.write(open('/proc/self/environ', 'rb').read())",
            env={"A": "b=c", "TZ": "Asia/X"},
        ).stdout
        assert dict(item.split("=", 1) for item in more.decode().split("\0") if item) == ENVIRONMENT | {
            "A": "b=c",
            "TZ": "Asia/X",
        }


def command_lines(word: str) -> list[str]:
    """Every process of the host whose command line shows the word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if word.encode() in (line := (entry / "cmdline").read_bytes()):
                    found.append(line.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def test_values_of_the_environment_and_input_are_on_no_command_line_of_the_host(planted: Planted) -> None:
    secret = f"secret{os.urandom(8).hex()}"
    with planted.lab.box() as box:
        exec_id = box.start("/bin/sh", "-s", stdin=f": {secret}\nsleep 1000\n".encode(), env={"TOKEN": secret})
        eventually(lambda: command_lines("sleep\0001000"), "the program runs")
        assert command_lines(secret) == []
        planted.lab.call("end", exec_id=exec_id, why="cancelled")
        # Control: what is an argument of the program is on its command line, there and on the host.
        shown = box.start("/bin/sh", "-c", f"sleep 1000; : {secret}")
        eventually(lambda: command_lines(secret), "an argument is seen")
        planted.lab.call("end", exec_id=shown, why="cancelled")


TEMPLATE = """
name: host
kind: frozen
programs: [sh bash cat sleep env grep]
languages: { bash: bash }
"""
INSIDE = """
read -r word
secret=CODE_WORD
found=
for process in /proc/[0-9]*; do
    [ "$process" = "/proc/$$" ] && continue
    cat "$process/environ" "$process/cmdline" 2>/dev/null | grep -qaF "$word" && found="$found $process"
done
env | grep -qF "$word" && found="$found environment"
echo "inside:$found"
echo "names:" $(compgen -e)
sleep 2
"""


@pytest.mark.parametrize("who", ["root", "user"] if os.geteuid() == 0 else ["user"])
def test_the_whole_program_with_canaries_leaves_them_nowhere(who: str) -> None:
    """`corral run` as the server of its own state directory: neither inside, nor in its files, nor on another's command line."""
    canary, code_word = f"zzz{os.urandom(8).hex()}", f"code{os.urandom(8).hex()}"
    state = Path(tempfile.mkdtemp(prefix="corral-security-"))
    program = state / "program.sh"
    program.write_text(INSIDE.replace("CODE_WORD", code_word))
    (state / "templates").mkdir()
    (state / "templates/host.yaml").write_text(TEMPLATE)
    become: dict[str, Any] = {}
    if who == "user" and os.geteuid() == 0:
        become = AS_USER
        for path in (state, program):
            os.chown(path, AS_USER["user"], AS_USER["group"])
    try:
        for runtime in [mode.partition("-")[0] for mode in MODES if mode.endswith(who)]:
            _run_with_canaries(runtime, program, state / "s", canary, code_word, become)
        files = [path for path in (state / "s").rglob("*") if path.is_file() and not path.is_symlink()]
        for path in files:
            # It went in as a program's input, which the node may still keep; nothing else may hold it.
            assert "spool" in str(path) or canary.encode() not in path.read_bytes(), path
        assert any(code_word.encode() in path.read_bytes() for path in files), "control: the request itself is found"
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _readable(places: list[str], into: Path) -> list[str]:
    """Copies of what is imported, which another user may read wherever checkout and environment lie (ours are closed to others)."""
    tools = (
        "__pycache__",
        "mypy*",
        "ruff*",
        "hypothesis*",
        "pytest*",
        "_pytest*",
        "fastapi*",
        "pydantic*",
        *("pip", "pip-*"),
        "setuptools*",
    )
    for number, place in enumerate(places):
        if not (into / str(number)).exists():
            shutil.copytree(place, into / str(number), ignore=shutil.ignore_patterns(*tools))
    for data in ("policy", "runners", "templates"):  # found beside the sources, as in a checkout
        shutil.copytree(Path(places[0]).parent / data, into / data, dirs_exist_ok=True)
    subprocess.run(["chmod", "-R", "a+rX", str(into)], check=True)
    return [str(into / str(number)) for number in range(len(places))]


def _run_with_canaries(
    runtime: str, program: Path, state: Path, canary: str, code_word: str, become: dict[str, Any]
) -> None:
    places = [str(Path(corral.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    if become:
        places = _readable(places, program.parent / "packages")
    child = subprocess.Popen(
        [
            user_python() if become else sys.executable,
            *("-c", "import sys; from corral.cli.main import main; sys.exit(main())"),
            *("run", "--runtime", runtime, "--timeout", "60", "--stdin", "-", str(program)),
        ],
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(program.parent),
            "PYTHONPATH": os.pathsep.join(places),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CORRAL_STATE_DIR": str(state),
            "CORRAL_TEMPLATES": str(program.parent / "templates"),
            "CANARY_HOST": canary,
            "REDIS_URL": f"redis://:{canary}@cache",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
        **become,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(canary.encode() + b"\n")
        child.stdin.close()
        assert child.stdout.readline() == b"inside:\n"
        names = child.stdout.readline().decode().removeprefix("names:").split()
        assert {*names} - {"PWD", "SHLVL", "_", "LC_CTYPE"} <= {*ENVIRONMENT, "PYTHONHASHSEED"}, names
        assert command_lines(code_word) == [], "the code is on a command line"
        assert command_lines(canary) == [], "the canary is on a command line"
        assert child.stdout.read() == b"" and child.wait(60) == 0
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
        if child.poll() is None:
            child.kill()
            child.wait()


def test_the_documented_set_is_the_one_of_the_service_too() -> None:
    from corral.services.execs import environment

    made = environment("sandbox")
    assert re.fullmatch(r"[A-Z_ ]+", " ".join(made))
    assert {name: made[name] for name in made} == {name: ENVIRONMENT[name] for name in made}, json.dumps(made)
