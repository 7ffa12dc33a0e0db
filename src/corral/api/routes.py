"""The API as a table of routes over the services, without a web framework: embedded mode calls `dispatch` directly.

A handler takes the services, the request and the parts of its pattern, and answers a `Reply` or raises `CorralError`.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Literal

from corral.api import expiry, files, identity, leases, pausing, queue, sse, templates
from corral.api.calls import (
    ANY_KEY,
    ANYBODY,
    Json,
    Reply,
    Request,
    Route,
    choice_of,
    document_of,
    flag_of,
    idempotency_of,
    ident_of,
    integer_of,
    object_of,
    seconds_of,
    seen_by,
    until_stop,
)
from corral.api.problems import MAX_BODY, problem, read_body
from corral.api.rate import check_rate
from corral.domain.identity import ADMIN, READ, RUN, check_may
from corral.domain.quantities import shown
from corral.domain.records import RunRecord
from corral.domain.result import refusal
from corral.errors import CorralError
from corral.services import readiness
from corral.services.control import Services
from corral.services.events import Caller, StreamEvent

__all__ = ["ROUTES", "Reply", "Request", "dispatch", "match"]

DEFAULT_WAIT_S = 60.0
MAX_OFFSET = 10**11
_IDENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
PRIME_S = 0.3
"""How long a stream that resumes is given to say that its cursor is gone, before the answer begins."""


async def dispatch(services: Services, request: Request) -> Reply:
    """Find the route, run it; every error becomes a problem document."""
    try:
        route, parts = match(request.method, request.path)
        check_scope(route, request.caller)
        if route.needs != ANYBODY:
            await check_rate(services, request.caller)
        if route.starts:
            services.core.check_accepting()
        if "tenant" in request.query and route.is_tenants_own:
            request = replace(request, caller=await identity.acting(services, request, route))
        return replace(await route.handler(services, request, **parts), seen=seen_by(services, request.caller))
    except CorralError as error:
        status, document, headers = problem(seen_by(services, request.caller)(error))
        return Reply(status, document, headers, media_type="application/problem+json")
    except Exception as error:
        services.core.log(f"unexpected: {request.method} {request.path}: {traceback.format_exc()}")
        status, document, headers = problem(
            CorralError("infra_error", f"an unexpected {type(error).__name__} in the service", retryable=False)
        )
        return Reply(status, document, headers, media_type="application/problem+json")


def check_scope(route: Route, caller: Caller) -> None:
    """`forbidden` unless the caller's key has what the route needs; said before anything is looked for, so of any id alike."""
    if route.needs not in (ANYBODY, ANY_KEY):
        check_may(caller.scopes, route.needs)


def match(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The route for a percent-encoded path; `not_found`, or `method_not_allowed` with what the path takes.

    HEAD is answered as GET where it has no route of its own; the wire leaves the body out.
    """
    segments = path.strip("/").split("/")
    allowed: dict[str, tuple[Route, dict[str, str]]] = {}
    for route in ROUTES:
        parts = _parts(route.pattern, segments)
        if parts is None:
            continue
        if route.method == method:
            return route, parts
        allowed.setdefault(route.method, (route, parts))
    if not allowed:
        raise CorralError("not_found", f"there is no {shown(path)}", hint="GET /openapi.json lists the paths")
    if method == "HEAD" and "GET" in allowed:
        return allowed["GET"]
    takes = sorted({*allowed, "HEAD"} if "GET" in allowed else allowed)
    hint = f"use {' or '.join(takes)}"
    raise CorralError("method_not_allowed", f"{shown(path)} does not take {shown(method)}", hint=hint, allow=takes)


def _parts(pattern: str, segments: list[str]) -> dict[str, str] | None:
    wanted = pattern.strip("/").split("/")
    rest = wanted[-1].endswith(":path}")
    if len(segments) < len(wanted) or (len(segments) > len(wanted) and not rest):
        return None
    found: dict[str, str] = {}
    for position, want in enumerate(wanted):
        if want.endswith(":path}"):
            found[want[1:-6]] = _unquote("/".join(segments[position:]))
        elif want.startswith("{"):
            if _IDENT.fullmatch(segments[position]) is None:
                return None  # not an id, so there is nothing of that name
            found[want[1:-1]] = segments[position]
        elif want != segments[position]:
            return None
    return found


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote_to_bytes

    return unquote_to_bytes(text).decode("utf-8", "surrogateescape")


def _stream_name(request: Request) -> Literal["stdout", "stderr"]:
    return "stderr" if choice_of(request, "stream", ("stdout", "stderr"), "stdout") == "stderr" else "stdout"


def _view(request: Request) -> tuple[bool, int | None]:
    """(with output, agent view's budget in characters or None)."""
    output = choice_of(request, "output", ("full", "none"), "full") == "full"
    if choice_of(request, "view", ("full", "agent"), "full") == "agent":
        return output, integer_of(request, "chars", 8000, 200, 1_000_000)
    return output, None


async def _stream(
    services: Services, request: Request, open_at: Callable[[str | None], AsyncIterator[StreamEvent]]
) -> Reply:
    text = choice_of(request, "encoding", ("text", "base64"), "text") == "text"
    start = sse.Position.parse(request.query.get("cursor") or request.headers.get("last-event-id"))
    source = until_stop(services, open_at(start.node))
    if (
        start.node is not None and request.method != "HEAD"
    ):  # whose events nobody asks for, so that nothing would end it
        source = await _primed(source)
    return Reply(events=sse.position(source, start, whole=text), text=text, media_type="text/event-stream")


async def _primed(source: AsyncIterator[StreamEvent]) -> AsyncIterator[StreamEvent]:
    """The same iterator, after an error that comes at once has been raised here (410 must be the answer's status)."""
    first = asyncio.ensure_future(anext(source, None))
    try:
        done, _ = await asyncio.wait({first}, timeout=PRIME_S)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if done and first.exception() is not None:
        await first

    async def rest() -> AsyncIterator[StreamEvent]:
        try:
            event = await first
            while event is not None:
                yield event
                event = await anext(source, None)
        finally:
            first.cancel()
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    return rest()


# -- runs ----------------------------------------------------------------------------------------------------------------------
async def _run_document(
    services: Services, request: Request, run: RunRecord, output: bool = True, view: int | None = None
) -> Json:
    document = await services.documents.run(run, output=output, view=view, pieces=request.pieces)
    return await queue.whole(services, run, document)


async def submit_run(services: Services, request: Request) -> Reply:
    wait = seconds_of(request, "wait", DEFAULT_WAIT_S)
    output, view = _view(request)
    document = await document_of(request)
    key = idempotency_of(request, "POST /v1/runs", services.queue.compared(document))
    run = await services.runs.submit(request.caller, document, key, wait)
    answer = await _run_document(services, request, run, output, view)
    location = {"Location": f"/v1/runs/{run.run_id}"}
    return Reply(200, answer) if run.state == "finished" else Reply(202, answer, location)


async def list_runs(services: Services, request: Request) -> Reply:
    limit = integer_of(request, "limit", 100, 1, 1000)
    runs, following = await services.runs.page(request.caller, after=ident_of(request, "after"), limit=limit)
    return Reply(200, {"items": [services.documents.run_summary(r) for r in runs], "next": following})


async def get_run(services: Services, request: Request, run_id: str) -> Reply:
    output, view = _view(request)
    run = await services.runs.wait(request.caller, run_id, seconds_of(request, "wait", 0.0))
    return Reply(200, await _run_document(services, request, run, output, view))


async def cancel_run(services: Services, request: Request, run_id: str) -> Reply:
    wait = seconds_of(request, "wait", 10.0)
    await services.runs.cancel(request.caller, run_id, "cancelled")
    run = await services.runs.wait(request.caller, run_id, wait)
    answer = await _run_document(services, request, run)
    return Reply(200 if run.state == "finished" else 202, answer)


async def stream_run(services: Services, request: Request, run_id: str) -> Reply:
    await services.runs.get(request.caller, run_id)
    return await _stream(services, request, lambda cursor: services.runs.stream(request.caller, run_id, cursor))


async def run_logs(services: Services, request: Request, run_id: str) -> Reply:
    stream = _stream_name(request)
    raw = await services.runs.logs(request.caller, run_id, stream, follow=flag_of(request, "follow"))
    return Reply(raw=raw, media_type="application/octet-stream")


async def run_artifact(services: Services, request: Request, run_id: str, path: str) -> Reply:
    size, raw = await services.runs.artifact(request.caller, run_id, path)
    return Reply(raw=raw, media_type="application/octet-stream", headers={"Content-Length": str(size)})


# -- sandboxes -----------------------------------------------------------------------------------------------------------------
async def create_sandbox(services: Services, request: Request) -> Reply:
    document = await object_of(request)
    key = idempotency_of(request, "POST /v1/sandboxes", document)
    view = await services.sandboxes.create(request.caller, document, key)
    return Reply(201, services.documents.sandbox(view), {"Location": f"/v1/sandboxes/{view.sandbox.sandbox_id}"})


async def list_sandboxes(services: Services, request: Request) -> Reply:
    limit = integer_of(request, "limit", 100, 1, 1000)
    views, following = await services.sandboxes.page(
        request.caller, after=ident_of(request, "after"), limit=limit, ended=flag_of(request, "all")
    )
    return Reply(200, {"items": [services.documents.sandbox(v) for v in views], "next": following})


async def get_sandbox(services: Services, request: Request, sandbox_id: str) -> Reply:
    view, history = await services.sandboxes.inspect(request.caller, sandbox_id)
    return Reply(200, services.documents.inspect(view, history))


async def delete_sandbox(services: Services, request: Request, sandbox_id: str) -> Reply:
    wait, lease = seconds_of(request, "wait", DEFAULT_WAIT_S), request.headers.get("corral-lease")
    view = await services.sandboxes.delete(request.caller, sandbox_id, wait, lease)
    return Reply(200 if view.sandbox.state == "terminated" else 202, services.documents.sandbox(view))


async def start_exec(services: Services, request: Request, sandbox_id: str) -> Reply:
    document = await document_of(request)
    output, view = _view(request)
    wait = seconds_of(request, "wait", DEFAULT_WAIT_S) if "wait" in request.query else None
    key = idempotency_of(request, f"POST /v1/sandboxes/{sandbox_id}/execs", document)
    fence = request.headers.get("corral-lease")
    record = await services.sandboxes.start_exec(request.caller, sandbox_id, document, key, fence, wait, DEFAULT_WAIT_S)
    refused = None if record.result is None else refusal(record.result["reason"], record.result["hint"])
    if refused is not None:
        raise refused
    answer = await services.documents.exec(record, output=output, view=view, pieces=request.pieces)
    location = {"Location": f"/v1/execs/{record.exec_id}"}
    return Reply(200 if record.result is not None else 202, answer, location)


async def get_archive(services: Services, request: Request, sandbox_id: str) -> Reply:
    path, user = files.path_of(request.query), files.user_of(request)
    raw = await services.sandboxes.get_tar(request.caller, sandbox_id, path, user)
    return Reply(raw=raw, media_type="application/x-tar")


async def put_archive(services: Services, request: Request, sandbox_id: str) -> Reply:
    path, user = files.path_of(request.query), files.user_of(request)
    lease = request.headers.get("corral-lease")
    await services.sandboxes.put_tar(request.caller, sandbox_id, _blocks(request.body), path, user, lease)
    return Reply(200, {})


async def _blocks(body: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    async for block in body:
        yield block


async def list_execs(services: Services, request: Request, sandbox_id: str) -> Reply:
    records = await services.sandboxes.list_execs(request.caller, sandbox_id)
    items = [await services.documents.exec(record, output=False) for record in records]
    return Reply(200, {"items": items, "next": None})


async def sandbox_logs(services: Services, request: Request, sandbox_id: str) -> Reply:
    stream = _stream_name(request)
    raw = await services.sandboxes.sandbox_logs(request.caller, sandbox_id, stream, follow=flag_of(request, "follow"))
    return Reply(raw=raw, media_type="application/octet-stream")


# -- execs ---------------------------------------------------------------------------------------------------------------------
async def get_exec(services: Services, request: Request, exec_id: str) -> Reply:
    output, view = _view(request)
    record = await services.sandboxes.wait_exec(request.caller, exec_id, seconds_of(request, "wait", 0.0))
    return Reply(200, await services.documents.exec(record, output=output, view=view, pieces=request.pieces))


async def stream_exec(services: Services, request: Request, exec_id: str) -> Reply:
    await services.sandboxes.get_exec(request.caller, exec_id)
    return await _stream(services, request, lambda cursor: services.sandboxes.stream(request.caller, exec_id, cursor))


async def exec_logs(services: Services, request: Request, exec_id: str) -> Reply:
    stream = _stream_name(request)
    raw = await services.sandboxes.logs(request.caller, exec_id, stream, follow=flag_of(request, "follow"))
    return Reply(raw=raw, media_type="application/octet-stream")


async def exec_artifact(services: Services, request: Request, exec_id: str, path: str) -> Reply:
    size, raw = await services.sandboxes.artifact(request.caller, exec_id, path)
    return Reply(raw=raw, media_type="application/octet-stream", headers={"Content-Length": str(size)})


async def cancel_exec(services: Services, request: Request, exec_id: str) -> Reply:
    lease = request.headers.get("corral-lease")
    record = await services.sandboxes.cancel_exec(request.caller, exec_id, "cancelled", lease)
    return Reply(200, await services.documents.exec(record, pieces=request.pieces))


async def signal_exec(services: Services, request: Request, exec_id: str) -> Reply:
    document, lease = await document_of(request), request.headers.get("corral-lease")
    await services.sandboxes.signal_exec(request.caller, exec_id, document, lease)
    return Reply(200, {})


async def resize_exec(services: Services, request: Request, exec_id: str) -> Reply:
    document, lease = await document_of(request), request.headers.get("corral-lease")
    await services.sandboxes.resize_exec(request.caller, exec_id, document, lease)
    return Reply(200, {})


async def stdin_exec(services: Services, request: Request, exec_id: str) -> Reply:
    data = await read_body(request.body, MAX_BODY)
    offset = integer_of(request, "offset", 0, 0, MAX_OFFSET) if "offset" in request.query else None
    lease = request.headers.get("corral-lease")
    taken = await services.sandboxes.stdin_exec(request.caller, exec_id, data, flag_of(request, "eof"), offset, lease)
    return Reply(200, {"open": taken})


async def exec_socket(services: Services, request: Request, exec_id: str) -> Reply:
    await services.sandboxes.get_exec(request.caller, exec_id)
    hint = "open it as a WebSocket, or use /stream, /stdin, /resize and /signal"
    raise CorralError("bad_request", "this path is a WebSocket", hint=hint)


# -- the installation ----------------------------------------------------------------------------------------------------------
async def collect_garbage(services: Services, request: Request) -> Reply:
    return Reply(200, await services.upkeep.gc(unknown=flag_of(request, "unknown")))


async def doctor(services: Services, request: Request) -> Reply:
    return Reply(
        200, await services.upkeep.doctor(fresh=flag_of(request, "fresh"), security=flag_of(request, "security"))
    )


async def healthz(services: Services, request: Request) -> Reply:
    return Reply(200, {"status": "ok"})


async def readyz(services: Services, request: Request) -> Reply:
    if services.core.draining:
        return Reply(503, {"status": "stopping", "missing": []}, {"Retry-After": "1"})
    seen = await readiness.look(services.core)
    more = {"missing": list(seen.missing), **({"warnings": list(seen.warnings)} if seen.warnings else {})}
    if seen.missing:
        return Reply(503, {"status": "not ready", **more}, {"Retry-After": "1"})
    default, _ = await services.upkeep.default_runtime()
    return Reply(200 if default else 503, {"status": "ready" if default else "no runtime", **more})


async def openapi(services: Services, request: Request) -> Reply:
    from corral.api.openapi import document

    return Reply(200, await asyncio.to_thread(document))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/runs", submit_run, starts=True),
    Route("GET", "/v1/runs", list_runs, of_tenant=True),
    Route("GET", "/v1/runs/{run_id}", get_run, of_tenant=True),
    Route("POST", "/v1/runs/{run_id}/cancel", cancel_run, of_tenant=True),
    Route("GET", "/v1/runs/{run_id}/stream", stream_run),
    Route("GET", "/v1/runs/{run_id}/logs", run_logs),
    Route("GET", "/v1/runs/{run_id}/artifacts/{path:path}", run_artifact),
    Route("POST", "/v1/sandboxes", create_sandbox, starts=True),
    Route("GET", "/v1/sandboxes", list_sandboxes, of_tenant=True),
    Route("GET", "/v1/sandboxes/{sandbox_id}", get_sandbox, of_tenant=True),
    Route("DELETE", "/v1/sandboxes/{sandbox_id}", delete_sandbox, of_tenant=True),
    Route("POST", "/v1/sandboxes/{sandbox_id}/execs", start_exec, starts=True),
    Route("GET", "/v1/sandboxes/{sandbox_id}/execs", list_execs, of_tenant=True),
    Route("GET", "/v1/sandboxes/{sandbox_id}/logs", sandbox_logs),
    Route("GET", "/v1/sandboxes/{sandbox_id}/files/archive", get_archive),
    Route("PUT", "/v1/sandboxes/{sandbox_id}/files/archive", put_archive),
    Route("GET", "/v1/sandboxes/{sandbox_id}/files", files.read_file),
    Route("HEAD", "/v1/sandboxes/{sandbox_id}/files", files.head_file),
    Route("PUT", "/v1/sandboxes/{sandbox_id}/files", files.write_file),
    Route("DELETE", "/v1/sandboxes/{sandbox_id}/files", files.remove_file),
    Route("GET", "/v1/sandboxes/{sandbox_id}/files/stat", files.stat_file),
    Route("GET", "/v1/sandboxes/{sandbox_id}/files/list", files.list_files),
    Route("POST", "/v1/sandboxes/{sandbox_id}/files/move", files.move_file),
    Route("POST", "/v1/sandboxes/{sandbox_id}/files/mkdir", files.make_directory),
    Route("GET", "/v1/sandboxes/{sandbox_id}/files/watch", files.watch_files),
    Route("GET", "/v1/execs/{exec_id}", get_exec, of_tenant=True),
    Route("GET", "/v1/execs/{exec_id}/stream", stream_exec),
    Route("GET", "/v1/execs/{exec_id}/logs", exec_logs),
    Route("GET", "/v1/execs/{exec_id}/artifacts/{path:path}", exec_artifact),
    Route("POST", "/v1/execs/{exec_id}/cancel", cancel_exec, of_tenant=True),
    Route("POST", "/v1/execs/{exec_id}/signal", signal_exec),
    Route("POST", "/v1/execs/{exec_id}/resize", resize_exec),
    Route("POST", "/v1/execs/{exec_id}/stdin", stdin_exec),
    Route("GET", "/v1/execs/{exec_id}/ws", exec_socket, scope=RUN),
    Route("GET", "/v1/templates", templates.list_templates, scope=READ),
    Route("POST", "/v1/templates", templates.build_template, starts=True, scope=ADMIN),
    Route("GET", "/v1/templates/{name}", templates.get_template, scope=READ),
    Route("DELETE", "/v1/templates/{name}", templates.delete_template, scope=ADMIN),
    *identity.ROUTES,
    *leases.ROUTES,
    *queue.ROUTES,
    *pausing.ROUTES,
    *expiry.ROUTES,
    Route("POST", "/v1/gc", collect_garbage, scope=ADMIN),
    Route("GET", "/v1/doctor", doctor, scope=ADMIN),
    Route("GET", "/openapi.json", openapi, scope=ANY_KEY),
    Route("GET", "/healthz", healthz, scope=ANYBODY),
    Route("GET", "/readyz", readyz, scope=ANYBODY),
)
