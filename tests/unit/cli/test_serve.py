"""What the operator of a server reads on standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.cli import serve
from corral.errors import CorralError


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    made = logging.getLogger("uvicorn.error")
    before = list(made.handlers)
    yield made
    for handler in set(made.handlers) - set(before):
        made.removeHandler(handler)


def told(log: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        log.error("Exception in ASGI application\n", exc_info=caught)


def test_an_answer_that_had_to_be_broken_off_is_one_line_a_fault_has_its_trace(
    log: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    serve.show_failures()
    told(log, CorralError("sandbox_deleted", "the sandbox sbx_1 was deleted"))
    assert capfd.readouterr().err == (
        "corral: an answer was broken off: sandbox_deleted: the sandbox sbx_1 was deleted\n"
    )
    told(log, KeyError("x"))
    assert "Traceback" in capfd.readouterr().err


def test_a_refused_websocket_is_not_logged(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    from uvicorn.protocols.websockets import websockets_sansio_impl

    serve.show_failures()
    assert serve.REFUSED_SOCKET in Path(websockets_sansio_impl.__file__).read_text(encoding="utf-8")
    log.error(serve.REFUSED_SOCKET)
    assert capfd.readouterr().err == ""
