"""Operations of the file program on single files and directories.

Everything is resolved here, inside, with the rights of the exec's user, so a link leads nowhere that this user could not go by
itself. Only regular files are opened for their content, through a descriptor whose type was looked at first: nothing here waits for
the other end of a FIFO. Memory does not grow with what is moved.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import errno
import os
import stat

from corral.guest.entries import CHUNK, Refused, facts, line, raw, refusal_of, say, seen, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

IDLE_S = 600
"""How long the other side may do nothing; then this program ends."""
UNSIZED = 1024 * 1024
"""What is read of a file that has no size of its own (/proc)."""
PAGE_BYTES = 1024 * 1024
PART = b".corral-"
PART_END = b".part"
_ZEROS = bytes(CHUNK)


# -- reading -------------------------------------------------------------------------------------------------------------------
def stat_(path: str, follow: str) -> None:
    target = raw(path)
    told = facts(target, os.stat(target)) if follow == "1" else seen(target)
    say(line(told))


def _open_regular(path: bytes) -> tuple[int, os.stat_result]:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if stat.S_ISDIR(info.st_mode):
            raise Refused("is_a_directory", f"{shown(path)!r} is a directory", shown(path))
        if not stat.S_ISREG(info.st_mode):
            raise Refused("not_a_file", f"{shown(path)!r} is no regular file", shown(path))
        return os.open(b"/proc/self/fd/%d" % handle, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), info
    finally:
        os.close(handle)


def _part_of(first: str, last: str, size: int, path: bytes) -> tuple[int, int]:
    """(offset, length) of a range `FIRST-LAST`, `FIRST-` or, without a first, the last LAST bytes."""
    if first == "-" and last == "-":
        return 0, size
    begin = int(first) if first != "-" else max(0, size - int(last))
    end = size if first == "-" or last == "-" else min(size, int(last) + 1)
    if begin >= size or end <= begin:
        raise Refused("range_not_satisfiable", f"{shown(path)!r} has {size} bytes", shown(path), size)
    return begin, end - begin


def read(path: str, first: str, last: str) -> None:
    """One line with the facts, `offset` and `length`, then exactly these bytes."""
    target = raw(path)
    fd, info = _open_regular(target)
    told = facts(target, info)
    if info.st_size == 0:
        content = os.read(fd, UNSIZED)
        while content and len(content) < UNSIZED and (more := os.read(fd, UNSIZED - len(content))):
            content += more
        if len(content) == UNSIZED:
            raise Refused("not_a_file", f"{shown(target)!r} does not tell its size", shown(target))
        begin, length = _part_of(first, last, len(content), target)
        say(line({**told, "size": len(content), "offset": begin, "length": length}) + content[begin : begin + length])
        return
    begin, length = _part_of(first, last, info.st_size, target)
    _signal.alarm(IDLE_S)
    say(line({**told, "offset": begin, "length": length}))
    at, end = begin, begin + length
    while at < end:
        _signal.alarm(IDLE_S)
        count = os.sendfile(1, fd, at, min(CHUNK, end - at))
        if count == 0:
            raise Refused("conflict", f"{shown(target)!r} became shorter while it was read", shown(target))
        at += count


# -- lists ---------------------------------------------------------------------------------------------------------------------
def list_(path: str, recursive: str, limit: str, after: str) -> None:
    """A line per entry in the order of the bytes of its path, then `{"next"}`: where the next page begins, or null."""
    top, wanted, last = raw(path), int(limit), raw(after)
    if not stat.S_ISDIR(os.stat(top).st_mode):
        raise Refused("not_a_directory", f"{path!r} is no directory", path)
    deep = recursive == "1"
    room = PAGE_BYTES
    page: list[bytes] = []
    for name in _walk(top, deep, wanted + 1, last):
        whole = _join(top, name)
        try:
            told = seen(whole)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise refusal_of(error, whole) from None
        if deep and told["type"] == "dir" and (why := _closed(whole)) is not None:
            told["error"] = why
        text = line(told)
        if page and (len(page) == wanted or len(text) > room):
            page.append(line({"next": shown(last)}))
            break
        room -= len(text)
        page.append(text)
        last = name
    else:
        page.append(line({"next": None}))
    _signal.alarm(IDLE_S)
    say(b"".join(page))


def _join(top: bytes, name: bytes) -> bytes:
    return top + name if top.endswith(b"/") else top + b"/" + name


def _closed(directory: bytes) -> str | None:
    """Why what is below cannot be listed."""
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    except OSError as error:
        return refusal_of(error, directory).code
    return None


def _walk(top: bytes, deep: bool, most: int, after: bytes) -> Iterator[bytes]:
    """Names relative to `top` behind `after`. A directory's content comes where `DIRECTORY/` sorts."""
    stack = [(b"", _keys(top, b"", deep, most, after))]
    while stack:
        prefix, keys = stack[-1]
        key = next(keys, None)
        if key is None:
            stack.pop()
        elif key.endswith(b"/"):
            below = prefix + key
            stack.append((below, _keys(_join(top, below[:-1]), below, deep, most, after)))
        else:
            yield prefix + key


def _keys(directory: bytes, prefix: bytes, deep: bool, most: int, after: bytes) -> Iterator[bytes]:
    """The names of a directory in order, `NAME/` where it has to be entered; never more than `most` of them in memory."""
    from heapq import nsmallest

    before: bytes | None = None
    while True:
        chosen = nsmallest(most, _names(directory, prefix, deep, after, before))
        yield from chosen
        if len(chosen) < most:
            return
        before = chosen[-1]


def _names(directory: bytes, prefix: bytes, deep: bool, after: bytes, before: bytes | None) -> Iterator[bytes]:
    try:
        found = os.scandir(directory)
    except OSError as error:
        if not prefix:
            raise
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return  # gone meanwhile; or its own entry says why it is not shown
        raise refusal_of(error, directory) from None
    with found:
        for entry in found:
            name = entry.name
            whole = prefix + name
            if whole > after and (before is None or name > before):
                yield name
            if deep and entry.is_dir(follow_symlinks=False):
                name += b"/"
                whole += b"/"
                if (whole > after or after.startswith(whole)) and (before is None or name > before):
                    yield name


# -- writing -------------------------------------------------------------------------------------------------------------------
class Part:
    """A new file that has no name until it is whole; where the file system cannot do that, one that goes when the program ends."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.name: bytes | None = None
        try:
            self.fd = os.open(b".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            self.name = part_name()
            for number in (_signal.SIGTERM, _signal.SIGALRM):
                _signal.signal(number, _end)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fd = os.open(self.name, flags, 0o600, dir_fd=parent)

    def _link(self, name: bytes) -> None:
        if self.name is not None:
            os.link(self.name, name, src_dir_fd=self.parent, dst_dir_fd=self.parent, follow_symlinks=False)
        else:
            # With descriptors given it is linkat, which follows the link that /proc shows.
            source = b"/proc/self/fd/%d" % self.fd
            os.link(source, name, src_dir_fd=self.parent, dst_dir_fd=self.parent, follow_symlinks=True)

    def place(self, name: bytes, overwrite: bool) -> None:
        """Give it its name in one step."""
        if not overwrite:
            self._link(name)
            return
        if self.name is None:
            try:
                self._link(name)
                return
            except FileExistsError:
                part = part_name()
                self._link(part)
                self.name = part
        os.rename(self.name, name, src_dir_fd=self.parent, dst_dir_fd=self.parent)
        self.name = None

    def close(self) -> None:
        os.close(self.fd)
        if self.name is not None:
            try:
                os.unlink(self.name, dir_fd=self.parent)
            except FileNotFoundError:
                pass


def _end(number: int, frame: Any) -> NoReturn:
    raise SystemExit(5)


def part_name() -> bytes:
    return PART + os.urandom(8).hex().encode() + PART_END


def _parent(path: bytes, parents: bool) -> tuple[int, bytes]:
    """(descriptor of the directory, last name)."""
    above, name = os.path.split(path)
    if name in (b"", b".", b".."):
        raise Refused("is_a_directory", f"{shown(path)!r} is a directory", shown(path))
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(above or b"/", flags), name
    except FileNotFoundError:
        if not parents:
            raise Refused("not_found", f"{shown(above)!r} does not exist", shown(above)) from None
        os.makedirs(above, exist_ok=True)
        return os.open(above, flags), name


def _look(parent: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def write(path: str, mode: str, parents: str, overwrite: str, size: str) -> None:
    """Take a file from standard input: all of it appears at once, or nothing changes. Then one line with its facts and `created`."""
    given = raw(path)
    # The file that a link names is the one to write, as for any program.
    target = os.path.realpath(given) if os.path.islink(given) else given
    parent, name = _parent(target, parents == "1")
    before = _look(parent, name)
    if before is not None:
        if stat.S_ISDIR(before.st_mode):
            raise Refused("is_a_directory", f"{path!r} is a directory", path)
        if overwrite != "1":
            raise Refused("already_exists", f"{path!r} exists", path)
        if not stat.S_ISREG(before.st_mode):
            raise Refused("not_a_file", f"{path!r} is no regular file", path)
        if not os.access(name, os.W_OK, dir_fd=parent):  # a rename would not ask: it needs the directory only
            raise Refused("permission_denied", f"{path!r} may not be written", path)
    part = Part(parent)
    try:
        total = _receive(part.fd)
        if size != "-" and total != int(size):
            raise Refused("bad_request", f"{total} bytes came, {size} were promised", path)
        if mode != "-":
            bits = int(mode, 8)
        elif before is not None:
            bits = stat.S_IMODE(before.st_mode) & 0o777
        else:
            bits = 0o666 & ~_umask()
        os.fchmod(part.fd, bits)
        part.place(name, overwrite == "1")
        info = os.fstat(part.fd)
    finally:
        part.close()
    say(line({**facts(given, info), "created": before is None}))


def _umask() -> int:
    old = os.umask(0o022)
    os.umask(old)
    return old


def _receive(fd: int) -> int:
    """Standard input to its end; runs of zeros become holes."""
    at = 0
    while True:
        _signal.alarm(IDLE_S)
        piece = os.read(0, CHUNK)
        if not piece:
            break
        if piece != _ZEROS[: len(piece)]:
            view, here = memoryview(piece), at
            while view:
                count = os.pwrite(fd, view, here)
                view, here = view[count:], here + count
        at += len(piece)
    os.ftruncate(fd, at)
    return at


def mkdir(path: str, parents: str, mode: str) -> None:
    target = raw(path)
    try:
        if parents == "1":
            os.makedirs(os.path.dirname(target) or b"/", exist_ok=True)
        os.mkdir(target, int(mode, 8))
        os.chmod(target, int(mode, 8))  # whatever the umask
    except FileExistsError:
        if not os.path.lexists(target):  # what exists is a file where a directory above it should be
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        if not os.path.isdir(target):
            raise
    say(line(facts(target, os.stat(target))))


# -- moving --------------------------------------------------------------------------------------------------------------------
def move(source: str, target: str, overwrite: str) -> None:
    """Rename, across file systems by a copy that appears at once. Then one line with the facts of what is there now."""
    old, new = raw(source), raw(target)
    os.lstat(old)
    if not os.path.lexists(os.path.dirname(new) or b"/"):
        raise Refused("not_found", f"{shown(os.path.dirname(new))!r} does not exist", shown(os.path.dirname(new)))
    try:
        _rename(old, new, overwrite == "1")
    except OSError as error:
        if error.errno == errno.EXDEV:
            _carry(old, new, overwrite == "1")
        elif error.errno == errno.ENOTDIR:
            detail = f"{shown(new)!r} is or leads through what is no directory"
            raise Refused("not_a_directory", detail, shown(new)) from None
        elif error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR):
            raise refusal_of(error, new) from None
        else:
            raise
    say(line(seen(new)))


def _rename(old: bytes, new: bytes, overwrite: bool) -> None:
    if overwrite:
        os.rename(old, new)
        return
    import ctypes

    rename = ctypes.CDLL(None, use_errno=True).renameat2
    if rename(-100, ctypes.c_char_p(old), -100, ctypes.c_char_p(new), 1) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(number, os.strerror(number))
    if os.path.lexists(new):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(old, new)


def _carry(old: bytes, new: bytes, overwrite: bool) -> None:
    import shutil

    # Looked at before anything is copied: what could not be removed afterwards would be there twice.
    if os.path.ismount(old):
        raise Refused("invalid_value", f"{shown(old)!r} is where a file system begins", shown(old))
    if not os.access(os.path.dirname(old) or b"/", os.W_OK | os.X_OK):
        raise Refused("permission_denied", f"{shown(old)!r} may not leave its directory", shown(old))
    beside = _join(os.path.dirname(new), part_name())
    _signal.signal(_signal.SIGTERM, _end)  # given up half-way: the half copy goes
    try:
        if stat.S_ISDIR(os.lstat(old).st_mode):
            shutil.copytree(shown(old), shown(beside), symlinks=True)
        elif stat.S_ISREG(os.lstat(old).st_mode) or os.path.islink(old):
            shutil.copy2(old, beside, follow_symlinks=False)
        else:
            raise Refused("not_a_file", f"{shown(old)!r} cannot leave its file system", shown(old))
        _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)  # from here on it is done, and what it replaces goes
        _rename(beside, new, overwrite)
    except (shutil.Error, shutil.SpecialFileError) as error:
        raise Refused("invalid_value", f"{shown(old)!r}: {error}"[:1000], shown(old)) from None
    finally:
        if os.path.lexists(beside):
            _remove_all(beside)
    _remove_all(old)


# -- removing ------------------------------------------------------------------------------------------------------------------
def remove(path: str, recursive: str) -> None:
    target = raw(path)
    info = os.lstat(target)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(target)
    elif recursive != "1":
        os.rmdir(target)
    elif os.path.ismount(target) or is_mount_point(target):
        raise Refused("invalid_value", f"{path!r} is where a file system begins", path)
    else:
        _remove_all(target)
    say(line({"removed": True}))


def empty(*paths: str) -> None:
    """Remove all that is in these directories and that this user may remove; tells the first entry that stays."""
    stays: bytes | None = None
    for directory in map(raw, paths):
        try:
            names = os.listdir(directory) if not os.path.islink(directory) else []
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            stays = stays or directory
            continue
        for name in names:
            target = os.path.join(directory, name)
            try:
                if os.path.ismount(target) or is_mount_point(target):
                    continue  # of the sandbox's own making, not of a program's
                _remove_all(target)
            except FileNotFoundError:
                continue
            except (OSError, Refused):
                stays = stays or target
    say(line({"stays": None if stays is None else shown(stays)}))


def is_mount_point(path: bytes) -> bool:
    """Also of a bind mount of the same file system, which has its parent's device."""
    wanted = os.path.realpath(path)
    with open("/proc/self/mountinfo", "rb") as table:
        for text in table:
            point = text.split()[4]
            if point == wanted or (b"\\" in point and _unescaped(point) == wanted):
                return True
    return False


def _unescaped(point: bytes) -> bytes:
    """Blanks, tabs, newlines and backslashes stand as three octal digits there."""
    first, *rest = point.split(b"\\")
    return first + b"".join(bytes((int(part[:3], 8),)) + part[3:] for part in rest)


def _remove_all(path: bytes) -> None:
    """A whole tree, however deep, with one descriptor at a time and no way through a link."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    here = os.open(path, flags)
    above: list[tuple[list[bytes], int, int]] = []
    try:
        left = _empty(here)
        while True:
            if left:
                info = os.fstat(here)
                above.append((left, info.st_dev, info.st_ino))
                below = os.open(left[-1], flags, dir_fd=here)
                os.close(here)
                here = below
                left = _empty(here)
                continue
            if not above:
                break
            left, device, inode = above.pop()
            back = os.open(b"..", flags, dir_fd=here)
            os.close(here)
            here = back
            info = os.fstat(here)
            if (info.st_dev, info.st_ino) != (device, inode):
                raise Refused("conflict", f"{shown(path)!r} was moved about while it was removed", shown(path))
            os.rmdir(left.pop(), dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(path)


def _empty(directory: int) -> list[bytes]:
    """Remove what is no directory, and empty ones; the names of the others."""
    left = []
    for entry in os.listdir(directory):
        name = os.fsencode(entry)
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
                continue
            os.rmdir(name, dir_fd=directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise refusal_of(error, name) from None
            left.append(name)
    return left


OPERATIONS: dict[str, Callable[..., None]] = {
    "stat": stat_,
    "read": read,
    "list": list_,
    "write": write,
    "mkdir": mkdir,
    "move": move,
    "remove": remove,
    "empty": empty,
}
