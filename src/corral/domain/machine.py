"""Small state machines as data: (state, event) -> state. A pair that is not in the table raises with the entity's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.errors import CorralError


def illegal(kind: str, state: str, event: str, events: Sequence[str], history: Sequence[Any] = ()) -> CorralError:
    """The error for a pair outside the table: what would be legal, and the story that led here."""
    return CorralError(
        "illegal_transition",
        f"a {kind} that is {state} does not take {event}",
        hint=f"legal here: {', '.join(events) or 'nothing, it is over'}",
        state=state,
        event=event,
        history=[entry if isinstance(entry, (str, int, dict)) else str(entry) for entry in history],
    )


@dataclass(frozen=True)
class Machine:
    """A machine of one entity; `table` is complete."""

    kind: str
    initial: str
    table: Mapping[tuple[str, str], str]
    final: frozenset[str]

    @property
    def states(self) -> frozenset[str]:
        return frozenset((self.initial, *self.table.values(), *(state for state, _ in self.table)))

    def decide(self, state: str, event: str, history: Sequence[Any] = ()) -> str:
        """The next state, or `illegal_transition`."""
        following = self.table.get((state, event))
        if following is None:
            raise illegal(self.kind, state, event, self.events(state), history)
        return following

    def events(self, state: str) -> list[str]:
        """What `state` takes."""
        return [event for origin, event in self.table if origin == state]

    def sources(self, event: str) -> tuple[str, ...]:
        """The states that take `event`: the `expect_states` of a compare-and-set."""
        return tuple(state for state, name in self.table if name == event)

    def mermaid(self) -> str:
        """The diagram for the docs."""
        lines = ["stateDiagram-v2", f"  [*] --> {self.initial}"]
        lines += [f"  {state} --> {following}: {event}" for (state, event), following in self.table.items()]
        lines += [f"  {state} --> [*]" for state in sorted(self.final)]
        return "\n".join(lines)
