"""K17: whatever a sandbox leaves, the next one finds nothing of it, even on the same user ids, disk device and directory."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import eventually, marked
from .serving import Server, remains

CREATIONS, MORE = 50, 4
"""At most so many until ids or disk device are met again, and so many more for what else may be."""
PLACES = ("/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/run/user/1000")
PORT = 18617

COMMON = (
    f"PORT = {PORT}"
    + r"""
import ctypes, errno, fcntl, json, mmap, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
word, places = sys.argv[1], sys.argv[2:]
KEY = 0x17C0DE
def ok(value):
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value
def writable_mounts():
    points = {os.fsdecode(line.split()[4].encode().decode("unicode_escape").encode("latin-1"))
              for line in open("/proc/self/mountinfo", "rb").read().decode("latin-1").splitlines()}
    return sorted(p for p in points if os.path.isdir(p) and os.access(p, os.W_OK) and not p.startswith("/proc"))
"""
)

LEAVE = (
    COMMON
    + r"""
left, refused = [], {}
def leave(kind, action):
    try:
        action()
        left.append(kind)
    except OSError as error:
        refused[kind] = errno.errorcode.get(error.errno, str(error))
def put(path, text=word, mode="a"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, mode) as file:
        file.write(text + "\n")
for place in sorted({*places, *writable_mounts()}):
    leave("file " + place, lambda: (put(f"{place}/.{word}"), put(f"{place}/{word}/deep/file")))
home = "/home/sandbox"
python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
leave("bashrc", lambda: put(f"{home}/.bashrc", f"echo {word}"))
leave("profile", lambda: put(f"{home}/.profile", f"echo {word}"))
leave("pip --user", lambda: (put(f"{home}/.local/lib/{python}/site-packages/usercustomize.py", f"import sys; sys.{word} = 1"),
                             put(f"{home}/.local/bin/{word}")))
leave("npm -g", lambda: (put(f"{home}/.npmrc", f"prefix={home}/.npm-global\n; {word}"),
                         put(f"{home}/.npm-global/lib/node_modules/{word}/package.json")))
leave("git", lambda: put(f"{home}/.gitconfig", f"[user]\n name = {word}"))
for path in ("/etc/hosts", "/etc/passwd", "/etc/ld.so.preload", "/etc/profile.d/x.sh", "/var/spool/cron/crontabs/sandbox",
             "/etc/cron.d/x", "/root/x", "/opt/x", "/usr/local/bin/x", "/.corral/x", "/run/x", "/x"):
    leave("file " + path, lambda: put(path))
leave("hostname", lambda: ok(libc.sethostname(word.encode(), len(word))))
leave("domainname", lambda: ok(libc.setdomainname(word.encode(), len(word))))
for name in ("kernel/core_pattern", "kernel/hostname", "net/ipv4/ip_default_ttl", "kernel/shm_rmid_forced", "fs/mqueue/msg_max"):
    leave("sysctl " + name, lambda: put(f"/proc/sys/{name}", "77", "w"))
def segment():
    identifier = ok(libc.shmget(KEY, 4096, 0o1666))
    libc.shmat.restype = ctypes.c_void_p
    ctypes.memmove(libc.shmat(identifier, None, 0), word.encode(), len(word))
leave("SysV shm", segment)
leave("SysV messages", lambda: ok(libc.msgget(KEY, 0o1666)))
leave("SysV semaphore", lambda: ok(libc.semget(KEY, 1, 0o1666)))
def posix_shm():
    fd = ok(libc.shm_open(f"/shm-{word}".encode(), os.O_RDWR | os.O_CREAT, 0o666))
    os.write(fd, word.encode())
leave("POSIX shm", posix_shm)
def posix_semaphore():
    libc.sem_open.restype = ctypes.c_void_p
    if not libc.sem_open(f"/sem-{word}".encode(), os.O_CREAT, 0o666, 1):
        raise OSError(ctypes.get_errno(), "sem_open")
leave("POSIX semaphore", posix_semaphore)
leave("POSIX messages", lambda: ok(libc.mq_open(b"/corral-k17", os.O_RDWR | os.O_CREAT, 0o666, None)))
leave("key", lambda: ok(libc.syscall(248, b"user", b"corral-k17", word.encode(), len(word), -4)))
leave("pipe", lambda: os.mkfifo(f"/tmp/pipe-{word}"))
leave("lock", lambda: fcntl.flock(os.open(f"/tmp/lock-{word}", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX))
def deleted():
    # Blocks of the disk that belong to nobody any more.
    with open(f"/workspace/unlinked-{word}", "wb", buffering=0) as file:
        page = (word.encode() * 4096)[: 1 << 16]
        for _ in range(1024):
            file.write(page)
        os.fsync(file.fileno())
        os.unlink(file.name)
leave("deleted blocks", deleted)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        told = []
        def listening(kind, action):
            try:
                told.append((kind, action()))
            except OSError as error:
                told.append((kind, None))
        def port(family, address, kind=socket.SOCK_STREAM):
            sock = socket.socket(family, kind)
            sock.bind(address)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            return sock
        listening("port", lambda: port(socket.AF_INET, ("0.0.0.0", PORT)))
        listening("port of IPv6", lambda: port(socket.AF_INET6, ("::1", PORT + 1)))
        listening("port of UDP", lambda: port(socket.AF_INET, ("127.0.0.1", PORT), socket.SOCK_DGRAM))
        listening("abstract socket", lambda: port(socket.AF_UNIX, "\0corral-k17"))
        listening("socket", lambda: port(socket.AF_UNIX, f"/tmp/socket-{word}"))
        def watches():
            kept = []
            while len(kept) < 100:
                try:
                    kept.append(ok(libc.inotify_init1(0)))
                    ok(libc.inotify_add_watch(kept[-1], b"/workspace", 0xfff))
                except OSError as error:
                    raise OSError(error.errno, f"only {len(kept)} of 100")
            return kept
        listening("watches", watches)
        hog = bytearray(b"x") * (300 << 20)
        os.write(write, json.dumps([kind for kind, made in told if made]).encode() + b"\n")
        os.close(0), os.close(1), os.close(2), os.close(write)
        if hasattr(libc, "prctl"):
            libc.prctl(15, b"corral-k17", 0, 0, 0)
        try:
            reader = os.open(f"/tmp/pipe-{word}", os.O_RDWR)
        except OSError:
            pass
        while True:
            time.sleep(1000)
    os._exit(0)
os.close(write)
with os.fdopen(read) as pipe:
    left += json.loads(pipe.readline())
left.append("daemon")
os.chdir("/")
print(json.dumps({"left": left, "refused": refused}))
"""
)

LOOK = (
    COMMON
    + r"""
found = []
def look(kind, action):
    try:
        if action():
            found.append(kind)
    except OSError:
        pass
held = word.encode()
seen = set()
for place in ["/etc", "/root", "/opt", "/usr/local", "/run", "/var/spool", "/.corral", "/tmp", "/dev/shm", *places, *writable_mounts()]:
    for folder, names, files in os.walk(place):
        for name in names + files:
            path = os.path.join(folder, name)
            here = word in path
            if not here and name in files and not os.path.islink(path) and os.path.isfile(path):
                try:
                    with open(path, "rb") as file:
                        here = held in file.read()
                except OSError:
                    pass
            if here:
                seen.add(path)
if seen:
    found.append("files")
look("environment", lambda: word in str(os.environ))
look("usercustomize", lambda: hasattr(sys, word))
look("hostname", lambda: word in socket.gethostname())
look("SysV shm", lambda: libc.shmget(KEY, 0, 0) >= 0)
look("SysV messages", lambda: libc.msgget(KEY, 0) >= 0)
look("SysV semaphore", lambda: libc.semget(KEY, 0, 0) >= 0)
look("POSIX shm", lambda: libc.shm_open(f"/shm-{word}".encode(), os.O_RDONLY, 0) >= 0)
def posix_semaphore():
    libc.sem_open.restype = ctypes.c_void_p
    return libc.sem_open(f"/sem-{word}".encode(), 0)
look("POSIX semaphore", posix_semaphore)
look("POSIX messages", lambda: libc.mq_open(b"/corral-k17", os.O_RDONLY) >= 0)
for ring in range(-8, 0):
    look("key", lambda: libc.syscall(250, 10, ring, b"user", b"corral-k17", 0) >= 0)
def answers(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as sock:
        sock.settimeout(5)
        sock.connect(address)
        if kind == socket.SOCK_DGRAM:
            sock.send(b"x")
            sock.settimeout(0.2)
            try:
                sock.recv(1)
            except TimeoutError:
                pass
        return True
look("port", lambda: answers(socket.AF_INET, ("127.0.0.1", PORT)))
look("port of IPv6", lambda: answers(socket.AF_INET6, ("::1", PORT + 1)))
look("port of UDP", lambda: answers(socket.AF_INET, ("127.0.0.1", PORT), socket.SOCK_DGRAM))
look("abstract socket", lambda: answers(socket.AF_UNIX, "\0corral-k17"))
for name in os.listdir("/proc"):
    if name.isdigit():
        look("daemon", lambda: "corral-k17" in open(f"/proc/{name}/comm").read() and "daemon" not in found)
"""
)
REPORT = '\nprint(json.dumps({"found": sorted(set(found)), "paths": sorted(seen)[:20], "pids": [int(n) for n in os.listdir("/proc") if n.isdigit()]}))\n'

UNWRITTEN = r"""
# Space that is allocated and never written must read as nothing, whatever the blocks below held.
import os, sys
free = os.statvfs("/workspace").f_bavail * os.statvfs("/workspace").f_frsize
size = min(int(free * 0.9), 200 << 20)  # no file may be larger than the disk, where that has no image of its own
fd = os.open("/workspace/space", os.O_RDWR | os.O_CREAT)
how = "allocated"
try:
    os.posix_fallocate(fd, 0, size)
except OSError:
    os.ftruncate(fd, size)
    how = "sparse"
total = 0
zeros = bytes(1 << 20)
while part := os.pread(fd, 1 << 20, total):
    if part != zeros[: len(part)]:
        print("not empty at", total)
        sys.exit(1)
    total += len(part)
os.unlink("/workspace/space")
print(how, total >> 20)
"""


@dataclass(frozen=True)
class Where:
    """What a sandbox stands on, as the host sees it."""

    uid: str | None
    device: str | None


def where(server: Server, sandbox: str) -> Where:
    """By a program inside, where the host sees those, else by the processes that are the sandbox; by the host's mounts."""
    instance = instance_of(server, sandbox)
    device = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if f"/{instance}/" in f"{left.split()[4]}/" and right.split()[1].startswith("/dev/loop"):
            device = right.split()[1]
    if server.box.own_kernel:  # whose programs are no processes of the host
        return Where(min(Host.of(server, sandbox).uids), device)
    mark = f"where{secrets.token_hex(8)}"
    exec_id = server.start(sandbox, "sh", "-c", f": {mark}; sleep 100; :")
    pid = eventually(lambda: marked(mark), 60, "the host sees the program")[-1]
    uid = Path(f"/proc/{pid}/status").read_text().partition("Uid:")[2].split()[0]
    server.call("POST", f"/v1/execs/{exec_id}/cancel")
    return Where(uid, device)


@dataclass(frozen=True)
class Host:
    """What the processes of a sandbox's own control group have, by the host's word: root's sandboxes only."""

    uids: frozenset[str]
    mounts: frozenset[str]
    """Device and directory of what they may write to."""
    namespaces: frozenset[str]

    @classmethod
    def of(cls, server: Server, sandbox: str) -> Host:
        wanted = f"/ins_{instance_of(server, sandbox)}"
        uids, mounts, namespaces = set(), set(), set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if not any(line.endswith(wanted) for line in (process / "cgroup").read_text().splitlines()):
                    continue
                table = (process / "mountinfo").read_text().splitlines()
                own = {os.readlink(process / "ns" / kind) for kind in ("user", "net", "ipc", "mnt")}
                uids.add((process / "status").read_text().partition("Uid:")[2].split()[0])
            except OSError:  # it ended meanwhile
                continue
            namespaces |= own
            rows = [line.split() for line in table]
            mounts |= {f"{row[2]} {row[3]}" for row in rows if "rw" in row[5].split(",")}
        return cls(frozenset(uids), frozenset(mounts), frozenset(namespaces))


def ask(server: Server, sandbox: str, program: str, *arguments: str, **more: Any) -> dict[str, Any]:
    result = server.run(sandbox, "python3", "-c", program, *arguments, **more)
    assert result["exit_code"] == 0, (
        result["reason"],
        result["stderr"]["text"][-2000:],
        result["stdout"]["text"][-500:],
    )
    answer: dict[str, Any] = json.loads(result["stdout"]["text"])
    return answer


def look(server: Server, sandbox: str, word: str) -> dict[str, Any]:
    return ask(server, sandbox, LOOK + REPORT, word, *PLACES)


def median_ms(server: Server, sandbox: str) -> float:
    """Of the smallest exec, by the wall clock of the caller."""
    times = []
    for _ in range(7):
        began = time.monotonic()
        assert server.run(sandbox, "true")["exit_code"] == 0
        times.append((time.monotonic() - began) * 1000)
    return statistics.median(times)


@pytest.fixture
def word() -> str:
    return f"k17{secrets.token_hex(12)}"


@pytest.fixture
def made(server: Server) -> Iterator[list[str]]:
    """Sandboxes to remove at the end."""
    sandboxes: list[str] = []
    yield sandboxes
    for sandbox in sandboxes:
        server.delete(sandbox)


ALWAYS = {"bashrc", "profile", "pip --user", "npm -g", "git", "SysV shm", "SysV messages", "SysV semaphore", "POSIX shm", "POSIX semaphore",
          "POSIX messages", "port", "port of UDP", "daemon", "pipe", "lock", "socket", "abstract socket", "watches", "deleted blocks",
          *(f"file {place}" for place in PLACES)}  # fmt: skip
"""Marks that must have been possible on every runtime, or nothing was shown."""
SHARED_ACCOUNT = ("bubblewrap-user", "runc-root")
"""Where the kernel counts watches of files for one id of the host that all sandboxes have: the caller's own, or root's (runc)."""
NEVER = (
    "hostname",
    "domainname",
    "key",
    "file /etc",
    "file /root",
    "file /usr",
    "file /.corral",
    "file /x",
    "file /opt",
    "file /run/x",
    "file /var/spool",
    "sysctl",
)
"""Marks that nobody can leave on any runtime."""


def leave(server: Server) -> str:
    """The program that leaves marks. Of what all sandboxes of one user share it takes little: other tests run beside it."""
    return LEAVE.replace("< 100", "< 10").replace("of 100", "of 10") if server.name in SHARED_ACCOUNT else LEAVE


def test_the_next_tenant_on_the_same_ids_and_the_same_disk_finds_nothing(
    server: Server, made: list[str], word: str
) -> None:
    first = server.create(memory="512M", disk="256M")
    made.append(first)
    base = median_ms(server, first)
    fresh = look(server, first, word)
    assert fresh["found"] == []
    told = ask(server, first, leave(server), word, *PLACES)
    possible = ALWAYS - (
        {"watches"} if server.name in SHARED_ACCOUNT else set()
    )  # other tests take of that account too
    assert not possible - {*told["left"]}, told["refused"]
    assert not [kind for kind in told["left"] if kind.startswith(NEVER)], told["left"]
    control = look(server, first, word)
    expected = {"files", "usercustomize", "daemon"} | {
        kind for kind in told["left"] if kind.startswith(("SysV", "POSIX", "port", "abstract", "key"))
    }
    assert {*control["found"]} == expected, "control: a later program of the same sandbox finds each of them"
    before = where(server, first)
    instance = instance_of(server, first)
    assert server.delete(first).status == 200
    eventually(lambda: not remains(server.box.state, [instance]), 30, "nothing of the first is left on the host")

    again: set[str] = set()
    wanted = {name for name, value in (("uid", before.uid), ("device", before.device)) if value is not None}
    for turn in range(CREATIONS):
        second = server.create(disk="256M")
        made.append(second)
        seen = look(server, second, word)
        assert (seen["found"], seen["paths"]) == ([], []), turn
        now = where(server, second)
        met = {name for name in wanted if getattr(now, name) == getattr(before, name)}
        if turn == 0 or met - again:
            unwritten = server.run(second, "python3", "-c", UNWRITTEN)
            assert unwritten["exit_code"] == 0, (turn, unwritten["stdout"]["text"], unwritten["stderr"]["text"])
            image = server.box.state / "i" / instance_of(server, second) / "disk.img"
            assert not image.exists() or word.encode() not in image.read_bytes()
        if turn == 0:
            # Other work of the machine comes and goes within the time; what the first left behind would stay.
            eventually(lambda: median_ms(server, second) <= 3 * base + 250, 60, "execs are as fast as before")
            # What the kernel counts per user id is free again.
            if server.name not in SHARED_ACCOUNT:
                ask(
                    server,
                    second,
                    COMMON + "print(json.dumps([ok(libc.inotify_init1(0)) for _ in range(100)] and {}))",
                    word,
                )
        again |= met
        assert server.delete(second).status == 200
        if again == wanted or (again and turn >= MORE):
            break
    # Which device it gets is decided among all that run on this machine: the ids are its own.
    assert again or not wanted, f"not met again in {CREATIONS} sandboxes: {before}"


def instance_of(server: Server, sandbox: str) -> str:
    return str(server.call("GET", f"/v1/sandboxes/{sandbox}").document["instance"]["id"]).removeprefix("ins_")


DEVICES = (
    COMMON
    + r"""
rows = {}
for line in open("/proc/self/mountinfo"):
    left = line.partition(" - ")[0].split()
    if "rw" in left[5].split(",") and not left[4].startswith(("/proc", "/dev/")):
        rows[f"{left[2]} {left[3]}"] = left[4]
print(json.dumps({"rows": rows, "net": os.readlink("/proc/self/ns/net"), "ipc": os.readlink("/proc/self/ns/ipc")}))
"""
)


def test_two_that_live_at_once_share_no_mount_port_memory_or_process(
    server: Server, made: list[str], word: str
) -> None:
    first, second = server.create(), server.create()
    made += [first, second]
    other = f"k17{secrets.token_hex(12)}"
    told = ask(server, first, leave(server), word, *PLACES)
    # The same ports, names and keys are free for the other one.
    also = ask(server, second, leave(server), other, *PLACES)
    shared = {"watches"} if server.name in SHARED_ACCOUNT else set()
    assert {*told["left"]} - shared == {*also["left"]} - shared, also["refused"]
    assert shared or "watches" in also["left"], "what one takes of the kernel's accounts is not taken from the other"
    for sandbox, own, foreign in ((first, word, other), (second, other, word)):
        assert "files" in look(server, sandbox, own)["found"]
        seen = look(server, sandbox, foreign)
        # Keys and ports of the same name are its own; nothing of the other's content is there.
        assert not {"files", "usercustomize", "POSIX shm", "POSIX semaphore", "hostname"} & {*seen["found"]}, seen
        assert seen["paths"] == []
    # A process of one is no process of the other: each has its own 1, and one daemon only.
    count = (
        COMMON
        + r"""
names = []
for number in filter(str.isdigit, os.listdir("/proc")):
    try:
        names.append(open(f"/proc/{number}/comm").read())
    except OSError:  # it ended meanwhile, or is the guest, of which a kernel of its own shows the number only
        pass
print(json.dumps({"n": names.count("corral-k17\n")}))
"""
    )
    assert [ask(server, sandbox, count, word)["n"] for sandbox in (first, second)] == [1, 1]
    if (
        server.box.own_kernel
    ):  # inside, numbers of devices and namespaces are that kernel's own: the host says what it stands on
        left, right = (Host.of(server, sandbox) for sandbox in (first, second))
        assert left.uids and left.mounts and not left.uids & right.uids and not left.mounts & right.mounts
        assert len(left.namespaces) >= 4 and not left.namespaces & right.namespaces
        return
    one, two = (ask(server, sandbox, DEVICES, word) for sandbox in (first, second))
    assert one["rows"] and not {*one["rows"]} & {*two["rows"]}
    assert one["net"] != two["net"] and one["ipc"] != two["ipc"]
