"""The filter compiler: a small BPF machine for both architectures, and real children under the filter."""

from __future__ import annotations

import errno
import json
import struct
import subprocess
import sys
from typing import Any

import pytest

from corral.linux import seccomp

ALLOW = 0x7FFF0000
ARCHES = ("x86_64", "aarch64")
FILTERS = [name for profile in seccomp.PROFILES for name in (profile, seccomp.exec_filter(profile))]


def table(arch: str) -> dict[str, Any]:
    found: dict[str, Any] = seccomp._data()["arches"][arch]
    return found


def run(program: bytes, arch: str, number: int, *args: int, audit: int | None = None) -> int | None:
    """What the kernel would do: None = allowed, else the errno."""
    values = [value & (1 << 64) - 1 for value in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    memory = struct.pack("<iIQ6Q", number, table(arch)["audit"] if audit is None else audit, 0, *values)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("<I", memory, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op in (0x15, 0x35, 0x45):
            hit = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += yes if hit else no
        else:
            assert op == 0x06
            return None if k == ALLOW else k & 0xFFFF


def call(arch: str, name: str, *args: int, profile: str = "default") -> int | None:
    return run(seccomp.compile(profile, arch), arch, table(arch)["numbers"][name], *args)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", FILTERS)
def test_every_listed_call_gets_its_errno_and_others_pass(arch: str, profile: str) -> None:
    program = seccomp.compile(profile, arch)
    numbers = table(arch)["numbers"]
    plain = {
        numbers[name]: getattr(errno, rule["errno"])
        for rule in seccomp.rules(profile)
        if "all" not in rule
        for name in rule["names"]
        if name in numbers
    }
    conditional = {
        numbers[n] for rule in seccomp.rules(profile) if "all" in rule for n in rule["names"] if n in numbers
    }
    for number in range(600):
        if number not in conditional:
            assert run(program, arch, number) == plain.get(number), number


@pytest.mark.parametrize("arch", ARCHES)
def test_foreign_abis_do_not_exist(arch: str) -> None:
    program = seccomp.compile("default", arch)
    assert run(program, arch, 1, audit=0x40000003) == errno.ENOSYS
    if arch == "x86_64":
        assert run(program, arch, 0x40000000 | 101) == errno.ENOSYS


@pytest.mark.parametrize("arch", ARCHES)
def test_conditions_on_arguments(arch: str) -> None:
    assert call(arch, "clone", 0x01200011) is None
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(arch, "clone", flag | 17) == errno.EPERM
    for family, answer in (
        (1, None),
        (2, None),
        (10, None),
        (16, None),
        (17, 97),
        (38, 97),
        (40, 97),
        (0x1_0000_0011, 97),
    ):
        assert call(arch, "socket", family) == answer
    assert call(arch, "ioctl", 0, 0x5401) is None
    assert call(arch, "ioctl", 0, 0x5412) == errno.EPERM
    assert call(arch, "ioctl", 0, 0xFFFFFFFF_00005412) == errno.EPERM
    for persona, answer in ((0, None), (8, None), (0x20008, None), (0xFFFFFFFF, None), (0x0400000, 1), (0x80000000, 1)):
        assert call(arch, "personality", persona) == answer
    assert call(arch, "prlimit64", 0, 7, 4096) is None
    assert call(arch, "prlimit64", 5, 7, 0) is None
    assert call(arch, "prlimit64", 5, 7, 4096) == errno.EPERM
    assert call(arch, "prlimit64", 5, 7, 1 << 32) == errno.EPERM
    assert call(arch, "mknodat", 0, 0, 0o100644) is None
    assert call(arch, "mknodat", 0, 0, 0o010644) is None
    assert call(arch, "mknodat", 0, 0, 0o020644) == errno.EPERM
    assert call(arch, "mknodat", 0, 0, 0o060644) == errno.EPERM


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", [name for name in FILTERS if name not in ("default", "exec")])
def test_a_profile_opens_what_it_names_and_nothing_else(arch: str, profile: str) -> None:
    opens = {
        "debug": {"personality", "process_vm_readv", "process_vm_writev", "ptrace"},
        "browser": {"chroot", "clone", "unshare"},
    }[profile.removesuffix("-exec")]
    narrow = "exec" if profile.endswith("-exec") else "default"
    values = (0, 1, 2, 8, 16, 17, 64, 0x5412, 0o020644, 0x40000, 0x60008, 0x10000000, 0x10000011, 0x20000, 0x80000000)
    for name in table(arch)["numbers"]:
        for value in values:
            args = (value, value, value)
            before, after = (call(arch, name, *args, profile=which) for which in (narrow, profile))
            assert after is not None or before is None or name in opens, (name, value)
            assert after == before or name in opens | {"socket", "socketpair", "setsockopt"}, (name, value)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", ["debug", "debug-exec"])
def test_debug_allows_tracing_and_addresses_that_stay(arch: str, profile: str) -> None:
    for name in ("ptrace", "process_vm_readv", "process_vm_writev"):
        assert call(arch, name, 16, 1, profile=profile) is None
    for persona, answer in ((0x0040000, None), (0xFFFFFFFF, None), (0x0400000, 1), (0x0440000, 1), (0x80000000, 1)):
        assert call(arch, "personality", persona, profile=profile) == answer
    for name in ("pidfd_getfd", "process_madvise", "kcmp", "bpf", "perf_event_open", "unshare", "setns", "mount"):
        assert call(arch, name, profile=profile) == errno.EPERM


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", ["browser", "browser-exec"])
def test_browser_allows_the_namespaces_of_a_browser_and_keeps_their_root_small(arch: str, profile: str) -> None:
    user, pid, net, others = 0x10000000, 0x20000000, 0x40000000, (0x20000, 0x2000000, 0x4000000, 0x8000000)
    for name in ("clone", "unshare"):
        assert call(arch, name, user | pid | net, profile=profile) is None
        for flag in others:
            assert call(arch, name, user | flag, profile=profile) == errno.EPERM
    assert call(arch, "unshare", 0x80, profile=profile) == errno.EPERM, "a time namespace"
    assert call(arch, "chroot", profile=profile) is None
    for name in ("ptrace", "setns", "mount", "umount2", "pivot_root", "keyctl", "bpf", "userfaultfd"):
        assert call(arch, name, profile=profile) == errno.EPERM
    assert call(arch, "clone3", profile=profile) == errno.ENOSYS
    route, uevent, netfilter, inet = 0, 15, 12, 2
    assert call(arch, "socket", 16, 3, route, profile=profile) is None
    assert call(arch, "socket", 16, 3, uevent, profile=profile) is None
    assert call(arch, "socket", 16, 3, netfilter, profile=profile) == errno.EPROTONOSUPPORT
    assert call(arch, "socket", inet, 1, netfilter, profile=profile) is None
    assert call(arch, "socket", 17, 3, 0, profile=profile) == errno.EAFNOSUPPORT
    for level in (0, 41):
        assert call(arch, "setsockopt", 3, level, 64, profile=profile) == errno.ENOPROTOOPT
        assert call(arch, "setsockopt", 3, level, 2, profile=profile) is None
    assert call(arch, "setsockopt", 3, 1, 64, profile=profile) is None, "SOL_SOCKET"


SOCKET_OPTIONS = {
    "tables": (0, (64, 65), (64, 65, 66, 67)),
    "tables of IPv6": (41, (64, 65), (64, 65, 68, 69)),
    "arp tables": (0, (96, 97), (96, 97, 98, 99)),
    "bridge tables": (0, (128, 129), (128, 129, 130, 131)),
    "multicast routing": (0, range(200, 213), range(200, 213)),
    "multicast routing of IPv6": (41, range(200, 213), range(200, 213)),
    "the virtual server": (0, range(1152, 1168), range(1152, 1160)),
}
"""What only root of a network namespace may do by options of a socket: level, numbers to set, numbers to get."""


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", ["browser", "browser-exec"])
@pytest.mark.parametrize("what", SOCKET_OPTIONS)
def test_socket_options_for_root_of_a_network_are_shut_where_a_program_can_become_it(
    arch: str, profile: str, what: str
) -> None:
    level, to_set, to_get = SOCKET_OPTIONS[what]
    program, spec = seccomp.compile(profile, arch), seccomp.to_oci(profile, arch)
    for name, options in (("setsockopt", to_set), ("getsockopt", to_get)):
        number = table(arch)["numbers"][name]
        for option in options:
            assert run(program, arch, number, 3, level, option) == errno.ENOPROTOOPT, (name, option)
            assert _oci(spec, name, 3, level, option) == errno.ENOPROTOOPT, (name, option)
            assert run(program, arch, number, 3, 1, option) is None, "another level has the number for something else"


@pytest.mark.parametrize("profile", ["browser", "browser-exec"])
def test_socket_options_of_every_program_stay(profile: str) -> None:
    traffic_class, receive_class, original_destination, address_family_free = 67, 66, 80, 78
    for name in ("setsockopt", "getsockopt"):
        for option in (traffic_class, receive_class, original_destination, address_family_free):
            assert call("x86_64", name, 3, 41, option, profile=profile) is None, option
        for option in (*range(1, 53), 80):
            assert call("x86_64", name, 3, 0, option, profile=profile) is None, option


def _oci(spec: dict[str, Any], name: str, *args: int) -> int | None:
    values = (*args, 0, 0, 0, 0, 0, 0)
    for entry in spec["syscalls"]:
        if name not in entry["names"]:
            continue
        tests = entry.get("args", [])
        indexes = [test["index"] for test in tests]
        assert len(indexes) == len(set(indexes)), "libseccomp takes one comparison per argument"
        if all(
            values[t["index"]] & t["value"] == t["valueTwo"]
            if t["op"] == "SCMP_CMP_MASKED_EQ"
            else values[t["index"]] != t["value"]
            for t in tests
        ):
            return int(entry["errnoRet"])
    return None


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", FILTERS)
def test_oci_form_decides_like_the_program(arch: str, profile: str) -> None:
    spec = json.loads(json.dumps(seccomp.to_oci(profile, arch)))
    program = seccomp.compile(profile, arch)
    interesting = (
        0,
        1,
        2,
        7,
        8,
        10,
        16,
        17,
        38,
        45,
        46,
        0x5412,
        0x541C,
        0o020644,
        0o060000,
        0o100644,
        0x20000,
        0x20008,
    )
    wide = (0x80000000, 0x80020008, 0xFFFFFFFF, 0x0040000, 0x10000000, 0x01200011, 1 << 32, (1 << 32) | 0x5412)
    for name, number in table(arch)["numbers"].items():
        for value in (*interesting, *wide):
            for at in range(3):
                args = [0, 0, 0]
                args[at] = value
                args[(at + 1) % 3] = 4096
                if name == "prlimit64" and args[0] == 1 << 32:
                    continue  # OCI compares 64 bits: stricter
                assert _oci(spec, name, *args) == run(program, arch, number, *args), (name, args)


def test_unknown_profile_is_an_error() -> None:
    with pytest.raises(KeyError):
        seccomp.compile("nosuch")


CHILD = """
import ctypes, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
program = bytes.fromhex(sys.argv[1])
buffer = ctypes.create_string_buffer(program)
class Fprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
if program:
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Fprog(len(program) // 8, ctypes.addressof(buffer))), 0, 0) == 0, ctypes.get_errno()
def errno_of(number, *args):
    ctypes.set_errno(0)
    return 0 if libc.syscall(number, *args) >= 0 else ctypes.get_errno()
def family(number):
    try:
        socket.socket(number, socket.SOCK_DGRAM).close()
        return 0
    except OSError as error:
        return error.errno
numbers = json.loads(sys.argv[2])
out = {
    "ptrace": errno_of(numbers["ptrace"], 16, 0x3FFFFFFF, 0, 0),
    "clone3": errno_of(numbers["clone3"], 0, 0),
    "io_uring": errno_of(numbers["io_uring_setup"], 0, 0),
    "unshare": errno_of(numbers["unshare"], 0x10000000),
    "packet": family(17), "unix": family(1), "inet": family(2), "netlink": family(16),
}
pid = os.fork()
if pid == 0:
    os._exit(7)
out["fork"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
import threading
thread = threading.Thread(target=lambda: out.update(thread=True)); thread.start(); thread.join()
print(json.dumps(out))
"""


def _child(program: bytes) -> dict[str, Any]:
    numbers = json.dumps(table(seccomp.machine())["numbers"])
    command = [sys.executable, "-I", "-S", "-c", CHILD, program.hex(), numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("profile", ["default", "exec"])
def test_real_children_are_refused_as_told(profile: str) -> None:
    answers = _child(seccomp.compile(profile))
    assert answers == {
        "ptrace": errno.EPERM,
        "clone3": errno.ENOSYS,
        "io_uring": errno.ENOSYS,
        "unshare": errno.EPERM,
        "packet": errno.EAFNOSUPPORT,
        "unix": 0,
        "inet": 0,
        "netlink": 0,
        "fork": 7,
        "thread": True,
    }


def test_without_the_filter_the_same_calls_are_not_refused() -> None:
    answers = _child(b"")
    assert answers["ptrace"] == errno.ESRCH
    assert answers["unshare"] == 0
    assert answers["clone3"] not in (0, errno.ENOSYS)
    assert answers["packet"] != errno.EAFNOSUPPORT
