"""What every program begins and ends with: system calls by name, and tries that each run in a child of their own."""

from __future__ import annotations

import json

from corral.linux import seccomp

_MORE = {
    "x86_64": {"getpid": 39, "prlimit64": 302, "sched_setaffinity": 203, "sched_setscheduler": 144, "ioprio_set": 251}
    | {"tgkill": 234, "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "clone": 56, "capset": 126}
    | {"seccomp": 317, "pidfd_send_signal": 424, "pidfd_open": 434, "setresuid": 117, "setpriority": 141},
    "aarch64": {"getpid": 172, "prlimit64": 261, "sched_setaffinity": 122, "sched_setscheduler": 119, "ioprio_set": 30}
    | {"tgkill": 131, "tkill": 130, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "clone": 220, "capset": 91}
    | {"seccomp": 277, "pidfd_send_signal": 424, "pidfd_open": 434, "setresuid": 147, "setpriority": 140},
}


NUMBERS: dict[str, int] = seccomp._data()["arches"][seccomp.machine()]["numbers"] | _MORE[seccomp.machine()]


PRELUDE = f"""
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
NR = {json.dumps(NUMBERS)}
answers = {{}}
def name_of(number):
    return errno.errorcode.get(number, str(number))
def call(name, *args):
    number = NR.get(name) if isinstance(name, str) else name
    if number is None:
        raise OSError(errno.ENOSYS, "no such call")
    ctypes.set_errno(0)
    known = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    value = libc.syscall(ctypes.c_long(number), *known)
    if value < 0:
        raise OSError(ctypes.get_errno(), name if isinstance(name, str) else str(name))
    return value
def attempt(name, action, *args):
    # In a child, so that what it changes or breaks is its own.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                found = action(*args)
                told = "ok" if found is None or found is True or isinstance(found, int) else str(found)
            except OSError as error:
                told = name_of(error.errno) if error.errno else "refused"
            except BaseException as error:
                told = type(error).__name__ + " " + str(error)
            os.write(write, told.encode())
        finally:
            os._exit(0)
    os.close(write)
    told = b""
    while part := os.read(read, 4096):
        told += part
    os.close(read)
    status = os.waitpid(child, 0)[1]
    answers[name] = told.decode() or f"killed by {{status & 127}}"
"""


TELL = "\nprint(json.dumps(answers))\n"
