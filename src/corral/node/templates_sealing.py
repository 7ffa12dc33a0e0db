"""What every base has in common, however it was made: mount points, a generated /etc, plain modes, no credential, a digest."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from corral.errors import CorralError

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
MOUNT_POINTS = [
    ".corral",
    "workspace",
    "home/sandbox",
    "root",
    "tmp",
    "var/tmp",
    "dev",
    "dev/shm",
    "dev/pts",
    "proc",
    "sys",
    "run",
    "run/user",
    "run/user/1000",
    "opt",
]

_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "group": "root:x:0:\ntty:x:5:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "resolv.conf": "nameserver 127.0.0.1\noptions attempts:1 timeout:2\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "protocols": "ip 0 IP\nicmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nipv6 41 IPv6\n",
    "services": "ftp 21/tcp\nssh 22/tcp\nsmtp 25/tcp\ndomain 53/tcp\ndomain 53/udp\nhttp 80/tcp\nhttps 443/tcp\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "os-release": 'NAME="Corral sandbox"\nID=corral\nPRETTY_NAME="Corral sandbox"\n',
    "profile": "",
}

SECRET_BY_NAME = ("shadow", "gshadow", "shadow-", "gshadow-", "passwd-", "group-", ".pwd.lock", "machine-id")
"""Of /etc: every file of a base can be read by everybody inside."""

_EOL = rb"(?:(?:\\r)?\\n|\r?\n)[ \t]{0,16}"  # also as JSON writes it
_CREDENTIALS = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        (
            b"-----BEGIN ",
            rb"-----BEGIN (?:RSA |EC |DSA |OPENSSH |ENCRYPTED )?PRIVATE KEY-----" + _EOL +
            rb"(?:(?:Proc-Type|DEK-Info): ?[^\r\n\\]{0,200}" + _EOL + rb"){0,4}"
            rb"(?:[A-Za-z0-9+/=]|" + _EOL + rb"){100}",
        ),
        *((word, rb"\b" + word + rb"[0-9A-Z]{16}\b") for word in (b"AKIA", b"ASIA")),
        *((b"gh%c_" % kind, rb"\bgh%c_[A-Za-z0-9]{36}\b" % kind) for kind in b"pousr"),
        (b"xox", rb"\bxox[abpr]-[0-9A-Za-z-]{20}"),
        (b"sk-", rb"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{40,400}\b"),
        (b"glpat-", rb"\bglpat-[0-9A-Za-z_-]{20}\b"),
    )
)  # fmt: skip
"""What each begins with, and what it is: looking for the beginnings takes a tenth of the time, and nearly no file has one."""
_OVERLAP = 4096
"""No pattern takes as many bytes."""
SEARCHED_BYTES = 1024 * 1024
"""A longer file is searched in blocks."""


def find_program(root: Path, name: str) -> str | None:
    """Path inside of a program in a base, or None; links are followed inside the base only."""
    for directory in ("usr/local/bin", "usr/bin", "bin"):
        inside = resolve_inside(root, f"/{directory}/{name}")
        if inside is not None and inside.is_file():
            return f"/{directory}/{name}"
    return None


def resolve_inside(root: Path, path: str) -> Path | None:
    """Where a path of the tree lies on the host, or None; every link is followed as if `root` were the root."""
    parts = [p for p in path.split("/") if p]
    done: list[str] = []
    for _ in range(200):
        if not parts:
            return root.joinpath(*done)
        part = parts.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        here = root.joinpath(*done, part)
        if here.is_symlink():
            target = os.readlink(here)
            parts = [p for p in target.split("/") if p and p != "."] + parts
            if target.startswith("/"):
                done = []
        elif here.exists():
            done.append(part)
        else:
            return None
    return None


def furnish(root: Path) -> None:
    """Mount points and a generated /etc. The tree may come from a stranger: no link in it is followed."""
    for directory in MOUNT_POINTS:
        _real_directory(root, directory)
    etc = _real_directory(root, "etc")
    for name, content in _ETC.items():
        path = etc / name
        if path.is_symlink() or not path.is_file() or name in ("passwd", "group", "resolv.conf", "hosts", "hostname"):
            _clear(path)
            path.write_text(content, encoding="utf-8")
            path.chmod(0o644)
    for name in SECRET_BY_NAME:
        _clear(etc / name)
    for link, target in (("mtab", "/proc/self/mounts"), ("localtime", "/usr/share/zoneinfo/Etc/UTC")):
        if not (etc / link).is_symlink() and not (etc / link).exists():
            (etc / link).symlink_to(target)


def _real_directory(root: Path, inside: str) -> Path:
    """A runtime mounts here by its path on the host: every part of it is a directory, a link or file there gives way."""
    path = root
    for part in inside.split("/"):
        path = path / part
        if path.is_symlink() or not path.is_dir():
            _clear(path)
            path.mkdir()
    return path


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Sealed:
    """What a finished tree is: its digest, and how much it holds."""

    digest: str
    files: int
    size_bytes: int


def seal(name: str, root: Path) -> Sealed:
    """Normalise owners and modes, look for credentials, and digest the whole tree."""
    digest = hashlib.sha256()
    count = size = 0
    own = (os.geteuid(), os.getegid())
    for directory, directories, files in os.walk(root):
        directories.sort()
        _make_plain(directory, os.lstat(directory), own, 0o755)
        for entry in sorted(files + [d for d in directories if os.path.islink(os.path.join(directory, d))]):
            path = os.path.join(directory, entry)
            info = os.lstat(path)
            relative = os.fsencode(os.path.relpath(path, root))
            count += 1
            if stat.S_ISLNK(info.st_mode):
                _make_plain(path, info, own, None)
                digest.update(b"l" + relative + b"\0" + os.fsencode(os.readlink(path)) + b"\0")
                continue
            if not stat.S_ISREG(info.st_mode):
                os.unlink(path)
                continue
            _make_plain(path, info, own, 0o755 if info.st_mode & 0o111 else 0o644)
            content = hashlib.sha256()
            with open(path, "rb") as file:
                search = CredentialSearch(name, relative)
                while block := file.read(SEARCHED_BYTES):
                    search.feed(block)
                    content.update(block)
                search.finish()
            size += info.st_size
            digest.update(b"f" + relative + b"\0" + (b"x" if info.st_mode & 0o111 else b"-") + content.digest())
        digest.update(b"d" + os.fsencode(os.path.relpath(directory, root)) + b"\0")
    return Sealed("sha256:" + digest.hexdigest(), count, size)


def _make_plain(path: str, info: os.stat_result, own: tuple[int, int], mode: int | None) -> None:
    """Owned by us, with `mode`, and without what extended attributes would grant or hide (capabilities, marks of overlayfs)."""
    if (info.st_uid, info.st_gid) != own and own[0] == 0:
        os.lchown(path, *own)
    for attribute in os.listxattr(path, follow_symlinks=False):
        if attribute != "security.selinux":
            os.removexattr(path, attribute, follow_symlinks=False)
    if mode is not None and stat.S_IMODE(info.st_mode) != mode:
        os.chmod(path, mode)


class CredentialSearch:
    """`template_unavailable` that names the file as soon as what is fed of it has what looks like a credential (A4)."""

    def __init__(self, name: str, relative: bytes, where: str = "") -> None:
        self._name = name
        self._relative = relative
        self._where = where
        self._kept = b""
        self._first = True
        self._skipped = False

    def feed(self, block: bytes) -> None:
        """The next bytes, best many at once. Compiled programs (ELF) are not searched."""
        if self._skipped:
            return
        if self._first:
            if len(self._kept) + len(block) < SEARCHED_BYTES:  # most files are small: they are searched once
                self._kept += block
                return
            self._skipped = (self._kept + block)[:4] == b"\x7fELF"
            if self._skipped:
                return
        self._search(self._kept + block, cut=True)
        self._kept = (self._kept + block)[-_OVERLAP:]
        self._first = False

    def finish(self) -> None:
        """There is no more."""
        if not self._skipped and not (self._first and self._kept[:4] == b"\x7fELF"):
            self._search(self._kept, cut=False)

    def _search(self, content: bytes, *, cut: bool) -> None:
        begin = 0 if self._first else 1  # a word may have begun before what was kept
        for word, pattern in _CREDENTIALS:
            at = content.find(word, begin)
            while at >= 0:
                found = pattern.match(content, at)
                if found is not None and not (
                    cut and found.end() == len(content)
                ):  # else it is seen whole with the next
                    raise CorralError(
                        "template_unavailable",
                        f"template {self._name}: {self._relative.decode('utf-8', 'backslashreplace')}{self._where}"
                        " looks like a credential",
                        hint="remove it from what the template is made from: nothing secret may be in a base",
                    )
                at = content.find(word, at + 1)


def refuse_credential(name: str, relative: bytes, content: bytes) -> None:
    """`CredentialSearch` of a whole file."""
    search = CredentialSearch(name, relative)
    search.feed(content)
    search.finish()
