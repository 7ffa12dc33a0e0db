"""K07: a fork bomb is held by the pids limit, is reported as what it was, and harms no neighbour."""

import threading
import time

from .conftest import Box, eventually, marked

BOMB = "f(){ f|f& };f; sleep 3"


def test_a_fork_bomb_is_held_while_a_neighbour_stays_fast(box: Box, marker: str) -> None:
    bomber, neighbour = box.sandbox("--pids", "64"), box.sandbox()
    times: list[float] = []
    failures: list[object] = []
    over = threading.Event()

    def small_execs() -> None:
        while not over.is_set():
            doc = box.exec_json(neighbour, "true")
            if doc.get("result", {}).get("reason") != "ok":
                failures.append(doc)
            else:
                times.append(doc["result"]["timings"]["total_ms"])
            over.wait(0.2)

    thread = threading.Thread(target=small_execs)
    thread.start()
    began = time.monotonic()
    doc = box.exec_json(bomber, "bash", "-c", BOMB, marker, options=("--timeout", "5"))
    took = time.monotonic() - began
    over.set()
    thread.join()
    result = doc["result"]
    assert took < 20
    assert result["timings"]["running_ms"] < 12000
    hits = result["usage"]["pids_limit_hits"]
    mode = result["limits"]["pids"]["mode"]
    if box.own_kernel:
        assert (mode, hits) == ("enforced", None), "held inside, where nobody counts"
    elif mode == "enforced":
        assert hits > 0
        assert result["limits"]["pids"]["hit"] is True
    else:
        assert result["reason"] == "pids_limit", result
    assert result["reason"] in ("timeout", "pids_limit", "ok")
    if result["reason"] == "ok" and mode == "enforced" and not box.own_kernel:
        assert result["hint"]
    assert failures == []
    assert times and sorted(times)[int(len(times) * 0.95)] < (5000 if box.own_kernel else 1000)
    assert box("sandbox", "rm", bomber).returncode == 0
    eventually(lambda: marked(marker) == [], 20, "no process of the bomb is left on the host")
    assert box("sandbox", "rm", neighbour).returncode == 0


def test_many_short_children_leave_no_zombies(box: Box) -> None:
    sandbox = box.sandbox()
    many = 50 if box.own_kernel else 300
    doc = box.exec_json(sandbox, "bash", "-c", f"for i in $(seq {many}); do (sleep .05 &); done; sleep 0.5")
    assert doc["result"]["exit_code"] in (0, 1, 254), doc["result"]
    zombies = box.exec_json(sandbox, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true")
    assert int(zombies["result"]["stdout"]["text"]) < 5
    assert box.exec_json(sandbox, "echo", "ok")["result"]["stdout"]["text"] == "ok\n"
    assert box("sandbox", "rm", sandbox).returncode == 0
