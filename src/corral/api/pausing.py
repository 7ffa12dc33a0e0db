"""Handlers that pause a sandbox and let it go on."""

from __future__ import annotations

from corral.api.calls import Reply, Request, Route
from corral.services.control import Services


async def pause(services: Services, request: Request, sandbox_id: str) -> Reply:
    """The sandbox, paused. Again: the same."""
    view = await services.pausing.pause(request.caller, sandbox_id, request.headers.get("corral-lease"))
    return Reply(200, services.documents.sandbox(view))


async def resume(services: Services, request: Request, sandbox_id: str) -> Reply:
    """The sandbox, in the state in which it was paused. Again: as it is."""
    view = await services.pausing.resume(request.caller, sandbox_id, request.headers.get("corral-lease"))
    return Reply(200, services.documents.sandbox(view))


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/sandboxes/{sandbox_id}/pause", pause),
    Route("POST", "/v1/sandboxes/{sandbox_id}/resume", resume),
)
