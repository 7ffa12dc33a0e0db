"""What the node port can be asked over a wire, read off the port itself: a method that is added there travels without a line here.

`once`: what a second time would do something else. Such a call is not repeated when the connection broke after it was sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from corral.ports import node as port

OPENED = {"FileBlocks": port.FileBlocks, "FileEvents": port.FileEvents}
"""Answers that are streams with a beginning of their own: their members, then their items."""
NOT_CALLED = frozenset({"open", "close", "lost"})
"""The client's own, and `lost`, whose notices are acknowledged."""
ONCE = frozenset({"signal_exec", "move_file", "remove_file", "checkpoint_instance"})
WAITS = frozenset({"wait_exec", "stdin_exec"})
"""Calls of which nothing is left when the caller is gone. All others go on to their end: half of them would be a leftover."""


@dataclass(frozen=True)
class Method:
    """One method: `call` answers once, `stream` is an iterator, `opened` answers and then streams."""

    name: str
    kind: Literal["call", "stream", "opened"]
    signature: inspect.Signature
    source: str | None
    """The parameter that is a stream from the caller."""
    progress: bool
    members: tuple[str, ...] = ()
    """What an opened stream has besides its items."""

    def bind(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """The arguments by the port's names for them; TypeError for those that it does not know."""
        bound = self.signature.bind(None, *arguments, **named).arguments
        del bound["self"]
        return bound

    def arrange(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same as a node takes them: by place where the port has a place, as a node may have other names. Not more than given."""
        self.signature.bind(None, **arguments)
        places = [each for each in list(self.signature.parameters.values())[1:] if each.kind is not each.KEYWORD_ONLY]
        while places and places[-1].name not in arguments:
            places.pop()
        placed = {each.name for each in places}
        return (
            tuple(arguments.get(each.name, each.default) for each in places),
            {name: value for name, value in arguments.items() if name not in placed},
        )

    def once(self, arguments: dict[str, Any]) -> bool:
        """It may have been done although nobody knows, and must not be done again."""
        if self.name == "stdin_exec":
            return arguments.get("offset") is None
        return self.name in ONCE or (self.name == "collect" and bool(arguments.get("mark")))


@functools.cache
def methods() -> dict[str, Method]:
    """All of the port and its optional parts."""
    found: dict[str, Method] = {}
    for part in vars(port).values():
        if not (isinstance(part, type) and getattr(part, "_is_protocol", False) and part.__module__ == port.__name__):
            continue
        if part.__name__ in OPENED:
            continue
        for name, function in vars(part).items():
            if not name.startswith("_") and inspect.isfunction(function) and name not in NOT_CALLED:
                found[name] = _method(name, function)
    return found


def _method(name: str, function: Callable[..., Any]) -> Method:
    signature = inspect.signature(function)
    answer = str(signature.return_annotation)
    kind: Literal["call", "stream", "opened"] = "call"
    members: tuple[str, ...] = ()
    if not inspect.iscoroutinefunction(function):
        kind = "stream"
    elif answer in OPENED:
        kind, members = "opened", tuple(getattr(OPENED[answer], "__annotations__", {}))
    source = [each for each, value in signature.parameters.items() if "AsyncIterator" in str(value.annotation)]
    return Method(name, kind, signature, source[0] if source else None, "progress" in signature.parameters, members)
