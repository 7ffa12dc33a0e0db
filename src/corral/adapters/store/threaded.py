"""A store whose connections each live in a thread of their own, which takes whole transactions from a queue.

A transaction is one hop: the caller's values are checked and encoded in its own thread, a thread of the store runs the transaction, and
the result comes back by `call_soon_threadsafe`. A caller that is cancelled leaves its transaction running; whether it happened must
then be read, as after a crash. Only what would be read for nobody, and has not begun, is left out.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from corral.errors import CorralError

from .sql import SqlStore
from .transacting import Tx

P = ParamSpec("P")
T = TypeVar("T")
Jobs = queue.SimpleQueue[Any]


class StoreThread(ABC):
    """A thread with a connection of its own that takes jobs from a queue; the stop job (None) ends it."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self._jobs = jobs
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def transact(self, work: Callable[[Tx], T]) -> T:
        """Run `work` in one transaction: all or nothing."""

    @abstractmethod
    def translated(self, error: BaseException) -> BaseException:
        """What the caller gets for what a job raised."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the connection, if there is one. Raises nothing."""

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future, needed = job
            if not needed and future.cancelled():
                del job, work, future
                continue  # else those who gave up while the database was slow would keep it so for those who come
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work(self)
            except BaseException as error:  # whatever it is, it belongs to the caller, and the thread goes on
                failure = self.translated(error)
                if failure is not error:
                    failure.__cause__ = error
            try:
                loop.call_soon_threadsafe(_deliver, future, result, failure)
            except RuntimeError:
                pass  # the caller's loop is closed: nobody waits any more
            del job, work, future, result, failure
        self.disconnect()


def _deliver(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return  # the caller was cancelled meanwhile
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)


W = TypeVar("W", bound=StoreThread)


class ThreadedStore(SqlStore, ABC, Generic[W]):
    """See the module docstring. Usable from several event loops at once."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._threads: list[tuple[W, Jobs]] = []
        self._writes: Jobs = queue.SimpleQueue()
        self._reads: Jobs = queue.SimpleQueue()
        self._usable = False
        self._installation: str | None = None

    @abstractmethod
    def _made(self, writes: Jobs, reads: Jobs) -> Sequence[tuple[W, Jobs]]:
        """The threads, not started, each with the queue that it takes jobs from."""

    @abstractmethod
    def _prepare(self, thread: W) -> str:
        """Make or check the tables, in a writer's thread; -> the installation id."""

    # -- opening and closing ---------------------------------------------------------------------------------------------------
    async def open(self) -> None:
        """Make or check the tables, connect. Again: nothing. After a failure it may be tried again."""
        with self._guard:
            if self._usable:
                return
            if not self._threads:
                self._threads = list(self._made(self._writes, self._reads))
                for thread, _ in self._threads:
                    thread.thread.start()
            prepared = self._hop(True, self._prepare)
        try:
            self._installation = await prepared
        except BaseException:
            self._stop()
            raise
        with self._guard:
            self._usable = bool(self._threads)

    async def close(self) -> None:
        """Finish what is queued, then disconnect. Again: nothing."""
        for thread, _ in self._stop():
            await asyncio.to_thread(thread.thread.join)

    def _stop(self) -> list[tuple[W, Jobs]]:
        with self._guard:
            threads, self._threads = self._threads, []
            self._usable = False
            if threads:
                for _, jobs in threads:
                    jobs.put(None)
                self._writes, self._reads = queue.SimpleQueue(), queue.SimpleQueue()
            return threads

    def _hop(self, writes: bool, work: Callable[[W], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        (self._writes if writes else self._reads).put((work, loop, future, writes))
        return future

    def _submit(self, writes: bool, work: Callable[[Tx], T]) -> asyncio.Future[T]:
        with self._guard:
            if not self._usable:
                raise CorralError("store_error", "the store is not open", retryable=False)
            return self._hop(writes, self._job(work))

    def _job(self, work: Callable[[Tx], T]) -> Callable[[W], T]:
        return lambda thread: thread.transact(work)

    async def _write(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(True, lambda tx: work(tx, *args, **kwargs))

    async def _read(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(False, lambda tx: work(tx, *args, **kwargs))

    async def installation_id(self) -> str:
        if self._installation is None:
            raise CorralError("store_error", "the store is not open", retryable=False)
        return self._installation
