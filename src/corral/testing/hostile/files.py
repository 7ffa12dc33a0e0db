"""Files of the kernel, places that may be written, set-uid programs."""

from __future__ import annotations

import os
import struct

from corral.testing.hostile.prelude import PRELUDE, TELL
from corral.testing.hostile.residue import PLACES

WRITABLE = set(PLACES)

WRITE = (
    PRELUDE
    + r"""
def make(path):
    fd = os.open(path + "/.probe", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.unlink(path + "/.probe")
for path, names, _ in os.walk("/", followlinks=False):
    if path == "/":
        names.remove("proc")
    attempt(path, make, path)
"""
    + TELL
)

ESCAPE = (
    PRELUDE
    + r"""
path, word = sys.argv[1:3]
def read(path):
    with open(path) as file:
        return None if word in file.read() else "another file"
def write(path):
    with open(path, "r+") as file:
        file.write("written from inside")
def through(path):
    link = f"/tmp/link-{os.getpid()}"
    os.symlink(path, link)
    try:
        return read(link)
    finally:
        os.unlink(link)
def above(depth):
    start = os.open(".", os.O_PATH)
    return read(f"/proc/self/fd/{start}/" + "../" * depth + path.lstrip("/"))
def create(path):
    os.close(os.open(os.path.dirname(path) + "/planted", os.O_CREAT | os.O_WRONLY))
attempt("directly", read, path)
attempt("up from /workspace", read, "../" * 12 + path.lstrip("/"))
attempt("up from a descriptor", above, 12)
attempt("a link", through, path)
for pid in ("1", "self", str(os.getppid())):
    for name in ("root", "cwd/../../../../../../.."):
        attempt(f"/proc/{'PID' if pid.isdigit() and pid != '1' else pid}/{name[:4]}", read, f"/proc/{pid}/{name}{path}")
attempt("beside the interpreter", read, "/.corral/../../../../.." + path)
attempt("written", write, path)
attempt("created beside", create, path)
"""
    + TELL
)
"""Arguments: a file of the host and a word in it."""

PLANT = (
    PRELUDE
    + r"""
file, parent = sys.argv[1:3]
def lay():
    os.chdir("/workspace")
    for name in ("out/deep", "real"):
        os.makedirs(name)
    open("out/fine", "w").write("mine")
    for target, name in ((file, "out/link"), (parent, "out/directory"), (parent, "linked"), ("/", "root"), ("../" * 9 + parent.lstrip("/"), "out/up"),
                         ("/proc/self/environ", "out/environ"), ("/proc/1/root" + parent, "out/proc"), ("loop", "out/loop"), (file, "main.py")):
        os.symlink(target, name)
    os.mkfifo("out/fifo")
    os.link("out/fine", "out/hard")
    open("out/new\nline", "w").close()
attempt("laid", lay)
"""
    + TELL
)
"""Names for the host to trip over. Arguments: a file of the host and its directory."""

HUNT = (
    PRELUDE
    + r"""
marker, pid = sys.stdin.read(), int(sys.argv[1])
answers["found"] = 0
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        try:
            answers["found"] += marker.encode() in open(f"/proc/{name}/cmdline", "rb").read()
        except OSError:
            pass
attempt("signal", os.kill, pid, 15)
"""
    + TELL
)
"""Look for a process by a marker (standard input) in its command line, and end it by the number that the host gives it (argument)."""


KERNEL_FILES = (
    PRELUDE
    + r"""
def read(path):
    with open(path, "rb", buffering=0) as file:
        return None if file.read(4) else "nothing"
def look(path):
    # /dev/null in its place is how it is masked.
    return "nothing" if os.fstat(os.open(path, os.O_RDONLY | os.O_NONBLOCK)).st_rdev == os.makedev(1, 3) else None
def write(path):
    os.close(os.open(path, os.O_WRONLY))
def enter(path):
    return None if os.listdir(path) else "nothing"
for path in json.loads(sys.argv[1])["read"]:
    attempt("read " + path, read, path)
for path in json.loads(sys.argv[1])["open"]:  # to read it would take it from the host's log
    attempt("open " + path, look, path)
for path in json.loads(sys.argv[1])["write"]:
    attempt("write " + path, write, path)
for path in json.loads(sys.argv[1])["enter"]:
    attempt("enter " + path, enter, path)
"""
    + TELL
)


TARGETS = {
    "read": ["/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug", "/proc/config.gz",
             "/proc/latency_stats", "/proc/kpagecount", "/proc/kpageflags", "/proc/vmallocinfo", "/proc/slabinfo", "/proc/mtrr",
             "/sys/kernel/mm/transparent_hugepage/enabled", "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/loop0", "/dev/loop-control"],
    "open": ["/proc/kmsg"],
    "write": ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
              "/proc/sys/vm/drop_caches", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ip_unprivileged_port_start",
              "/proc/sys/fs/file-max", "/proc/sys/kernel/shmmax", "/proc/irq/default_smp_affinity",
              "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/cgroup.procs", "/dev/fuse", "/dev/kvm", "/dev/net/tun"],
    "enter": ["/proc/acpi", "/proc/scsi", "/proc/fs", "/proc/driver", "/sys", "/sys/firmware", "/sys/fs/cgroup", "/sys/kernel/debug"],
}  # fmt: skip


RAISED = (
    PRELUDE
    + r"""
import shutil, subprocess
def run(path):
    return str(subprocess.run([path]).returncode)
def copy_and_run(place):
    shutil.copy(sys.argv[1], place + "/raised")
    os.chmod(place + "/raised", 0o6755)
    assert os.stat(place + "/raised").st_mode & 0o4000
    return run(place + "/raised")
attempt("as it is", run, sys.argv[1])
for place in sys.argv[2:]:
    attempt(place, copy_and_run, place)
"""
    + TELL
)


def who_am_i() -> bytes:
    """A static program of a few instructions that ends with its effective uid (the low 8 bits): no libc that would drop what set-uid gives."""
    code = {
        "x86_64": b"\xb8\x6b\0\0\0\x0f\x05\x89\xc7\xb8\xe7\0\0\0\x0f\x05",  # geteuid; exit_group
        "aarch64": struct.pack("<4I", 0xD28015E8, 0xD4000001, 0xD2800BC8, 0xD4000001),
    }[os.uname().machine]
    machine = {"x86_64": 62, "aarch64": 183}[os.uname().machine]
    size, base = 64 + 56 + len(code), 0x400000
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, base + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000) + code
