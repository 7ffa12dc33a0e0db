"""What programs expect of the system around them: devices, limits, names, memory, signals, sockets. Prints TAP."""

import ctypes
import fcntl
import getpass
import grp
import locale
import mmap
import multiprocessing
import os
import pty
import pwd
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from multiprocessing import shared_memory

TESTS = []
libc = ctypes.CDLL(None, use_errno=True)


def test(function):
    TESTS.append(function)
    return function


def ok(value):
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


@test
def devices_work():
    for name in ("null", "zero", "full", "random", "urandom"):
        assert os.access(f"/dev/{name}", os.R_OK | os.W_OK), name
    assert os.path.islink("/dev/fd") and os.path.exists("/dev/stdin") and os.path.exists("/dev/ptmx")
    with open("/dev/full", "wb", buffering=0) as file:
        try:
            file.write(b"x")
            raise AssertionError("/dev/full took a byte")
        except OSError as error:
            assert error.errno == 28
    with open("/dev/stdout", "w"):
        pass


@test
def standard_streams_can_be_opened_again_by_path():
    assert (
        subprocess.run("echo x | cat /dev/stdin; echo y >/dev/stderr", shell=True, capture_output=True).stdout == b"x\n"
    )
    assert subprocess.run(["bash", "-c", "cat <(echo a) <(echo b)"], capture_output=True).stdout == b"a\nb\n"


@test
def a_terminal_can_be_made_and_has_a_name():
    leader, follower = pty.openpty()
    assert os.ttyname(follower).startswith("/dev/pts/")
    termios.tcgetattr(follower)
    child = subprocess.Popen(["sh", "-c", "tty; stty size"], stdin=follower, stdout=follower, start_new_session=True)
    os.close(follower)
    assert child.wait(30) == 0
    assert b"/dev/pts/" in os.read(leader, 100)


@test
def script_and_sudo_like_programs_find_their_controlling_terminal():
    pid, fd = pty.fork()
    if pid == 0:
        try:
            said = b"got" if os.open("/dev/tty", os.O_RDWR) >= 0 else b"none"
        except OSError as error:
            said = str(error).encode()
        os.write(1, said)
        os._exit(0)
    said = os.read(fd, 100)
    os.waitpid(pid, 0)
    assert said == b"got", said.decode()


@test
def a_terminal_takes_a_traceback():
    pid, fd = pty.fork()
    if pid == 0:
        sys.excepthook(ValueError, ValueError("x"), None)  # which begins with a write of no bytes
        os._exit(0)
    assert b"ValueError" in os.read(fd, 1000)
    os.waitpid(pid, 0)


@test
def the_user_has_a_name_a_group_and_a_home():
    entry = pwd.getpwuid(os.getuid())
    assert entry.pw_name == getpass.getuser() and os.path.isdir(entry.pw_dir)
    assert os.path.expanduser("~") == entry.pw_dir and os.access(entry.pw_dir, os.W_OK)
    assert grp.getgrgid(os.getgid()).gr_name
    assert subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip() == entry.pw_name


@test
def the_host_name_resolves():
    socket.getaddrinfo(socket.gethostname(), 80)
    assert socket.gethostbyname("localhost") == "127.0.0.1"
    assert socket.getfqdn()


@test
def loopback_is_up_in_both_families():
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.1.2.3"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((host, 0))
            server.listen()
            socket.create_connection(server.getsockname()[:2], 10).close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 0))
    assert "lo" in [name for _, name in socket.if_nameindex()]


@test
def low_ports_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 443))


@test
def an_unknown_name_fails_within_seconds():
    began = time.monotonic()
    try:
        socket.getaddrinfo("no-such-name.invalid", 80)
        raise AssertionError("resolved")
    except socket.gaierror:
        assert time.monotonic() - began < 10


@test
def the_locale_is_utf8():
    locale.setlocale(locale.LC_ALL, "")
    assert locale.getpreferredencoding().lower().replace("-", "") == "utf8"
    assert subprocess.run(["sh", "-c", "echo ä你 | wc -m"], capture_output=True).stdout.strip() == b"3"


@test
def time_zones_are_known():
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    assert time.localtime(0).tm_hour == 9
    os.environ["TZ"] = "UTC"
    time.tzset()


@test
def posix_semaphores_and_locks_between_processes():
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert sum(pool.map(abs, range(-50, 0))) == 1275
    lock = multiprocessing.get_context("spawn").Lock()
    assert lock.acquire(timeout=5)


@test
def posix_shared_memory_of_a_useful_size():
    made = shared_memory.SharedMemory(create=True, size=16 << 20)
    made.buf[:] = b"x" * len(made.buf)
    made.close()
    made.unlink()


@test
def system_v_shared_memory():
    identifier = ok(libc.shmget(0, 1 << 20, 0o600))
    ok(libc.shmctl(identifier, 0, None))


@test
def message_queues():
    made = ok(libc.mq_open(b"/programs", os.O_RDWR | os.O_CREAT, 0o600, None))
    ok(libc.mq_send(made, b"hi", 2, 0))
    ok(libc.mq_unlink(b"/programs"))


@test
def memory_can_be_executable_and_locked():
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(b"x")
    both = libc.mmap
    both.restype = ctypes.c_void_p
    both.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    assert both(None, 4096, 7, 0x22, -1, 0) not in (None, ctypes.c_void_p(-1).value)
    with open("/proc/self/exe", "rb") as file:
        assert file.read(4) == b"\x7fELF"
    ok(libc.mlock(ctypes.create_string_buffer(4096), 4096))


@test
def memory_files():
    fd = os.memfd_create("x")
    os.write(fd, b"#!/bin/sh\necho from memory\n")
    assert subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd], capture_output=True).stdout == b"from memory\n"


@test
def a_program_can_be_traced():
    pid = os.fork()
    if pid == 0:
        ok(libc.ptrace(0, 0, None, None))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status)
    ok(libc.ptrace(7, pid, None, None))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


@test
def a_debugger_attaches_to_its_child():
    child = subprocess.Popen(["sleep", "100"])
    ok(libc.ptrace(0x4206, child.pid, None, None))  # SEIZE
    child.kill()
    assert child.wait(30) == -9


@test
def watches_of_files():
    fd = ok(libc.inotify_init1(os.O_NONBLOCK))
    place = tempfile.mkdtemp()
    ok(libc.inotify_add_watch(fd, place.encode(), 0x100))
    open(f"{place}/seen", "w").close()
    select.select([fd], [], [], 10)
    assert b"seen" in os.read(fd, 4096)


@test
def many_watches_and_open_files():
    fd = ok(libc.inotify_init1(0))
    with tempfile.TemporaryDirectory() as place:
        for n in range(2000):
            os.mkdir(f"{place}/{n}")
            ok(libc.inotify_add_watch(fd, f"{place}/{n}".encode(), 0x100))
    os.close(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 1024 and hard >= 4096, f"open files: {soft} of {hard}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(3000)]
    for one in kept:
        os.close(one)


@test
def a_stack_can_be_made_larger():
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    assert hard == resource.RLIM_INFINITY or hard >= 64 << 20, hard
    subprocess.run(["sh", "-c", "ulimit -s 65536 && ulimit -c 0 && ulimit -n 1024"], check=True)


@test
def a_hundred_threads_and_timers():
    done = []
    threads = [threading.Thread(target=lambda: done.append(1)) for _ in range(100)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(done) == 100
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.3)
    assert seen
    os.timerfd_create if hasattr(os, "timerfd_create") else ok(libc.timerfd_create(1, 0))
    ok(libc.eventfd(0, 0))


@test
def a_process_has_a_descriptor():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -15


@test
def signals_with_values_and_between_groups():
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pause()
    while os.getsid(pid) != pid:
        time.sleep(0.01)
    os.killpg(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -15
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    ok(libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), 7))
    assert signal.sigtimedwait([signal.SIGRTMIN], 10).si_signo == signal.SIGRTMIN


@test
def orphans_are_collected():
    subprocess.run(["sh", "-c", "(sleep 0.05 &) ; exit 0"], check=True)
    time.sleep(0.5)
    zombies = [n for n in os.listdir("/proc") if n.isdigit() and _state(n) == "Z"]
    assert not zombies, zombies


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@test
def proc_tells_what_tools_ask():
    for name in ("meminfo", "cpuinfo", "stat", "uptime", "loadavg", "mounts", "filesystems", "version", "self/maps",
                 "self/smaps", "self/status", "self/cgroup", "self/mountinfo", "self/io", "self/limits", "sys/kernel/osrelease",
                 "sys/kernel/pid_max", "sys/kernel/random/uuid", "sys/kernel/random/boot_id", "sys/vm/overcommit_memory", "sys/net/core/somaxconn"):  # fmt: skip
        with open(f"/proc/{name}") as file:
            assert file.read(), name
    assert os.cpu_count() and len(os.sched_getaffinity(0)) >= 1


@test
def a_process_finds_itself_in_proc():
    assert os.readlink("/proc/self") == str(os.getpid())
    shown = subprocess.run(["ps", "-o", "pid=", "-p", str(os.getpid())], capture_output=True, text=True)
    assert shown.stdout.split() == [str(os.getpid())], shown.stderr
    assert subprocess.run(["df", "/workspace"], capture_output=True).returncode == 0


@test
def own_priority_and_scheduling():
    os.nice(1)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    ok(libc.prctl(15, b"renamed", 0, 0, 0))
    resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
    resource.prlimit(os.getpid(), resource.RLIMIT_CORE)


@test
def limits_by_number_of_a_process():
    resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0))


@test
def files_have_extended_attributes():
    with tempfile.NamedTemporaryFile(dir="/workspace") as file:
        os.setxattr(file.name, "user.note", b"x")
        assert os.getxattr(file.name, "user.note") == b"x"


@test
def files_locks_and_attributes():
    with tempfile.NamedTemporaryFile(dir="/workspace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        os.truncate(file.name, 64 << 20)
        os.utime(file.name, (1, 1))
        os.chmod(file.name, 0o751)
        os.link(file.name, file.name + "x")
        os.unlink(file.name + "x")
    os.mkfifo("/workspace/fifo")
    os.unlink("/workspace/fifo")
    with open(os.open("/workspace", os.O_TMPFILE | os.O_RDWR), "wb") as file:
        file.write(b"x")


@test
def io_uring_and_clone3_are_there_or_say_that_they_are_not():
    for number in (425, 435):
        value = libc.syscall(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_long(0))
        assert value == -1 and ctypes.get_errno() in (22, 14, 38), os.strerror(ctypes.get_errno())


@test
def programs_of_a_directory_of_ones_own_run():
    for place in ("/workspace", "/tmp", os.path.expanduser("~"), "/var/tmp", "/dev/shm"):
        path = f"{place}/program-{os.getpid()}"
        with open(path, "w") as file:
            file.write("#!/bin/sh\necho ran\n")
        os.chmod(path, 0o755)
        try:
            assert subprocess.run([path], capture_output=True).stdout == b"ran\n", place
        finally:
            os.unlink(path)


@test
def temporary_files_of_50_megabytes():
    with tempfile.TemporaryFile(dir="/tmp") as file:
        for _ in range(50):
            file.write(bytes(1 << 20))


WITHIN_S = 60


def main():
    for function in TESTS:
        sys.stdout.flush()
        read, write = os.pipe()
        pid = os.fork()  # what one changes or breaks is its own
        if pid == 0:
            os.close(read)
            os.setpgid(0, 0)
            try:
                function()
                os._exit(0)
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode()[:500])
                os._exit(1)
        os.close(write)
        why = b""
        if select.select([read], [], [], WITHIN_S)[0]:  # a word of why, or its end
            why = os.read(read, 500)
        else:
            why = b"not done after %d seconds" % WITHIN_S
            os.killpg(pid, signal.SIGKILL)  # what it started in terminals ends with these
        os.close(read)
        good = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("ok" if good else "not ok", "-", function.__name__.replace("_", " "))
        if not good:
            print("#", why.decode(errors="replace").replace("\n", " "))


main()
