"""Sealing: text that the store keeps and that only this installation can read.

Contract for every adapter:

* `seal` makes text from which, without the installation's key, nothing but the length can be told, another one each time. `about` is
  what it belongs to; it is not in it, and the text opens only with the same `about`: a sealed text that is put elsewhere is worthless.
* `unseal` of what `seal` made is the text; ValueError for what was changed, is about something else, or was sealed by another installation, and
  where the key cannot be read.
  What was never sealed is answered as it is: rows of before there was a seal.
* `mark` is the same for the same text and key, and tells nothing of the text to whoever has not the key.
* All workers of an installation have one key; it outlives them. No I/O before the first call. Callable from every thread.
"""

from __future__ import annotations

from typing import Protocol


class Sealer(Protocol):
    """See the module docstring."""

    def seal(self, text: str, about: str) -> str: ...

    def unseal(self, sealed: str, about: str) -> str: ...

    def mark(self, text: str) -> str: ...


class Unsealed:
    """For services without an installation: everything stays as it is."""

    def seal(self, text: str, about: str) -> str:
        return text

    def unseal(self, sealed: str, about: str) -> str:
        return sealed

    def mark(self, text: str) -> str:
        return text
