"""Every way in which a program ends is reported as what it was, quickly, and harms no neighbour."""

import re
import threading
import time
from pathlib import Path

import pytest

from .conftest import Box, eventually, owner_of

HOG = "x = []\nwhile True: x.append(bytearray(1 << 20))"
CHILD_HOG = f"import subprocess, sys\nr = subprocess.run([sys.executable, '-c', {HOG!r}])\nprint('child', r.returncode)"


def mode(result: dict, limit: str) -> str:
    return result["limits"][limit]["mode"]


def test_main_out_of_memory_is_oom_and_names_the_limit(box: Box) -> None:
    status, doc = box.document("run", "--json", "--runtime", box.runtime, "--memory", "96M", "-c", HOG)
    result = doc["result"]
    assert (status, result["reason"], result["signal"], result["exit_code"]) == (137, "oom", "SIGKILL", 137), result
    assert "96 MiB" in result["hint"]
    assert result["limits"]["memory"] == {"value": 96 << 20, "mode": mode(result, "memory"), "hit": True}
    if mode(result, "memory") == "enforced":
        assert result["usage"]["oom_kills"] >= 1
        assert result["usage"]["peak_memory_bytes"] <= 97 << 20


def test_a_child_out_of_memory_is_told_in_a_hint_while_the_program_ends_well(box: Box) -> None:
    _, doc = box.document("run", "--json", "--runtime", box.runtime, "--memory", "96M", "-c", CHILD_HOG)
    result = doc["result"]
    if mode(result, "memory") == "enforced":
        assert (result["reason"], result["exit_code"], result["stdout"]["text"]) == ("ok", 0, "child -9\n"), result
        assert result["usage"]["oom_kills"] >= 1
        assert "memory" in result["hint"]
    else:  # watched: the whole exec is ended, and says so
        assert result["reason"] == "oom", result


def test_a_program_that_wants_more_than_its_share_of_the_processors_is_told_so(box: Box) -> None:
    spin = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    result = box.run_json("--cpu", "0.25", "-c", spin)["result"]
    assert result["reason"] == "ok", result
    held = mode(result, "cpu") == "enforced"
    assert result["limits"]["cpu"]["hit"] is held, "without the kernel nothing holds it back, and nothing is claimed"
    if held:
        assert result["usage"]["cpu_seconds"] < 0.8
    assert box.run_json("-c", "import time; time.sleep(1)")["result"]["limits"]["cpu"]["hit"] is False


def test_a_plain_kill_9_is_a_signal_not_oom(box: Box) -> None:
    status, doc = box.document("run", "--json", "--runtime", box.runtime, "-c", "import os; os.kill(os.getpid(), 9)")
    result = doc["result"]
    assert (status, result["reason"], result["signal"], result["exit_code"]) == (137, "signal", "SIGKILL", 137)
    assert result["limits"]["memory"]["hit"] is False


def test_the_pids_limit_is_told_from_other_failures(box: Box) -> None:
    code = (
        "import os, sys, time\nkids = []\ntry:\n for i in range(400):\n  p = os.fork()\n  if p == 0: time.sleep(2); os._exit(0)\n  kids.append(p)\n"
        "except OSError as e: print(e.errno, len(kids)); sys.exit(9)\n"
    )
    _, doc = box.document("run", "--json", "--runtime", box.runtime, "--pids", "32", "-c", code)
    result = doc["result"]
    if mode(result, "pids") == "enforced":
        assert (result["reason"], result["exit_code"]) == ("pids_limit", 9), result
        assert result["usage"]["pids_limit_hits"] >= 1
        assert result["limits"]["pids"]["hit"] is True
        assert int(result["stdout"]["text"].split()[1]) <= 32
    else:
        assert result["reason"] == "pids_limit", result


@pytest.mark.parametrize("where", ["/workspace", "/home/sandbox", "/var/tmp"])
def test_a_full_disk_is_disk_full(box: Box, where: str) -> None:
    code = f"f = open('{where}/big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()"
    _, doc = box.document("run", "--json", "--runtime", box.runtime, "--disk", "64M", "-c", code)
    result = doc["result"]
    assert result["reason"] == "disk_full", result
    assert result["limits"]["disk"]["hit"] is True
    assert "64 MiB" in result["hint"]
    if mode(result, "disk") == "enforced":
        assert result["exit_code"] == 1
        assert "No space left" in result["stderr"]["text"]


def test_no_inode_left_is_inodes(box: Box) -> None:
    code = "import itertools\nfor i in itertools.count(): open(f'f{i}', 'w').close()"
    _, doc = box.document("run", "--json", "--runtime", box.runtime, "--timeout", "100", "-c", code, timeout=200)
    result = doc["result"]
    if mode(result, "inodes") == "enforced":
        assert (result["reason"], result["exit_code"]) == ("inodes", 1), result
        assert result["limits"]["inodes"]["hit"] is True
        assert result["files_truncated"] is True
        assert len(result["files"]) == 10_000
    else:
        assert (result["reason"], result["exit_code"]) == ("inodes", 137), result


def test_a_full_tmp_stops_at_its_limit_and_kills_nobody(box: Box) -> None:
    code = "import os\ntry:\n open('/tmp/x', 'wb').write(bytes(200 << 20))\nexcept OSError as e: print(e.errno, os.path.getsize('/tmp/x') >> 20)"
    doc = box.run_json("--tmp", "32M", "-c", code)
    result = doc["result"]
    assert result["reason"] == "ok", result
    errno, size = map(int, result["stdout"]["text"].split())
    assert errno == 28
    assert size <= 32


def test_closed_pipes_end_nothing_and_the_exit_code_arrives(box: Box) -> None:
    doc = box.run_json(
        "-c", "import os, time\nos.write(1, b'a'); os.close(1); os.close(2); time.sleep(0.3); os._exit(5)"
    )
    assert (doc["result"]["exit_code"], doc["result"]["stdout"]["text"]) == (5, "a")


def test_a_background_child_that_holds_the_pipes_does_not_hold_the_result(box: Box, marker: str) -> None:
    began = time.monotonic()
    doc = box.run_json("--shell", f"sleep 300 {marker[:0]}& echo done")
    assert time.monotonic() - began < 20
    assert (doc["result"]["reason"], doc["result"]["stdout"]["text"]) == ("ok", "done\n")


def test_background_children_live_on_between_execs_of_a_sandbox(box: Box) -> None:
    sandbox = box.sandbox()
    box.exec_json(sandbox, "sh", "-c", "sleep 300 & echo $! > pid")
    alive = box.exec_json(sandbox, "sh", "-c", "[ -d /proc/$(cat pid) ] && echo alive")["result"]
    assert alive["stdout"]["text"] == "alive\n", alive
    assert box("sandbox", "rm", sandbox).returncode == 0


@pytest.mark.slow
def test_each_exit_code_is_reported_as_it_is(box: Box) -> None:
    sandbox = box.sandbox()
    for code in (0, 1, 2, 3, 42, 77, 100, 123, 124, 125, 126, 127, 128, 129, 130, 137, 143, 200, 254, 255):
        done = box("exec", sandbox, "--", "sh", "-c", f"exit {code}")
        assert done.returncode == code
        result = box.exec_json(sandbox, "sh", "-c", f"exit {code}")["result"]
        assert (result["exit_code"], result["signal"], result["reason"]) == (
            code,
            None,
            "ok" if code == 0 else "nonzero_exit",
        )
    assert box("sandbox", "rm", sandbox).returncode == 0


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT", "SEGV", "ABRT", "PIPE", "USR1"])
def test_death_by_a_signal_names_it(box: Box, name: str) -> None:
    import signal

    status, doc = box.document("run", "--json", "--runtime", box.runtime, "--shell", f"kill -{name} $$; sleep 5")
    result = doc["result"]
    number = getattr(signal, "SIG" + name)
    assert (status, result["reason"], result["signal"], result["exit_code"]) == (
        128 + number,
        "signal",
        "SIG" + name,
        128 + number,
    )


def test_a_program_that_is_not_there_is_127_and_the_hint_names_it(box: Box) -> None:
    status, doc = box.document("run", "--json", "--runtime", box.runtime, "--", "nosuchprogram", "x")
    assert (status, doc["result"]["exit_code"], doc["result"]["reason"]) == (127, 127, "nonzero_exit")
    assert "nosuchprogram" in doc["result"]["hint"]


def test_a_file_that_is_not_a_program_is_126(box: Box) -> None:
    status, doc = box.document("run", "--json", "--runtime", box.runtime, "--", "/etc/passwd")
    assert (status, doc["result"]["exit_code"], doc["result"]["reason"]) == (126, 126, "nonzero_exit")


def test_a_missing_working_directory_is_an_error_with_a_code(box: Box) -> None:
    status, doc = box.document("run", "--json", "--runtime", box.runtime, "--cwd", "/no/such", "--", "true")
    code = doc["error"]["code"] if "error" in doc else doc["result"]["reason"]
    assert status == 125
    assert "cwd_not_found" in (code, doc.get("result", {}).get("hint", ""), doc.get("error", {}).get("code"))


def rss(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) * 1024  # type: ignore[union-attr]


@pytest.mark.slow
def test_floods_and_hogs_leave_the_service_small_and_the_neighbour_fast(box: Box) -> None:
    holder = box.popen("run", "--runtime", box.runtime, "--timeout", "300", "--", "sleep", "290")
    owner = eventually(lambda: owner_of(box.state), 30, "somebody owns the state directory")
    neighbour = box.sandbox()
    times: list[float] = []
    failures: list[object] = []
    over = threading.Event()

    def small_execs() -> None:
        while not over.is_set():
            doc = box.exec_json(neighbour, "true")
            if doc.get("result", {}).get("reason") == "ok":
                times.append(doc["result"]["timings"]["total_ms"])
            else:
                failures.append(doc)
            over.wait(0.1)

    thread = threading.Thread(target=small_execs)
    thread.start()
    before = rss(owner)
    peak = before
    try:
        for args in (
            ("--output-kill", "64M", "--", "yes", "0123456789" * 20),
            ("--memory", "96M", "-c", HOG),
            ("--disk", "64M", "-c", "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()"),
            ("--output-kill", "64M", "-c", "import os\nwhile True: os.write(2, b'e' * 65536)"),
        ):
            done = box("run", "--runtime", box.runtime, "--timeout", "60", *args, timeout=200)
            assert done.returncode != 0
            peak = max(peak, rss(owner))
    finally:
        over.set()
        thread.join()
    assert failures == []
    assert len(times) > 5
    assert sorted(times)[int(len(times) * 0.95)] < 1000
    assert peak - before < 32 << 20
    holder.terminate()
    holder.wait(60)
    box("sandbox", "rm", neighbour)
