"""Handlers about the queue and webhooks, and what they add to the document of a run."""

from __future__ import annotations

from typing import Any

from corral.api.calls import Reply, Request, Route, integer_of
from corral.domain.identity import READ, TENANT
from corral.domain.records import RunRecord
from corral.services.control import Services

Json = dict[str, Any]


async def whole(services: Services, run: RunRecord, document: Json) -> Json:
    """The document of a run with where it stands in the queue, and what became of its webhook."""
    document["queue"] = await services.queue.of_run(run)
    document["webhook"] = await services.webhooks.of_run(run)
    return document


async def show_queue(services: Services, request: Request) -> Reply:
    limit = integer_of(request, "limit", 100, 1, 1000)
    return Reply(200, await services.queue.show(request.caller, limit))


async def get_secret(services: Services, request: Request) -> Reply:
    return Reply(200, await services.webhooks.secret(request.caller))


async def rotate_secret(services: Services, request: Request) -> Reply:
    return Reply(200, await services.webhooks.rotate(request.caller))


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/queue", show_queue, scope=READ, of_tenant=True),
    Route("GET", "/v1/webhooks/secret", get_secret, scope=TENANT),
    Route("POST", "/v1/webhooks/secret/rotate", rotate_secret, scope=TENANT),
)
