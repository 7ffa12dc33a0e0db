"""Templates as the operator sees them: what there is, building, removing. Recipes are the operator's; a caller names them only.

A build goes on when the call that began it gives up; whoever asks for the same template joins it, but a refresh that comes during a
plain build, which may have read what is to be read anew, follows it. How far it is, and why the last one failed, is known while
this owner lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from corral.domain.records import SandboxView
from corral.errors import CorralError
from corral.services.control import Core

Json = dict[str, Any]


@dataclass
class _Build:
    refresh: bool
    task: asyncio.Task[str] | None = None
    text: str = ""
    part: float | None = None
    error: CorralError | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


class Templates:
    """See the module docstring. `living` gives every sandbox that is not terminated."""

    def __init__(self, core: Core, living: Callable[[], Awaitable[list[SandboxView]]]) -> None:
        self._core = core
        self._living = living
        self._builds: dict[str, _Build] = {}

    async def every(self) -> list[Json]:
        """All templates, by name."""
        return [self._with_state(known) for known in await self._core.node.templates()]

    async def get(self, name: str, wait_s: float = 0.0, tenant_id: str | None = None) -> Json:
        """One with all that is known of it; a build that runs is waited for at most `wait_s`. `not_found`.

        `tenant_id`: as this tenant may see it, without the sandboxes of others, and where on the host it lies.
        """
        await self._wait(self._builds.get(name), wait_s)
        document = self._with_state(await self._core.node.template(name))
        users = [view.sandbox for view in await self._living() if view.sandbox.template_id == name]
        document["sandboxes"] = [user.sandbox_id for user in users if tenant_id in (None, user.tenant_id)]
        return document if tenant_id is None else {**document, "path": None}

    async def build(self, name: str, *, refresh: bool, wait_s: float) -> Json:
        """Begin a build, or join the one that runs, and wait for it at most `wait_s`; raises why it failed while waited for."""
        await self._core.node.template(name)  # not_found before anything begins
        known = self._builds.get(name)
        before = known.task if known is not None and known.running else None
        if known is None or before is None or (refresh and not known.refresh):
            build = self._builds[name] = _Build(refresh)
            build.task = self._core.spawn(self._run(name, build, before), f"template {name}")
        joined = self._builds[name]
        await self._wait(joined, wait_s)
        if joined.error is not None:
            raise joined.error
        return await self.get(name)

    async def remove(self, name: str) -> Json:
        """Its base, and its recipe unless it is shipped; `template_in_use` names the sandboxes that have it."""
        await self._core.node.template(name)
        build = self._builds.get(name)
        if build is not None and build.running:
            raise CorralError("conflict", f"the template {name} is being built", hint="wait for the build")
        living = await self._living()
        users = [view.sandbox.sandbox_id for view in living if view.sandbox.template_id == name]
        if users:
            raise CorralError(
                "template_in_use",
                f"{len(users)} {'sandbox uses' if len(users) == 1 else 'sandboxes use'} the template {name}",
                hint=f"remove first: {' '.join(users[:10])}",
                sandboxes=users[:100],
            )
        self._builds.pop(name, None)
        return await self._core.node.remove_template(name, _digests(living))

    async def sweep(self) -> dict[str, int]:
        """Remove bases that nobody needs any more; -> counts without zeros."""
        counts = await self._core.node.sweep_templates(_digests(await self._living()))
        return {kind: count for kind, count in counts.items() if count}

    async def bases(self) -> Json:
        """Disk use of all bases."""
        return await self._core.node.bases(_digests(await self._living()))

    async def _run(self, name: str, build: _Build, before: asyncio.Task[str] | None) -> str:
        def progress(text: str, part: float | None) -> None:
            build.text, build.part = text, part
            if self._core.progress is not None:
                self._core.progress(text, part)

        if before is not None:
            build.text = f"template {name}: waiting for the build that runs"
            await asyncio.wait({before})
        try:
            return await self._core.node.build_template(name, progress, refresh=build.refresh)
        except CorralError as error:
            build.error = error
            return ""
        except Exception as error:  # whoever asks later must not take it for a build that went well
            told = f"the build of {name} failed: {type(error).__name__}: {error}"
            self._core.log(told)
            build.error = CorralError("infra_error", told, hint="this is a fault of Corral")
            return ""

    async def _wait(self, build: _Build | None, wait_s: float) -> None:
        if build is None or build.task is None or not build.running or wait_s <= 0:
            return
        stopping = asyncio.ensure_future(self._core.departing.wait())
        try:
            await asyncio.wait({build.task, stopping}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        self._core.check_open()

    def _with_state(self, known: Json) -> Json:
        name = str(known["name"])
        build = self._builds.get(name)
        state: Json | None = None
        if build is not None and build.running:
            state = {"state": "building", "text": build.text, "part": build.part, "error": None}
        elif build is not None and build.error is not None:
            state = {"state": "failed", "text": build.text, "part": None, "error": build.error.to_problem()}
        return {**known, "allowed": self._core.policy.template_rule(name) is not None, "build": state}


def _digests(views: list[SandboxView]) -> frozenset[str]:
    return frozenset(view.sandbox.template_digest for view in views)
