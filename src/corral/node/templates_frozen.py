"""The kind `frozen`: an allow-list of the host's programs, copied once with everything that they load.

Each program comes with its links, its interpreter and every library that the loader names; `trees` are globs of data. Nothing of the
host's /etc, /home or /root comes along but what a glob names.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from corral.node.interpreter import elf_interpreter, shared_libraries
from corral.node.templates_recipe import Recipe
from corral.node.templates_sealing import PROGRAM_PATH, find_program

Progress = Callable[[str, float | None], None]


def _expand(pattern: str) -> Iterator[str]:
    if (match := re.search(r"\{([^{}]*)\}", pattern)) is None:
        yield from sorted(glob.glob(pattern))
        return
    for word in match.group(1).split(","):
        yield from _expand(pattern[: match.start()] + word + pattern[match.end() :])


class _Copier:
    """Copies host paths to the same place below `root`: link by link, interpreter and libraries included, each once."""

    def __init__(self, root: Path, exclude: Sequence[str]) -> None:
        self._root = root
        self._exclude = re.compile("|".join(fnmatch.translate(p) for p in exclude) or r"(?!)")
        self._seen: set[str] = set()
        self._pending: list[str] = []
        self.bytes = 0

    def add(self, path: str) -> None:
        """Copy what `path` names and everything that it needs to run."""
        self._pending.append(path)
        while self._pending:
            self._one(self._pending.pop())

    def _one(self, path: str) -> None:
        path = self._through_linked_parents(os.path.normpath(path))
        if path in self._seen or self._exclude.match(path):
            return
        self._seen.add(path)
        try:
            info = os.lstat(path)
        except OSError:
            return
        target = self._root / path.lstrip("/")
        if stat.S_ISLNK(info.st_mode):
            link = os.readlink(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(link)
            self._pending.append(os.path.join(os.path.dirname(path), link))
        elif stat.S_ISDIR(info.st_mode):
            target.mkdir(parents=True, exist_ok=True)
            self._pending.extend(entry.path for entry in os.scandir(path))
        elif stat.S_ISREG(info.st_mode):
            self._file(path, target, info)

    def _through_linked_parents(self, path: str) -> str:
        # /lib -> usr/lib and the like: the link itself is made inside, and the file goes where the link points.
        parts = path.split("/")[1:]
        here = ""
        for index, part in enumerate(parts[:-1]):
            here += "/" + part
            if os.path.islink(here):
                link = os.readlink(here)
                inside = self._root / here.lstrip("/")
                inside.parent.mkdir(parents=True, exist_ok=True)
                if not inside.is_symlink():
                    inside.symlink_to(link)
                real = os.path.normpath(os.path.join(os.path.dirname(here), link, *parts[index + 1 :]))
                return self._through_linked_parents(real)
        return path

    def _file(self, path: str, target: Path, info: os.stat_result) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, target)
        except PermissionError:
            return  # what the caller may not read cannot be in a base
        # Set-id bits never enter a base; times are kept, so that the .pyc files beside sources stay valid.
        target.chmod(0o755 if info.st_mode & 0o111 else 0o644)
        os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
        self.bytes += info.st_size
        with open(path, "rb") as file:
            magic = file.read(256)
        if magic[:4] == b"\x7fELF":
            loader = elf_interpreter(Path(path))
            if loader:
                self._pending.append(loader)
            if loader or ".so" in os.path.basename(path):
                self._pending.extend(str(found) for found in shared_libraries(loader or _DEFAULT_LOADER, Path(path)))
        elif magic[:2] == b"#!" and info.st_mode & 0o111:
            words = magic[2:].split(b"\n", 1)[0].decode(errors="replace").split()
            for word in words[:2]:
                found = word if word.startswith("/") else shutil.which(word, path=PROGRAM_PATH)
                if found and os.path.exists(found) and not os.path.isdir(found):
                    self._pending.append(found)


_DEFAULT_LOADER = elf_interpreter(Path(os.path.realpath("/bin/sh"))) or "/lib64/ld-linux-x86-64.so.2"


def freeze(recipe: Recipe, root: Path, progress: Progress) -> None:
    """Fill `root`, which is empty, with what the recipe lists and this host has."""
    for link in ("bin", "sbin", "lib", "lib64", "lib32"):
        if os.path.islink(f"/{link}"):
            target = os.readlink(f"/{link}")
            (root / target).mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(target)
    copier = _Copier(root, recipe.exclude)
    programs = recipe.programs
    trees = [path for pattern in recipe.trees for path in _expand(pattern)]
    todo = [found for name in programs if (found := shutil.which(name, path=PROGRAM_PATH))] + trees
    for index, path in enumerate(todo):
        if index % 10 == 0:
            progress(f"template {recipe.name}: {path}", 0.85 * index / max(1, len(todo)))
        copier.add(path)
    if "python3" in programs and not find_program(root, "python3"):
        _freeze_own_python(copier, root)


def _freeze_own_python(copier: _Copier, root: Path) -> None:
    """A host without a system Python still has the one that runs Corral: put it at /usr/local."""
    import sys

    prefix = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    local = root / "usr" / "local"
    (local / "bin").mkdir(parents=True, exist_ok=True)
    (local / "lib").mkdir(exist_ok=True)
    drop = shutil.ignore_patterns(
        "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages", "config-*"
    )
    shutil.copytree(prefix / "lib" / version, local / "lib" / version, ignore=drop, dirs_exist_ok=True)
    binary = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    shutil.copy2(binary, local / "bin" / "python3")
    loader = elf_interpreter(binary) or _DEFAULT_LOADER
    for file in (binary, *(local / "lib" / version / "lib-dynload").glob("*.so")):
        for library in shared_libraries(loader, file):
            if library.is_relative_to(prefix):
                shutil.copy2(library, local / "lib" / library.name)
            else:
                copier.add(str(library))
