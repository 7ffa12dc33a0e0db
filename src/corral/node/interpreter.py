"""The projected interpreter: a trimmed copy of Corral's own CPython that runs in any image of the architecture.

`ensure_interpreter(state_dir)` -> path of a content-addressed tree, built on first use (about a second) and never
written again. The tree appears inside a sandbox at /.corral and needs nothing from the image, neither a libc nor /bin:

    bin/python3                 the interpreter's binary
    lib/ld.so, lib/*.so*        its own dynamic loader and every library that binary and modules need
    lib/pythonX.Y/…             only the modules that the guest and its tools import, as source with unchecked-hash .pyc
    site/boot.pyc, site/corral/guest/*.py

It is started as `/.corral/lib/ld.so --library-path /.corral/lib /.corral/bin/python3 -I -S -B /.corral/site/boot.pyc …`.
The key covers the interpreter's identity and the guest's sources, so a new version of either makes a new tree beside the
old one, which live sandboxes go on using.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from corral.errors import CorralError

BUILDER_VERSION = 4
INSIDE = "/.corral"

PYTHON_ARGV = (f"{INSIDE}/lib/ld.so", "--library-path", f"{INSIDE}/lib", f"{INSIDE}/bin/python3", "-I", "-S", "-B")
"""Command that runs the projected interpreter inside a sandbox; append a script and its arguments."""

GUEST_ARGV = (*PYTHON_ARGV, f"{INSIDE}/site/boot.pyc")
"""Command that starts the guest. Compiled: where any source is compiled at the start, the compiler alone costs a millisecond."""

_ROOTS = (
    "os, io, sys, time, errno, signal, select, selectors, socket, struct, fcntl, termios, tty, pty, resource, json, "
    "base64, zlib, binascii, tarfile, gzip, shutil, stat, re, ctypes, threading, traceback, hashlib, random, array, mmap, "
    "subprocess, warnings, codecs, functools, contextlib, tempfile, fnmatch, glob, pathlib, argparse, linecache, locale, "
    "copy, types, weakref, heapq, bisect, string, textwrap, collections.abc, importlib.util, importlib.machinery, "
    "encodings.utf_8, encodings.ascii, encodings.latin_1, encodings.idna, encodings.utf_16"
)
"""What the guest may import, now or lazily; what these import comes along."""

_PROGRAMS = ("boot.py", "files.py")

Progress = Callable[[str, float | None], None]


def ensure_interpreter(state_dir: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The tree's path, built if it is not there. Safe with many processes at once; raises `infra_error` with a hint."""
    store = Path(state_dir) / "interpreter"
    key = _key()
    tree = store / key
    if (tree / ".complete").exists():
        return tree
    store.mkdir(parents=True, exist_ok=True)
    store.chmod(0o755)
    with open(store / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (tree / ".complete").exists():
            return tree
        if progress:
            progress("preparing the guest's interpreter", None)
        shutil.rmtree(tree, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=store))
        try:
            _build(work)
            work.chmod(0o755)
            (work / ".complete").touch()
            os.rename(work, tree)
        except (OSError, subprocess.SubprocessError) as error:
            raise CorralError(
                "infra_error",
                f"the guest's interpreter cannot be prepared: {error}",
                hint="check free space in the state directory",
                retryable=False,
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return tree


def _base_python() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


def _guest_sources() -> list[Path]:
    # Found by path, not by import: the node knows where the guest's files lie but never runs them.
    guest = Path(__file__).resolve().parent.parent / "guest"
    return sorted(p for p in guest.iterdir() if p.suffix == ".py")


def _imports_of_guest() -> list[str]:
    """Every standard-library module that a guest source imports anywhere, found by reading, so that none is missing inside."""
    names: set[str] = set()
    for source in _guest_sources():
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return sorted(name for name in names if name.partition(".")[0] != "corral")


def _key() -> str:
    digest = hashlib.sha256()
    python = _base_python()
    stat = python.stat()
    digest.update(f"{BUILDER_VERSION}|{sys.version}|{python}|{stat.st_size}|{stat.st_mtime_ns}|{_ROOTS}".encode())
    for source in _guest_sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def elf_interpreter(path: Path) -> str | None:
    """PT_INTERP of an ELF file (its dynamic loader), or None for a static one or another kind of file."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF" or head[4] != 2:
            return None
        offset = int.from_bytes(head[32:40], "little")
        size, count = int.from_bytes(head[54:56], "little"), int.from_bytes(head[56:58], "little")
        for index in range(count):
            file.seek(offset + index * size)
            header = file.read(size)
            if int.from_bytes(header[0:4], "little") == 3:
                file.seek(int.from_bytes(header[8:16], "little"))
                return file.read(int.from_bytes(header[32:40], "little")).rstrip(b"\0").decode()
    return None


def shared_libraries(loader: str, path: Path) -> Iterator[Path]:
    """Every shared library that the loader would map for an ELF file, by asking the loader itself (it runs nothing of the file)."""
    listed = subprocess.run(
        [loader, "--list", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    for line in listed.stdout.splitlines():
        _, arrow, rest = line.partition(" => ")
        target = (rest if arrow else line).strip().rsplit(" (", 1)[0]
        if target.startswith("/"):
            yield Path(target)


def _build(work: Path) -> None:
    python = _base_python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = work / "lib"
    stdlib = library / version
    for directory in (work / "bin", stdlib / "lib-dynload", work / "site" / "corral" / "guest"):
        directory.mkdir(parents=True)
    shutil.copyfile(python, work / "bin" / "python3")
    (work / "bin" / "python3").chmod(0o755)

    wanted = ", ".join([_ROOTS, *_imports_of_guest()])
    list_files = f"import sys, {wanted}\nfor m in list(sys.modules.values()):\n f = getattr(m, '__file__', None)\n f and print(f)\n"
    listing = subprocess.run(
        [str(python), "-I", "-S", "-c", list_files], capture_output=True, text=True, check=True, env={}
    )
    source_root = Path(os.__file__).resolve().parent
    binaries = [python]
    for line in sorted(set(listing.stdout.splitlines())):
        source = Path(line)
        if source.suffix == ".so":
            shutil.copyfile(source, stdlib / "lib-dynload" / source.name)
            binaries.append(source)
        elif source.suffix == ".py" and source.resolve().is_relative_to(source_root):
            target = stdlib / source.resolve().relative_to(source_root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            _compile(target, work)

    loader = elf_interpreter(python)
    if loader is None:
        raise OSError(f"{python} is not a dynamic 64-bit ELF program")
    shutil.copyfile(loader, library / "ld.so")
    (library / "ld.so").chmod(0o755)
    for binary in binaries:
        for found in shared_libraries(loader, binary):
            target = library / found.name
            if not target.exists() and found.name != Path(loader).name:
                shutil.copyfile(found, target)

    site = work / "site"
    (site / "corral" / "__init__.py").write_text("")
    _compile(site / "corral" / "__init__.py", work)
    for source in _guest_sources():
        target = site / "boot.py" if source.name == "boot.py" else site / "corral" / "guest" / source.name
        shutil.copyfile(source, target)
        _compile(target, work, beside=source.name in _PROGRAMS)
    for path in work.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
        elif path.stat().st_mode & 0o111 == 0:
            path.chmod(0o644)


def _compile(target: Path, work: Path, *, beside: bool = False) -> None:
    """Where imports look for it, or `beside` the source, where it can be started as a program."""
    py_compile.compile(
        str(target),
        cfile=f"{target}c" if beside else None,
        dfile=f"{INSIDE}/{target.relative_to(work)}",
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
