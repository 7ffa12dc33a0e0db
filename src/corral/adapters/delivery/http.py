"""Deliveries over HTTP/1.1 by asyncio's own streams: one connection for each request, of whose answer the status line is read."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from corral.domain.addresses import Address, normal
from corral.ports.delivery import DeliveryError, Post

RESOLVE_S = 5.0
LOOK_UPS = 32
"""At once, those that nobody waits for any more included."""
CONNECT_S = 5.0
ANSWER_S = 15.0
MAX_HEAD = 16 * 1024
"""Of an answer, interim ones included."""
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |\r|\n)")


class HttpSender:
    """`ports.delivery.Sender`. `context`: whom TLS trusts, else the system's authorities (`SSL_CERT_FILE` names others)."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._look_ups = threading.BoundedSemaphore(LOOK_UPS)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await self._looked_up(host, port)
        except TimeoutError as error:
            raise DeliveryError(f"the name {host} was not resolved within {RESOLVE_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise DeliveryError(f"the name {host} cannot be resolved") from error
        addresses = (normal(ip_address(str(address[0]))) for *_, address in found)
        return list(dict.fromkeys(addresses))

    def _looked_up(self, host: str, port: int) -> asyncio.Future[list[Any]]:
        """By a thread of its own: a look-up cannot be ended, and somebody's slow name servers must not take the threads that all share."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        def tell(found: list[Any] | None, error: Exception | None) -> None:
            if answer.done():
                return  # nobody waits any more
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found or [])

        def look_up() -> None:
            found, failure = None, None
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            except Exception as error:
                failure = error
            finally:
                self._look_ups.release()
            with contextlib.suppress(RuntimeError):  # the service has ended
                loop.call_soon_threadsafe(tell, found, failure)

        if not self._look_ups.acquire(blocking=False):
            raise DeliveryError("too many names are being resolved; name servers do not answer")
        try:
            threading.Thread(target=look_up, name="resolve", daemon=True).start()
        except RuntimeError as error:
            self._look_ups.release()
            raise DeliveryError(f"the name {host} cannot be resolved now") from error
        return answer

    async def post(self, request: Post) -> int:
        target, context = request.target, None
        if target.scheme == "https":
            self._context = context = self._context or ssl.create_default_context()
        where = f"{target.host} ({request.address})"
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    str(request.address),
                    target.port,
                    ssl=context,
                    server_hostname=target.host if context is not None else None,
                    limit=MAX_HEAD,
                )
        except TimeoutError as error:
            raise DeliveryError(f"{where} did not take the connection within {CONNECT_S:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise DeliveryError(f"the certificate of {where} is not valid: {error.verify_message}") from error
        except (OSError, ssl.SSLError) as error:
            raise DeliveryError(f"{where} cannot be reached: {_words(error)}") from error
        try:
            async with asyncio.timeout(ANSWER_S):
                writer.write(_head(request) + request.body)
                await writer.drain()
                return await _status(reader)
        except TimeoutError as error:
            raise DeliveryError(f"{where} did not answer within {ANSWER_S:g} s", connected=True) from error
        except (OSError, ssl.SSLError) as error:
            raise DeliveryError(f"{where} broke the connection: {_words(error)}", connected=True) from error
        except ValueError as error:
            raise DeliveryError(f"the answer of {where} is not HTTP", connected=True) from error
        finally:
            writer.transport.abort()


def _head(request: Post) -> bytes:
    target = request.target
    fields = {
        "Host": target.authority,
        "User-Agent": "corral",
        "Accept": "*/*",
        "Connection": "close",
        "Content-Length": str(len(request.body)),
        **request.headers,
    }
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise DeliveryError("a header of the request holds a line break")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _status(reader: asyncio.StreamReader) -> int:
    """The final status; ValueError for what is not HTTP or too large."""
    left = MAX_HEAD
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("it was closed without an answer") from error
        except asyncio.LimitOverrunError as error:
            raise ValueError("too long a line") from error
        found = _STATUS.match(line)
        if found is None:
            raise ValueError("no status line")
        status = int(found[1])
        if status >= 200:
            return status
        while line not in (b"\r\n", b"\n"):  # an interim answer: its fields, then the next status line
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError("it was closed without an answer") from error
            except asyncio.LimitOverrunError as error:
                raise ValueError("too long a line") from error
            left -= len(line)
            if left < 0:
                raise ValueError("too long an answer")


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
