"""Mounts by system call: binds with their flags set before anyone can see them, id maps, tmpfs, loop images, and taking it all down.

Everything is built detached (`open_tree`, `fsmount`), given its flags, and attached in one `move_mount`: there is no moment at
which a tree is visible with too many rights, and no process is started. A mount made here ends up *private*, whatever the mount
below it is, so what is later mounted inside it does not spread, nor does what the host mounts elsewhere appear in it.

Failures are `OSError` with the call and the path; callers at the edge of a port turn them into a `CorralError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# Same numbers on every architecture that came after 2019's unification (x86_64 and aarch64 among them).
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_CLONE = 1
_CLONE_NEWNS = 0x20000
_CLOEXEC = os.O_CLOEXEC
_MOVE_F_EMPTY_PATH = 4
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6

_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC, _ATTR_NOATIME, _ATTR_IDMAP = 1, 2, 4, 8, 0x10, 0x100000

_MS_REC, _MS_PRIVATE, _MS_SLAVE, _MS_SHARED = 0x4000, 1 << 18, 1 << 19, 1 << 20
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_CLR_FD = 0x4C82, 0x4C0A, 0x4C01
_LO_FLAGS_AUTOCLEAR = 4


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _fail(call: str, path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}", path)


def _syscall(number: int, *args: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *args))


def bind(
    source: str,
    target: str,
    *,
    read_only: bool,
    nosuid: bool = True,
    nodev: bool = True,
    recursive: bool = False,
    private: bool = True,
) -> None:
    """Show the tree `source` at `target` too. Mounts below `source` stay out unless `recursive`.

    With `private=False` the copy goes on receiving what is mounted below a shared `source` later.
    """
    with _clone(source, recursive) as tree:
        flags = _flags(read_only, nosuid, nodev)
        _set_attributes(tree, flags, source, recursive=recursive, propagation=_MS_PRIVATE if private else 0)
        attach(tree, target, private=private)


def idmapped_bind(
    source: str,
    target: str,
    userns_fd: int,
    *,
    read_only: bool = True,
    nosuid: bool = True,
    nodev: bool = True,
) -> None:
    """`bind` whose owners are translated by the map of a user namespace: id N on disk appears as the host id that N has there."""
    with _clone(source, False) as tree:
        _set_attributes(tree, _flags(read_only, nosuid, nodev), source, userns_fd=userns_fd)
        attach(tree, target)


def tmpfs(
    target: str,
    *,
    size: int,
    inodes: int | None = None,
    mode: int = 0o1777,
    uid: int = 0,
    gid: int = 0,
    noexec: bool = False,
) -> None:
    """A tmpfs with a hard byte limit (and inode limit) at `target`, nosuid and nodev."""
    options: dict[str, str | None] = {"size": str(size), "mode": f"{mode:o}", "uid": str(uid), "gid": str(gid)}
    if inodes is not None:
        options["nr_inodes"] = str(inodes)
    fd = new_filesystem("tmpfs", "tmpfs", options, flags=_ATTR_NOEXEC if noexec else 0)
    try:
        attach(fd, target)
    finally:
        os.close(fd)


def new_filesystem(kind: str, source: str, options: dict[str, str | None], *, flags: int = 0) -> int:
    """A detached mount of a new superblock, nosuid, nodev, noatime; -> its descriptor, for `attach` (the caller closes it).

    Files below it can be made through the descriptor (`dir_fd=`) before anybody sees the mount.
    """
    context = _syscall(_FSOPEN, kind.encode(), 1)
    if context < 0:
        raise _fail("fsopen", kind)
    try:
        settings = {"source": source, **options}
        for key, value in settings.items():
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            text = None if value is None else os.fsencode(value)
            if _syscall(_FSCONFIG, context, command, key.encode(), text, 0) < 0:
                raise _fail(f"fsconfig {key}", source)
        if _syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0) < 0:
            raise _fail("fsconfig create", source)
        mount = _syscall(_FSMOUNT, context, 1, _ATTR_NOSUID | _ATTR_NODEV | _ATTR_NOATIME | flags)
        if mount < 0:
            raise _fail("fsmount", source)
        return mount
    finally:
        os.close(context)


def set_idmap(mount_fd: int, userns_fd: int) -> None:
    """Give a detached mount its id map. From then on ids outside the map (root's too) cannot create files in it."""
    _set_attributes(mount_fd, 0, "detached mount", userns_fd=userns_fd)


def attach(mount_fd: int, target: str, *, private: bool = True) -> None:
    """Make a detached mount visible at `target`, private unless told otherwise."""
    if _syscall(_MOVE_MOUNT, mount_fd, b"", _AT_FDCWD, os.fsencode(target), _MOVE_F_EMPTY_PATH) < 0:
        raise _fail("move_mount", target)
    if private:
        make_private(target)  # a mount attached below a shared one becomes shared


def umount(target: str, *, detach: bool = False) -> None:
    """Take the topmost mount off `target`; EBUSY while somebody uses it. `detach` only hides it until the last user ends."""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if detach else 0)
    if _libc.umount2(os.fsencode(target), flags) < 0:
        raise _fail("umount", target)


def make_private(path: str, *, recursive: bool = False) -> None:
    """Neither spread mounts made below `path` nor receive any."""
    _propagation(path, _MS_PRIVATE, recursive)


def make_slave(path: str, *, recursive: bool = False) -> None:
    """Receive mounts from the peers of `path`, spread none."""
    _propagation(path, _MS_SLAVE, recursive)


def make_shared(path: str, *, recursive: bool = False) -> None:
    """Spread mounts made below `path` to copies made from now on. Make it private first, or older copies see them too."""
    _propagation(path, _MS_SHARED, recursive)


def make_read_only(path: str) -> None:
    """Let nobody write through the mount at `path` from this mount namespace; its other mounts stay as they are."""
    attributes = _MountAttr(_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if _syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), 0, ctypes.byref(attributes), size) < 0:
        raise _fail("mount_setattr", path)


def in_own_namespace(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a mount namespace of its own, a slave of ours; what it mounts or takes away only it sees.

    Processes that `work` starts live in that namespace; it ends with the last of them.
    """
    answer: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if _libc.unshare(_CLONE_NEWNS) < 0:
                raise _fail("unshare", "mount namespace")
            make_slave("/", recursive=True)
            answer.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="own-namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]


def mounts_below(prefix: str) -> list[str]:
    """Mount points at or below `prefix` in this mount namespace, oldest first; one that is mounted over appears twice."""
    wanted = os.fsencode(os.path.realpath(prefix))
    below = wanted.rstrip(b"/") + b"/"
    found = []
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            point = _unescape(line.split(b" ", 5)[4])
            if point == wanted or point.startswith(below):
                found.append(os.fsdecode(point))
    return found


def sources(pid: str) -> list[tuple[str, str, str]]:
    """(device "MAJOR:MINOR", path within its file system, mount point) of each mount that a process sees; "self" is this one."""
    with open(f"/proc/{pid}/mountinfo", "rb") as table:
        rows = [line.split(b" ", 5)[2:5] for line in table]
    return [
        (os.fsdecode(device), os.fsdecode(_unescape(root)), os.fsdecode(_unescape(at))) for device, root, at in rows
    ]


def umount_below(prefix: str) -> list[str]:
    """Take off every mount at or below `prefix`, newest first; -> those that are still there (somebody uses them)."""
    while points := mounts_below(prefix):
        progress = False
        for point in reversed(points):
            try:
                umount(point)
                progress = True
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EINVAL, errno.ENOENT):
                    raise
        if not progress:
            break
    return points


def attach_loop(image: str) -> tuple[int, str]:
    """A loop device for a file: -> (its descriptor, its path). It frees itself when the last user ends: descriptor or mount."""
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(64):  # another process may take the free number between the two calls
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                device = f"/dev/loop{number}"
                loop = _open_loop(device, number)
                try:
                    fcntl.ioctl(loop, _LOOP_CONFIGURE, _loop_config(file, image))
                except OSError as error:
                    os.close(loop)
                    if error.errno != errno.EBUSY:
                        raise
                    continue
                return loop, device
        finally:
            os.close(control)
    finally:
        os.close(file)
    raise OSError(errno.EBUSY, "no loop device could be taken", image)


def loops_below(prefix: str) -> dict[str, str]:
    """Loop device -> file behind it, for every file at or below `prefix`."""
    wanted = os.path.realpath(prefix)
    found = {}
    for name in os.listdir("/sys/block"):
        if not name.startswith("loop"):
            continue
        try:
            with open(f"/sys/block/{name}/loop/backing_file", "rb") as file:
                behind = os.fsdecode(file.read().rstrip(b"\n")).removesuffix(" (deleted)")
        except OSError:  # not in use
            continue
        if behind == wanted or behind.startswith(wanted.rstrip("/") + "/"):
            found[f"/dev/{name}"] = behind
    return found


def free_loop(device: str) -> None:
    """Let go of a loop device that nothing is mounted from; while it is in use, it frees itself at the end of that use."""
    try:
        loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.ioctl(loop, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EBUSY):
            raise
    finally:
        os.close(loop)


def _flags(read_only: bool, nosuid: bool, nodev: bool) -> int:
    return (_ATTR_RDONLY if read_only else 0) | (_ATTR_NOSUID if nosuid else 0) | (_ATTR_NODEV if nodev else 0)


@contextmanager
def _clone(source: str, recursive: bool) -> Iterator[int]:
    flags = _CLONE | _CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    tree = _syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags)
    if tree < 0:
        raise _fail("open_tree", source)
    try:
        yield tree
    finally:
        os.close(tree)


_BUSY_PAUSES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)


def _set_attributes(
    tree: int,
    flags: int,
    path: str,
    *,
    userns_fd: int | None = None,
    recursive: bool = False,
    propagation: int = _MS_PRIVATE,
) -> None:
    if userns_fd is not None:
        flags |= _ATTR_IDMAP
    attributes = _MountAttr(flags, 0, propagation, 0 if userns_fd is None else userns_fd)
    how = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    # EBUSY means a writer whose file was closed a moment ago and whose release the kernel has put off: seen with many starts at once.
    for pause in (*_BUSY_PAUSES, None):
        if _syscall(_MOUNT_SETATTR, tree, b"", how, ctypes.byref(attributes), size) >= 0:
            return
        if ctypes.get_errno() != errno.EBUSY or pause is None:
            raise _fail("mount_setattr", path)
        time.sleep(pause)


def _propagation(path: str, kind: int, recursive: bool) -> None:
    flags = ctypes.c_ulong(kind | (_MS_REC if recursive else 0))
    if _libc.mount(None, os.fsencode(path), None, flags, None) < 0:
        raise _fail("mount propagation", path)


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return b"".join(
        part if index == 0 else bytes([int(part[:3], 8)]) + part[3:] for index, part in enumerate(field.split(b"\\"))
    )


def _open_loop(device: str, number: int) -> int:
    try:
        return os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # /dev is not kept by the kernel here
        os.mknod(device, 0o600 | 0o060000, os.makedev(7, number))
        return os.open(device, os.O_RDWR | os.O_CLOEXEC)


def _loop_config(file: int, image: str) -> bytes:
    name = os.fsencode(image)[-63:].ljust(64, b"\0")
    info = struct.pack("5Q4I", 0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR) + name + bytes(64 + 32 + 16)
    return struct.pack("2I", file, 0) + info + bytes(64)
