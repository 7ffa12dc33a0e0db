"""Doors of the kernel that need no bug to be more than a program should have: tried directly, or inside a user namespace of one's own.

What would do harm on a host is asked for with arguments that cannot work: an errno that comes after the check of privilege shows that
the door is open. First argument: `exec` or `namespace` (inside a sandbox), `user` (a plain child, no root), `root` (a plain child of
root, with mounts, names and IPC of its own), `names` (which doors there are).
"""

from __future__ import annotations

from typing import Any

from corral.testing.hostile.prelude import PRELUDE, TELL

DOORS = (
    PRELUDE
    + r"""
def here():
    return os.getpid()
def child_of(value):
    if value == 0:
        os._exit(0)
    return value
def buffer(size=4096):
    return ctypes.create_string_buffer(size)
def words(*values):
    return struct.pack("=" + "Q" * len(values), *values)
def terminal(request):
    master, slave = os.openpty()
    os.setsid()
    fcntl.ioctl(slave, 0x540E, 0)
    fcntl.ioctl(slave, request, b"x")
def by_int_80():
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
    value = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if value != os.getpid():  # a kernel that takes it for a call of its own numbers has not let it in
        raise OSError(errno.EPERM if value == -errno.EPERM else errno.ENOSYS, "int 0x80")
def device():
    path = f"/tmp/corral-door-{os.getpid()}"
    os.mknod(path, 0o020600, os.makedev(1, 3))
    os.unlink(path)
def vm(verb):
    local, other = buffer(8), buffer(8)
    call(verb, here(), words(ctypes.addressof(local), 8), 1, words(ctypes.addressof(other), 8), 1, 0)
def own_namespace():
    try:
        own = os.open("/proc/self/ns/uts", os.O_RDONLY)
    except FileNotFoundError:
        raise OSError(errno.ENOSYS, "no such namespaces") from None
    call("setns", own, 0)
def handle():
    call("name_to_handle_at", -100, b"/tmp", struct.pack("=II", 128, 0) + bytes(128), buffer(8), 0)
FILTER = {
    "ptrace": lambda: call("ptrace", 0, 0, 0, 0),
    "keyctl": lambda: call("keyctl", 0, -2, 1),
    "add_key": lambda: call("add_key", b"user", b"door", b"x", 1, -2),
    "request_key": lambda: call("request_key", b"user", b"door-that-is-not", None, 0),
    "io_uring_setup": lambda: call("io_uring_setup", 1, buffer()),
    "io_uring_enter": lambda: call("io_uring_enter", -1, 1, 0, 0, None, 0),
    "io_uring_register": lambda: call("io_uring_register", -1, 0, None, 0),
    "userfaultfd": lambda: call("userfaultfd", 1),
    "perf_event_open": lambda: call("perf_event_open", struct.pack("=IIQQQQQ", 1, 64, 0, 0, 0, 0, 0x60) + bytes(16), 0, -1, -1, 0),
    "unshare user": lambda: call("unshare", 0x10000000),
    "clone user": lambda: child_of(call("clone", 0x10000000 | 17, 0, 0, 0, 0)),
    "clone3": lambda: child_of(call("clone3", words(0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)),
    "personality": lambda: call("personality", 0x40000),
    "modify_ldt": lambda: call("modify_ldt", 0, buffer(), 64),
    "kcmp": lambda: call("kcmp", here(), here(), 1, 0, 0),
    "process_vm_readv": lambda: vm("process_vm_readv"),
    "process_vm_writev": lambda: vm("process_vm_writev"),
    "pidfd_getfd": lambda: call("pidfd_getfd", os.pidfd_open(here()), 1, 0),
    "process_madvise": lambda: call("process_madvise", -1, None, 0, 21, 0),
    "process_mrelease": lambda: call("process_mrelease", -1, 0),
    "adjtimex": lambda: call("adjtimex", buffer()),
    "clock_adjtime": lambda: call("clock_adjtime", 0, buffer()),
    "clock_settime": lambda: call("clock_settime", 0, words(1, 2 * 10**9)),
    "name_to_handle_at": handle,
    "mbind": lambda: call("mbind", 0, 4096, 0, None, 0, 0),
    "set_mempolicy": lambda: call("set_mempolicy", 0, None, 0),
    "migrate_pages": lambda: call("migrate_pages", 0, 1, words(1), words(1)),
    "move_pages": lambda: call("move_pages", 0, 0, None, None, None, 0),
    "quotactl": lambda: call("quotactl", 0x80000400, b"/dev/corral-none", 0, buffer()),
    "quotactl_fd": lambda: call("quotactl_fd", -1, 0x80000400, 0, buffer()),
    "sysfs": lambda: call("sysfs", 3, 0, 0),
    "ustat": lambda: call("ustat", 0, buffer()),
    "iopl": lambda: call("iopl", 0),
    "ioperm": lambda: call("ioperm", 0, 1, 0),
    "fanotify_init": lambda: call("fanotify_init", 0x200, 0),
    "listmount": lambda: call("listmount", struct.pack("=IIQQ", 24, 0, 2**64 - 1, 0), buffer(), 8, 0),
    "statmount": lambda: call("statmount", struct.pack("=IIQQ", 24, 0, 1, 0), buffer(), 4096, 0),
    "lsm_list_modules": lambda: call("lsm_list_modules", buffer(), struct.pack("=I", 4096), 0),
    "lsm_set_self_attr": lambda: call("lsm_set_self_attr", 100, buffer(), 32, 0),
    "TIOCSTI": lambda: terminal(0x5412),
    "TIOCLINUX": lambda: terminal(0x541C),
    "alg socket": lambda: socket.socket(38, socket.SOCK_SEQPACKET).close(),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM).close(),
}
if os.uname().machine == "x86_64":
    FILTER["32 bit call"] = by_int_80
NAMESPACE = {
    "mount tmpfs": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "bind mount": lambda: call("mount", b"/", b"/tmp", None, 0x1000, None),
    "move /proc": lambda: call("mount", b"/proc", b"/tmp", None, 0x2000, None),
    "umount2": lambda: call("umount2", b"/proc", 2),
    "fsopen": lambda: call("fsopen", b"tmpfs", 0),
    "fsmount": lambda: call("fsmount", -1, 0, 0),
    "fsconfig": lambda: call("fsconfig", -1, 6, None, None, 0),
    "fspick": lambda: call("fspick", -100, b"/tmp", 0),
    "move_mount": lambda: call("move_mount", -1, b"", -100, b"/tmp", 4),
    "open_tree": lambda: call("open_tree", -100, b"/", 0x80001),
    "mount_setattr": lambda: call("mount_setattr", -100, b"/tmp", 0, bytes(32), 32),
    "pivot_root": lambda: call("pivot_root", b"/", b"/"),
    "chroot": lambda: call("chroot", b"/tmp"),
    "setns": own_namespace,
    "unshare mounts": lambda: call("unshare", 0x20000),
    "unshare net": lambda: call("unshare", 0x40000000),
    "unshare pids": lambda: call("unshare", 0x20000000),
    "sethostname": lambda: call("sethostname", b"x", 1),
    "setdomainname": lambda: call("setdomainname", b"x", 1),
    "setuid 0": lambda: os.setuid(0),
    "setgid 0": lambda: os.setgid(0),
    "packet socket": lambda: socket.socket(17, socket.SOCK_RAW, 3).close(),
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    "raw socket 6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58).close(),
}
HOST = {
    "bpf": lambda: call("bpf", 0, struct.pack("=IIII", 2, 4, 4, 1) + bytes(56), 72),
    "syslog": lambda: call("syslog", 10, None, 0),
    "acct": lambda: call("acct", b"/dev/corral-none/x"),
    "swapon": lambda: call("swapon", b"/dev/corral-none", 0),
    "swapoff": lambda: call("swapoff", b"/dev/corral-none"),
    "reboot": lambda: call("reboot", 1, 2, 3, None),
    "kexec_load": lambda: call("kexec_load", 0, 17, None, 0xFFFF0000),
    "init_module": lambda: call("init_module", None, 0, b""),
    "finit_module": lambda: call("finit_module", -1, b"", 0),
    "delete_module": lambda: call("delete_module", b"corral_no_such_module", 0o4000),
    "settimeofday": lambda: call("settimeofday", None, None),
    "open_by_handle_at": lambda: call("open_by_handle_at", os.open("/", os.O_RDONLY), struct.pack("=II", 8, 1) + bytes(8), 0),
    "vhangup": lambda: (os.setsid(), call("vhangup"))[1],
    "mknod device": device,
    "nice -20": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
}
def inside_a_namespace(action):
    uid, gid = os.getuid(), os.getgid()
    call("unshare", 0x10000000 | 0x20000 | 0x4000000 | 0x8000000 | 0x40000000)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return action()
where = sys.argv[1]
if where in ("exec", "namespace") and os.path.isdir("/.corral/lib"):
    # Some of these would take the host's mounts apart: only inside a sandbox, or behind a namespace of one's own.
    for name, action in {**FILTER, **NAMESPACE, **HOST}.items():
        if where == "namespace":
            attempt(name, inside_a_namespace, action)
        else:
            attempt(name, action)
elif where == "user" and os.getuid() != 0:
    for name, action in FILTER.items():
        attempt(name, action)
    for name, action in NAMESPACE.items():
        attempt(name, inside_a_namespace, action)
elif where == "root":
    for name, action in HOST.items():
        attempt(name, action)
elif where == "names":
    answers = {"filter": list(FILTER), "namespace": list(NAMESPACE), "host": list(HOST)}
else:
    raise SystemExit("not here")
"""
    + TELL
)


BEYOND = {"EINVAL", "EFAULT", "EBADF", "ENOENT", "ENOKEY", "E2BIG", "ENOTTY", "EIO", "EBUSY", "ESRCH", "ESTALE", "EOPNOTSUPP", "EOVERFLOW", "ENOTBLK"}  # fmt: skip
"""Answers that come after the check of privilege: the call was let in."""


SHUT = {"EPERM", "ENOSYS", "EAFNOSUPPORT", "EACCES", "killed by 31"}
"""SIGSYS is how libseccomp answers calls of another architecture."""


def opened(answers: dict[str, Any]) -> set[str]:
    return {name for name, answer in answers.items() if answer == "ok" or answer in BEYOND}
