"""The detach keys among what is typed."""

from __future__ import annotations

import click
import pytest

from corral.cli.tty import DETACH, Keys, keys_of


@pytest.mark.parametrize(
    ("text", "keys"),
    [(DETACH, b"\x1d\x1d"), ("ctrl-p,ctrl-q", b"\x10\x11"), ("ctrl-],d", b"\x1dd"), ("CTRL-@", b"\0"), ("none", b""), ("", b"")],
)  # fmt: skip
def test_keys_are_named_as_people_write_them(text: str, keys: bytes) -> None:
    assert keys_of(text) == keys


@pytest.mark.parametrize("text", ["meta-x", "ctrl-", "ctrl-ab", "ctrl-1", "é", "a,,b", "\x03"])
def test_what_is_no_key_is_refused_by_name(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no key"):
        keys_of(text)


def typed(*pieces: bytes, detach: bytes = b"\x1d\x1d") -> tuple[bytes, bool]:
    """(what goes to the program, did the user leave)."""
    keys, out = Keys(detach), b""
    for piece in pieces:
        more, leaves = keys.take(piece)
        out += more
        if leaves:
            return out, True
    return out + keys.release(), False


@pytest.mark.parametrize("pieces", [(b"ab\x1d\x1dcd",), (b"ab\x1d", b"\x1dcd"), (b"a", b"b", b"\x1d", b"\x1d")])
def test_the_keys_leave_wherever_they_are_cut_and_nothing_after_them_goes_in(pieces: tuple[bytes, ...]) -> None:
    assert typed(*pieces) == (b"ab", True)


@pytest.mark.parametrize("pieces", [(b"\x1d",), (b"a\x1d", b"b\x1d"), (b"\x1dx\x1dy",), (bytes(range(256)),)])
def test_what_only_begins_like_the_keys_goes_in(pieces: tuple[bytes, ...]) -> None:
    assert typed(*pieces) == (b"".join(pieces), False)


def test_a_beginning_that_repeats_is_still_found() -> None:
    assert typed(b"aa", b"ab", detach=b"aab") == (b"a", True)


def test_without_keys_everything_goes_in() -> None:
    assert typed(b"\x1d\x1d\x1d", detach=b"") == (b"\x1d\x1d\x1d", False)
