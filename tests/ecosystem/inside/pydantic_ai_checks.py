"""pydantic-ai's own suite for workspaces, over the plug. Runs in the environment of `pydantic-ai.lock`, started by `test_pydantic_ai.py`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from pydantic_ai.workspaces import WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from corral import AsyncCorral
from corral.integrations.pydantic_ai import CorralBackend


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TestCorralBackend(WorkspaceBackendSuite):
    """Each test has a client of its own; every sandbox that a test made is deleted after it."""

    @pytest.fixture
    async def client(self, anyio_backend: str) -> AsyncIterator[AsyncCorral]:
        async with AsyncCorral() as client:
            yield client

    @pytest.fixture
    async def fresh_backend(self, client: AsyncCorral) -> AsyncIterator[Callable[[], CorralBackend]]:
        made: list[CorralBackend] = []

        def make() -> CorralBackend:
            made.append(CorralBackend(client, runtime=os.environ["ECOSYSTEM_RUNTIME"]))
            return made[-1]

        yield make
        for backend in made:
            await backend.delete()

    @pytest.fixture
    def backend(self, fresh_backend: Callable[[], CorralBackend]) -> CorralBackend:
        return fresh_backend()

    @pytest.fixture
    def attach_backend(self, client: AsyncCorral) -> Callable[[WorkspaceRef], CorralBackend]:
        return lambda ref: CorralBackend(client, ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[CorralBackend], Awaitable[None]]:
        return lambda backend: backend.delete()
