"""Reading, tracing, altering and starving the guest or a supervisor. First argument: `guest` or `supervisor`."""

from __future__ import annotations

from corral.testing.hostile.prelude import PRELUDE, TELL

LOOK_AT_GUEST = (
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
