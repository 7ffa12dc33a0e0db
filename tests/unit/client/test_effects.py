"""What the two faces of the client wait with."""

import threading
from concurrent.futures import Future

import pytest

from corral.client import effects


def test_a_wait_in_pieces_ends_with_the_future_its_error_or_the_time() -> None:
    done: Future[int] = Future()
    threading.Timer(0.4, done.set_result, [7]).start()
    assert effects.result_of(done) == 7
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("of its own"))
    with pytest.raises(TimeoutError, match="of its own"):
        effects.result_of(failed)
    with pytest.raises(TimeoutError):
        effects.result_of(Future(), 0.01)
