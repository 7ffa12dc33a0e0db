"""The SDK from a program's side: the same tests over both faces and every way to reach a service.

Each test is written once, for asyncio. The synchronous face is put behind the same surface by `Awaited`, which calls it in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import pytest

from corral.client import AsyncCorral, Corral, CorralError, async_sdk

from .breaking import BreakingProxy

RECIPE = (
    "name: host\nkind: frozen\ndescription: small\n"
    "programs: [sh bash sleep true cat printf head wc seq dd mkdir ln rm touch stat stty]\nlanguages: {bash: bash}\n"
)
MODES = ["owner", "socket", "remote"]
FACES = ["sync", "async"]


# -- the synchronous face with the surface of the other ------------------------------------------------------------------------
class Awaited:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._twin = getattr(async_sdk, f"Async{type(inner).__name__}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or not hasattr(self._twin, name):
            return awaited(value)
        if not inspect.iscoroutinefunction(getattr(self._twin, name)):
            return lambda *a, **k: awaited(value(*a, **k))

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return awaited(await asyncio.to_thread(value, *arguments, **keywords))

        return call

    async def __aenter__(self) -> Any:
        await asyncio.to_thread(self._inner.__enter__)
        return self

    async def __aexit__(self, *why: Any) -> None:
        await asyncio.to_thread(self._inner.__exit__, *why)


class AwaitedItems:
    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner

    def __aiter__(self) -> AwaitedItems:
        return self

    async def __anext__(self) -> Any:
        missing = object()
        item = await asyncio.to_thread(next, self._inner, missing)
        if item is missing:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        await asyncio.to_thread(self._inner.close)  # type: ignore[attr-defined]


def awaited(value: Any) -> Any:
    if isinstance(value, list):
        return [awaited(each) for each in value]
    if isinstance(value, GeneratorType):
        return AwaitedItems(value)
    return Awaited(value) if type(value).__module__ == "corral.client.sdk" else value


# -- where the service is ------------------------------------------------------------------------------------------------------
class Places:
    """One state directory per way to reach it, made when it is first wanted."""

    def __init__(self, above: Path) -> None:
        self.above = above
        self._made: dict[str, dict[str, Any]] = {}
        self._children: list[subprocess.Popen[str]] = []

    def arguments(self, mode: str) -> dict[str, Any]:
        if mode not in self._made:
            self._made[mode] = getattr(self, f"_{mode}")(self.above / mode)
        return self._made[mode]

    def port(self) -> int:
        return int(self.arguments("remote")["url"].rpartition(":")[2])

    def _owner(self, state: Path) -> dict[str, Any]:
        return {"state_dir": state}

    def _socket(self, state: Path) -> dict[str, Any]:
        code = "import signal; from corral.client import connect; t = connect(); print('ready', flush=True); signal.pause()"
        child = self._child([sys.executable, "-c", code], state)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return {"state_dir": state}

    def _remote(self, state: Path) -> dict[str, Any]:
        served = self.serve(state)
        return {"url": served["url"], "key": served["key"]}

    def serve(self, state: Path, *words: str, port: str = "0") -> dict[str, Any]:
        code = "from corral.cli.main import main; main()"
        child = self._child([sys.executable, "-c", code, "serve", "--port", port, *words], state)
        assert child.stdout is not None
        url = child.stdout.readline().split()[-1]
        key = state.parent / f"{state.name}.key"
        if not key.exists():
            key.write_text(child.stdout.readline().split()[-1])
        return {"url": url, "key": key.read_text(), "child": child}

    def stop(self, served: dict[str, Any]) -> None:
        served["child"].terminate()
        served["child"].wait(60)

    def _child(self, words: list[str], state: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "CORRAL_STATE_DIR": str(state)}
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self._children.append(child)
        return child

    def close(self) -> None:
        for arguments in self._made.values():
            with Corral(**arguments) as c:
                for box in c.sandboxes.list():
                    box.delete()
                c.request("POST", "/v1/gc")
                assert c.request("GET", "/v1/doctor")["leftovers"] == []
        for child in self._children:
            child.terminate()
            child.wait(60)


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    above = Path(tempfile.mkdtemp(prefix="corral-sdk-"))
    above.chmod(0o711)
    (above / "templates").mkdir()
    (above / "templates" / "host.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORRAL_TEMPLATES", str(above / "templates"))
        patch.setenv("CORRAL_RUNTIMES", "bubblewrap")
        for name in ("CORRAL_URL", "CORRAL_KEY", "CORRAL_STATE_DIR"):
            patch.delenv(name, raising=False)
        made = Places(above)
        try:
            yield made
        finally:
            made.close()
            shutil.rmtree(above, ignore_errors=True)


Opened = Callable[..., Any]


def opened(face: str, **arguments: Any) -> Any:
    return AsyncCorral(**arguments) if face == "async" else awaited(Corral(**arguments))


@pytest.fixture(params=[(mode, face) for mode in MODES for face in FACES], ids=lambda p: f"{p[0]}-{p[1]}")
async def c(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[Any]:
    mode, face = request.param
    arguments = await asyncio.to_thread(places.arguments, mode)
    async with await asyncio.to_thread(opened, face, **arguments) as client:
        yield client


@pytest.fixture
async def box(c: Any) -> AsyncIterator[Any]:
    async with await c.sandboxes.create() as made:
        yield made


@pytest.fixture(params=FACES)
async def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


# -- runs ----------------------------------------------------------------------------------------------------------------------
async def test_a_run_has_a_result_whatever_the_program_does(c: Any) -> None:
    run = await c.run(code="echo 你好; cat; echo no >&2; exit 3", language="bash", stdin=b"\xff\x00")
    result = run.result
    assert (result.reason, result.exit_code, result.ok, result.started) == ("nonzero_exit", 3, False, True)
    assert result.stdout.data == "你好\n".encode() + b"\xff\x00"
    assert result.stderr.text == "no\n"
    run = await c.run(command=["sh", "-c", "mkdir out; cat in/a > out/b"], files={"in/a": bytes(range(256))})
    assert run.result.ok and [a["path"] for a in run.result.artifacts] == ["/workspace/out/b"]
    assert await run.artifact("/workspace/out/b") == await run.artifact("out/b") == bytes(range(256))
    assert "code" in run.decisions["plan"]["verdict"] or run.decisions["plan"]


async def test_a_refusal_is_an_error_with_its_code(c: Any) -> None:
    with pytest.raises(CorralError) as caught:
        await c.run(command=["true"], memory="much")
    assert (caught.value.code, caught.value.field, caught.value.retryable) == ("invalid_value", "/memory", False)
    with pytest.raises(CorralError) as caught:
        await c.runs.get("run_nope")
    assert caught.value.code == "not_found"
    with pytest.raises(CorralError) as caught:
        await c.sandboxes.get("sbx_nope")
    assert caught.value.code == "not_found"


async def test_a_submitted_run_is_waited_for_streamed_and_found_again(c: Any) -> None:
    handle = await c.submit(shell="cat; echo a; sleep 1; echo b")
    with pytest.raises(TimeoutError):
        await handle.wait(0.05)
    events = [event async for event in handle.stream()]
    assert [events[0].kind, events[-1].kind] == ["started", "ended"]
    assert b"".join(event.data for event in events) == b"a\nb\n"
    first = next(event for event in events if event.data)
    rest = [event async for event in handle.stream(first.cursor)]
    assert b"".join(event.data for event in rest) == b"a\nb\n"[len(first.data) :]
    run = await handle.wait()
    again = await c.runs.get(handle.id)
    assert run.result.ok and again.state == "finished" and again.result.stdout.text == "a\nb\n"
    assert handle.id in [summary["id"] for summary in await c.runs.list(limit=20)]


async def test_a_submitted_run_can_be_cancelled(c: Any) -> None:
    handle = await c.submit(command=["sleep", "600"], timeout_s=700)
    await handle.cancel()
    run = await handle.wait(30)
    assert run.result.reason == "cancelled"


async def test_an_agent_view_comes_with_the_result(c: Any, box: Any) -> None:
    result = await box.exec(shell="seq 100000", agent_view=400)
    assert result.agent_view is not None and len(result.agent_view) <= 400 and result.stdout.bytes == 588895
    assert (await c.run(command=["true"], agent_view=400)).result.agent_view is not None


# -- sandboxes and execs -------------------------------------------------------------------------------------------------------
async def test_a_sandbox_is_kept_listed_and_deleted_at_the_end(c: Any) -> None:
    async with await c.sandboxes.create(files={"a.txt": "content\n"}) as box:
        assert (await box.exec(["cat", "a.txt"])).stdout.text == "content\n"
        assert box.id in [each.id for each in await c.sandboxes.list()]
        assert (await (await c.sandboxes.get(box.id)).exec(shell="exit 7")).exit_code == 7
    assert (await box.refresh()).state == "terminated"
    assert box.id not in [each.id for each in await c.sandboxes.list()]
    assert box.id in [each.id for each in await c.sandboxes.list(all=True)]
    await box.delete()
    with pytest.raises(CorralError) as caught:
        await box.exec(["true"])
    assert caught.value.code == "sandbox_deleted"


async def test_exec_stream_yields_as_it_comes_and_closing_it_cancels(box: Any) -> None:
    events = [event async for event in box.exec_stream(shell="echo a; echo b >&2; exit 4")]
    assert {e.kind for e in events} == {"started", "stdout", "stderr", "ended"}
    assert events[-1].doc["result"]["exit_code"] == 4
    source = box.exec_stream(shell="echo first; sleep 600", timeout_s=700)
    async for event in source:
        if event.data == b"first\n":
            break
    await source.aclose()

    async def cancelled() -> bool:
        return [(await each.refresh()).result.reason for each in (await box.execs.list())[-1:]] == ["cancelled"]

    await until(cancelled)


async def test_an_interactive_exec_takes_input_in_order_until_its_end(box: Any) -> None:
    running = await box.start(["cat"], stdin=b"zero\n")
    written = b"".join(b"%d " % n for n in range(100_000))
    assert await running.write("one\n") is True
    assert await running.write(written) is True
    assert running.stdin_offset == 4 + len(written)
    await running.close_stdin()
    result = await running.wait(60)
    assert result.ok and result.stdout.data == b"zero\none\n" + written
    assert (await running.refresh()).state == "exited" or running.result.ok


async def test_a_terminal_is_resized_signalled_and_cancelled(box: Any) -> None:
    running = await box.start(shell="trap 'stty size' WINCH; stty size; while :; do sleep 0.1; done", pty=(30, 100))
    seen = b""
    async for event in running.events():
        seen += event.data
        if b"30 100" in seen and b"41 99" not in seen:
            await running.resize(41, 99)
        if b"41 99" in seen:
            break
    await running.signal("KILL")
    assert (await running.wait(60)).signal in ("KILL", "SIGKILL")
    other = await box.start(["sleep", "600"], timeout_s=700)
    assert (await (await other.cancel()).wait(60)).reason == "cancelled"
    found = await box.execs.get(other.id)
    assert found.result.reason == "cancelled" and found.sandbox_id == box.id


async def test_waits_are_bounded_and_resumed(box: Any) -> None:
    running = await box.start(shell="cat", timeout_s=60)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await running.wait(0.2)
    assert time.monotonic() - began < 20
    await running.write(b"x", eof=True)
    assert (await running.wait(60)).stdout.data == b"x"


# -- files ---------------------------------------------------------------------------------------------------------------------
async def test_files_are_written_read_listed_moved_and_deleted(box: Any) -> None:
    files = box.files
    info = await files.write("dir/数据.bin", bytes(range(256)), mode=0o640)
    assert (info.path, info.name, info.size, info.mode, info.is_file) == (
        "/workspace/dir/数据.bin", "数据.bin", 256, 0o640, True,
    )  # fmt: skip
    assert await files.read("dir/数据.bin") == bytes(range(256))
    assert await files.read("dir/数据.bin", 10, 5) == bytes(range(10, 15))
    assert await files.read("dir/数据.bin", 250) == bytes(range(250, 256))
    assert await files.read("dir/数据.bin", 1000) == b"" and await files.read("dir/数据.bin", 3, 0) == b""
    await files.write("text", "你好")
    assert await files.read_text("text") == "你好"
    await files.mkdir("made/deep", mode=0o700)
    assert (await files.stat("made/deep")).is_dir
    assert [entry.name for entry in await files.list()] == ["dir", "made", "text"]
    names = {entry.path for entry in await files.list("/workspace", recursive=True)}
    assert names >= {"/workspace/dir/数据.bin", "/workspace/made/deep"}
    await files.move("text", "made/text")
    assert await files.exists("made/text") and not await files.exists("text")
    for wrong, code in ((files.read("text"), "not_found"), (files.read("made"), "is_a_directory")):
        with pytest.raises(CorralError) as caught:
            await wrong
        assert caught.value.code == code
    with pytest.raises(CorralError):
        await files.write("made/text", b"other", overwrite=False)
    await files.delete("made", recursive=True)
    assert not await files.exists("made")


async def test_a_name_that_is_not_utf8_comes_back_as_it_is(box: Any) -> None:
    name = b"/workspace/\xff\xfe\xe4"
    await box.files.write(name, b"1")
    (entry,) = await box.files.list()
    assert entry.path_bytes == name and await box.files.read(entry.path) == b"1"
    moved = await box.files.move(entry.path, b"/workspace/\x80")
    assert moved.path_bytes == b"/workspace/\x80"
    await box.files.delete(moved.path)
    assert await box.files.list() == []


async def test_large_content_goes_both_ways_in_blocks_with_progress(box: Any) -> None:
    block = os.urandom(1 << 20)
    seen: list[tuple[int, int | None]] = []
    await box.files.write("big", (block for _ in range(24)), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (24 << 20, None) and seen == sorted(seen)
    seen.clear()
    digest = hashlib.sha256()
    async for piece in box.files.stream("big", progress=lambda done, total: seen.append((done, total))):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(block * 24).digest() and seen[-1] == (24 << 20, 24 << 20)
    file = io.BytesIO(b"skipped" + block)
    file.seek(7)
    await box.files.write("from-a-file", file)
    assert await box.files.read("from-a-file") == block


async def test_trees_and_files_are_uploaded_and_downloaded(box: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "名").write_bytes(b"\x00\xff" * 300_000)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    seen: list[int] = []
    await box.files.upload(source, "into/tree", progress=lambda done, total: seen.append(done))
    assert seen == sorted(seen) and seen[-1] > 600_000
    assert (await box.exec(["./into/tree/run.sh"])).stdout.text == "ran\n"
    back = tmp_path / "back"
    await box.files.download("into/tree", back)
    assert (back / "sub" / "名").read_bytes() == b"\x00\xff" * 300_000 and (back / "sub" / "empty").is_dir()
    assert os.readlink(back / "link") == "run.sh" and (back / "run.sh").stat().st_mode & 0o777 == 0o755
    await box.files.upload(source / "run.sh", "one.sh")
    await box.files.download("one.sh", tmp_path / "one.sh")
    assert (tmp_path / "one.sh").read_text() == "#!/bin/sh\necho ran\n" and (tmp_path / "one.sh").stat().st_mode & 0o111
    longest = tmp_path / "longest" / ("名" * 85)
    longest.parent.mkdir()
    await box.files.download("one.sh", longest)
    assert longest.stat().st_size == 19 and len(list(longest.parent.iterdir())) == 1
    with pytest.raises(CorralError):
        await box.files.download("nothing", tmp_path / "nothing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "longest", "one.sh", "source"]
    archive = b"".join([block async for block in box.archive.get("into/tree")])
    await box.files.mkdir("copy")
    await box.archive.put("copy", archive)
    assert await box.files.read("copy/tree/sub/名") == b"\x00\xff" * 300_000


async def test_a_watch_tells_what_happens_until_it_is_closed(box: Any) -> None:
    source = box.files.watch()
    kinds = []
    async for event in source:
        if event.kind == "started":
            await box.files.write("new", b"1")
        kinds.append((event.kind, event.path))
        if event.kind != "started" and event.path == "/workspace/new":
            break
    await source.aclose()
    assert kinds[0][0] == "started"


# -- interruptions -------------------------------------------------------------------------------------------------------------
async def ended_as_cancelled(c: Any, box_id: str) -> bool:
    found = (await c.request("GET", f"/v1/sandboxes/{box_id}/execs"))["items"]
    return [each["result"] and each["result"]["reason"] for each in found] == ["cancelled"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early", [True, False])
async def test_a_cancelled_task_cancels_the_exec_it_waited_for(places: Places, mode: str, early: bool) -> None:
    arguments = await asyncio.to_thread(places.arguments, mode)
    threads = threading.active_count()
    async with AsyncCorral(**arguments) as c, await c.sandboxes.create() as box:
        task = asyncio.create_task(box.exec(["sleep", "600"], timeout_s=700))
        if not early:

            async def running() -> bool:
                return [each.state for each in await box.execs.list()] == ["running"]

            await until(running)
        else:
            await asyncio.sleep(0.02)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 20
        await until(lambda: ended_as_cancelled(c, box.id))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await c.run(command=["sleep", "600"], timeout_s=700)

        async def over() -> bool:
            return (await c.runs.list(limit=1))[0]["reason"] == "cancelled"

        await until(over)
    assert threading.active_count() <= threads + 8  # what the loop's own pool keeps; nothing of ours waits


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_cancels_the_exec_it_waited_for_and_leaves_the_client_usable(places: Places, mode: str) -> None:
    with Corral(**places.arguments(mode)) as c, c.sandboxes.create() as box:
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            for call in (
                lambda: box.exec(["sleep", "600"], timeout_s=700),
                lambda: list(box.exec_stream(["sleep", "600"], timeout_s=700)),
                lambda: c.run(command=["sleep", "600"], timeout_s=700),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(KeyboardInterrupt):
                    call()
            started = box.start(["sleep", "600"], timeout_s=700)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                started.wait()
            assert started.refresh().result is None, "a handle's wait leaves the program alone"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        found = c.request("GET", f"/v1/sandboxes/{box.id}/execs")["items"]
        end = time.monotonic() + 60
        while [e["result"] and e["result"]["reason"] for e in found[:2]] != ["cancelled", "cancelled"]:
            assert time.monotonic() < end
            found = c.request("GET", f"/v1/sandboxes/{box.id}/execs")["items"]
        assert c.runs.get(c.runs.list(limit=1)[0]["id"]).wait(60).result.reason == "cancelled"
        assert box.exec(["true"]).ok


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- connections that break ----------------------------------------------------------------------------------------------------
@pytest.fixture
def broken(places: Places) -> Iterator[Callable[[int], dict[str, Any]]]:
    proxies: list[BreakingProxy] = []

    def through(seed: int) -> dict[str, Any]:
        proxies.append(BreakingProxy(places.port(), seed))
        arguments = places.arguments("remote")
        return {"url": f"http://127.0.0.1:{proxies[-1].port}", "key": arguments["key"]}

    yield through
    assert sum(proxy.cut for proxy in proxies) > 3 * len(proxies), "the proxy did its work"
    for proxy in proxies:
        proxy.close()


LINES = b"".join(b"%d line\n" % n for n in range(1, 30_001))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_over_breaking_connections_streams_are_exact_and_nothing_starts_twice(
    places: Places, broken: Callable[[int], dict[str, Any]], face: str, seed: int
) -> None:
    straight, through = places.arguments("remote"), broken(seed)
    async with opened(face, **straight) as calm, opened(face, **through) as c, await calm.sandboxes.create() as kept:
        box = await c.sandboxes.get(kept.id)
        for number in range(8):
            result = await box.exec(shell=f"echo {number} >> /workspace/log; echo {number}")
            assert result.stdout.text == f"{number}\n"
        program = "echo s >> /workspace/log; i=0; while [ $i -lt 300 ]; do seq -f '%.0f line' $((i*100+1)) $((i*100+100)); i=$((i+1)); done"
        for _ in range(2):
            got, offsets, kinds = b"", [], []
            async for event in box.exec_stream(shell=program):
                kinds.append(event.kind)
                if event.kind == "stdout":
                    offsets.append((event.offset, len(event.data)))
                    got += event.data
            assert got == LINES
            assert kinds[0] == "started" and kinds[-1] == "ended" and kinds.count("started") == 1
            assert "gap" not in kinds and offsets == sorted(offsets)
        assert await kept.files.read_text("log") == "".join(f"{n}\n" for n in range(8)) + "s\ns\n"
        assert len(await kept.execs.list()) == 10
        running = await box.start(shell="echo i >> /workspace/log; cat")
        for at in range(0, len(LINES), 20_000):
            await running.write(LINES[at : at + 20_000])
        await running.close_stdin()
        assert (await running.wait(60)).stdout.data == LINES
        assert (await kept.files.read_text("log")).count("i") == 1


@pytest.mark.parametrize("seed", [4, 5])
async def test_over_breaking_connections_files_are_whole(
    places: Places, broken: Callable[[int], dict[str, Any]], face: str, seed: int, tmp_path: Path
) -> None:
    content = os.urandom(150_000)
    (tmp_path / "local").write_bytes(content)
    async with (
        opened(face, **places.arguments("remote")) as calm,
        opened(face, **await asyncio.to_thread(broken, seed)) as c,
        await calm.sandboxes.create() as kept,
    ):
        box = await c.sandboxes.get(kept.id)
        await kept.files.write("there", content)
        for _ in range(4):
            assert await box.files.read("there") == content
            assert await box.files.read("there", 1000, 100_000) == content[1000:101_000]
        await box.files.download("there", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content
        small = content[:8000]
        for number in range(6):
            await box.files.write(f"w{number}", small)
            assert await kept.files.read(f"w{number}") == small
        for number in range(6):
            await box.files.delete(f"w{number}")
        assert [entry.name for entry in await kept.files.list()] == ["there"]


async def test_a_read_that_is_broken_while_the_file_changes_says_so(places: Places, face: str) -> None:
    arguments = await asyncio.to_thread(places.arguments, "remote")
    proxy = BreakingProxy(places.port(), 1)
    proxy.calm = True
    through = {"url": f"http://127.0.0.1:{proxy.port}", "key": arguments["key"]}
    async with opened(face, **arguments) as calm, opened(face, **through) as c, await calm.sandboxes.create() as kept:
        await kept.files.write("f", b"a" * 30_000_000)
        source = (await c.sandboxes.get(kept.id)).files.stream("f")
        whole = await anext(source)
        proxy.break_all()
        async for block in source:
            whole += block
            if len(whole) == 30_000_000:
                break
        assert whole == b"a" * 30_000_000, "it goes on at the byte where it broke off"
        source = (await c.sandboxes.get(kept.id)).files.stream("f")
        await anext(source)
        await kept.files.write("f", b"b" * 30_000_000)
        proxy.break_all()
        with pytest.raises(CorralError) as caught:
            async for _ in source:
                pass
        assert caught.value.code == "conflict"
    proxy.close()


# -- many at once --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
async def test_two_hundred_streams_at_once_need_no_threads(places: Places, mode: str) -> None:
    arguments = await asyncio.to_thread(places.arguments, mode)
    async with AsyncCorral(**arguments) as c, await c.sandboxes.create() as box:
        running = await box.start(shell="echo ready; cat", stdin_open=True)
        threads = threading.active_count()
        ready = asyncio.Semaphore(0)

        async def follow() -> bytes:
            got = b""
            async for event in running.events():
                got += event.data
                if event.data.startswith(b"ready"):
                    ready.release()
            return got

        streams = [asyncio.create_task(follow()) for _ in range(200)]
        for _ in streams:
            async with asyncio.timeout(60):
                await ready.acquire()
        assert threading.active_count() <= threads + 8
        await running.write(b"all\n", eof=True)
        assert set(await asyncio.gather(*streams)) == {b"ready\nall\n"}


# -- where a client goes, and what it says when it cannot ------------------------------------------------------------------------
async def test_a_wrong_key_and_a_foreign_server_are_told_apart(places: Places, face: str) -> None:
    url = (await asyncio.to_thread(places.arguments, "remote"))["url"]
    for key in ("wrong", "", None):
        async with opened(face, url=url, key=key) as c:
            with pytest.raises(CorralError) as caught:
                await c.run(command=["true"])
        assert caught.value.code == "unauthorized" and "CORRAL_KEY" in str(caught.value.hint)
    async with opened(face, url=f"{url}/nowhere", key="x") as c:
        with pytest.raises(CorralError):
            await c.run(command=["true"])
    async with opened(face, url=url, key="with\nbreak") as c:
        with pytest.raises(CorralError) as caught:
            await c.run(command=["true"])
        assert caught.value.code == "invalid_value"


async def test_the_environment_says_where_to_go(
    places: Places, face: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = await asyncio.to_thread(places.arguments, "remote")
    monkeypatch.setenv("CORRAL_URL", arguments["url"])
    monkeypatch.setenv("CORRAL_KEY", arguments["key"])
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with opened(face) as c:
        assert (await c.run(command=["true"])).result.ok
    async with opened(face, state_dir=tmp_path / "state") as c:
        assert await c.runs.list() == [], "a state directory that is named comes before the environment"


@pytest.fixture(scope="module")
def secure(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    child = places.serve(places.above / "secure", "--tls-cert", str(cert), "--tls-key", str(key))
    yield {"url": child["url"].replace("127.0.0.1", "localhost"), "key": child["key"], "ca_file": cert}


async def test_tls_is_verified(secure: dict[str, Any], face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(face, **secure) as c:
        assert (await c.run(shell="echo safe")).result.stdout.text == "safe\n"
        async with await c.sandboxes.create() as box:
            content = os.urandom(3_000_000)
            await box.files.write("f", content)
            assert await box.files.read("f") == content
            assert [event.kind async for event in box.exec_stream(["true"])] == ["started", "ended"]
    unknown = {**secure, "ca_file": None}
    by_number = {**secure, "url": secure["url"].replace("localhost", "127.0.0.1")}
    plain = {**secure, "url": secure["url"].replace("https", "http")}
    for arguments, words in ((unknown, "certificate"), (by_number, "certificate"), (plain, "")):
        began = time.monotonic()
        async with opened(face, **arguments) as c:
            with pytest.raises(CorralError) as caught:
                await c.run(command=["true"])
        assert words in caught.value.detail and caught.value.hint
        assert time.monotonic() - began < 20
    monkeypatch.setenv("CORRAL_CA_FILE", str(secure["ca_file"]))
    async with opened(face, **unknown) as c:
        assert (await c.run(command=["true"])).result.ok
    with pytest.raises(CorralError) as caught:
        opened(face, **{**secure, "ca_file": "/nowhere"})
    assert caught.value.field == "CORRAL_CA_FILE"


async def test_https_to_a_server_without_tls_is_told(places: Places, face: str) -> None:
    arguments = await asyncio.to_thread(places.arguments, "remote")
    async with opened(face, **{**arguments, "url": arguments["url"].replace("http", "https")}) as c:
        with pytest.raises(CorralError) as caught:
            await c.run(command=["true"])
    assert caught.value.code == "node_unavailable" and "http://" in str(caught.value.hint)


async def test_a_client_outlives_a_restart_of_its_server(places: Places, face: str) -> None:
    name = f"again-{face}"
    served = await asyncio.to_thread(places.serve, places.above / name)
    port = served["url"].rpartition(":")[2]
    async with opened(face, url=served["url"], key=served["key"]) as c, await c.sandboxes.create() as box:
        running = await box.start(shell="echo before; cat; echo after")
        await asyncio.to_thread(places.stop, served)
        again = asyncio.create_task(asyncio.to_thread(places.serve, places.above / name, port=port))
        await running.write(b"through\n", eof=True)
        got = b"".join([event.data async for event in running.events()])
        assert got == b"before\nthrough\nafter\n"
    await asyncio.to_thread(places.stop, await again)
