"""A loop whose time is virtual and whose threads are calls: a case takes no time by waiting, and is the same every time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

TURN_S = 1.5
"""Processor time that one turn of the loop may take, whatever a guest says. Seconds would mean that every other sandbox waits."""
BEGIN = 100_000.0


class Broken(AssertionError):
    """What a guest must never be able to bring about; the message says what."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer when nothing else is left to do; where there is none, what waits would wait for ever."""

    def __init__(self, longest_s: float) -> None:
        self.now = BEGIN
        super().__init__()
        self._end = self.now + longest_s
        self.turn_s = 0.0
        self.guest_s = 0.0
        """Processor time of the guest and of work that has threads of its own, which is no part of the host's turns."""
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.failures.append(context))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        with self.elsewhere():
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)
        return future

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.guest_s += time.thread_time() - began

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
            if not self._ready:  # type: ignore[attr-defined]
                self._jump()
        began, beside = time.thread_time(), self.guest_s
        super()._run_once()  # type: ignore[misc]
        self.turn_s = max(self.turn_s, time.thread_time() - began - (self.guest_s - beside))

    def _jump(self) -> None:
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        if not times:
            raise Broken(f"nothing will ever happen again, and these wait: {waiting(self)}")
        self.now = max(self.now, min(times))
        if self.now > self._end:
            raise Broken(f"still at work after {self._end - BEGIN:.0f} virtual seconds: {waiting(self)}")


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks of a loop and where each stands."""
    told = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f" at {os.path.basename(frames[-1].f_code.co_filename)}:{frames[-1].f_lineno}" if frames else ""
        told.append(f"{task.get_coro().__qualname__}{where}")  # type: ignore[union-attr]
    return ", ".join(sorted(told)) or "none"


class Time:
    """Stands in for the module `time` where a case runs."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now

    time = monotonic

    def clock_gettime(self, clock: int) -> float:
        return self._loop.now

    def time_ns(self) -> int:
        return int(self._loop.now * 1e9)

    def perf_counter(self) -> float:
        return self._loop.now


class Secrets:
    """Stands in for the module `secrets`: numbers in a row."""

    def __init__(self) -> None:
        self._count = 0

    def token_bytes(self, size: int) -> bytes:
        self._count += 1
        return self._count.to_bytes(size, "big")

    token_hex = staticmethod(secrets.token_hex)


@contextlib.contextmanager
def replaced(**parts: Any) -> Iterator[None]:
    """`replaced(name=(module, "attribute", value))` while the block runs."""
    before = {name: getattr(module, attribute) for name, (module, attribute, _) in parts.items()}
    try:
        for module, attribute, value in parts.values():
            setattr(module, attribute, value)
        yield
    finally:
        for name, (module, attribute, _) in parts.items():
            setattr(module, attribute, before[name])


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def conduct(work: Callable[[VirtualLoop], Coroutine[Any, Any, None]], longest_s: float = 4 * 3600.0) -> VirtualLoop:
    """Run one case on a loop of its own; Broken when it leaves a task, a thread or a descriptor, or held the loop up."""
    fds, threads = descriptors(), threading.active_count()
    loop = VirtualLoop(longest_s)
    try:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(work(loop))
            for _ in range(20):
                loop.run_until_complete(asyncio.sleep(0))
            if left := asyncio.all_tasks(loop):
                raise Broken(f"{len(left)} tasks are left: {waiting(loop)}")
        except BaseException:
            _clear(loop)
            raise
        if loop.failures:
            raise Broken(f"unheard: {loop.failures[0].get('message')}: {loop.failures[0].get('exception')!r}")
        if loop.turn_s > TURN_S:
            raise Broken(f"the loop was held up for {loop.turn_s:.2f} s of processor time")
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    if threading.active_count() > threads:
        raise Broken(f"{threading.active_count() - threads} threads are left")
    if more := descriptors() - fds:
        gc.collect()
        if more := descriptors() - fds:
            raise Broken(f"{len(more)} descriptors are left: {[_names(fd) for fd in more]}")
    return loop


def _names(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "closed"


def _clear(loop: asyncio.AbstractEventLoop) -> None:
    """After a failure: what is left of the case must not reach the next one."""
    with contextlib.suppress(BaseException):
        for _ in range(3):
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            for _ in range(10):
                loop.call_soon(lambda: None)
                loop.call_soon(loop.stop)
                loop.run_forever()
