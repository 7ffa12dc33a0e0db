"""A paused sandbox stands still: the host sees no processor time, its time limits wait, and it goes on where it was, whoever serves it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .conftest import Box, eventually, of_instance, workspace
from .serving import Answer, Server

TICKS = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    name = "child"
else:
    name = "parent"
count = 0
while True:
    count += 1
    with open("/workspace/beat." + name, "a") as file:
        file.write("x")
    if name == "parent":
        print(count, flush=True)
    time.sleep(0.005)
"""
STILL_S = 1.0


def turn(server: Server, sandbox: str, word: str) -> Answer:
    return server.call("POST", f"/v1/sandboxes/{sandbox}/{word}")


def turned(server: Server, sandbox: str, word: str, state: str) -> None:
    answer = turn(server, sandbox, word)
    assert (answer.status, answer.document["state"]) == (200, state), str(answer)


def instance_of(server: Server, sandbox: str) -> str:
    return str(server.call("GET", f"/v1/sandboxes/{sandbox}").document["instance"]["id"])


def beats(box: Box, instance: str) -> tuple[int, ...]:
    """How much each program has written, as the host sees it."""
    found = (workspace(box, instance) / f"beat.{name}" for name in ("parent", "child"))
    return tuple(path.stat().st_size if path.exists() else 0 for path in found)


def ticks_of(pids: list[int]) -> int:
    """Processor time of processes of the host, in ticks."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total


def runs(pid: int) -> bool:
    """Not as a process that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until_more(look: Callable[[], tuple[int, ...]], than: tuple[int, ...]) -> None:
    eventually(lambda: all(new > old for new, old in zip(look(), than, strict=True)), 60, "they go on")


def test_nothing_runs_while_it_is_paused_and_all_goes_on_after(server: Server) -> None:
    box, sandbox = server.box, server.create()
    instance = instance_of(server, sandbox)
    exec_id = server.start(sandbox, "python3", "-c", TICKS)
    until_more(lambda: beats(box, instance), (0, 0))
    for _ in range(3):
        turned(server, sandbox, "pause", "paused")
        pids = of_instance(instance)
        before, used = beats(box, instance), ticks_of(pids)
        time.sleep(STILL_S)
        assert beats(box, instance) == before
        assert ticks_of(pids) - used <= 2, "a guest that stops its tree may look around, programs may not"
        refused = server.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": ["true"]})
        assert (refused.status, refused.code) == (409, "sandbox_paused"), str(refused)
        read = server.call("GET", f"/v1/sandboxes/{sandbox}/files", path="/etc/passwd")
        assert (read.status, read.code) == (409, "sandbox_paused"), str(read)
        turned(server, sandbox, "resume", "running")
        until_more(lambda: beats(box, instance), before)
    ended = server.call("POST", f"/v1/execs/{exec_id}/cancel").document["result"]
    assert ended["reason"] == "cancelled"
    numbers = ended["stdout"]["text"].split()
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)], "each line once, in order"
    assert server.run(sandbox, "echo", "after")["stdout"]["text"] == "after\n"
    assert server.delete(sandbox).status == 200


def test_the_time_limit_of_a_program_waits_for_it(server: Server) -> None:
    sandbox = server.create()
    exec_id = server.start(sandbox, "sleep", "1000", timeout_s=4)
    turned(server, sandbox, "pause", "paused")
    time.sleep(6)
    turned(server, sandbox, "resume", "running")
    resumed = time.monotonic()
    result = server.result(exec_id)
    assert result["reason"] == "timeout", result
    assert time.monotonic() - resumed > 0.5, "most of its seconds were left"
    server.delete(sandbox)


def test_what_is_cancelled_while_paused_ends_first_and_a_paused_sandbox_is_deleted_at_once(server: Server) -> None:
    box, sandbox = server.box, server.create()
    instance = instance_of(server, sandbox)
    exec_id = server.start(sandbox, "python3", "-c", TICKS)
    until_more(lambda: beats(box, instance), (0, 0))
    turned(server, sandbox, "pause", "paused")
    asked = server.call("GET", f"/v1/execs/{exec_id}").document
    assert asked["state"] == "running"
    with ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(server.call, "POST", f"/v1/execs/{exec_id}/cancel")
        time.sleep(0.3)
        assert turn(server, sandbox, "resume").document["state"] in ("running", "leased")
        assert cancelling.result().status == 200
    assert server.result(exec_id)["reason"] == "cancelled"
    eventually(lambda: server.call("GET", f"/v1/sandboxes/{sandbox}").document["state"] == "leased", 20, "idle again")
    waiting = server.start(sandbox, "python3", "-c", TICKS)
    turned(server, sandbox, "pause", "paused")
    pids = of_instance(instance)
    begun = time.monotonic()
    deleted = server.delete(sandbox)
    assert (deleted.status, deleted.document["state"]) == (200, "terminated")
    assert time.monotonic() - begun < 30
    assert server.result(waiting)["reason"] == "sandbox_deleted"
    assert not [pid for pid in pids if runs(pid)]


def test_a_service_that_dies_finds_it_paused_again(box: Box) -> None:
    server = Server(box)
    key = server.key
    sandbox = server.create()
    instance = instance_of(server, sandbox)
    exec_id = server.start(sandbox, "python3", "-c", TICKS, timeout_s=600)
    until_more(lambda: beats(box, instance), (0, 0))
    turned(server, sandbox, "pause", "paused")
    before = beats(box, instance)
    os.kill(server.pid, signal.SIGKILL)
    server.process.communicate(timeout=60)
    second = box.popen("serve", "--port", "0")
    try:
        assert second.stdout is not None
        server.port, server.key = int(second.stdout.readline().decode().rpartition(":")[2]), key
        assert beats(box, instance) == before, "nothing ran meanwhile"
        assert server.call("GET", f"/v1/sandboxes/{sandbox}").document["state"] == "paused"
        assert server.call("GET", f"/v1/execs/{exec_id}").document["state"] == "running"
        turned(server, sandbox, "resume", "running")
        until_more(lambda: beats(box, instance), before)
        ended = server.call("POST", f"/v1/execs/{exec_id}/cancel").document["result"]
        numbers = ended["stdout"]["text"].split()
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)], "each line once, in order"
        turned(server, sandbox, "pause", "paused")
        assert server.delete(sandbox).document["state"] == "terminated"
    finally:
        second.terminate()
        second.communicate(timeout=120)


def test_the_command_line_pauses_and_resumes(box: Box) -> None:
    sandbox = box.sandbox()
    assert box("sandbox", "pause", sandbox).stdout.decode() == f"{sandbox} paused\n"
    refused = box("exec", sandbox, "--", "true")
    assert refused.returncode == 125 and b"sandbox_paused" in refused.stderr
    assert box.document("sandbox", "resume", sandbox, "--json")[1]["state"] == "leased"
    assert box("exec", sandbox, "--", "echo", "on").stdout == b"on\n"
    assert box("sandbox", "rm", sandbox).returncode == 0
    declared = box.document("doctor", "--json")[1]["runtimes"]
    [mine] = [one["capabilities"] for one in declared if one["name"] == box.runtime]
    assert mine["pause"] is True
    assert mine["pause_by"] == ("guest" if box.name == "bubblewrap-user" else "host")
