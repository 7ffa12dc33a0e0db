"""K01: a time-out (or a cancel, or a client that is gone) ends the whole tree; the witness is the host."""

import os
import signal
import time

import pytest

from .conftest import Box, eventually, living, marked, owner_of, workspace

WRITERS = r"""
import os, signal, subprocess, sys, time
mark = sys.argv[1]
print("start", flush=True)
loop = '''
import sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    for name in ("beat", "beat." + sys.argv[1]):
        open(name, "a").write("x")
    time.sleep(0.02)
'''
subprocess.Popen([sys.executable, "-c", loop, "child", mark])
subprocess.Popen(["setsid", "nohup", sys.executable, "-c", loop, "session", mark], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", loop, "orphan", mark])
    os._exit(0)
subprocess.Popen(["sleep", "60", ]).wait()
"""


def beat(box: Box, sandbox: str) -> int:
    doc = box.exec_json(sandbox, "sh", "-c", "wc -c <beat")
    return int(doc["result"]["stdout"]["text"])


def all_there(box: Box, marker: str) -> bool:
    return len(living(box, marker)) >= (3 if box.own_kernel else 4)  # three write, the fourth waits for them


def written(box: Box, sandbox: str) -> list[int]:
    """How much each of the writers has written until now, by the host's view of the disk."""
    instance = box.document("sandbox", "inspect", sandbox, "--json")[1]["instance"]["id"]
    return [path.stat().st_size for path in workspace(box, instance).glob("beat.*")]


def test_a_timeout_ends_every_process_of_the_tree(box: Box, marker: str) -> None:
    sandbox = box.sandbox()
    began = time.monotonic()
    doc = box.exec_json(sandbox, "python3", "-c", WRITERS, marker, options=("--timeout", "6"))
    took = time.monotonic() - began
    result = doc["result"]
    assert result["reason"] == "timeout", result
    assert result["started"] is True
    assert result["stdout"]["text"] == "start\n"
    assert "6" in result["hint"]
    assert result["limits"]["wall"]["hit"] is True
    assert 6000 <= result["timings"]["running_ms"] <= 12_000
    assert took < 30
    assert marked(marker) == []
    first, each = beat(box, sandbox), written(box, sandbox)
    time.sleep(1)
    assert beat(box, sandbox) == first > 0
    assert written(box, sandbox) == each and sum(each) > 0, "nobody writes any more"
    listing = box.exec_json(sandbox, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")["result"]["stdout"]["text"]
    assert marker not in listing
    ok = box.exec_json(sandbox, "echo", "ok")["result"]
    assert (ok["exit_code"], ok["stdout"]["text"]) == (0, "ok\n")
    assert box("sandbox", "rm", sandbox).returncode == 0


def test_the_command_line_says_124_on_timeout_and_prints_what_came(box: Box, marker: str) -> None:
    # Enough for an interpreter to start and to write, on a busy machine too.
    done = box("run", "--runtime", box.runtime, "--timeout", "8", "-c", WRITERS, marker)
    assert (done.returncode, done.stdout) == (124, b"start\n"), done.stderr
    assert b"timeout" in done.stderr
    assert living(box, marker) == []


def test_a_cancel_ends_every_process_of_the_tree(box: Box, marker: str) -> None:
    process = box.popen("run", "--json", "--runtime", box.runtime, "-c", WRITERS, marker)
    eventually(lambda: all_there(box, marker), 60, "all four processes are there")

    def the_run() -> str | None:
        items = box.document("runs", "--json")[1]["items"]
        open_ones = [item["id"] for item in items if item["state"] == "running"]
        return open_ones[0] if open_ones else None

    run_id = eventually(the_run, 30, "the run is listed as running")
    assert box("cancel", run_id).returncode == 0
    out, err = process.communicate(timeout=60)
    assert process.returncode == 137, err
    assert b'"cancelled"' in out
    assert living(box, marker) == []


@pytest.mark.parametrize(("sig", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_command_line_cancels_and_leaves_nothing(
    box: Box, marker: str, sig: signal.Signals, status: int
) -> None:
    process = box.popen("run", "--runtime", box.runtime, "-c", WRITERS, marker)
    eventually(lambda: all_there(box, marker), 60, "all four processes are there")
    process.send_signal(sig)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert out == b"start\n"
    assert [pid for pid in living(box, marker) if pid != process.pid] == []


def test_a_killed_client_is_missed_by_the_owner_of_the_state_directory(box: Box, marker: str) -> None:
    holder = box.popen("run", "--runtime", box.runtime, "--timeout", "300", "--", "sleep", "290")
    eventually(lambda: owner_of(box.state) is not None, 60, "somebody owns the state directory")
    process = box.popen("run", "--runtime", box.runtime, "--timeout", "200", "-c", WRITERS, marker)
    eventually(lambda: all_there(box, marker), 60, "all four processes are there")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    eventually(lambda: not living(box, marker), 30, "the killed client's processes are gone")
    holder.terminate()
    assert holder.wait(60) == 143


def test_a_killed_client_that_was_the_owner_leaves_nothing_after_gc(box: Box, marker: str) -> None:
    process = box.popen("run", "--runtime", box.runtime, "--timeout", "200", "-c", WRITERS, marker)
    eventually(lambda: all_there(box, marker), 60, "all four processes are there")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    eventually(lambda: box("gc") and not living(box, marker), 40, "the killed client's processes are gone")
