"""Many commands on one state directory while its owner dies: no false result, and nothing is left after `gc`."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import Box, eventually, holding, marked, owner_of


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3])
def test_eight_at_once_with_the_owner_killed_in_the_middle(box: Box, marker: str, rounds: int) -> None:
    for _ in range(rounds):
        sandbox = box.sandbox("--ttl", "600")
        code = "import sys, time\nfor i in range(20): print(i, sys.argv[1], flush=True); time.sleep(0.1)\nsys.exit(7)"
        runs = [box.popen("run", "--json", "--runtime", box.runtime, "-c", code, marker) for _ in range(4)]
        execs = [box.popen("exec", sandbox, "--json", "--", "python3", "-c", code, marker) for _ in range(4)]
        owner = eventually(lambda: owner_of(box.state), 60, "somebody owns the state directory")
        eventually(lambda: len(marked(marker)) > 8, 60, "programs are running")
        time.sleep(0.3)
        os.kill(owner, signal.SIGKILL)
        expected = "".join(f"{i} {marker}\n" for i in range(20))
        finished = 0
        for process in (*runs, *execs):
            out, err = process.communicate(timeout=120)
            if process.pid == owner or process.returncode == -signal.SIGKILL:
                continue
            doc = json.loads(out)
            assert "result" in doc, (doc, err)
            result = doc["result"]
            if result["reason"] == "nonzero_exit":
                assert (result["exit_code"], result["stdout"]["text"], process.returncode) == (7, expected, 7)
                finished += 1
            else:
                assert result["reason"] in ("infra_error", "sandbox_lost", "cancelled"), result
                assert result["started"] in (True, None), result
                assert process.returncode in (125, 137)
        assert finished >= 1
        assert box("sandbox", "rm", sandbox).returncode in (0, 125)
        assert box("gc").returncode == 0
        eventually(lambda: not marked(marker), 60, "no process of these commands is left")
        assert box.document("doctor", "--json")[1]["leftovers"] == []
        mounts = Path("/proc/self/mountinfo").read_text()
        assert f"{box.state}/i/" not in mounts


def test_eight_commands_at_once_all_get_their_own_result(box: Box) -> None:
    code = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[1]))"
    processes = [box.popen("run", "--runtime", box.runtime, "-c", code, str(n)) for n in range(8)]
    for n, process in enumerate(processes):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (n, f"{n}\n".encode()), err


@pytest.mark.parametrize("point", ["runtime.create.root", "runtime.create.started", "runtime.destroy.stopped"])
def test_a_probe_that_is_cut_short_leaves_nothing_after_gc(box: Box, point: str) -> None:
    cut = dataclasses.replace(box, env={**box.env, "CORRAL_FAULT_POINTS": f"{point}=kill"})
    assert cut("doctor", "--fresh").returncode == -signal.SIGKILL
    assert box.document("doctor", "--json")[1]["leftovers"], "the death left something to be found"
    gone = box("gc")
    assert gone.returncode == 0, gone.stderr
    assert box.document("doctor", "--fresh", "--json")[1]["leftovers"] == []
    assert not holding(box.state), "nothing that the probe had started lives on"
    assert f"{box.state}/" not in Path("/proc/self/mountinfo").read_text()
    assert os.listdir(box.state / "i") == []
