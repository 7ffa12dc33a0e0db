"""The writable disk of one instance: a file-system image with hard byte and inode limits, or (without root) plain directories.

Everything lies under fixed names, so `discard` finds it whatever state a crash left behind: `disk.img` (sparse image) in the
instance's directory, `disk` (where it is mounted) in its place, which may be a mount of its own: a loop device tells the path of
its file only as long as the mount through which that was opened is there. `disk` has `workspace`, `home`, `var_tmp` for the
sandbox's user; `disk/guest.log` is for the guest's own output: it counts against the disk, is not reachable from inside, and cannot
fill the host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Callable

from corral import faults
from corral.errors import CorralError
from corral.linux import mounts
from corral.ports.runtime import HostTree

DIRECTORIES = {"workspace": 0o755, "home": 0o755, "var_tmp": 0o1777}
LOG = "guest.log"

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SEARCHABLE = 0o755
_BLOCK = 4096
_INODE = 256
_BLANK_FORMAT = 1
_BLANKS = 32
_KEPT_S = 2.0
"""How long a device may take to be let go of: whoever looks at new devices, like udev, has it open for moments, and the last umount of
a mount namespace that ended with its process is work that the kernel puts off, on a busy host for more than half a second."""
_EXT4_SHUTDOWN = 0x8004587D
_SHUTDOWN_NOLOGFLUSH = 2


def prepare(
    directory: str,
    place: str,
    size_bytes: int,
    inodes: int,
    uid: int,
    gid: int,
    *,
    idmap: Callable[[], int] | None = None,
    blanks: str | None = None,
) -> HostTree:
    """Make and mount the image: exactly `size_bytes` can be written, in about `inodes` files.

    `uid`/`gid` own the directories on disk. With `idmap` (answers a user namespace; called as late as possible) the mount shows them
    as the host ids that the namespace has for them, so the image itself does not depend on the range; the answer names the ids as
    seen at the mount. `blanks` is a directory that keeps new images, one per size, so that only the first is computed.
    """
    if os.path.lexists(f"{directory}/disk.img") and (left := discard(directory, place)):
        raise CorralError("infra_error", f"an older disk is still in use: {', '.join(left)}")
    image, point = f"{directory}/disk.img", f"{place}/disk"
    os.makedirs(point, exist_ok=True)
    os.chmod(point, _SEARCHABLE)
    _make_image(image, size_bytes, inodes, blanks)
    faults.point("runtime.create.image")
    mount = _mount_image(image)
    try:
        _limit_exactly(mount, size_bytes)
        for name, mode in DIRECTORIES.items():
            os.mkdir(name, dir_fd=mount)
            os.chown(name, uid, gid, dir_fd=mount)
            os.chmod(name, mode, dir_fd=mount)
        os.close(os.open(LOG, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=mount))
        if idmap is not None:
            mounts.set_idmap(mount, idmap())
        mounts.attach(mount, point)
    finally:
        os.close(mount)
    faults.point("runtime.create.disk")
    seen = os.stat(f"{point}/workspace")
    return HostTree(point, seen.st_uid, seen.st_gid, "image")


def prepare_directory(place: str, uid: int, gid: int) -> HostTree:
    """The same layout as plain directories, without any limit of its own (who cannot mount watches instead)."""
    point = f"{place}/disk"
    os.makedirs(point, exist_ok=True)
    os.chmod(point, _SEARCHABLE)
    for name, mode in DIRECTORIES.items():
        path = f"{point}/{name}"
        os.makedirs(path, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(path, uid, gid)
        os.chmod(path, mode)
    os.close(os.open(f"{point}/{LOG}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    return HostTree(point, uid, gid, "directory")


def restore(directory: str, place: str, image: str, *, idmap: Callable[[], int]) -> HostTree:
    """Make and mount a copy of a disk that was detached (`detach`) with all its content and its limits. `idmap` as in `prepare`."""
    copy, point = f"{directory}/disk.img", f"{place}/disk"
    os.makedirs(point, exist_ok=True)
    os.chmod(point, _SEARCHABLE)
    _copy_image(image, copy)
    faults.point("runtime.create.image")
    mount = _mount_image(copy)
    try:
        mounts.set_idmap(mount, idmap())
        mounts.attach(mount, point)
    finally:
        os.close(mount)
    faults.point("runtime.create.disk")
    seen = os.stat(f"{point}/workspace")
    return HostTree(point, seen.st_uid, seen.st_gid, "image")


def detach(directory: str, place: str, *, timeout_s: float = 5.0) -> list[str]:
    """Take the disk off, written out whole; -> what still uses it. Every process of the instance must be dead."""
    image, point = f"{directory}/disk.img", f"{place}/disk"
    end = time.monotonic() + timeout_s
    while points := mounts.umount_below(point):
        if time.monotonic() > end:
            return points
        time.sleep(0.005)
    remove_tree(point)  # see `discard`
    return [f"{device} (somebody has files of it open)" for device in _await_loops(image)]


def move(image: str, target: str) -> None:
    """Give a detached disk to somebody else, by another name."""
    try:
        os.rename(image, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_image(image, target)
        os.unlink(image)


def free(place: str) -> tuple[int, int]:
    """(bytes, inodes) that can still be used."""
    numbers = os.statvfs(f"{place}/disk")
    return numbers.f_bavail * numbers.f_frsize, numbers.f_favail


def discard(directory: str, place: str, *, timeout_s: float = 5.0) -> list[str]:
    """Remove the disk with all it holds; -> what could not be removed. Call it when every process of the instance is dead.

    Who still uses the mount is waited for. Copies of it that other mount namespaces keep go too. The loop device is the witness: one
    that somebody uses through such a copy is named here; its content is gone all the same, and it frees itself with the last user.
    """
    image, point = f"{directory}/disk.img", f"{place}/disk"
    end = time.monotonic() + timeout_s
    pause = 0.001
    while points := mounts.mounts_below(point):
        _forget_dirty_data(point)
        if not mounts.umount_below(point):
            break
        if time.monotonic() > end:
            return points
        time.sleep(pause)
        pause = min(0.05, pause * 2)
    # With the directory the kernel detaches what is mounted on it in any mount namespace, be it private and locked: no umount would.
    remove_tree(point)
    kept = _await_loops(image)
    with contextlib.suppress(FileNotFoundError):
        if kept:
            os.truncate(image, 0)
        os.unlink(image)
    return [f"{device} (somebody has files of it open)" for device in kept]


def _await_loops(image: str) -> list[str]:
    """Wait until no loop device has the image; -> those that somebody keeps."""
    end = time.monotonic() + _KEPT_S
    pause = 0.0005
    while devices := list(mounts.loops_below(image)):
        for device in devices:
            mounts.free_loop(device)
        if time.monotonic() > end:
            return devices
        time.sleep(pause)
        pause = min(0.01, pause * 2)
    return []


def stray_loops(prefix: str) -> dict[str, str]:
    """Loop device -> image, for all images below `prefix`."""
    return mounts.loops_below(prefix)


def remove_tree(path: str) -> None:
    """Remove a tree however deep its directories nest and whatever their modes are. No process may be changing it."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
    except FileNotFoundError:
        return
    waiting, number = [path], 0
    while waiting:
        current = waiting.pop()
        os.chmod(current, 0o700)
        with os.scandir(current) as entries:
            for entry in list(entries):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif os.path.dirname(entry.path) == path:
                    waiting.append(entry.path)
                else:
                    # Moved up, so that no path ever grows beyond what the kernel takes.
                    os.chmod(entry.path, 0o700)
                    while os.path.lexists(lifted := f"{path}/.{number}"):
                        number += 1
                    os.rename(entry.path, lifted)
                    waiting.append(lifted)
        if current != path:
            os.rmdir(current)
    os.rmdir(path)


def _make_image(image: str, size_bytes: int, inodes: int, blanks: str | None) -> None:
    # The tables come on top, so that the limit is what the program can write.
    size = size_bytes + inodes * _INODE + size_bytes // 1024 + (2 << 20)
    size += size // 50 if size < (800 << 20) else 16 << 20  # the kernel holds back 2 %, at most 16 MiB
    size = -(-size // _BLOCK) * _BLOCK
    blank = None if blanks is None else f"{blanks}/disk-{_BLANK_FORMAT}-{size}-{inodes}.img"
    source = _open_blank(blank, size)
    if source is None:
        source = _new_image(size, inodes, size_bytes)
        if blank is not None:
            _keep_blank(source, blank)
    try:
        _write_image(source, image, size)
    finally:
        os.close(source)


def _copy_image(source: str, target: str) -> None:
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write_image(fd, target, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _write_image(source: int, image: str, size: int) -> None:
    fd = os.open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _copy_sparse(source, fd, size)
    finally:
        os.close(fd)


def _new_image(size: int, inodes: int, size_bytes: int) -> int:
    """A new file system in memory; -> its descriptor. Nothing of it is left, whoever dies."""
    mkfs = shutil.which("mkfs.ext4", path=_PATH)
    if mkfs is None:
        raise CorralError("infra_error", "mkfs.ext4 is not installed", hint="install the package e2fsprogs")
    memory = os.memfd_create("disk", os.MFD_CLOEXEC)
    try:
        os.truncate(memory, size)
        command = [mkfs, "-q", "-F", "-b", str(_BLOCK), "-I", str(_INODE), "-m", "0", "-N", str(inodes + 16)]
        command += ["-O", "^has_journal,^resize_inode,^metadata_csum,uninit_bg"]
        command += ["-E", "lazy_itable_init=1,nodiscard", f"/proc/self/fd/{memory}"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": _PATH},
            cwd="/",
            timeout=60,
            pass_fds=[memory],
        )
        if done.returncode != 0:
            why = done.stderr.decode("utf-8", "replace").strip()
            raise CorralError("infra_error", f"mkfs.ext4 could not make a disk of {size_bytes} bytes: {why}")
    except BaseException:
        os.close(memory)
        raise
    return memory


def _open_blank(blank: str | None, size: int) -> int | None:
    if blank is None:
        return None
    try:
        fd = os.open(blank, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(fd).st_size == size:
        return fd
    os.close(fd)
    return None


def _keep_blank(source: int, blank: str) -> None:
    """Keep a new image for the next disk of its size. That it cannot be kept is no failure."""
    directory = os.path.dirname(blank)
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)
        kept = [entry for entry in os.scandir(directory) if entry.name.startswith("disk-")]
        for entry in sorted(kept, key=lambda entry: entry.stat().st_mtime)[: max(0, len(kept) - _BLANKS + 1)]:
            os.unlink(entry.path)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Without a name until it is whole.
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                _copy_sparse(source, fd, os.fstat(source).st_size)
                name = os.path.basename(blank)
                os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(fd)
        finally:
            os.close(folder)


def _copy_sparse(source: int, target: int, size: int) -> None:
    os.truncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(target, os.pread(source, min(end - at, 1 << 20), at), at)


def _mount_image(image: str) -> int:
    loop, device = mounts.attach_loop(image)
    try:
        faults.point("runtime.create.loop")
        return mounts.new_filesystem("ext4", device, {"noinit_itable": None})
    finally:
        os.close(loop)  # the mount holds the device from now on; it frees itself with it


def _limit_exactly(mount: int, size_bytes: int) -> None:
    """Take away what the image has above its limit, by a file that only the host sees."""
    numbers = os.fstatvfs(mount)
    surplus = numbers.f_bavail * numbers.f_frsize - size_bytes
    if surplus >= _BLOCK:
        fd = os.open("pad", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=mount)
        try:
            os.posix_fallocate(fd, 0, surplus // _BLOCK * _BLOCK)
        finally:
            os.close(fd)


def _forget_dirty_data(point: str) -> None:
    """Stop the file system without writing back what will be thrown away: umount of a full disk costs no writes then."""
    try:
        fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if os.path.ismount(point):
            fcntl.ioctl(fd, _EXT4_SHUTDOWN, struct.pack("I", _SHUTDOWN_NOLOGFLUSH))
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EPERM, errno.EIO, errno.EINVAL):
            raise
    finally:
        os.close(fd)
