"""Coordination over Redis: publish and subscribe on one channel of the installation, counters with an expiry. Keeps nothing else there.

One task holds the connection. It listens, sends what is to be rung in batches, and each second sends a word to itself: only when that
comes back through publish and subscribe is the way to the others known to be open. Whatever breaks it (an end, a restart, a server
that hangs, one that has become a replica, whose words stay with it) leads to the same: not healthy, counters of this worker alone, a
new connection after a pause that grows. A server that answers and refuses to count (rights, memory, a stranger's key) breaks nothing:
that count is this worker's alone, which is told once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from corral.errors import CorralError
from corral.ports.coordination import MAX_KEY, PATIENCE_S, Counted

from .windows import Windows

if TYPE_CHECKING:
    from redis.asyncio import Redis

BATCH = 500
QUEUE = 10_000
"""What is to be rung and not sent yet, at most; what comes beyond is dropped, as everybody also looks by himself."""
PROBE_S = 1.0
"""How often the way is tried."""
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)
AT_ONCE = 8
"""Counts that ask Redis at the same time; the others wait for their turn, within their patience."""
WORDS_BYTES = 256 * 1024
"""Longer messages are a stranger's."""
COUNT = """
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
  used = 0
  left = tonumber(ARGV[3])
end
if used + tonumber(ARGV[1]) > tonumber(ARGV[2]) then
  return {0, left}
end
redis.call('SET', KEYS[1], used + tonumber(ARGV[1]), 'PX', math.max(1, left))
return {1, 0}
"""


class RedisCoordination:
    """`corral.ports.coordination.Coordination` over `url` (redis, rediss or unix), whose password is never shown."""

    alone = False

    def __init__(self, url: str, installation: str = "default", log: Callable[[str], None] = lambda line: None) -> None:
        if not _readable(url):
            hint = "write redis://HOST:PORT/0, rediss://… or unix:///path/to/the/socket, with % for special characters"
            raise CorralError("invalid_value", "the URL of Redis", field="redis_url", hint=hint)
        self._url = url
        self._channel = f"corral:{installation}:wake"
        self._counter = f"corral:{installation}:count:"
        self._me = secrets.token_hex(8)
        """Tells our own words from those of others."""
        self._log = log
        self._windows = Windows(lambda: time.monotonic_ns() // 1_000_000)
        self._heard: Callable[[str], None] = lambda key: None
        self._missed: Callable[[], None] = lambda: None
        self._queue: dict[str, None] = {}
        self._news = asyncio.Event()
        self._echo = asyncio.Event()
        self._broken = asyncio.Event()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._client: Redis | None = None
        self._task: asyncio.Task[None] | None = None
        self._healthy = False
        self._told: bool | None = None
        self._refusals: set[str] = set()
        """Why counts were refused, as far as it is told."""
        self._epoch = 0
        """How many connections have worked."""

    @property
    def healthy(self) -> bool:
        return self._healthy

    async def open(self, heard: Callable[[str], None], missed: Callable[[], None]) -> None:
        self._heard, self._missed = heard, missed
        first = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._hold(first), name="coordination")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await first.wait()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        if (
            self._healthy and self._queue and (client := self._client) is not None
        ):  # the last word: others may go on at once
            with contextlib.suppress(*_failures()):
                async with asyncio.timeout(PATIENCE_S):
                    await self._send(client)
        self._healthy = False
        self._broken.set()
        task.cancel()
        await asyncio.wait({task}, timeout=5 * PATIENCE_S)

    def ring(self, keys: Sequence[str]) -> None:
        if self._task is None:
            return
        for key in keys:
            if len(self._queue) >= QUEUE:
                return
            if 0 < len(key) <= MAX_KEY and key.isprintable():
                self._queue[key] = None
        self._news.set()

    async def count(self, key: str, amount: int, limit: int, window_ms: int) -> Counted:
        from redis.exceptions import ResponseError

        client = self._client
        if self._healthy and client is not None:
            name = self._counter + key.encode("utf-8", "surrogatepass")[:MAX_KEY].hex()
            clock = asyncio.get_running_loop().time
            asked_at: float | None = None
            try:
                async with asyncio.timeout(PATIENCE_S), self._turns:
                    asked_at = clock()
                    allowed, left = await _counted(client, name, amount, limit, window_ms)
                    return Counted(bool(allowed), 0 if allowed else max(1, int(left)))
            except ResponseError as error:
                if _is_elsewhere(error):
                    self._broken.set()
                else:
                    self._refused(error)
            except TimeoutError:  # a turn that did not come, or came late, says nothing of Redis
                if asked_at is not None and clock() - asked_at >= PATIENCE_S / 2:
                    self._broken.set()
            except _failures():
                self._broken.set()  # asking again would only make the next caller wait as long
        return self._windows.count(key[:MAX_KEY], amount, limit, window_ms)

    # -- the connection --------------------------------------------------------------------------------------------------------
    async def _hold(self, first: asyncio.Event) -> None:
        attempt = 0
        while self._task is not None:  # a group of tasks that breaks while it is cancelled tells only of the break
            began, why = self._epoch, "a call was not answered"
            try:
                await self._connected(first)
            except ExceptionGroup as group:
                why = _said(group)
            except asyncio.CancelledError:
                # The group's own, which came late because the library held it up: only a close ends this task.
                task = asyncio.current_task()
                if self._task is None or task is None:
                    raise
                while task.cancelling():
                    task.uncancel()
            except Exception as error:  # whatever the library raises: nobody else would begin again
                why = _said(error)
            if self._epoch != began:
                attempt = 0
            self._healthy, self._client = False, None
            self._tell(False, why)
            await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
            attempt += 1

    async def _connected(self, first: asyncio.Event) -> None:
        """Until something breaks, which is raised or returned from."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        client = Redis.from_url(
            self._url,
            socket_timeout=PATIENCE_S,
            socket_connect_timeout=PATIENCE_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._broken.clear()
        self._echo.clear()
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await pubsub.subscribe(self._channel)
            async with asyncio.TaskGroup() as group:
                works = [
                    group.create_task(self._part(work))
                    for work in (self._listen(pubsub), self._probe(client), self._sending(client))
                ]
                await self._writable(client)
                await self._echoed(client)
                self._client, self._healthy = client, True
                self._epoch += 1
                self._tell(True, "")
                if first.is_set():
                    self._missed()
                first.set()
                await self._broken.wait()
                for work in works:
                    work.cancel()
        finally:
            self._healthy = False
            with contextlib.suppress(Exception):  # of a connection that is broken anyway
                async with asyncio.timeout(PATIENCE_S):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
                    await client.aclose()

    async def _part(self, work: Coroutine[Any, Any, None]) -> None:
        """With one part the others end, also one whose cancellation was lost in the library."""
        try:
            await work
        finally:
            self._broken.set()

    async def _listen(self, pubsub: Any) -> None:
        while not self._broken.is_set():
            message = await pubsub.get_message(timeout=PROBE_S)
            data = None if message is None else message.get("data")
            if not isinstance(data, bytes) or len(data) > WORDS_BYTES:
                continue
            origin, *keys = data.decode("utf-8", "replace").split("\n")
            if origin == self._me:
                self._echo.set()
                continue
            for key in keys[:BATCH]:
                if 0 < len(key) <= MAX_KEY:
                    self._heard(key)

    async def _probe(self, client: Redis) -> None:
        while not self._broken.is_set():
            await asyncio.sleep(PROBE_S)
            await self._writable(client)
            await self._echoed(client)

    async def _writable(self, client: Redis) -> None:
        """It is no replica, which is raised."""
        from redis.exceptions import ResponseError

        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await _counted(client, f"{self._counter}{self._me}", 1, 1, 1000)
        except ResponseError as error:
            if _is_elsewhere(error):
                raise
            self._refused(error)

    async def _echoed(self, client: Redis) -> None:
        """Our own word has come back; TimeoutError if it does not."""
        self._echo.clear()
        async with asyncio.timeout(2 * PATIENCE_S):
            await client.publish(self._channel, self._me)
            await self._echo.wait()

    async def _sending(self, client: Redis) -> None:
        while not self._broken.is_set():
            await self._news.wait()
            await self._send(client)

    async def _send(self, client: Redis) -> None:
        self._news.clear()
        while self._queue:
            keys = list(self._queue)[:BATCH]
            for key in keys:
                del self._queue[key]
            await client.publish(self._channel, "\n".join((self._me, *keys)))

    def _refused(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind in self._refusals:
            return
        self._refusals.add(kind)
        self._log(f"coordination: Redis does not count, each worker counts for itself: {_said(error)}")

    def _tell(self, healthy: bool, why: str) -> None:
        if self._told is healthy or (self._told is None and healthy):
            self._told = healthy
            return
        self._told = healthy
        if healthy:
            self._log("coordination: Redis answers again")
        else:
            self._log(f"coordination: Redis is lost, all goes on without it, only slower: {why}")


async def _counted(client: Redis, name: str, amount: int, limit: int, window_ms: int) -> Any:
    script: Any = client.eval(COUNT, 1, name, str(amount), str(limit), str(window_ms))
    return await script


def _is_elsewhere(error: Exception) -> bool:
    """Whether it refuses because another server is to be asked now, which a new connection may lead to."""
    from redis.exceptions import ClusterDownError, ReadOnlyError

    return isinstance(error, ReadOnlyError | ClusterDownError)


def _readable(url: str) -> bool:
    """Whether it is a URL of Redis; one whose password has made a port or a path of what follows it is none."""
    from redis.asyncio.connection import parse_url

    try:
        parse_url(url)
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "unix" or "@" not in f"{parts.path}{parts.query}{parts.fragment}"


def _failures() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError, ValueError)


def _said(error: Exception) -> str:
    """The first of the reasons, in few words."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:200]}" if str(error) else type(error).__name__
