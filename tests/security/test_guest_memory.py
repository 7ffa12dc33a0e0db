"""Threat: an exec reads, traces, alters or starves the guest or its supervisor.

Five defences stand side by side: other uids (`uid`), the system call filter (`seccomp`), guest and supervisors that are not dumpable
(`dumpable`), a capability that they have and execs lack (`capability`), and Landlock (`landlock`, where guest and execs share a
uid). Most doors are closed by several at once, so no single switch opens them; therefore the controls go the other way round: with all
five off every door is open, and each defence put back alone closes exactly the doors that it is for.
"""

from __future__ import annotations

import pytest

from .conftest import Box, Lab, landlock_abi
from .probes import PRELUDE, TELL

LOOK = (
    PRELUDE
    + r"""
far = (ctypes.c_size_t * 2)()
def first_map(pid):
    with open(f"/proc/{pid}/maps") as file:
        return int(file.readline().split("-")[0], 16)
def read_memory(pid):
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(first_map(pid))
        return None if file.read(4) else "nothing"
def write_memory(pid):
    at = int([line for line in open(f"/proc/{pid}/maps") if " rw-p " in line][0].split("-")[0], 16)
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    os.pwrite(fd, os.pread(fd, 1, at), at)
def read_file(pid, name):
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    os.read(fd, 8)
def enter_directory(pid, name):
    os.close(os.open(f"/proc/{pid}/{name}/.", os.O_PATH))
def take_descriptor(pid):
    names = os.listdir(f"/proc/{pid}/fd")
    os.stat(f"/proc/{pid}/fd/{names[0]}")
def process_vm(pid, verb):
    # An address of our own image: guest, supervisor and this program are one binary without randomised base, or it is EFAULT.
    local = ctypes.create_string_buffer(1)
    mine = (ctypes.c_size_t * 2)(ctypes.addressof(local), 1)
    theirs = (ctypes.c_size_t * 2)(ctypes.addressof(local), 1)
    try:
        call(verb, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    except OSError as error:
        if error.errno != errno.EFAULT:  # let in, nothing there
            raise
def seize(pid):
    call("ptrace", 0x4206, pid, 0, 0)
def get_descriptor(pid):
    call("pidfd_getfd", os.pidfd_open(pid), 0, 0)
def set_limit(pid):
    old = (ctypes.c_uint64 * 2)()
    call("prlimit64", pid, 7, None, ctypes.byref(old))
    call("prlimit64", pid, 7, ctypes.byref(old), None)
def score(pid):
    with open(f"/proc/{pid}/oom_score_adj", "r+") as file:
        file.write("1000")
def affinity(pid):
    os.sched_setaffinity(pid, os.sched_getaffinity(pid))
def scheduler(pid):
    call("sched_setscheduler", pid, 3, ctypes.byref(ctypes.c_int(0)))
def priority(pid):
    os.setpriority(os.PRIO_PROCESS, pid, 19)
def compare(pid):
    call("kcmp", os.getpid(), pid, 0, 0, 0)
def madvise(pid):
    call("process_madvise", os.pidfd_open(pid), None, 0, 21, 0)
pid = 1 if sys.argv[1] == "guest" else os.getppid()
# `attempt` forks: the supervisor is this process's parent.
for name in ("environ", "maps", "smaps", "auxv", "stack", "syscall", "pagemap", "io", "personality"):
    attempt(name, read_file, pid, name)
for name in ("root", "cwd"):
    attempt(name, enter_directory, pid, name)
for name in ("fd", "map_files"):
    attempt("list " + name, lambda: os.listdir(f"/proc/{pid}/{name}") and None)
attempt("exe", lambda: os.readlink(f"/proc/{pid}/exe") and None)
attempt("namespace", lambda: os.close(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)))
attempt("follow fd", take_descriptor, pid)
attempt("read memory", read_memory, pid)
attempt("write memory", write_memory, pid)
attempt("ptrace", seize, pid)
attempt("process_vm_readv", process_vm, pid, "process_vm_readv")
attempt("process_vm_writev", process_vm, pid, "process_vm_writev")
attempt("pidfd_getfd", get_descriptor, pid)
attempt("kcmp", compare, pid)
attempt("process_madvise", madvise, pid)
attempt("prlimit", set_limit, pid)
attempt("oom_score_adj", score, pid)
attempt("affinity", affinity, pid)
attempt("scheduler", scheduler, pid)
attempt("priority", priority, pid)
"""
    + TELL
)

ALL = ("uid", "seccomp", "dumpable", "capability", "landlock")
SWITCH = {
    "uid": "unsafe_one_uid",
    "seccomp": "unsafe_no_seccomp",
    "dumpable": "unsafe_dumpable_guest",
    "landlock": "unsafe_no_landlock",
}


def layers(lab: Lab) -> list[str]:
    """The defences that exist here."""
    found = [name for name in ALL if name != "landlock" or landlock_abi() >= 6]
    return [name for name in found if name != "uid" or lab.info["capabilities"]["two_uids"]]


def opened(lab: Lab, target: str, on: str | None) -> tuple[dict[str, str], Box]:
    """What a look at the target finds with only this defence on (None: with none)."""
    off = [SWITCH[name] for name in ALL if name in SWITCH and name != on]
    if not lab.info["capabilities"]["two_uids"]:
        off = [name for name in off if name != "unsafe_one_uid"]
    # With two uids the guest needs its capabilities to change to the other: then they are not what is being switched.
    without = on not in ("capability", "uid")
    with lab.box(*off, without_capability=without) as box:
        answers = box.ask(LOOK, target)
        assert box.works()
        return answers, box


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_nothing_of_the_guest_or_a_supervisor_can_be_read_traced_or_altered(box: Box, target: str) -> None:
    answers = box.ask(LOOK, target)
    assert {name for name, answer in answers.items() if answer == "ok"} == set(), answers
    assert box.works()


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_the_same_holds_with_one_uid_for_both(lab: Lab, target: str) -> None:
    if not lab.info["capabilities"]["two_uids"]:
        pytest.skip("the sandboxes of this mode have one uid anyway: the check above is this one")
    with lab.box("unsafe_one_uid") as box:
        answers = box.ask(LOOK, target)
        assert {name for name, answer in answers.items() if answer == "ok"} == set(), answers
        assert box.works()


# Doors that a defence closes when it is the only one; whatever is not named stays open under it.
_LOOKS = {
    "environ",
    "maps",
    "smaps",
    "auxv",
    "root",
    "cwd",
    "list fd",
    "list map_files",
    "exe",
    "namespace",
    "follow fd",
}
_LOOKS |= {"read memory", "write memory", "pagemap", "io", "personality", "stack", "syscall"}
_CALLS = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"}
_RANK = {"affinity", "scheduler", "priority"}
_ROOT_ONLY = {"stack", "process_madvise"}
"""Closed to everybody who is not root of the host, whatever we do."""
CLOSES = {
    "uid": _LOOKS | _CALLS | _RANK | {"prlimit", "oom_score_adj"},
    "seccomp": _CALLS | {"prlimit"},
    "dumpable": _LOOKS | _CALLS | {"oom_score_adj"},
    "capability": (_LOOKS | _CALLS | _RANK) - {"list fd"},
    "landlock": (_LOOKS | _CALLS) - {"list fd"},
}


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_control_with_every_defence_off_the_doors_are_open(lab: Lab, target: str) -> None:
    answers, _ = opened(lab, target, None)
    shut = {name for name, answer in answers.items() if answer != "ok"}
    assert shut <= _ROOT_ONLY, {name: answers[name] for name in shut}


@pytest.mark.parametrize("defence", ALL)
def test_control_each_defence_alone_closes_its_own_doors_and_no_others(lab: Lab, defence: str) -> None:
    if defence not in layers(lab):
        pytest.skip(f"{defence} is no defence of this mode on this kernel")
    bare, _ = opened(lab, "guest", None)
    answers, box = opened(lab, "guest", defence)
    assert box.same_uid == (defence != "uid")
    open_before = {name for name, answer in bare.items() if answer == "ok"}
    closed = {name for name in open_before if answers[name] != "ok"}
    assert closed == CLOSES[defence] & open_before, answers
