"""The application behind FastAPI: the same table of routes, with a schema at /openapi.json. For a server; embedded mode needs none."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from starlette.requests import Request as WebRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corral.api.asgi import Application
from corral.api.routes import ROUTES
from corral.services.control import Services

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]


class _Through(Response):
    """Leaves the whole call to the application below."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


def create_app(services: Services, *, key: str | None = None) -> FastAPI:
    """The FastAPI application. With `key`, each call but the health checks needs `Authorization: Bearer KEY`."""
    app = FastAPI(title="Corral", version=version("corral"), docs_url=None, redoc_url=None)
    application = Application(services, key)

    async def call(request: WebRequest) -> Response:
        return _Through(application)

    for route in ROUTES:
        name = f"{route.method.lower()} {route.pattern}"
        app.add_api_route(
            route.pattern, call, methods=[route.method], response_model=None, name=name, operation_id=name
        )
    app.add_route("/{rest:path}", call, methods=METHODS, include_in_schema=False)
    return app
