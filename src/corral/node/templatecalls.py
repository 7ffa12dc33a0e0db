"""The part of the node port that is about templates; a base that an instance of the journal stands on is never removed.

Who stands on what is asked at the moment of the removal, when no other can begin: not when the call came.
"""

from __future__ import annotations

import asyncio
from typing import Any

from corral.node.journal import Journal
from corral.node.templates import Templates
from corral.ports.node import Progress

Json = dict[str, Any]


class TemplateCalls:
    """Mixed into `LocalNode`; see `ports.node.Node`."""

    _templates: Templates
    _journal: Journal

    async def templates(self) -> list[Json]:
        return await asyncio.to_thread(self._templates.describe)

    async def ensure_template(self, template: str, progress: Progress | None = None) -> str:
        return (await self._templates.ensure(template, progress)).digest

    async def template_seccomp(self, template: str) -> str:
        return (await self._templates.ensure(template)).seccomp

    async def template(self, name: str) -> Json:
        return await asyncio.to_thread(self._templates.show, name)

    async def build_template(self, name: str, progress: Progress | None = None, *, refresh: bool = False) -> str:
        return (await self._templates.ensure(name, progress, refresh=refresh, current=True)).digest

    async def remove_template(self, name: str, keep: frozenset[str]) -> Json:
        return await asyncio.to_thread(self._templates.remove, name, lambda: keep | self._standing())

    async def sweep_templates(self, keep: frozenset[str]) -> dict[str, int]:
        return await asyncio.to_thread(self._templates.sweep, lambda: keep | self._standing())

    async def bases(self, keep: frozenset[str]) -> Json:
        return await asyncio.to_thread(self._templates.disk_use, keep | self._standing())

    def _standing(self) -> frozenset[str]:
        """Digests of the bases under instances that are not gone yet."""
        return frozenset(str(entry.data.get("template_digest")) for entry in list(self._journal.instances.values()))
