"""A tree that nobody uses any more goes, whatever a sandbox has made of it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from corral.linux.guesttree import beneath

_DEEP = 48
"""Directories below this depth are moved up before they are emptied."""


def remove_tree(path: str) -> list[str]:
    """Remove a tree of ours that a sandbox may have filled, its processes dead; -> what could not be removed.

    Works beyond PATH_MAX (deep directories are moved up first) and on modes 0000; never follows a link or enters another mount.
    """
    left: list[str] = []
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return left
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return left
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    try:
        # Directories moved to the top by one pass are emptied by the next one.
        for _ in range(10_000):
            left.clear()
            if not _empty(top, top, 0, left, path):
                break
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        left.append(f"{path}: {error.strerror}")
    return left


def _empty(top: int, directory: int, depth: int, left: list[str], path: str) -> bool:
    """Remove what is in `directory`; True when something was moved up and another pass is needed."""
    moved = False
    with os.scandir(directory) as scan:
        names = [os.fsencode(entry.name) for entry in scan]
    for name in names:
        try:
            os.unlink(name, dir_fd=directory)
            continue
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM, errno.EACCES):
                left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}")
                continue
        try:
            child = _open_dir_anyhow(directory, name)
        except OSError as error:
            left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}")
            continue
        try:
            if depth < _DEEP:
                moved |= _empty(top, child, depth + 1, left, f"{path}/{os.fsdecode(name)}"[:300])
            else:
                with os.scandir(child) as scan:
                    below = [os.fsencode(entry.name) for entry in scan]
                for one in below:
                    with contextlib.suppress(OSError):  # a directory moves only when its owner may write in it
                        os.close(_open_dir_anyhow(child, one))
                    os.rename(one, b".corral-up-" + secrets.token_hex(8).encode(), src_dir_fd=child, dst_dir_fd=top)
                    moved = True
            os.rmdir(name, dir_fd=directory)
        except OSError as error:
            left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}"[:400])
        finally:
            os.close(child)
    return moved


def _open_dir_anyhow(directory: int, name: bytes) -> int:
    handle = beneath.open_one(directory, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
