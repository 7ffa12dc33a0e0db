"""Starting and ending: exit facts, failures before the start, at most once, environment of the program."""

from __future__ import annotations

import signal

import pytest

from corral.channel import Ended, GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError

from .conftest import start

FENCE = Fence(1, 1)


async def test_every_exit_code_is_reported(guest, client: GuestClient) -> None:
    for code in (0, 1, 2, 7, 100, 126, 127, 128, 137, 254, 255):
        result = await guest.run(client, "sh", "-c", f"exit {code}")
        assert (result.status["exit_code"], result.status["signal"], result.status["state"]) == (code, None, "ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGPIPE])
async def test_death_by_signal_is_reported_as_such(guest, client: GuestClient, number: int) -> None:
    result = await guest.run(client, "sh", "-c", f"kill -{int(number)} $$")
    assert (result.status["exit_code"], result.status["signal"]) == (None, int(number))


async def test_what_never_started_says_why_and_was_not_started(guest, client: GuestClient) -> None:
    cases = [
        (["no-such-program"], {}, "argv", "ENOENT"),
        (["/no/such/program"], {}, "argv", "ENOENT"),
        (["/etc/passwd"], {}, "argv", "EACCES"),
        (["true"], {"cwd": "/no/such/directory"}, "cwd", "ENOENT"),
        (["true"], {"cwd": "/etc/passwd"}, "cwd", "ENOTDIR"),
        (["no\udcff\u4f60"], {}, "argv", "ENOENT"),
    ]
    for argv, more, what, errno in cases:
        result = await guest.run(client, *argv, **more)
        assert result.status["state"] == "failed"
        assert result.status["started"] is False
        assert result.status["failure"] is not None
        assert (result.status["failure"]["what"], result.status["failure"]["errno"]) == (what, errno)


async def test_an_unreachable_user_is_a_failure_of_the_user_step(launch) -> None:
    guest = launch("same_uid")
    client = await guest.connect()
    result = await guest.run(client, "true", uid=0, gid=0)
    assert result.status["failure"] is not None
    assert (result.status["failure"]["what"], result.status["started"]) == ("user", False)


async def test_attach_to_what_never_started_ends_at_once(guest, client: GuestClient) -> None:
    spec = guest.spec("no-such-program")
    await client.start_exec(spec, fence=FENCE)
    result = await guest.follow(client, spec["exec_id"])
    assert (result.status["state"], result.stdout) == ("failed", b"")


async def test_a_second_start_of_an_id_runs_nothing(guest, client: GuestClient) -> None:
    spec = guest.spec("sh", "-c", "echo once")
    first = await client.start_exec(spec, fence=FENCE)
    second = await client.start_exec(spec, fence=FENCE)
    assert (first["already"], second["already"]) == (False, True)
    assert (await guest.follow(client, spec["exec_id"])).stdout == b"once\n"
    third = await client.start_exec(spec, fence=FENCE)
    assert (third["already"], third["state"], third["exit_code"]) == (True, "ended", 0)
    failed = guest.spec("no-such-program")
    await client.start_exec(failed, fence=FENCE)
    again = await client.start_exec(failed, fence=FENCE)
    assert (again["already"], again["state"]) == (True, "failed")


async def test_status_of_an_unknown_exec_is_never_started(guest, client: GuestClient) -> None:
    status = await client.exec_status("exe_nobody")
    assert (status["state"], status["started"]) == ("unknown", False)
    with pytest.raises(CorralError) as caught:
        async for _ in client.attach("exe_nobody"):
            pass
    assert caught.value.code == "not_found"


async def test_the_program_gets_exactly_its_environment_and_descriptors(guest, client: GuestClient) -> None:
    result = await guest.run(client, "env", env={"PATH": "/usr/bin:/bin", "A": "1 2=3", "名": "值"})
    assert sorted(result.stdout.decode().splitlines()) == ["A=1 2=3", "PATH=/usr/bin:/bin", "名=值"]
    script = (
        "import os,sys;print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')));"
        "print(os.getpid()==os.getsid(0), os.getpgid(0)==os.getpid());"
        "print(oct(os.umask(0)), os.getcwd(), os.getpriority(os.PRIO_PROCESS,0));"
        "print(open('/proc/self/oom_score_adj').read().strip());"
        "print([l.split()[1] for l in open('/proc/self/status') if l[:7] in ('SigIgn:','SigBlk:','NoNewPr')]);"
        "import resource;print(resource.getrlimit(resource.RLIMIT_CORE),resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    result = await guest.run(client, "python3", "-I", "-S", "-c", script, rlimits={"nofile": 333})
    lines = result.stdout.decode().splitlines()
    assert lines[0] == "[0, 1, 2] 4", result.stderr  # the fourth is the listing itself
    assert lines[1] == "True True"
    assert lines[2] == "0o22 / 5"
    assert lines[3] == "500"
    # Python itself ignores PIPE (bit 12) and XFSZ (bit 24); nothing else is ignored or blocked.
    assert lines[4] == "['1', '0000000000000000', '0000000001001000']" or lines[4].count("0000000001001000") == 1
    assert lines[5] == "(0, 0) (333, 333)"


async def test_a_program_may_raise_its_open_files_to_the_limit_and_starts_with_what_select_can_take(
    guest, client: GuestClient
) -> None:
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)); resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))"
    result = await guest.run(client, "python3", "-I", "-S", "-c", script, rlimits={"nofile": 3000})
    assert (result.stdout, result.stderr) == (b"(1024, 3000)\n", b"")


async def test_execs_run_as_the_other_user_without_capabilities(guest, client: GuestClient) -> None:
    result = await guest.run(
        client, "sh", "-c", "id -u; id -g; id -G; grep -E 'CapEff|CapPrm|CapAmb' /proc/self/status"
    )
    lines = result.stdout.decode().splitlines()
    assert lines[0] == str(guest.exec_uid)
    if guest.mode != "child":
        assert lines[1] == str(guest.exec_uid)
        assert lines[2] == str(guest.exec_uid)
        assert all(line.split()[1] == "0" * 16 for line in lines[3:])


async def test_argv_reaches_the_program_byte_for_byte(guest, client: GuestClient) -> None:
    odd = ["", " ", "a\nb", "你好", "\udcff\udc80x", "'\"$(x)`", "-", "é" * 1000]
    script = "import sys,os;sys.stdout.buffer.write(b'|'.join(os.fsencode(a) for a in sys.argv[1:]))"
    result = await guest.run(client, "python3", "-I", "-S", "-X", "utf8", "-c", script, *odd)
    assert result.stdout == b"|".join(part.encode("utf-8", "surrogateescape") for part in odd)


async def test_argv0_is_looked_up_on_the_path_of_the_exec(guest, client: GuestClient) -> None:
    assert (await guest.run(client, "true", env={"PATH": "/nowhere"})).status["failure"]["what"] == "argv"
    assert (await guest.run(client, "true", env={"PATH": "/nowhere:/usr/bin:/bin"})).status["exit_code"] == 0
    assert (await guest.run(client, "true", env={})).status["exit_code"] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": "ls"}, "argv"),
        ({"argv": ["\ud800"]}, "argv"),
        ({"env": {"A=B": "1"}}, "env"),
        ({"env": {"A": 1}}, "env"),
        ({"cwd": None}, "cwd"),
        ({"umask": "022"}, "umask"),
        ({"umask": True}, "umask"),
        ({"rlimits": {"nosuch": 1}}, "rlimits"),
        ({"rlimits": {"nofile": -1}}, "nofile"),
        ({"background": "maybe"}, "background"),
        ({"stdin": "x"}, "stdin"),
        ({"pty": [0, 80]}, "pty"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"exec_id": ""}, "exec_id"),
        ({"seccomp": 1}, "seccomp"),
    ],
)
async def test_a_bad_spec_is_refused_by_field_and_starts_nothing(launch, change: dict, field: str) -> None:
    guest = launch("child")
    client = await guest.connect()
    spec = guest.spec("true") | change
    with pytest.raises(CorralError) as caught:
        await client.start_exec(spec, fence=FENCE)
    assert (caught.value.code, caught.value.field) == ("bad_request", field)
    if spec["exec_id"]:
        assert (await client.exec_status(spec["exec_id"]))["state"] == "unknown"
    assert (await guest.run(client, "true")).status["exit_code"] == 0


async def test_many_execs_at_once_end_each_with_its_own_output(guest, client: GuestClient) -> None:
    import asyncio

    results = await asyncio.gather(*(guest.run(client, "sh", "-c", f"echo {n}; exit {n}") for n in range(40)))
    assert [(r.stdout, r.status["exit_code"]) for r in results] == [(f"{n}\n".encode(), n) for n in range(40)]


async def test_times_and_use_are_reported(guest, client: GuestClient) -> None:
    result = await guest.run(client, "python3", "-c", "import time;x=sum(range(3_000_000));time.sleep(.1)")
    status = result.status
    assert status["started_ms"] is not None and status["ended_ms"] is not None
    assert 100 <= status["ended_ms"] - status["started_ms"] < 30_000
    assert status["utime_ms"] and status["maxrss_kib"] and status["maxrss_kib"] > 5000


async def test_the_seccomp_filter_holds_in_execs_and_not_in_the_guest(launch, tmp_path) -> None:
    # Classic BPF: sethostname (170 on x86_64, 161 on aarch64) answers errno 77, everything else is allowed.
    import platform
    import struct

    number = 170 if platform.machine() == "x86_64" else 161
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 77), (0x06, 0, 0, 0x7FFF0000)]
    path = tmp_path / "filter"
    path.write_bytes(b"".join(struct.pack("=HBBI", *line) for line in program))
    guest = launch("child", "--seccomp-exec", str(path))
    client = await guest.connect()
    script = "import ctypes;l=ctypes.CDLL(None,use_errno=True);l.sethostname(b'x',-1);print(ctypes.get_errno())"
    assert (await guest.run(client, "python3", "-c", script)).stdout == b"77\n"
    assert (await guest.run(client, "python3", "-c", script, seccomp=False)).stdout != b"77\n"


async def test_a_filter_that_cannot_be_read_stops_the_guest(launch) -> None:
    guest = launch("child", "--seccomp-exec", "/no/such/filter")
    assert guest.process.wait(30) == 2


async def test_ended_is_the_last_item(guest, client: GuestClient) -> None:
    spec = guest.spec("echo", "x")
    await client.start_exec(spec, fence=FENCE)
    items = [item async for item in client.attach(spec["exec_id"])]
    assert [type(i).__name__ for i in items] == ["Data", "Ended"]
    assert isinstance(items[-1], Ended)
    assert items[-1].status["offsets"] == {"stdout": 2, "stderr": 0}


async def test_signals_that_the_guests_starter_ignored_are_not_ignored_by_programs() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGQUIT, signal.SIGUSR1)}
    try:
        guest = start("child")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        client = await guest.connect()
        result = await guest.run(client, "grep", "SigIgn", "/proc/self/status")
        assert int(result.stdout.split()[1], 16) == 0
    finally:
        await guest.stop()
