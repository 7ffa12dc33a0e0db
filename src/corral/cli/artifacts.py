"""Write what a run left as artifacts into a local directory. Neither the paths nor what lies in that directory is trusted.

The directory itself may be a link; below it no link is followed, so that a tree that was copied there earlier leads nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from corral.client import Transport
from corral.errors import CorralError

Json = dict[str, Any]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def check(directory: str) -> None:
    """Refuse a directory that could not be written to, before anything runs. Makes nothing."""
    why = None
    if not directory or "\0" in directory:
        why = "is no name of a directory"
    elif os.path.isdir(directory):
        why = None if os.access(directory, os.W_OK | os.X_OK) else "cannot be written to"
    elif os.path.lexists(directory):
        why = "is no directory"
    else:
        above = os.path.dirname(os.path.abspath(directory))
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            why = f"cannot be made: {above!r} is no directory"
        elif not os.access(above, os.W_OK | os.X_OK):
            why = f"cannot be made: {above!r} cannot be written to"
    if why is not None:
        raise click.BadParameter(f"{directory!r} {why}", param_hint="--out")


def write(transport: Transport, document: Json, directory: str) -> list[CorralError]:
    """Each artifact under `directory`: its path below /workspace/out if all lie there, else its path below /workspace.

    -> what could not be written, one error each; the others are there. Each appears whole or not at all.
    """
    artifacts = (document.get("result") or {}).get("artifacts") or []
    hint = f"the run has ended; its artifacts are kept under {document.get('id')}"
    failures: list[CorralError] = []
    try:
        paths = [_parts(str(a["path"])) for a in artifacts]
        if paths and all(len(parts) > 1 and parts[0] == "out" for parts in paths):
            paths = [parts[1:] for parts in paths]
        os.makedirs(directory, exist_ok=True)
        root = os.open(directory, _FOLDER)
    except CorralError as error:
        return [error]
    except OSError as error:
        return [_failure(f"cannot write {directory!r}: {error.strerror}", hint)]
    try:
        for artifact, parts in zip(artifacts, paths, strict=True):
            try:
                _fetch(transport, str(artifact["url"]), root, parts)
            except OSError as error:
                shown = os.path.join(directory, *(error.filename if isinstance(error.filename, list) else parts))
                failures.append(_failure(f"cannot write {shown!r}: {error.strerror}", hint))
            except CorralError as error:
                failures.append(error)
    finally:
        os.close(root)
    return failures


def _failure(detail: str, hint: str) -> CorralError:
    return CorralError("infra_error", detail, hint=hint, field="--out", retryable=False)


def _parts(path: str) -> list[str]:
    parts = path.removeprefix("/workspace/").lstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CorralError("infra_error", f"the service named an artifact {path!r}", retryable=False)
    return parts


def _fetch(transport: Transport, url: str, root: int, parts: list[str]) -> None:
    with _parent(root, parts) as folder:
        part = f".corral-{os.urandom(8).hex()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o666, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                for block in transport.download(url):
                    file.write(block)
            os.replace(part, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)  # a link of that name is replaced
        except BaseException as error:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            if isinstance(error, OSError):
                error.filename = None
            raise


@contextmanager
def _parent(root: int, parts: list[str]) -> Iterator[int]:
    """The directory of an artifact, made name by name without following a link. OSError has the parts that were in the way."""
    folder = os.dup(root)
    try:
        for depth, name in enumerate(parts[:-1], 1):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            try:
                deeper = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                linked = os.path.islink(f"/proc/self/fd/{folder}/{name}")
                why = "a symbolic link is in the way" if linked else error.strerror
                raise OSError(error.errno, why, parts[:depth]) from error
            os.close(folder)
            folder = deeper
        yield folder
    finally:
        os.close(folder)
