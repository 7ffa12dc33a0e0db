"""Threat: what one sandbox leaves behind is found by the next one, even when that gets the same uids, loop device, directory and group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODES, Box, Lab, status_of
from .probes import PRELUDE, TELL

PLACES = ("/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/run/user/1000")

LEAVE = (
    PRELUDE
    + r"""
word, places = sys.argv[1], sys.argv[2:]
for place in places:
    os.mkdir(f"{place}/{word}")
    for name in (f"{place}/{word}/file", f"{place}/.{word}"):
        open(name, "w").write(word)
open("/home/sandbox/.bashrc", "a").write(f"echo {word}\n")
os.makedirs("/home/sandbox/.local/lib/python3/site-packages", exist_ok=True)
open("/home/sandbox/.local/lib/python3/site-packages/" + word, "w").write(word)
identifier = libc.shmget(0x5EC0DE, 4096, 0o1666)
libc.shmat.restype = ctypes.c_void_p
ctypes.memmove(libc.shmat(identifier, None, 0), word.encode(), len(word))
libc.msgget(0x5EC0DE, 0o1666)
libc.semget(0x5EC0DE, 1, 0o1666)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        tcp = socket.create_server(("127.0.0.1", 18081))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("\0" + "corral-residue")
        unix.listen()
        unlinked = open(f"/workspace/unlinked-{word}", "w")
        unlinked.write(word * 1000)
        os.unlink(unlinked.name)
        libc.prctl(15, b"residue", 0, 0, 0)
        os.write(write, b"up")
        os.close(1), os.close(2), os.close(write)
        while True:
            time.sleep(1000)
    os._exit(0)
os.close(write)
assert os.read(read, 2) == b"up"
"""
    + TELL
)

LOOK = (
    PRELUDE
    + r"""
word = sys.argv[1].encode()
found = []
for place in sys.argv[2:]:
    for folder, names, files in os.walk(place):
        for name in names + files:
            path = os.path.join(folder, name)
            held = word in os.fsencode(name)
            if not held and name in files and not os.path.islink(path):
                held = word in open(path, "rb").read()
            if held:
                found.append(path)
answers["files"] = len(found)
answers["shm"] = libc.shmget(0x5EC0DE, 0, 0) >= 0
answers["msg"] = libc.msgget(0x5EC0DE, 0) >= 0
answers["sem"] = libc.semget(0x5EC0DE, 0, 0) >= 0
def tcp():
    socket.create_connection(("127.0.0.1", 18081), 2).close()
def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0corral-residue")
attempt("tcp", tcp)
attempt("abstract", abstract)
answers["processes"] = 0
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            answers["processes"] += open(f"/proc/{name}/comm").read() == "residue\n"
        except OSError:
            pass
answers["hostname"] = socket.gethostname()
answers["used"] = {place: os.statvfs(place).f_files - os.statvfs(place).f_ffree for place in sys.argv[2:]}
"""
    + TELL
)

CLEAN = {"files": 0, "shm": False, "msg": False, "sem": False, "tcp": "ECONNREFUSED", "abstract": "ECONNREFUSED", "processes": 0}  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def narrow(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A node with room for one sandbox at a time: the next one gets the same ids."""
    first = 65536 * (33000 + int.from_bytes(os.urandom(2)) % 25000)  # above every block that is claimed by itself
    lab = Lab(request.param, subuid_range=(first, 65536) if request.param.endswith("root") else None)
    yield lab
    lab.close()


def loop_device(box: Box) -> str | None:
    """The device that carries the disk of a sandbox."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == str(box.tree):
            return right.split()[1]
    return None


def groups(box: Box) -> set[str]:
    """The control groups of the guest on the host."""
    text = Path(f"/proc/{box.guest_pid()}/cgroup").read_text()
    return {line.split(":", 2)[2] for line in text.splitlines() if "corral" in line}


def uids(box: Box) -> str:
    """Whom on the host the guest is."""
    return status_of(box.guest_pid())["Uid"]


def facts(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: answers[name] for name in CLEAN}


def test_the_next_sandbox_on_the_same_ids_device_and_group_finds_nothing(narrow: Lab) -> None:
    word = f"mark{os.urandom(8).hex()}"
    with narrow.box() as first:
        fresh = first.ask(LOOK, word, *PLACES)
        assert facts(fresh) == CLEAN
        assert first.ask(LEAVE, word, *PLACES) == {}
        # Control: a later exec of the same sandbox finds each of them.
        seen = facts(first.ask(LOOK, word, *PLACES))
        assert seen.pop("files") >= 3 * len(PLACES)
        assert seen == {"shm": True, "msg": True, "sem": True, "tcp": "ok", "abstract": "ok", "processes": 1}
        before = (loop_device(first), uids(first), groups(first), first.directory, first.instance)
        directory, image = Path(first.directory), loop_device(first)
    assert not directory.exists()
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    if image is not None:
        backing = Path(f"/sys/block/{os.path.basename(image)}/loop/backing_file")
        assert not backing.exists() or str(directory) not in backing.read_text()
    met_device = image is None
    for turn in range(8):
        if met_device and turn:
            break
        # The same name: the same directory and control group.
        with narrow.box(instance=before[4]) as box:
            answers = box.ask(LOOK, word, *PLACES)
            assert facts(answers) == CLEAN, turn
            if image is not None:
                assert answers["used"] == fresh["used"], "as fresh as the first was"
            assert answers["hostname"] == fresh["hostname"]
            assert (uids(box), groups(box), box.directory) == before[1:4], "it is the same place"
            met_device = met_device or loop_device(box) == image


def test_two_that_live_at_once_see_nothing_of_each_other(lab: Lab) -> None:
    word = f"mark{os.urandom(8).hex()}"
    with lab.box() as first, lab.box() as second:
        first.ask(LEAVE, word, *PLACES)
        assert first.ask(LOOK, word, *PLACES)["processes"] == 1
        assert facts(second.ask(LOOK, word, *PLACES)) == CLEAN
        # Nor do they share a mount that either may write to.
        shared = set(_devices(first)) & set(_devices(second))
        assert not shared, shared


MOUNTS = PRELUDE + 'answers["rows"] = open("/proc/self/mountinfo").read().splitlines()\n' + TELL


def _devices(box: Box) -> dict[str, str]:
    """(device, directory in it) of every writable mount, as the kernel names them -> where it is inside."""
    found = {}
    for line in box.ask(MOUNTS)["rows"]:
        fields = line.partition(" - ")[0].split()
        if "rw" in fields[5].split(",") and not fields[4].startswith(("/proc", "/dev/")):
            found[f"{fields[2]} {fields[3]}"] = fields[4]
    return found
