"""The stages of `./check`, printed with their times; ends with one summary line in the words of pytest.

    stages.py CHECKOUT [--fast] [--only STAGE]...       (started by `./check`)

As root, system packages that tests need and that are missing are installed by apt-get; as an ordinary user the stages run with
what there is, and what could not be shown is printed. A failed stage does not hide the ones after it.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

# program -> package of Debian and Ubuntu, what cannot be shown without it
SYSTEM = {
    "crun": ("crun", "the runtime crun"),
    "runc": ("runc", "the runtime runc"),
    "runsc": ("runsc", "the runtime runsc (gVisor)"),
    "bwrap": ("bubblewrap", "bubblewrap as the system packages it"),
    "newuidmap": ("uidmap", "two uids inside for an ordinary user"),
    "mmdebstrap": ("mmdebstrap", "root file systems of the operator"),
    "busybox": ("busybox-static", "a template without Python or libc"),
    "mkfs.ext4": ("e2fsprogs", "disk limits of the kernel"),
    "losetup": ("mount", "disk limits of the kernel"),
    "setpriv": ("util-linux", "an ordinary user beside root"),
    "gcc": ("gcc", "programs in C"),
    "node": ("nodejs", "programs in JavaScript"),
    "git": ("git", "checks over the tracked files"),
    "zstd": ("zstd", "archives that are packed with zstd"),
    "openssl": ("openssl", "a service behind TLS"),
    "initdb": ("postgresql", "the store on PostgreSQL"),
    "/usr/lib/*/libnss_wrapper.so": ("libnss-wrapper", "PostgreSQL for a user without a name"),
    "redis-server": ("redis-server", "coordination by Redis"),
    "faketime": ("faketime", "clocks that jump"),
}
FAST = ("format", "lint", "types", "imports", "unit")
SLOW = ("conformance", "integration", "security", "faults", "acceptance", "e2e", "ecosystem")
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


class Stages:
    """Runs them, remembers how they went."""

    def __init__(self, checkout: Path, fast: bool) -> None:
        self.checkout = checkout
        self.fast = fast
        self.bin = Path(sys.executable).parent
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.names: list[str] = []
        """The tests that failed, as pytest tells them: named once more at the end, where a log that is cut short still has them."""
        self.began = time.monotonic()

    def run(self, stage: str) -> None:
        """One stage with its output as it comes."""
        commands: dict[str, list[str | Path]] = {
            "format": [self.bin / "ruff", "format", "--check", "."],
            "lint": [self.bin / "ruff", "check", "."],
            "types": [sys.executable, "-m", "mypy"],
            "imports": [sys.executable, "-I", "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        }
        began = time.monotonic()
        print(f"== {stage}", flush=True)
        if stage in commands:
            status = subprocess.run(commands[stage], cwd=self.checkout).returncode
        else:
            status = self._pytest(stage)
        if status:
            self.failed.append(stage)
        word = "FAILED" if status else "ok"
        print(f"-- {stage}: {word}, {time.monotonic() - began:.1f} s\n", flush=True)

    def _pytest(self, stage: str) -> int:
        names = ("unit", "properties") if stage == "unit" else (stage,)
        folders = [f"tests/{name}" for name in names if any((self.checkout / "tests" / name).rglob("test_*.py"))]
        if not folders:
            print(f"no tests in {', '.join(names)}")
            return 0
        workers = str(max(2, min(4, os.cpu_count() or 2)))
        command = [sys.executable, "-m", "pytest", "-n", workers, "-rfEs", "--durations", "20", "--durations-min", "2"]
        command += folders
        if stage == "unit":
            command += ["-m", "not slow"] if self.fast else []
        child = subprocess.Popen(command, cwd=self.checkout, stdout=subprocess.PIPE, text=True, errors="replace")
        assert child.stdout is not None
        last = ""
        for line in child.stdout:
            print(line, end="", flush=True)
            if COUNTS.search(line) and " in " in line:
                last = line
            if line.startswith(("FAILED tests/", "ERROR tests/")):
                self.names.append(line.rstrip("\n")[:500])
        status = child.wait()
        for number, word in COUNTS.findall(last):
            self.counts["error" if word.startswith("error") else word] += int(number)
        if status and not self.counts["failed"] and not self.counts["error"]:
            self.counts["error"] += 1
        return status

    def summary(self) -> int:
        """The last line, and the exit status."""
        words = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
        counts = {"passed": self.counts["passed"], "failed": self.counts["failed"]}
        counts |= {word: self.counts[word] for word in words if self.counts[word]}
        for name in self.names:
            print(name)
        if self.failed:
            print(f"failed stages: {', '.join(self.failed)}")
        line = ", ".join(f"{number} {word}" for word, number in counts.items())
        print(f"{line} in {time.monotonic() - self.began:.1f}s")
        return 1 if self.failed else 0


def _missing(path: str) -> dict[str, tuple[str, str]]:
    """What of SYSTEM is not there: programs by their names, other files by where they may lie."""
    return {
        name: what
        for name, what in SYSTEM.items()
        if not (glob.glob(name) if name.startswith("/") else shutil.which(name, path=path))
    }


def system_packages() -> bool:
    """Install what is missing, as root; else say what will not be shown. -> True if all of it is here."""
    # Debian keeps the programs of PostgreSQL beside PATH, in a directory for each version.
    path = ":".join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", *glob.glob("/usr/lib/postgresql/*/bin")])
    missing = _missing(path)
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = sorted({package for package, _ in missing.values()})
        print(f"== system packages: {' '.join(packages)}", flush=True)
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends"]
        with open(os.devnull, "w") as null:
            subprocess.run(["apt-get", "update", "-q"], env=environment, stdout=null)
            for package in packages:  # one by one: one that this release lacks must not keep the others out
                subprocess.run([*install, package], env=environment, stdout=null)
        missing = _missing(path)
    for name, (package, what) in missing.items():
        print(f"not shown: {what} ({name} is missing; apt-get install {package})")
    if os.geteuid() != 0:
        print("not shown: what needs root (run ./check as root)")
    print(flush=True)
    return not missing


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="check", description="Set up what is missing and run all tests.")
    parser.add_argument("checkout", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--fast", action="store_true", help="only format, lint, types, imports, unit and property tests"
    )
    parser.add_argument("--only", action="append", metavar="STAGE", choices=FAST + SLOW, help="only this stage")
    options = parser.parse_args(argv)
    stages = Stages(options.checkout, options.fast)
    wanted = options.only or (FAST if options.fast else FAST + SLOW)
    if any(stage in SLOW for stage in wanted) and system_packages():
        os.environ["CORRAL_TEST_COMPLETE"] = "1"  # tests/conftest.py: no test may say that a program is missing
    for stage in wanted:
        stages.run(stage)
    return stages.summary()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
