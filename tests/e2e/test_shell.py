"""`corral shell` and `corral attach` as somebody at a real terminal meets them, and what a broken connection does not change."""

from __future__ import annotations

import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.conftest import Box, eventually, marked, owner_of
from corral.client import Corral
from integration.breaking import BreakingProxy

from .conftest import KEY, Served
from .person import PROMPT, Person

DETACH = b"\x1d\x1d"
ECHO = ["--command", "sh", "-c", "stty raw -echo; echo ready; exec cat"]
"""A program that gives back every byte as it came."""


def living(box: Box) -> list[str]:
    return [item["id"] for item in box.document("sandbox", "ls", "--json")[1]["items"]]


# -- a terminal ----------------------------------------------------------------------------------------------------------------
def test_a_terminal_in_a_fresh_sandbox_from_the_first_key_to_the_last(box: Box) -> None:
    before = living(box)
    with Person(box, "shell", "--runtime", box.runtime, rows=31, cols=97) as person:
        person.sees(PROMPT)
        person.type("stty size; tty; id -un; echo 你好 $((40+2))\r")
        assert re.search(r"\n31 97\r\n/dev/pts/\d+\r\nsandbox\r\n你好 42\r\n", person.sees("42\r\n"))
        person.type("sh -c 'echo u''p; exec sleep 600'\r")
        person.sees("up\r\n")
        person.type(b"\x03")
        person.sees(PROMPT)
        person.type("sh -c 'echo u''p; exec sleep 600'\r")
        person.sees("up\r\n")
        person.type(b"\x1a")
        person.sees("Stopped")
        person.type("kill %1; wait; exec sh -c 'exit 7'\r")
        assert person.leaves() == 7
        assert person.terminal_is_as_found()
    assert living(box) == before


def test_end_of_file_leaves_the_shell_and_a_sandbox_that_was_there_stays(box: Box, sandbox: str) -> None:
    with Person(box, "shell", sandbox) as person:
        person.sees(PROMPT)
        person.type(b"\x04")
        assert person.leaves() == 0
    assert sandbox in living(box)


def test_the_window_inside_is_the_window_here(box: Box, sandbox: str) -> None:
    program = "trap 'stty size' WINCH; trap 'exit 0' INT; stty size; while :; do sleep 0.1; done"
    with Person(box, "shell", sandbox, "--command", "sh", "-c", program) as person:
        person.sees("30 100\r\n")
        for rows, cols in ((40, 120), (10, 20), (50, 132)):
            person.resize(rows, cols)
            person.sees(f"{rows} {cols}\r\n")
        person.type(b"\x03")
        assert person.leaves() == 0


def test_every_byte_goes_in_and_comes_out(one: Box) -> None:
    text = bytes(b for b in range(256) if b != 0x1D) + "你好，世界 ✓ é".encode() + b"\x1d." + b"\x1dx\xff\xfe"
    with Person(one, "shell", *ECHO) as person:
        person.sees("ready\r?\n")
        person.type(text)
        assert person.sees_bytes(len(text)) == text
        person.process.terminate()
        assert person.leaves() == 128 + signal.SIGTERM


def test_the_status_of_a_program_that_dies_of_a_signal(one: Box) -> None:
    with Person(one, "shell", "--command", "sh", "-c", "kill -SEGV $$") as person:
        assert person.leaves() == 128 + signal.SIGSEGV


def test_a_limit_that_ends_the_shell_is_told(one: Box) -> None:
    with Person(one, "shell", "--timeout", "1") as person:
        person.sees("corral: timeout: ")
        assert person.leaves() == 124
        assert person.terminal_is_as_found()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_us_ends_what_is_inside_and_gives_the_terminal_back(
    one: Box, marker: str, number: signal.Signals
) -> None:
    before = living(one)
    with Person(one, "shell", "--command", "bash", "-c", f"echo up; exec -a {marker} sleep 600") as person:
        person.sees("up\r\n")
        person.process.send_signal(number)
        assert person.leaves() == 128 + number
        assert person.terminal_is_as_found()
    eventually(lambda: not marked(marker), what="nothing inside lives")
    assert living(one) == before


def test_a_stop_from_outside_gives_the_terminal_back_until_it_goes_on(one: Box) -> None:
    with Person(one, "shell") as person:
        person.sees(PROMPT)
        person.process.send_signal(signal.SIGTSTP)
        eventually(lambda: _state(person.process.pid) == "T", what="it stands")
        assert person.terminal_is_as_found()
        person.process.send_signal(signal.SIGCONT)
        eventually(lambda: not person.terminal_is_as_found(), what="it has the terminal again")
        person.type("echo on $((1+1)); exit\r")
        person.sees("\non 2\r\n")
        assert person.leaves() == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_cannot_start_leaves_no_sandbox_and_no_raw_terminal(one: Box) -> None:
    before = living(one)
    for words, status in ((["--cwd", "/none"], 125), (["--command", "no-such-x"], 127), (["--memory", "1"], 125)):
        with Person(one, "shell", *words) as person:
            assert person.leaves() == status
            assert person.terminal_is_as_found() and b"corral: " in person.screen
    assert living(one) == before


# -- leaving and coming back -----------------------------------------------------------------------------------------------------
def test_the_keys_leave_it_running_and_attach_comes_back(box: Box) -> None:
    with Person(box, "shell", "--runtime", box.runtime) as person:
        person.sees(PROMPT)
        person.type("left=behind; echo was here\r")
        person.sees("\nwas here\r\n")
        person.type(DETACH)
        assert person.leaves() == 0
        assert person.terminal_is_as_found()
        said = person.screen.decode()
    [exec_id] = re.findall(r"corral attach (exe_\w+)", said)
    [sandbox] = re.findall(r"corral: kept (sbx_\w+)", said)
    for cols in (77, 66):  # left again, and come back to again
        with Person(box, "attach", exec_id, "--detach-keys", "ctrl-p,q", rows=20, cols=cols) as person:
            person.sees("was here\r\n")
            person.type("echo $left; stty size\r")
            person.sees(f"\nbehind\r\n20 {cols}\r\n")
            person.type(b"\x10q")
            assert person.leaves() == 0
            assert person.terminal_is_as_found()
    with Person(box, "attach", exec_id) as person:
        person.type("exit 9\r")
        assert person.leaves() == 9
    assert box("sandbox", "rm", sandbox).returncode == 0


def test_attach_follows_what_has_no_terminal_and_ctrl_c_leaves_it_running(one: Box) -> None:
    box, sandbox = one, one.sandbox()
    program = "echo one; while [ ! -e go ]; do sleep 0.1; done; rm go; echo two; exit 4"
    starter = box.popen("exec", sandbox, "--", "sh", "-c", program)
    assert starter.stdout is not None and starter.stdout.readline() == b"one\n"
    with Corral(state_dir=box.state) as c:
        [exec_id] = [e.id for e in c.sandboxes.get(sandbox).execs.list()]
    with Person(box, "attach", exec_id) as person:
        person.sees("one\r\n")
        person.type(b"\x03")
        assert person.leaves() == 130
        assert f"corral cancel {exec_id}" in person.screen.decode()
    follower = box.popen("attach", exec_id)
    assert follower.stdout is not None and follower.stdout.readline() == b"one\n"
    assert box("exec", sandbox, "--", "touch", "go").returncode == 0
    assert follower.communicate(timeout=60)[0] == b"two\n"
    assert (follower.returncode, starter.wait(60)) == (4, 4)
    assert box("attach", exec_id).stdout == b"one\ntwo\n"
    assert box("sandbox", "rm", sandbox).returncode == 0


def test_attach_to_a_run_ends_with_its_status(one: Box) -> None:
    runner = one.popen("run", "--", "sh", "-c", "echo begun; sleep 2; exit 6")
    assert runner.stdout is not None and runner.stdout.readline() == b"begun\n"
    [run] = [r["id"] for r in one.document("runs", "--json")[1]["items"] if r["state"] == "running"]
    followed = one("attach", run)
    assert (followed.returncode, followed.stdout, runner.wait(60)) == (6, b"begun\n", 6)


# -- pipes -----------------------------------------------------------------------------------------------------------------------
def test_without_a_terminal_it_is_a_script_on_pipes(one: Box) -> None:
    before = living(one)
    done = one("shell", input="echo 你好; echo err >&2; printf '\\377'; exit 5\necho never\n".encode())
    assert (done.returncode, done.stdout, done.stderr) == (5, "你好\n".encode() + b"\xff", b"err\n")
    data = random.Random(5).randbytes(3_000_000)
    assert one("shell", "--command", "cat", input=data).stdout == data
    assert one("shell").returncode == 0
    assert living(one) == before


@pytest.mark.parametrize(
    "words",
    [["--command"], ["--detach-keys", "meta-x"], ["sbx_" + "0" * 26, "--keep"], ["sbx_" + "0" * 26, "--memory", "1G"],
     ["sbx_" + "0" * 26, "ls"], ["--bogus"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_is_2(one: Box, words: list[str]) -> None:
    said = one("shell", *words)
    assert (said.returncode, said.stdout) == (2, b"")
    assert said.stderr.startswith(b"corral: usage: ")


# -- broken connections ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def proxy(served: Served) -> Iterator[BreakingProxy]:
    """Between a person and the server; once it is no more calm, most connections through it are cut after some hundred bytes."""
    made = BreakingProxy(served.port, seed=11, high=20_000, share=0.8)
    made.calm = True
    yield made
    made.close()


def breaks(proxy: BreakingProxy) -> None:
    """From now on."""
    proxy.calm = False
    proxy.break_all()


def test_a_shell_at_a_server(served: Served) -> None:
    before = living(served.remote)
    with Person(served.remote, "shell") as person:
        person.sees(PROMPT)
        person.type("stty size; echo 你好; exit 3\r")
        person.sees("\n30 100\r\n你好\r\n")
        assert person.leaves() == 3
    assert living(served.remote) == before


def test_connections_that_break_lose_and_double_nothing(served: Served, proxy: BreakingProxy) -> None:
    dice = random.Random(7)
    lines = [f"{n} 你好 " + "".join(dice.choices("字母éx", k=dice.randrange(40))) + "\n" for n in range(600)]
    with Person(served.through(proxy.port), "shell", *ECHO) as person:
        person.sees("ready\r?\n")
        breaks(proxy)
        whole = "".join(lines).encode()
        for at in range(0, len(lines), 30):
            person.type("".join(lines[at : at + 30]))
            if at % 60:  # sometimes with input under way, sometimes when all has come back
                person.sees_bytes(len("".join(lines[: at + 30]).encode()), 120)
            proxy.break_all()
        came = person.sees_bytes(len(whole), 120)
        if came != whole:
            at = next((n for n, pair in enumerate(zip(came, whole, strict=False)) if pair[0] != pair[1]), len(came))
            pytest.fail(
                f"{len(came)} of {len(whole)} bytes; at {at} came {came[at : at + 200]!r} for {whole[at : at + 200]!r}"
            )
        proxy.calm = True
        person.process.terminate()
        assert person.leaves() == 128 + signal.SIGTERM
        assert person.terminal_is_as_found()


def test_much_output_over_breaking_connections_is_exact(served: Served, proxy: BreakingProxy) -> None:
    program = "echo ready; read go; seq 1 60000"
    shell = served.through(proxy.port).popen("shell", "--command", "sh", "-c", program, stdin=subprocess.PIPE)
    assert shell.stdout is not None and shell.stdout.readline() == b"ready\n"
    breaks(proxy)
    out, err = shell.communicate(b"go\n", timeout=200)
    assert shell.returncode == 0, err
    assert out == b"".join(b"%d\n" % n for n in range(1, 60001))
    assert proxy.cut > 5


def test_a_program_that_is_quiet_for_longer_than_connections_hold_goes_on(served: Served, proxy: BreakingProxy) -> None:
    with Person(served.through(proxy.port), "shell") as person:
        person.sees(PROMPT)
        for _ in range(3):
            proxy.break_all()
        person.type("echo still $((1+1)); exit\r")
        person.sees("\nstill 2\r\n")
        assert person.leaves() == 0


def test_the_end_of_the_process_that_serves_the_directory_is_not_noticed(one: Box, marker: str) -> None:
    owner = one.popen("run", "--", "sh", "-c", f"echo up; : {marker}; sleep 300")
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    assert owner_of(one.state) == owner.pid
    with Person(one, "shell") as person:
        person.sees(PROMPT)
        person.type("left=alive; echo before\r")
        person.sees("\nbefore\r\n")
        owner.kill()
        owner.wait()
        person.type("echo $left and well\r")
        person.sees("\nalive and well\r\n")
        assert owner_of(one.state) == person.process.pid
        person.type("exit 5\r")
        assert person.leaves() == 5


def test_a_restart_of_the_server_is_not_noticed(one: Box) -> None:
    there = Box(one.name, one.runtime, one.state, one.prefix, one.program, one.env | {"CORRAL_ADMIN_KEY": KEY})

    def serve() -> tuple[subprocess.Popen[bytes], int]:
        server = there.popen("serve", "--port", "0")
        assert server.stdout is not None
        return server, int(server.stdout.readline().decode().rpartition(":")[2])

    server, port = serve()
    proxy = BreakingProxy(port, seed=1)
    proxy.calm = True
    away = {"CORRAL_URL": f"http://127.0.0.1:{proxy.port}", "CORRAL_KEY": KEY}
    try:
        with Person(Box(one.name, one.runtime, one.state, one.prefix, one.program, one.env | away), "shell") as person:
            person.sees(PROMPT)
            person.type("left=alive; echo before\r")
            person.sees("\nbefore\r\n")
            server.terminate()
            assert server.wait(60) == 0
            person.type("echo $left and ")
            server, proxy.target = serve()
            person.type("well\r")
            person.sees("\nalive and well\r\n")
            person.type("exit 5\r")
            assert person.leaves() == 5
    finally:
        proxy.close()
        server.terminate()
        server.wait(60)
