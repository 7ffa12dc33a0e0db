"""Make or repair the Python environment of a checkout, then become the command line. Standard library only.

    environment.py CHECKOUT VENV LOCK [ARGS...]        (started by `./corral`)

The environment holds the packages of LOCK, each checked against its recorded digest, and the checkout itself by path,
so that nothing is built and the checkout may be read-only. Any number of callers may start at once: one works under a
lock on the directory, the others wait and find it done. A stamp is written last; what was interrupted is made anew.
With CORRAL_SETUP=check the path of the environment is printed instead of running anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import NoReturn

STAMPS = {"requirements.lock": "corral.stamp", "requirements-dev.lock": "check.stamp"}
UNFINISHED = "corral.unfinished"
UNREACHABLE = (
    "Failed to establish a new connection",
    "Name or service not known",
    "Temporary failure in name resolution",
    "dns error",
)

SCRIPT = """#!{python} -I
import sys

from corral.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


class SetupFailed(Exception):
    """One line for the user."""


def say(text: str) -> None:
    """Progress, for people only."""
    if sys.stderr.isatty():
        print(f"corral: {text}", file=sys.stderr, flush=True)


def stamp(checkout: Path, lock: str) -> str:
    """What `./corral` compares: the checkout's path and the digests of what the environment was made from."""
    lines = [str(checkout)]
    for name in (lock, "pyproject.toml"):
        lines.append(f"{hashlib.sha256((checkout / name).read_bytes()).hexdigest()}  {name}")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Whole or not at all."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


class Environment:
    """One directory with a lock on itself."""

    def __init__(self, checkout: Path, venv: Path) -> None:
        self.checkout = checkout
        self.venv = venv
        self.python = venv / "bin" / "python"
        try:
            venv.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock = os.open(venv, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            hint = "set XDG_CACHE_HOME to a directory of yours"
            raise SetupFailed(f"cannot keep packages in {venv}: {error.strerror}; {hint}") from None
        facts = os.fstat(self.lock)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise SetupFailed(
                f"{venv} can be changed by others: remove it, or set XDG_CACHE_HOME to a directory of yours"
            )

    def run(self, what: str, *argv: str | Path) -> None:
        """One step, its output in a log. The child holds the lock too: should we die, nobody starts over beside it."""
        log = self.venv / "setup.log"
        with log.open("ab") as out:
            try:
                child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(self.lock,))
            except OSError as error:
                raise SetupFailed(f"cannot {what}: {argv[0]}: {error.strerror}") from None
            try:
                status = child.wait()
            except BaseException:
                child.kill()
                child.wait()
                raise
        if status != 0:
            why = reason(log.read_text(errors="replace"))
            raise SetupFailed(f"cannot {what}: {why} (run it again to go on; log: {log})")

    def ready(self, name: str, wanted: str) -> bool:
        try:
            return (self.venv / name).read_text() == wanted and os.access(self.python, os.X_OK)
        except OSError:
            return False

    def usable(self) -> bool:
        """A Python that runs, made whole: ours and finished, or made by hand."""
        if (self.venv / UNFINISHED).exists() or not self.python.exists():
            return False
        probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
        try:
            return subprocess.run([self.python, "-I", "-c", probe], capture_output=True, timeout=60).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def clear(self) -> None:
        """Empty the directory; it stays, as it is the lock."""
        for entry in self.venv.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def make(self, lock: str) -> None:
        """Bring the environment to LOCK. The caller holds the lock."""
        venv = self.venv
        uv = None if has_ensurepip() else shutil.which("uv")
        whole = self.usable() or (uv is not None and self.python.exists() and not (self.venv / UNFINISHED).exists())
        for name in STAMPS.values():
            (self.venv / name).unlink(missing_ok=True)
        if not whole:
            self.clear()
        (self.venv / UNFINISHED).touch()
        (self.venv / "setup.log").write_bytes(b"")
        if not whole:
            say("making a Python environment")
            if uv is None:
                self.run("make a Python environment", sys.executable, "-I", "-m", "venv", venv)
            else:
                self.run("make a Python environment", uv, "venv", "-q", "--allow-existing", "-p", sys.executable, venv)
        say("installing packages")
        if uv is None:
            pip: tuple[str | Path, ...] = (
                self.python,
                "-I",
                "-m",
                "pip",
                "install",
                "--no-input",
                "--disable-pip-version-check",
                "--no-user",
            )
            compiled: tuple[str, ...] = () if self.cache() is None else ("--no-compile",)
        else:
            pip = (Path(uv), "pip", "install", "-p", os.fspath(self.python))
            compiled = ()
        hashed = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", self.checkout / lock)
        self.run("install the packages", *pip, *compiled, *hashed)
        self.place_package()
        for name, stamp_name in STAMPS.items():
            if name == lock or lock == "requirements-dev.lock":
                write(self.venv / stamp_name, stamp(self.checkout, name))
        (self.venv / UNFINISHED).unlink()

    def place_package(self) -> None:
        """The checkout by path, with the metadata by which entry points are found; as an installer would leave it."""
        project = tomllib.loads((self.checkout / "pyproject.toml").read_text())["project"]
        site = Path(subprocess.check_output([self.python, "-I", "-c", SITE], text=True).strip())
        for old in [*site.glob("corral-*.dist-info"), *site.glob("__editable__*corral*")]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        info = site / f"corral-{project['version']}.dist-info"
        info.mkdir()
        groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
        points = "\n".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in members.items())
            for group, members in groups.items()
        )
        write(site / "corral.pth", f"{self.checkout / 'src'}\n")
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: corral\nVersion: {project['version']}\n")
        write(info / "entry_points.txt", points)
        write(info / "INSTALLER", "corral\n")
        script = self.venv / "bin" / "corral"
        write(script, SCRIPT.format(python=self.python), 0o700)
        names = [f"{info.name}/{n}" for n in ("METADATA", "entry_points.txt", "INSTALLER", "RECORD")]
        record = ["corral.pth", *names, os.path.relpath(script, site)]
        write(info / "RECORD", "".join(f"{name},,\n" for name in record))

    def cache(self) -> Path | None:
        """Where compiled modules go when the checkout is not the caller's to write; the same rule as in `./corral`."""
        return None if self.venv == self.checkout / ".venv" else self.venv / "pycache"


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def has_ensurepip() -> bool:
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return False
    return True


def reason(log: str) -> str:
    """The line that says why, out of an installer's output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(sign in line for line in lines for sign in UNREACHABLE):
        return "the package index cannot be reached"
    errors = [line for line in lines if line.lower().startswith(("error", "×"))]
    return (errors or lines or ["no output"])[-1]


class Stopped(BaseException):
    """A signal said so."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while setting up")
        self.number = number


def end(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def wants_document(words: list[str]) -> bool:
    """Is `--json` among the words of the command line?"""
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def put_problem(code: str, title: str, status: int, detail: str) -> None:
    """The one document of `--json`, as `corral.errors` writes it."""
    kind = {"type": f"urn:corral:error:{code}", "title": title, "status": status, "detail": detail, "code": code}
    print(
        json.dumps({"error": {**kind, "retryable": code != "cancelled", "hint": "run it again to go on"}}), flush=True
    )


def refuse(detail: str, words: list[str]) -> int:
    """Say why there is no environment, in the form that was asked for. -> exit status"""
    if wants_document(words):
        put_problem("infra_error", "The platform failed", 500, detail)
    else:
        print(f"corral: {detail}", file=sys.stderr)
    return 125


def main(argv: list[str]) -> int:
    checkout, venv, lock, *rest = argv
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        environment = Environment(Path(checkout), Path(venv))
        wanted = stamp(environment.checkout, lock)
        try:
            fcntl.flock(environment.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of the same environment")
            fcntl.flock(environment.lock, fcntl.LOCK_EX)
        if not environment.ready(STAMPS[lock], wanted):
            environment.make(lock)
    except SetupFailed as failure:
        return refuse(str(failure), rest)
    except OSError as error:
        return refuse(f"cannot set up in {venv}: {error.filename or ''}: {error.strerror}", rest)
    except Stopped as stopped:
        if wants_document(rest):
            put_problem("cancelled", "The call was stopped", 409, str(stopped))
        return 128 + stopped.number
    if os.environ.get("CORRAL_SETUP") == "check":
        print(environment.venv)
        return 0
    prefix = environment.cache()
    flags = ["-I", "-S"] if prefix is None else ["-I", "-S", "-X", f"pycache_prefix={prefix}"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    argv = [os.fspath(environment.python), *flags, os.fspath(environment.checkout / "deploy" / "start.py"), *rest]
    os.execv(environment.python, argv)  # noqa: S606


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
