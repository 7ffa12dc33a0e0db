"""Behaviour probes of the host: quick, in a process of their own, and a missing means is told, not guessed."""

import os
import threading

from corral.linux import posture


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
