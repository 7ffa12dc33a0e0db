"""The calls behind both faces of the SDK, written once: waiting, cancelling, input at its offset, pages. Documents in, documents out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from corral.client.line import Event, Json, Line, Params, new_key
from corral.client.transport import quote
from corral.errors import CorralError

WAIT_S = 60.0
"""The longest wait that one request asks for."""
LAST_WORD_S = 5.0
"""How long an interrupted call takes to end what it had started."""
INPUT_BLOCK = 256 * 1024


class Calls:
    """Over one line."""

    def __init__(self, line: Line) -> None:
        self.line = line

    # -- what runs, a run or an exec ---------------------------------------------------------------------------------------------
    async def to_its_end(self, path: str, at: str, document: Json, view: int | None) -> Json:
        """POST to `path`, wait for the result, however long. Interrupted: what was started is cancelled, and nothing is left waiting.

        `at`: the path below which the started thing is found by its id.
        """
        key = new_key()
        params = viewed(view)
        known: str | None = None
        try:
            answer = await self.line.request(
                "POST", path, document, {**params, "wait": WAIT_S}, {"Idempotency-Key": key}
            )
            known = answer["id"]
            while answer["result"] is None:
                answer = await self.line.request("GET", f"{at}/{known}", None, {**params, "wait": WAIT_S})
            return answer
        except CorralError:
            raise
        except BaseException:
            await self.line.effects.finish(self._end(path, at, document, key, known), LAST_WORD_S)
            raise

    async def _end(self, path: str, at: str, document: Json, key: str, known: str | None) -> None:
        line = self.line.hurried(LAST_WORD_S)
        if known is None:  # the same request once more tells its id, whether it had arrived or not
            answer = await line.request("POST", path, document, {"wait": 0, "output": "none"}, {"Idempotency-Key": key})
            known = str(answer["id"])
        await line.request("POST", f"{at}/{known}/cancel", None, {"wait": 0})

    async def start(self, path: str, at: str, document: Json) -> Json:
        """POST without waiting. Interrupted before the id is known: what was started is cancelled."""
        key = new_key()
        try:
            return await self.line.request("POST", path, document, {"wait": 0}, {"Idempotency-Key": key})
        except CorralError:
            raise
        except BaseException:
            await self.line.effects.finish(self._end(path, at, document, key, None), LAST_WORD_S)
            raise

    async def look(self, path: str) -> Json:
        """As it is now."""
        return await self.line.request("GET", path)

    async def wait(self, path: str, timeout_s: float | None, view: int | None = None) -> Json:
        """The document with its result; TimeoutError after `timeout_s`, which changes nothing: wait again."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = WAIT_S if until is None else min(WAIT_S, max(0.0, until - time.monotonic()))
            answer = await self.line.request("GET", path, None, {**viewed(view), "wait": round(left, 3)})
            if answer["result"] is not None:
                return answer
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{answer['id']} has not ended within {timeout_s} s; wait again, or cancel it")

    async def cancel(self, path: str) -> Json:
        """End it; the document, with its result unless it takes longer than the service waits."""
        return await self.line.request("POST", f"{path}/cancel")

    async def watched(self, path: str, at: str, document: Json) -> AsyncGenerator[Event, None]:
        """Start at the first event; the events. Closed or interrupted before the end: what was started is cancelled."""
        key = new_key()
        known: str | None = None
        ended = False
        try:
            answer = await self.line.request(
                "POST", path, document, {"wait": 0, "output": "none"}, {"Idempotency-Key": key}
            )
            known = str(answer["id"])
            events = self.line.stream(f"{at}/{known}/stream")
            try:
                async for event in events:
                    ended = event.kind == "ended"
                    yield event
            finally:
                await events.aclose()
        except CorralError:
            ended = True
            raise
        finally:
            if not ended:
                await self.line.effects.finish(self._end(path, at, document, key, known), LAST_WORD_S)

    # -- an exec's input ---------------------------------------------------------------------------------------------------------
    async def write(
        self, exec_id: str, data: bytes, eof: bool, offset: int | None
    ) -> AsyncGenerator[tuple[int, bool], None]:
        """Hand `data` over in blocks; yields how many bytes have been accepted so far, and whether the program reads on.

        With `offset` (of the first byte in the whole input) a block that was cut off is sent again: what has arrived is not
        doubled. Without it a block that was cut off is an error.
        """
        path = f"/v1/execs/{quote(exec_id)}/stdin"
        at = 0
        while True:
            block = data[at : at + INPUT_BLOCK]
            last = at + len(block) == len(data)
            params: dict[str, Any] = {"eof": True if eof and last else None}
            if offset is not None:
                params["offset"] = offset + at
            try:
                answer = await self.line.request("POST", path, None, params, raw=block, once=offset is None)
            except CorralError as error:
                if at == 0 or error.code != "conflict":
                    raise
                yield at, False  # it has ended after it took the blocks before
                return
            at += len(block)
            reads = bool(answer.get("open", True))
            yield at, reads
            if last or not reads:
                return

    async def signal(self, exec_id: str, signal: str | int) -> None:
        """Once: not repeated when nobody knows whether it arrived."""
        await self.line.request("POST", f"/v1/execs/{quote(exec_id)}/signal", {"signal": signal}, once=True)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        await self.line.request("POST", f"/v1/execs/{quote(exec_id)}/resize", {"rows": rows, "cols": cols})

    # -- sandboxes ---------------------------------------------------------------------------------------------------------------
    async def create(self, document: Json) -> Json:
        """A sandbox. Interrupted before its id is known: the one that the request may have made is deleted."""
        key = new_key()
        try:
            return await self.line.request("POST", "/v1/sandboxes", document, None, {"Idempotency-Key": key})
        except CorralError:
            raise
        except BaseException:
            await self.line.effects.finish(self._unmake(document, key), LAST_WORD_S)
            raise

    async def _unmake(self, document: Json, key: str) -> None:
        line = self.line.hurried(LAST_WORD_S)
        made = await line.request("POST", "/v1/sandboxes", document, None, {"Idempotency-Key": key})
        await line.request("DELETE", f"/v1/sandboxes/{made['id']}", None, {"wait": 0})

    async def extend(
        self, sandbox_id: str, ttl_s: float | Literal["none"] | None, idle_timeout_s: float | Literal["none"] | None
    ) -> Json:
        """Move its ends; None = stays."""
        ends = {"ttl_s": ttl_s, "idle_timeout_s": idle_timeout_s}
        document = {name: value for name, value in ends.items() if value is not None}
        return await self.line.request("PATCH", f"/v1/sandboxes/{quote(sandbox_id)}", document)

    async def turn(self, sandbox_id: str, word: str) -> Json:
        """`pause` or `resume`: what is so already stays so, and one that is asked for again after a broken connection is the same."""
        return await self.line.request("POST", f"/v1/sandboxes/{quote(sandbox_id)}/{word}")

    async def delete(self, sandbox_id: str) -> Json:
        """End it and wait until it is terminated."""
        path = f"/v1/sandboxes/{quote(sandbox_id)}"
        while True:
            answer = await self.line.request("DELETE", path, None, {"wait": WAIT_S})
            if answer["state"] == "terminated":
                return answer

    # -- all ---------------------------------------------------------------------------------------------------------------------
    async def pages(self, path: str, params: Params | None = None, limit: int | None = None) -> list[Json]:
        """All items of a list, or the first `limit`."""
        items: list[Json] = []
        after: str | None = None
        while True:
            count = 1000 if limit is None else min(1000, limit - len(items))
            page = await self.line.request("GET", path, None, {**(params or {}), "after": after, "limit": count})
            items += page["items"]
            after = page["next"]
            if after is None or (limit is not None and len(items) >= limit):
                return items

    async def artifact(self, path: str, name: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        inner = "/".join(quote(part) for part in name.strip("/").split("/"))
        parts = [block async for block in self.line.download(f"{path}/artifacts/{inner}")]
        return b"".join(parts)


def viewed(view: int | None) -> dict[str, Any]:
    """Parameters that ask for the agent view in `view` characters."""
    return {} if view is None else {"view": "agent", "chars": view}
