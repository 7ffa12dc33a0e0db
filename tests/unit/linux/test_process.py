"""ProcessRef: only the very process is ever signalled."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.linux import process, sockets

SRC = Path(process.__file__).parents[1]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "300"])
    yield child
    child.kill()
    child.wait()


def test_reference_survives_json(sleeper: subprocess.Popen[bytes]) -> None:
    ref = process.ref_of(sleeper.pid)
    assert ref is not None
    assert process.ProcessRef.from_json(ref.to_json()) == ref


@pytest.mark.parametrize(
    "bad", [{}, {"pid": "7", "start_time": 1, "boot_id": "x"}, {"pid": True, "start_time": 1, "boot_id": "x"}]
)
def test_damaged_reference_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        process.ProcessRef.from_json(bad)


def test_kill_ends_the_process(sleeper: subprocess.Popen[bytes]) -> None:
    ref = process.ref_of(sleeper.pid)
    assert ref is not None and process.is_alive(ref)
    assert process.kill(ref, signal.SIGKILL)
    assert process.wait_gone_blocking(ref, 30)
    # Unreaped: a zombie has its number still, but is not alive.
    assert process.ref_of(sleeper.pid) == ref
    assert not process.is_alive(ref)


def test_a_recycled_number_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    ref = process.ref_of(sleeper.pid)
    assert ref is not None
    older = dataclasses.replace(ref, start_time=ref.start_time - 1)
    other_boot = dataclasses.replace(ref, boot_id="00000000-0000-0000-0000-000000000000")
    for stale in (older, other_boot):
        assert not process.is_alive(stale)
        assert not process.kill(stale)
    assert sleeper.poll() is None


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_numbers_up_to_one_are_refused(pid: int) -> None:
    with pytest.raises(ValueError):
        process.kill(process.ProcessRef(pid, 0, process.boot_id()), 0)


def test_name_with_parentheses_and_spaces(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "300"])
    try:
        ref = process.ref_of(child.pid)
        own = process.ref_of(os.getpid())
        assert ref is not None and own is not None
        assert ref.start_time >= own.start_time
    finally:
        child.kill()
        child.wait()


async def test_wait_gone_returns_at_exit_and_can_be_cancelled(sleeper: subprocess.Popen[bytes]) -> None:
    ref = process.ref_of(sleeper.pid)
    assert ref is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait_gone(ref), 0.05)
    waiter = asyncio.create_task(process.wait_gone(ref))
    await asyncio.sleep(0)
    assert not waiter.done()
    process.kill(ref)
    await asyncio.wait_for(waiter, 30)
    sleeper.wait()
    await asyncio.wait_for(process.wait_gone(ref), 30)


def test_signals_are_sent_in_one_module_only() -> None:
    banned = {"kill", "killpg", "pidfd_send_signal", "tgkill", "pthread_kill"}
    offenders = []
    for path in sorted(SRC.rglob("*.py")):
        relative = path.relative_to(SRC)
        if relative.parts[0] == "guest" or relative == Path("linux/process.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Attribute) and node.attr in banned and isinstance(node.value, ast.Name)
            if named and node.value.id in ("os", "signal", "posix"):  # type: ignore[attr-defined]
                offenders.append(f"{relative}:{node.lineno}")
            imported = isinstance(node, ast.ImportFrom) and node.module in ("os", "signal", "posix")
            if imported and banned & {alias.name for alias in node.names}:  # type: ignore[attr-defined]
                offenders.append(f"{relative}:{node.lineno}")
    assert offenders == []


def test_socket_in_a_directory_with_a_long_path(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    with sockets.listen(str(deep), "s") as server:
        assert (deep / "s").stat().st_mode & 0o777 == 0o600
        assert not os.get_inheritable(server.fileno())
        with sockets.connect(str(deep), "s", timeout_s=10) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"hello")
                assert peer.recv(5) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(str(deep), "s")
    sockets.listen(str(deep), "s").close()
    with pytest.raises(ValueError):
        sockets.listen(str(deep), "../s")
