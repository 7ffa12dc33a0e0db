"""`c.templates` of both clients: what sandboxes are made from. Documents are those of the API."""

from __future__ import annotations

from corral.client.calls import Calls
from corral.client.effects import drive
from corral.client.line import Json
from corral.client.transport import quote
from corral.errors import CorralError

AT = "/v1/templates"
LOOK_S = 30.0


class TemplateSteps:
    """The calls, for whatever effects the line has."""

    def __init__(self, calls: Calls) -> None:
        self._line = calls.line

    async def every(self) -> list[Json]:
        return list((await self._line.request("GET", AT))["items"])

    async def get(self, name: str) -> Json:
        return await self._line.request("GET", f"{AT}/{quote(name)}")

    async def build(self, name: str, refresh: bool) -> Json:
        document = await self._line.request("POST", AT, {"name": name, "refresh": refresh}, {"wait": LOOK_S})
        while (state := document["build"]) is not None and state["state"] == "building":
            document = await self._line.request("GET", f"{AT}/{quote(name)}", None, {"wait": LOOK_S})
        if state is not None:
            raise CorralError.from_problem(state["error"])
        if document["digest"] is None:
            raise CorralError("infra_error", f"the build of {name} was interrupted", hint="build it again")
        return document

    async def delete(self, name: str) -> Json:
        return await self._line.request("DELETE", f"{AT}/{quote(name)}")


class Templates:
    """`c.templates`."""

    def __init__(self, calls: Calls) -> None:
        self._steps = TemplateSteps(calls)

    def list(self) -> list[Json]:
        """All, by name: `name kind digest available reason languages skills description allowed build`."""
        return drive(self._steps.every())

    def get(self, name: str) -> Json:
        """One with its recipe, size, packages, path and sandboxes; `not_found`."""
        return drive(self._steps.get(name))

    def build(self, name: str, *, refresh: bool = False) -> Json:
        """Build a recipe of the operator and wait for its end; `template_unavailable` says why not."""
        return drive(self._steps.build(name, refresh))

    def delete(self, name: str) -> Json:
        """Remove its base, and its recipe unless it is shipped; `template_in_use`."""
        return drive(self._steps.delete(name))


class AsyncTemplates:
    """`c.templates` of `AsyncCorral`."""

    def __init__(self, calls: Calls) -> None:
        self._steps = TemplateSteps(calls)

    async def list(self) -> list[Json]:
        """All, by name: `name kind digest available reason languages skills description allowed build`."""
        return await self._steps.every()

    async def get(self, name: str) -> Json:
        """One with its recipe, size, packages, path and sandboxes; `not_found`."""
        return await self._steps.get(name)

    async def build(self, name: str, *, refresh: bool = False) -> Json:
        """Build a recipe of the operator and wait for its end; `template_unavailable` says why not."""
        return await self._steps.build(name, refresh)

    async def delete(self, name: str) -> Json:
        """Remove its base, and its recipe unless it is shipped; `template_in_use`."""
        return await self._steps.delete(name)
