"""Signals at PID 1 and at supervisors, by each of the kernel's ways."""

from __future__ import annotations

from corral.testing.hostile.prelude import PRELUDE, TELL

WAYS = (
    "kill",
    "tkill",
    "tgkill",
    "sigqueue",
    "thread sigqueue",
    "pidfd",
    "directory as pidfd",
    "owner",
    "owner as group",
)


SIGNAL = (
    PRELUDE
    + r"""
def info(number):
    # si_code SI_QUEUE, as sigqueue() would send it.
    return struct.pack("iii", number, 0, -1).ljust(128, b"\0")
def by_owner(pid):
    left, right = socket.socketpair()
    fcntl.fcntl(left, fcntl.F_SETOWN, pid)
    fcntl.fcntl(left, 10, 9)
    fcntl.fcntl(left, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    right.send(b"x")
    time.sleep(0.1)
def send(way, pid, number):
    if way == "kill":
        os.kill(pid, number)
    elif way == "tkill":
        call("tkill", pid, number)
    elif way == "tgkill":
        call("tgkill", pid, pid, number)
    elif way == "sigqueue":
        call("rt_sigqueueinfo", pid, number, info(number))
    elif way == "thread sigqueue":
        call("rt_tgsigqueueinfo", pid, pid, number, info(number))
    elif way == "pidfd":
        signal.pidfd_send_signal(os.pidfd_open(pid), number)
    elif way == "directory as pidfd":
        call("pidfd_send_signal", os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY), number, None, 0)
    elif way == "owner":
        by_owner(pid)
    elif way == "owner as group":
        by_owner(-os.getpgid(pid))
    elif way == "group":
        os.kill(-os.getpgid(pid), number)
    elif way == "everybody":
        os.kill(-1, number)
"""
)


AT_SUPERVISOR = (
    SIGNAL
    + r"""
supervisor = os.getppid()
try:
    answers["told"] = name_of(0) if send(sys.argv[1], supervisor, int(sys.argv[2])) is None else "?"
except OSError as error:
    answers["told"] = name_of(error.errno)
end = time.monotonic() + 0.15
while os.getppid() == supervisor and time.monotonic() < end:
    time.sleep(0.01)
def state():
    try:
        return open(f"/proc/{supervisor}/stat").read().rpartition(")")[2].split()[0]
    except PermissionError:
        return "hidden"  # it is there, and shows nothing of itself
    except OSError:
        return "gone"
answers["supervisor"] = "gone" if os.getppid() != supervisor else state()
"""
    + TELL
    + r"""
sys.stdout.flush()
if len(sys.argv) > 3:
    time.sleep(60)
"""
)


AT_GUEST = (
    SIGNAL
    + r"""
for number in [n for n in range(1, 65) if n not in (32, 33)]:
    for way in ("kill", "pidfd", "tgkill", "sigqueue"):
        try:
            send(way, 1, number)
        except OSError:
            pass
for way in ("owner", "owner as group"):  # its group has the number 1: to signal that is kill(-1), see below
    try:
        send(way, 1, 9)
    except OSError:
        pass
answers["alive"] = os.path.exists("/proc/1/stat")
"""
    + TELL
)
