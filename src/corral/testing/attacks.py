"""Programs that run inside a sandbox in the conformance checks of a runtime, as text: standard library only, JSON on stdout.

Those with `%` take their numbers by formatting. Each tells what happened, not whether that was right.
"""

LOOK = """
import json, os, socket
fds = []
for fd in range(256):
    try:
        os.fstat(fd)
        fds.append(fd)
    except OSError: pass
try:
    open("/etc/shadow").read(); shadow = "read"
except OSError as error: shadow = error.errno
print(json.dumps({"fds": fds, "hostname": socket.gethostname(), "shadow": shadow,
    "interfaces": [name for _, name in socket.if_nameindex()]}))
"""

WRITE = """
import json, os
answers = {}
def attempt(name, action):
    try:
        action()
        answers[name] = "ok"
    except OSError as error:
        answers[name] = os.strerror(error.errno)
for path, _, _ in os.walk("/", followlinks=False):
    if path.startswith(("/proc/", "/dev/pts")) or path.count("/") > 4: continue
    attempt(path, lambda: os.close(os.open(path + "/.probe", os.O_CREAT | os.O_WRONLY)))
attempt("/run/user/1000", lambda: os.close(os.open("/run/user/1000/.probe", os.O_CREAT | os.O_WRONLY)))
for path in ("/etc/passwd", "/.corral/bin/python3", "/bin/busybox", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern",
             "/proc/sys/vm/drop_caches", "/proc/sys/net/ipv4/ip_forward", "/proc/1/oom_score_adj"):
    attempt("write " + path, lambda: os.close(os.open(path, os.O_WRONLY)))
print(json.dumps(answers))
"""

FILL = """
import errno, json, os
path, most = %r, %d
written, why = 0, None
try:
    fd = os.open(path + "/fill", os.O_CREAT | os.O_WRONLY)
    while written < most:
        written += os.write(fd, bytes(65536))
except OSError as error:
    why = errno.errorcode[error.errno]
print(json.dumps({"bytes": written, "errno": why}))
"""

FILES = """
import errno, json, os
made, why = 0, None
try:
    for made in range(%d):
        os.close(os.open(f"/workspace/{made}", os.O_CREAT | os.O_WRONLY))
except OSError as error:
    why = errno.errorcode[error.errno]
print(json.dumps({"files": made, "errno": why}))
"""

FORK = """
import errno, json, os, time
children, why = 0, None
r, w = os.pipe()
try:
    for _ in range(%d):
        if os.fork() == 0:
            os.close(w)
            os.read(r, 1)
            os._exit(0)
        children += 1
except OSError as error:
    why = errno.errorcode[error.errno]
print(json.dumps({"children": children, "errno": why}))
"""

OWNER_SIGNAL = """
import fcntl, os, socket, time
left, right = socket.socketpair()
fcntl.fcntl(left, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(left, 10, 9)
fcntl.fcntl(left, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
parent = os.getppid()
right.send(b"x")
time.sleep(0.3)
raise SystemExit(1 if os.getppid() == parent else 0)
"""

HOSTILE = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL("/.corral/lib/libc.so.6", use_errno=True)
x86 = os.uname().machine == "x86_64"
answers = {}
def told(name, value):
    answers[name] = "done" if value >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
def call(name, number, *args):
    ctypes.set_errno(0)
    told(name, libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]))
def attempt(name, action):
    try:
        action()
        answers[name] = "done"
    except OSError as error:
        answers[name] = errno.errorcode.get(error.errno, "?")
ptrace, process_vm_readv, mount, umount2, unshare, setns = (101, 310, 165, 166, 272, 308) if x86 else (117, 270, 40, 39, 97, 268)
targets = {"guest": 1, "supervisor": os.getppid()}
for who, pid in targets.items():
    if pid == 1 and who == "supervisor":
        continue
    call(f"ptrace attach {who}", ptrace, 16, pid, 0, 0)
    call(f"ptrace seize {who}", ptrace, 0x4206, pid, 0, 0)
    for name in ("environ", "mem", "maps", "auxv", "stack", "syscall"):
        attempt(f"read {name} {who}", lambda: os.read(os.open(f"/proc/{pid}/{name}", os.O_RDONLY), 1))
    attempt(f"write mem {who}", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
    attempt(f"list fd {who}", lambda: os.listdir(f"/proc/{pid}/fd"))
    for name in ("root", "cwd", "exe"):
        attempt(f"follow {name} {who}", lambda: os.readlink(f"/proc/{pid}/{name}"))
    for name in ("user", "mnt", "pid", "net"):
        def enter():
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            if libc.syscall(setns, fd, 0) < 0:
                raise OSError(ctypes.get_errno(), "setns")
        attempt(f"setns {name} {who}", enter)
    local = ctypes.create_string_buffer(8)
    vec = (ctypes.c_size_t * 2)(ctypes.addressof(local), 8)
    far = (ctypes.c_size_t * 2)(0x400000, 8)
    call(f"process_vm_readv {who}", process_vm_readv, pid, ctypes.byref(vec), 1, ctypes.byref(far), 1, 0)
    limit = (ctypes.c_uint64 * 2)(3, 3)
    call(f"prlimit {who}", 302 if x86 else 261, pid, 7, ctypes.byref(limit), None)
    attempt(f"oom_score_adj {who}", lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000") and None)
    pidfd = libc.syscall(434, pid, 0)
    call(f"pidfd_getfd {who}", 438, pidfd, 0, 0)
    attempt(f"priority {who}", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)) if who == "guest" else None
call("mount tmpfs", mount, b"none", b"/tmp", b"tmpfs", 0, None)
call("mount proc", mount, b"none", b"/tmp", b"proc", 0, None)
call("umount workspace", umount2, b"/workspace", 2)
call("umount proc", umount2, b"/proc", 2)
call("open_tree", 428, -100, b"/", 1)
call("fsopen", 430, b"tmpfs", 0)
call("chroot", 161 if x86 else 51, b"/tmp")
call("pivot_root", 155 if x86 else 41, b"/", b"/tmp")
call("bpf", 321 if x86 else 280, 0, None, 0)
call("perf", 298 if x86 else 241, None, 0, -1, -1, 0)
call("keyctl", 250 if x86 else 219, 0, -3, 1)
call("io_uring", 425, 1, ctypes.create_string_buffer(256))
call("userfaultfd", 323 if x86 else 282, 0)
call("kexec", 246 if x86 else 104, 0, 0, None, 0)
call("module", 175 if x86 else 105, None, 0, b"")
call("sethostname", 170 if x86 else 161, b"x", 1)
call("reboot", 169 if x86 else 142, 0xfee1dead, 672274793, 0, None)
call("swapon", 167 if x86 else 224, b"/tmp/x", 0)
call("settimeofday", 164 if x86 else 170, (ctypes.c_long * 2)(1, 0), None)
call("personality", 135 if x86 else 92, 0x0400000)
call("unshare user", unshare, 0x10000000)
call("unshare mount", unshare, 0x00020000)
call("unshare net", unshare, 0x40000000)
call("clone3", 435, (ctypes.c_uint64 * 11)(0x10000000), 88)
attempt("setuid 0", lambda: os.setuid(0))
attempt("setgid 0", lambda: os.setgid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("mknod", lambda: os.mknod("/tmp/null", 0o020666, os.makedev(1, 3)))
attempt("packet socket", lambda: socket.socket(17, socket.SOCK_RAW, 3))
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attempt("alg", lambda: socket.socket(38, socket.SOCK_SEQPACKET))
attempt("nice -20", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w"))
attempt("core_pattern", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("ip_forward", lambda: open("/proc/sys/net/ipv4/ip_forward", "w"))
attempt("kcore", lambda: open("/proc/kcore", "rb").read(1).index(b"\\x7f"))
attempt("disk device", lambda: [os.open(f"/dev/{n}", os.O_RDONLY) for n in ("vda", "sda", "loop0", "mem", "kmsg", "fuse")])
attempt("connect out", lambda: socket.create_connection(("192.0.2.1", 80), 1))
attempt("metadata", lambda: socket.create_connection(("169.254.169.254", 80), 1))
print(json.dumps(answers))
"""

TRACE = """
import ctypes, errno, json, os, signal
libc = ctypes.CDLL("/.corral/lib/libc.so.6", use_errno=True)
x86 = os.uname().machine == "x86_64"
ptrace, process_vm_readv, personality = (101, 310, 135) if x86 else (117, 270, 92)
secret = ctypes.create_string_buffer(b"inside")
def call(number, *args):
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return value if value >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
answers = {"fixed addresses": call(personality, 0x0040000)}
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(1)
answers["attach"] = call(ptrace, 16, child, 0, 0)
if answers["attach"] == 0:
    os.waitpid(child, 0)
    word = ctypes.c_long()
    answers["peek"] = call(ptrace, 1, child, ctypes.addressof(secret), ctypes.byref(word))
    answers["word"] = bytes(word)[:6].decode()
    here = ctypes.create_string_buffer(6)
    near = (ctypes.c_size_t * 2)(ctypes.addressof(here), 6)
    far = (ctypes.c_size_t * 2)(ctypes.addressof(secret), 6)
    answers["read"] = call(process_vm_readv, child, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
    answers["detach"] = call(ptrace, 17, child, 0, 0)
os.kill(child, signal.SIGKILL)
answers["status"] = os.waitpid(child, 0)[1]
print(json.dumps(answers))
"""

BROWSE = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL("/.corral/lib/libc.so.6", use_errno=True)
x86 = os.uname().machine == "x86_64"
clone, mount, setns = (56, 165, 308) if x86 else (220, 40, 268)
USER, PID, NET, MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x20000
answers = {}
def attempt(name, action):
    try:
        action()
        answers[name] = "done"
    except OSError as error:
        answers[name] = errno.errorcode.get(error.errno, "?")
def checked(value):
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
def child():
    pid = libc.syscall(ctypes.c_long(clone), ctypes.c_long(USER | PID | NET | 17), None, None, None, None)
    checked(pid)
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
attempt("namespaces of a child", child)
uid = os.getuid()
def enter():
    checked(libc.unshare(USER | NET))
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
attempt("root of its own", enter)
attempt("mount namespace", lambda: checked(libc.unshare(MOUNT)))
attempt("mount", lambda: checked(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
attempt("enter the guest's", lambda: checked(libc.syscall(setns, os.open("/proc/1/ns/user", os.O_RDONLY), 0)))
attempt("netfilter", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12))
attempt("iptables", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).setsockopt(0, 64, bytes(96)))
attempt("virtual server", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).setsockopt(0, 1157, bytes(0)))
attempt("multicast routing", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 2).setsockopt(0, 200, 1))
attempt("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
attempt("device", lambda: os.mknod("/tmp/null", 0o020666, os.makedev(1, 3)))
attempt("guest memory", lambda: open("/proc/1/mem", "rb"))
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("write base", lambda: open("/etc/passwd", "a"))
attempt("kill guest", lambda: os.kill(1, 9) if GUEST_IS_ANOTHER else checked(-1))
attempt("chroot", lambda: os.chroot("/proc/self/fdinfo"))
print(json.dumps(answers))
"""
"""Needs `GUEST_IS_ANOTHER` put before it: whether the guest has a uid of its own."""
