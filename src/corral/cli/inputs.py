"""Local files that go along with a request: `FILE` and `--file SRC[:DEST]`.

A name that the caller wrote may be a link. Links inside a directory are not the caller's words: one that stays inside is sent as
the content it points to, one that leads out is refused. Only regular files are read; nothing here waits for a writer.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import click

from corral.errors import CorralError

Json = dict[str, Any]

MAX_BODY = 32 * 1024 * 1024
ROOM = MAX_BODY * 3 // 4
"""What fits into a body as base64."""
_PARENT_MODE = 0o755
"""What a directory gets that is made because something lies in it."""
_FILE = "name a file or directory that can be read: --file SRC[:DEST]"


def code_of(name: str) -> str:
    """The text of FILE."""
    hint = "to run a program of the sandbox, put -- before it"
    try:
        descriptor, _ = _open(name, follow=True)
        with open(descriptor, "rb") as file:
            return file.read(MAX_BODY + 1).decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as error:
        if isinstance(error, IsADirectoryError):
            hint = f"name the file to run; --file {name} sends the directory along"
        raise CorralError("usage", f"cannot read {name!r}: {why(error)}", field="FILE", hint=hint) from error


def files_of(sources: Sequence[str], taken: str | None, code: str | None = None) -> list[Json]:
    """Each file of `SRC[:DEST]`, in order; directories whole, modes kept. `taken` is the name that FILE has inside, `code` its text.

    A directory that has FILE at its own place goes along without it: `run --file app:. app/main.go`
    """
    room = ROOM
    found: list[Json] = []
    for source in sources:
        src, dest = _split(source)
        for path, inside, bare in _members(src, dest):
            is_taken = os.path.normpath(inside) == taken
            if is_taken and (path == src or os.path.isdir(path)):
                raise click.BadParameter(f"{path!r} would replace FILE at {taken!r}", param_hint="--file")
            if os.path.isdir(path):
                bits = stat.S_IMODE(os.stat(path).st_mode) & 0o777
                if bare or bits != _PARENT_MODE:
                    found.append({"path": inside, "type": "dir", "mode": f"{bits:04o}"})
                continue
            try:
                descriptor, facts = _open(path, follow=path == src)
                with open(descriptor, "rb") as file:
                    room -= facts.st_size
                    data = b"" if room < 0 else file.read(facts.st_size + 1)
            except (OSError, ValueError) as error:
                raise _refusal(f"cannot read {path!r}: {why(error)}") from error
            if room < 0:
                hint = "create a sandbox, copy them with corral cp, then use corral exec"
                raise CorralError("too_large", "the files are over 24 MiB together", field="/files", hint=hint)
            if is_taken:
                if data.decode("utf-8", "surrogateescape") == code:
                    continue
                raise click.BadParameter(f"{path!r} would replace FILE at {taken!r}", param_hint="--file")
            mode = f"{stat.S_IMODE(facts.st_mode) & 0o777:04o}"
            found.append({"path": inside, "mode": mode, "base64": base64.b64encode(data).decode("ascii")})
    return found


def why(error: Exception) -> str:
    """What went wrong, without the name."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _split(source: str) -> tuple[str, str]:
    """(SRC, name below /workspace). The last `:` splits; with nothing after it, or without it, SRC keeps its own name."""
    src, colon, dest = source.rpartition(":")
    if not colon:
        src, dest = source, ""
    if not src:
        raise click.BadParameter(f"{source!r} names no SRC", param_hint="--file")
    if colon and not os.path.lexists(src) and os.path.lexists(source):
        raise _refusal(f"cannot read {src!r}: the last ':' splits SRC from DEST", f"write {source + ':'!r}")
    own = os.path.basename(os.path.abspath(src))
    dest = dest or own
    dest = "." if dest.rstrip("/") == "/workspace" else dest.removeprefix("/workspace/")
    if os.path.isdir(src):
        return src, dest.rstrip("/")
    return src, dest + own if dest.endswith("/") else dest


def _open(path: str, *, follow: bool) -> tuple[int, os.stat_result]:
    """A regular file and its facts; never waits, whatever has taken its place."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    facts = os.stat(path, follow_symlinks=follow)
    if stat.S_ISREG(facts.st_mode):  # to open a device may already do something
        descriptor = os.open(path, flags)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode):
            return descriptor, facts
        os.close(descriptor)
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise ValueError(f"it is {_kind(facts.st_mode)}, not a regular file")


def _kind(mode: int) -> str:
    names = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}
    return names.get(stat.S_IFMT(mode), "a device")


def _members(src: str, dest: str) -> Iterator[tuple[str, str, bool]]:
    """(local path, path inside, nothing lies in it) of all that SRC stands for, directories before what they hold."""
    if not os.path.isdir(src):
        yield src, dest, True
        return
    root = os.path.realpath(src)
    yield from _below(root, src, root, dest, (root,))


def _below(root: str, shown: str, folder: str, dest: str, within: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
    """The same of one directory, `shown` as the caller knows it. `within` are the real directories that we are in."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _refusal(f"cannot read {shown!r}: {why(error)}") from error
    if os.path.normpath(dest) != ".":  # /workspace itself is what it is
        yield folder, dest, not names
    for name in names:
        path, entry = os.path.join(folder, name), os.path.join(shown, name)
        inside = os.path.normpath(os.path.join(dest, name))
        if os.path.islink(path):
            target = os.path.realpath(path)
            if os.path.commonpath((root, target)) != root:
                raise _refusal(f"the link {entry!r} leads out of {within[0]!r}", "corral cp copies links as links")
            if not os.path.exists(target):
                raise _refusal(f"the link {entry!r} leads nowhere", "corral cp copies links as links")
            path = target
        if os.path.isdir(path):
            if path in within:
                raise _refusal(
                    f"the link {entry!r} leads to a directory that holds it", "corral cp copies links as links"
                )
            yield from _below(root, entry, path, inside, (*within, path))
        else:
            yield path, inside, True


def _refusal(detail: str, hint: str = _FILE) -> CorralError:
    return CorralError("usage", detail, field="--file", hint=hint)
