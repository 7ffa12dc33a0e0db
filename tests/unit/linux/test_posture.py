"""Behaviour probes of the host: quick, in a process of their own, and a missing means is told, not guessed."""

import ctypes
import os
import struct
import threading

import pytest

from corral.linux import posture, seccomp


def test_every_probe_answers_from_a_process_with_threads_and_changes_nothing_of_it() -> None:
    before = (os.readlink("/proc/self/ns/user"), os.getpid())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        checks = posture.checks()
    finally:
        stop.set()
        thread.join()
    names = [check.name for check in checks]
    assert len(names) == len(set(names)) >= 14 and {"seccomp filter", "user namespaces", "landlock"} <= set(names)
    assert all(check.seen for check in checks)
    assert all(check.hint or check.ok is not False for check in checks), "what is missing says how to mend it"
    assert (os.readlink("/proc/self/ns/user"), os.getpid()) == before
    by_name = {check.name: check for check in checks}
    assert by_name["seccomp filter"].ok, "the tests of the filter need it"


@pytest.mark.parametrize("signal_number", [9, 31])
def test_a_probe_whose_child_dies_did_not_work(signal_number: int) -> None:
    def dies(libc: ctypes.CDLL) -> bool:
        os.kill(os.getpid(), signal_number)
        return True

    def raises(libc: ctypes.CDLL) -> bool:
        raise OSError

    assert posture._in_child(dies) is False and posture._in_child(raises) is False
    assert posture._in_child(lambda libc: True) is True


ALLOWS_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
REFUSES_UNSHARE_ONLY = (
    struct.pack("=HBBI", 0x20, 0, 0, 0)
    + struct.pack("=HBBI", 0x15, 0, 1, seccomp._data()["arches"][seccomp.machine()]["numbers"]["unshare"])
    + struct.pack("=HBBI", 0x06, 0, 0, 0x00050001)
    + ALLOWS_ALL
)


@pytest.mark.parametrize(
    ("program", "seen"),
    [
        (ALLOWS_ALL, "lets through what it should refuse"),
        (REFUSES_UNSHARE_ONLY, "lets through what it should refuse"),
        (struct.pack("=HBBI", 0xFFFF, 0, 0, 0), "cannot be installed"),
    ],
)
def test_a_filter_that_does_not_hold_is_seen(program: bytes, seen: str) -> None:
    check = posture._seccomp(program)
    assert (check.ok, check.seen) == (False, seen)


def test_where_all_is_refused_already_nothing_is_said_of_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posture, "_HARMLESS", (lambda libc: -1,))
    check = posture._seccomp()
    assert check.ok is None and "without it" in check.seen
