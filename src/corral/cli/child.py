"""A process that `corral serve` started: what it was given, and what it tells its parent. It never outlives that."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field

from corral.cli import terminal
from corral.errors import CorralError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """`status`: a pipe to the parent; `descriptors`: listening sockets and the lock of the state directory, by name; `first`: nothing of this server has
    answered yet, so that what its settings name and what is not there is a mistake in them."""

    parent: int
    status: int
    name: str = ""
    descriptors: dict[str, int] = field(default_factory=dict)
    tls: tuple[str, str] | None = None
    first: bool = False

    def to_json(self) -> str:
        """What `take` reads. Nothing in it is secret: it is seen in the list of processes."""
        return json.dumps({**self.__dict__, "tls": list(self.tls) if self.tls else None})

    @classmethod
    def take(cls, given: str | None) -> Child | None:
        """Become the child that the parent wants; None without one. From here on nothing that is started here gets the descriptors."""
        if given is None:
            return None
        document = json.loads(given)
        document["tls"] = tuple(document["tls"]) if document["tls"] else None
        us = cls(**document)
        for descriptor in (us.status, *us.descriptors.values()):
            os.set_inheritable(descriptor, False)
        import ctypes  # the parent needs none

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != us.parent:  # it had died before we asked to die with it
            os._exit(1)
        return us

    def tell(self, state: str, **more: object) -> None:
        """One line for the parent."""
        try:
            os.write(self.status, json.dumps({"state": state, **more}).encode() + b"\n")
        except OSError:
            pass  # it is gone, and we with it

    def ready(self) -> None:
        """All is there."""
        self.tell("ready")

    def waiting(self, missing: str, why: str) -> None:
        """It answers, and cannot work yet."""
        self.tell("waiting", missing=missing, why=why)

    def refused(self, error: CorralError) -> None:
        """To start it again would not help."""
        self.tell("refused", problem=error.to_problem(), why=str(error))


def log(line: str) -> None:
    """To the log that all processes of a server share."""
    terminal.say(f"corral: {line}")
