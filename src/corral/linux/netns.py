"""Network namespaces that nobody is in, kept by a mount: for programs of ours whose sockets no other process of the host may reach.

Abstract socket names belong to a network namespace and have no permissions: whoever is in it can connect.
"""

from __future__ import annotations

import ctypes
import os
import threading

from corral.linux import mounts

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def keep_new(target: str) -> None:
    """Make a network namespace without any interface that is up, and have it at the new file `target` until that is unmounted."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            if _libc.unshare(_CLONE_NEWNET) < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"unshare: {os.strerror(number)}", "network namespace")
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            mounts.bind("/proc/thread-self/ns/net", target, read_only=False)
        except BaseException as error:
            failure.append(error)

    # A thread of its own, which ends: the namespace would stay with the next work of a pooled one.
    thread = threading.Thread(target=work, name="network-namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
