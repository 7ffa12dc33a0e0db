"""Output: byte-exact, in order, bounded while nobody reads, resumed by offset; and input with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os

import pytest

from corral.channel import Data, Ended, GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError

FENCE = Fence(1, 1)
MIB = 1024 * 1024


def python(script: str) -> tuple[str, ...]:
    return ("python3", "-I", "-S", "-c", script)


async def test_all_byte_values_on_both_streams(guest, client: GuestClient) -> None:
    script = "import os;d=bytes(range(256))*100\nfor i in range(0,len(d),4096):os.write(1,d[i:i+4096]);os.write(2,d[i:i+4096][::-1])"
    result = await guest.run(client, *python(script))
    whole = bytes(range(256)) * 100
    assert result.stdout == whole
    assert len(result.stderr) == len(whole) and sorted(result.stderr) == sorted(whole)


async def test_one_line_of_8_mib(guest, client: GuestClient) -> None:
    result = await guest.run(client, *python("import sys;sys.stdout.write('y'*8388608);sys.exit(7)"))
    assert hashlib.sha256(result.stdout).hexdigest() == hashlib.sha256(b"y" * 8 * MIB).hexdigest()
    assert result.status["exit_code"] == 7
    assert result.status["offsets"] == {"stdout": 8 * MIB, "stderr": 0}


async def test_bytes_one_by_one_keep_their_order_and_times(guest, client: GuestClient) -> None:
    script = "import os,time\nfor b in 'café ☕ 你好'.encode():os.write(1,bytes([b]));time.sleep(.01)"
    result = await guest.run(client, *python(script), env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
    assert result.stdout.decode() == "café ☕ 你好"
    times = [chunk.t_ms for chunk in result.chunks]
    assert times == sorted(times) and len(set(times)) >= 3


async def test_500_tiny_outputs_at_concurrency_8(guest, client: GuestClient) -> None:
    gate = asyncio.Semaphore(8)

    async def one() -> bytes:
        async with gate:
            return (await guest.run(client, "printf", "x")).stdout

    assert await asyncio.gather(*(one() for _ in range(500))) == [b"x"] * 500


async def test_the_tail_of_main_is_never_lost(guest, client: GuestClient) -> None:
    """Main fills the pipe and ends at once; a background process keeps the pipe open."""
    script = "import os;os.fork() or (__import__('time').sleep(60));os.write(1,b'z'*65536);os._exit(3)"
    for _ in range(20):
        result = await guest.run(client, *python(script), background="kill")
        assert (result.stdout, result.status["exit_code"]) == (b"z" * 65536, 3)


async def test_an_exec_ends_with_its_main_program_not_with_the_last_pipe(guest, client: GuestClient) -> None:
    begun = asyncio.get_running_loop().time()
    result = await guest.run(client, "sh", "-c", "sleep 100 & echo started")
    assert (result.stdout, result.status["state"], result.status["background"]) == (b"started\n", "ended", 1)
    assert asyncio.get_running_loop().time() - begun < 30
    report = await client.kill_exec(result.status["exec_id"], 0, fence=FENCE)
    assert report == {"killed_all": True, "killed": 1}


async def test_a_kept_background_process_can_go_on_writing(guest, client: GuestClient, tmp_path) -> None:
    """What it writes is dropped, but it neither blocks nor dies of it."""
    script = "i=0; while [ $i -lt 300 ]; do printf %01000d 1 || exit 9; i=$((i+1)); done; echo done >&2; sleep 100"
    result = await guest.run(client, "sh", "-c", f"({script}) & exit 0")
    assert result.status["background"] >= 1
    for _ in range(200):
        usage = await client.usage()
        if usage["processes"] >= 2:  # its supervisor and the process itself, still there after 300 kB
            break
        await asyncio.sleep(0.05)
    assert (await client.kill_exec(result.status["exec_id"], 0, fence=FENCE))["killed"] >= 1


async def test_closed_output_pipes_end_nothing(guest, client: GuestClient) -> None:
    result = await guest.run(client, "sh", "-c", "exec >&- 2>&-; sleep .2; exit 5")
    assert (result.status["exit_code"], result.stdout) == (5, b"")


async def test_the_writer_blocks_while_nobody_reads_and_nothing_is_lost(guest, client: GuestClient) -> None:
    spec = guest.spec(*python("import os\nfor i in range(64):os.write(1,bytes([i])*65536)"))
    await client.start_exec(spec, fence=FENCE)
    last = -1
    while True:
        status = await client.exec_status(spec["exec_id"])
        if status["offsets"]["stdout"] == last:
            break
        last = status["offsets"]["stdout"]
        await asyncio.sleep(0.3)
    assert status["state"] == "running"
    assert MIB <= last < MIB + 128 * 1024
    result = await guest.follow(client, spec["exec_id"])
    assert result.stdout == b"".join(bytes([i]) * 65536 for i in range(64))


async def test_a_slow_consumer_holds_the_program_back_not_the_others(guest, client: GuestClient) -> None:
    spec = guest.spec(*python("import os\nwhile True:os.write(1,b'q'*65536)"))
    await client.start_exec(spec, fence=FENCE)
    stream = client.attach(spec["exec_id"])
    first = await anext(stream)
    assert isinstance(first, Data)
    for _ in range(20):
        assert (await guest.run(client, "echo", "hi")).stdout == b"hi\n"
    status = await client.exec_status(spec["exec_id"])
    assert status["offsets"]["stdout"] <= 4 * MIB
    await client.kill_exec(spec["exec_id"], 0, fence=FENCE)
    rest = [item async for item in stream]
    assert isinstance(rest[-1], Ended)
    assert rest[-1].status["offsets"]["stdout"] == len(first.data) + sum(len(i.data) for i in rest[:-1])


async def test_output_resumes_exactly_over_ten_reconnects(guest) -> None:
    script = "import os,random\nr=random.Random(7)\nfor i in range(400):os.write(1,r.randbytes(r.randrange(1,20000)))"
    import random

    generator = random.Random(7)
    expected = b"".join(generator.randbytes(generator.randrange(1, 20000)) for _ in range(400))
    client = await guest.connect()
    spec = guest.spec("python3", "-c", script)
    await client.start_exec(spec, fence=FENCE)
    got = b""
    ended = None
    for attempt in range(11):
        with contextlib.suppress(CorralError):
            async for item in client.attach(spec["exec_id"], {"stdout": len(got), "stderr": 0}):
                if isinstance(item, Ended):
                    ended = item
                    break
                assert item.offset == len(got)
                got += item.data
                if attempt < 10 and len(got) > (attempt + 1) * len(expected) // 14:
                    break  # in the middle, with more on its way
        if attempt < 10:
            client = await guest.connect()
    assert ended is not None
    assert hashlib.sha256(got).digest() == hashlib.sha256(expected).digest()


async def test_the_newest_client_wins_and_the_older_one_knows(guest) -> None:
    old = await guest.connect()
    new = await guest.connect()
    await asyncio.wait_for(old.closed.wait(), 30)
    with pytest.raises(CorralError) as caught:
        await old.ping()
    assert caught.value.code == "guest_lost"
    assert await new.ping() < 30


async def test_an_exec_runs_on_while_there_is_no_client(guest) -> None:
    client = await guest.connect()
    spec = guest.spec("sh", "-c", "sleep .5; echo alone; exit 5")
    await client.start_exec(spec, fence=FENCE)
    await client.close()
    await asyncio.sleep(1)
    fresh = await guest.connect()
    result = await guest.follow(fresh, spec["exec_id"])
    assert (result.stdout, result.status["exit_code"]) == (b"alone\n", 5)


async def test_a_second_follower_takes_over_from_the_first(guest, client: GuestClient) -> None:
    spec = guest.spec("sh", "-c", "echo one; read x; echo two", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    first = client.attach(spec["exec_id"])
    item = await anext(first)
    assert isinstance(item, Data) and item.data == b"one\n"
    second = asyncio.create_task(guest.follow(client, spec["exec_id"]))
    with pytest.raises(CorralError) as caught:
        await asyncio.wait_for(anext(first), 30)
    assert caught.value.code == "conflict"
    await client.stdin(spec["exec_id"], b"\n", fence=FENCE)
    assert (await second).stdout == b"one\ntwo\n"


async def test_acknowledged_output_is_gone(guest, client: GuestClient) -> None:
    spec = guest.spec("echo", "gone")
    await client.start_exec(spec, fence=FENCE)
    await guest.follow(client, spec["exec_id"])
    with pytest.raises(CorralError) as caught:
        await guest.follow(client, spec["exec_id"])
    assert caught.value.code == "cursor_gone"
    again = await guest.follow(client, spec["exec_id"], {"stdout": 5, "stderr": 0})
    assert (again.stdout, again.status["exit_code"]) == (b"", 0)


async def test_an_offset_beyond_the_end_is_refused(guest, client: GuestClient) -> None:
    spec = guest.spec("true")
    await client.start_exec(spec, fence=FENCE)
    with pytest.raises(CorralError) as caught:
        await guest.follow(client, spec["exec_id"], {"stdout": 1, "stderr": 0})
    assert caught.value.code == "bad_request"


# -- input -----------------------------------------------------------------------------------------------------------------------
async def test_without_input_the_program_reads_end_of_file_at_once(guest, client: GuestClient) -> None:
    assert (await guest.run(client, "cat")).status["exit_code"] == 0


async def test_input_arrives_whole_and_ends(guest, client: GuestClient) -> None:
    data = os.urandom(3 * MIB) + b"\xffCORRAL\x00SYNC\xfe\xfd\xfc\xfb" * 3
    spec = guest.spec("sha256sum", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    assert await client.stdin(spec["exec_id"], data[:MIB], fence=FENCE)
    assert await client.stdin(spec["exec_id"], data[MIB:], eof=True, fence=FENCE)
    result = await guest.follow(client, spec["exec_id"])
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_input_waits_for_a_program_that_does_not_read(guest, client: GuestClient) -> None:
    spec = guest.spec("sh", "-c", "read go; sleep 1; wc -c", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    await client.stdin(spec["exec_id"], b"go\n", fence=FENCE)
    sending = asyncio.create_task(client.stdin(spec["exec_id"], b"1" * 2 * MIB, eof=True, fence=FENCE))
    await asyncio.sleep(0.3)
    assert not sending.done()
    assert await client.ping() < 30
    assert await sending is True
    assert int((await guest.follow(client, spec["exec_id"])).stdout) in (2 * MIB,)


async def test_input_to_a_program_that_closed_it_or_ended_says_so(guest, client: GuestClient) -> None:
    spec = guest.spec("sh", "-c", "exec <&-; sleep 100", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    for _ in range(100):
        if not await client.stdin(spec["exec_id"], b"x" * 1000, fence=FENCE):
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("nobody said that the input is closed")
    await client.kill_exec(spec["exec_id"], 0, fence=FENCE)
    blocked = guest.spec("sleep", "1", stdin="open")
    await client.start_exec(blocked, fence=FENCE)
    assert await client.stdin(blocked["exec_id"], b"x" * MIB, fence=FENCE) is False
    assert await client.stdin(blocked["exec_id"], b"x", fence=FENCE) is False


async def test_input_offsets_make_a_repetition_harmless(guest) -> None:
    client = await guest.connect()
    spec = guest.spec("cat", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    await client.stdin(spec["exec_id"], b"abc", fence=FENCE)
    client = await guest.connect()
    await client.stdin(spec["exec_id"], b"abcdef", eof=True, fence=FENCE, offset=0)
    assert (await guest.follow(client, spec["exec_id"])).stdout == b"abcdef"


# -- terminal --------------------------------------------------------------------------------------------------------------------
async def test_a_terminal_is_one_with_size_and_job_control(guest, client: GuestClient) -> None:
    spec = guest.spec(
        "sh", "-c", "stty size; test -t 0 -a -t 1 -a -t 2 && echo tty; : >/dev/tty && echo ctty", pty=[31, 97]
    )
    await client.start_exec(spec, fence=FENCE)
    result = await guest.follow(client, spec["exec_id"])
    assert result.stdout == b"31 97\r\ntty\r\nctty\r\n"


async def test_a_terminal_resizes_takes_input_and_ctrl_c(guest, client: GuestClient) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do read l && echo got $l; done"
    spec = guest.spec("sh", "-c", script, pty=[24, 80], stdin="open")
    await client.start_exec(spec, fence=FENCE)
    stream = client.attach(spec["exec_id"])
    seen = b""

    async def until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            item = await asyncio.wait_for(anext(stream), 30)
            assert isinstance(item, Data)
            seen += item.data

    await until(b"ready")
    await client.resize(spec["exec_id"], 40, 100, fence=FENCE)
    await client.stdin(spec["exec_id"], b"hello\n", fence=FENCE)
    await until(b"got hello")
    await client.stdin(spec["exec_id"], b"\x03", fence=FENCE)
    rest = [item async for item in stream]
    assert b"40 100" in seen + b"".join(i.data for i in rest[:-1])
    assert isinstance(rest[-1], Ended)
    assert rest[-1].status["signal"] == 2 or rest[-1].status["exit_code"] == 130


async def test_the_last_output_of_a_terminal_is_never_lost(guest, client: GuestClient) -> None:
    for n in range(20):
        result = await guest.run(
            client, "sh", "-c", f"printf %03000d {n}; (sleep 50 &) ; printf END", pty=[24, 80], background="kill"
        )
        assert result.stdout == f"{n:03000d}END".encode()
