"""Delivery: one request to one address that was judged already. The sender decides nothing and follows nothing.

Contract for every adapter:

* `resolve` answers the addresses that a name has now, in the order of preference, each once; no connection is made. `post` connects to
  exactly the given address, whatever the name resolves to by then; the name goes into TLS (certificates are checked against it) and into
  the `Host` header.
* A redirect is an answer like any other. Of an answer the status is read, bounded in size and time; its body is not kept.
* What fails on the way raises `DeliveryError` with a sentence that holds nothing of the request.
* No I/O before the first call; `close` is idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from corral.domain.addresses import Address
from corral.domain.webhook import Target


class DeliveryError(Exception):
    """There was no answer. `connected`: the request may have arrived."""

    def __init__(self, detail: str, *, connected: bool = False) -> None:
        super().__init__(detail)
        self.connected = connected


@dataclass(frozen=True)
class Post:
    """A request: to `address`, which `target`'s host stood for when it was judged."""

    target: Target
    address: Address
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class Sender(Protocol):
    """See the module docstring."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]: ...

    async def post(self, request: Post) -> int:
        """-> the status of the answer."""
        ...
