"""File transfers: how a stream is cut before it goes inside."""

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from corral.node.transfers import gathered


@given(st.lists(st.binary(max_size=30), max_size=40), st.integers(1, 50))
async def test_gathering_keeps_every_byte_and_makes_no_small_piece_but_the_last(
    blocks: list[bytes], least: int
) -> None:
    async def source() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    pieces = [piece async for piece in gathered(source(), least)]
    assert b"".join(pieces) == b"".join(blocks)
    assert all(len(piece) >= least for piece in pieces[:-1]) and all(pieces)
