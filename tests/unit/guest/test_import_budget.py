"""The guest's start: it imports low-level modules only, and the short list of them is reviewed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import corral

BOOT = Path(corral.__file__).parent / "guest" / "boot.py"

ALLOWED = {
    # extension and built-in modules
    "_ctypes", "_json", "_signal", "_socket", "_struct", "errno", "fcntl", "gc", "posix", "resource", "select", "time",
    # what the interpreter itself needs to start, frozen into it
    "_abc", "_codecs", "_collections_abc", "_frozen_importlib", "_frozen_importlib_external", "_imp", "_io", "_stat",
    "_thread", "_warnings", "_weakref", "abc", "builtins", "codecs", "encodings", "encodings.aliases", "encodings.utf_8",
    "genericpath", "io", "marshal", "ntpath", "os", "os.path", "posixpath", "stat", "sys", "winreg", "zipimport",
    "_distutils_hack", "__main__", "atexit", "faulthandler", "itertools", "_operator",
    "__future__",
    # the guest
    "corral", "corral.guest", "corral.guest.begin", "corral.guest.connections", "corral.guest.execs", "corral.guest.kernel", "corral.guest.launch",
    "corral.guest.loop",
    "corral.guest.main", "corral.guest.posts", "corral.guest.processes", "corral.guest.protocol", "corral.guest.record", "corral.guest.requests",
    "corral.guest.streams", "corral.guest.supervisor",
}  # fmt: skip

SLOW = {
    "asyncio",
    "ctypes",
    "dataclasses",
    "enum",
    "json",
    "logging",
    "re",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "typing",
}


def test_the_guest_imports_only_what_is_listed() -> None:
    script = f"import sys; sys.argv=[{str(BOOT)!r}]; sys.path.insert(0, {str(BOOT.parents[2])!r}); import corral.guest.main; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & SLOW
    assert loaded <= ALLOWED, f"not on the list: {sorted(loaded - ALLOWED)}"


def test_the_import_time_log_names_no_slow_module() -> None:
    """`-X importtime` of the real start file, which ends at once for want of a control socket."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-I", "-S", "-B", str(BOOT)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--control-fd is missing" in done.stderr
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "corral.guest.main" in names
    assert not names & SLOW
