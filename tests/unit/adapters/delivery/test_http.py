"""The sender over real sockets: it connects to the address that it is given, and checks the certificate for the name."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from corral.adapters.delivery import http
from corral.adapters.delivery.http import HttpSender
from corral.domain.webhook import Target
from corral.ports.delivery import DeliveryError, Post

HERE = ipaddress.ip_address("127.0.0.1")
NAME = "hooks.example"  # resolves to nothing here: only the address that is given counts


class Place:
    """A listener; `requests` are the heads and bodies that came."""

    def __init__(self, answer: bytes | Callable[[asyncio.StreamWriter], object]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(length))
        if callable(self.answer):
            await self.answer(writer)
        else:
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def listening(answer, context: ssl.SSLContext | None = None) -> AsyncIterator[Place]:
    place = Place(answer)
    server = await asyncio.start_server(place.serve, "127.0.0.1", 0, ssl=context)
    place.port = server.sockets[0].getsockname()[1]
    try:
        yield place
    finally:
        server.close()


def post(port: int, scheme: str = "http", host: str = NAME, body: bytes = b'{"id":"run_1"}') -> Post:
    return Post(Target(scheme, host, port, "/hook?x=1"), HERE, {"webhook-id": "whd_1"}, body)


def certified(place: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(of a server whose certificate is for `name`, of a client that trusts it)."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = place / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    client = ssl.create_default_context(cadata=made.public_bytes(serialization.Encoding.PEM).decode())
    return server, client


async def test_the_request_is_whole_and_goes_to_the_given_address():
    async with listening(b"HTTP/1.1 204 No Content\r\n\r\n") as place:
        assert await HttpSender().post(post(place.port)) == 204
    [request] = place.requests
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /hook?x=1 HTTP/1.1\r\n") and body == b'{"id":"run_1"}'
    assert f"Host: {NAME}:{place.port}".encode() in head and b"webhook-id: whd_1" in head


@pytest.mark.parametrize(
    "answer, status",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", 200),
        (b"HTTP/1.0 500\r\n\r\n", 500),
        (b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n", 202),
    ],
)
async def test_the_final_status_is_what_counts(answer, status):
    async with listening(answer) as place:
        assert await HttpSender().post(post(place.port)) == status


async def test_a_redirect_is_an_answer_and_is_not_followed():
    async with listening(b"HTTP/1.1 200 OK\r\n\r\n") as other:
        location = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:{other.port}/\r\n\r\n".encode()
        async with listening(location) as place:
            assert await HttpSender().post(post(place.port)) == 307
    assert other.requests == []


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 99 x\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * 200_000,
     b"HTTP/1.1 100 Continue\r\n" + b"A: b\r\n" * 9000],
)  # fmt: skip
async def test_an_answer_that_is_none_is_a_failure(answer):
    async with listening(answer) as place:
        with pytest.raises(DeliveryError) as caught:
            await HttpSender().post(post(place.port))
    assert caught.value.connected


async def test_a_receiver_that_never_answers_is_left(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_S", 0.2)

    async def drip(writer):
        while not writer.is_closing():
            writer.write(b"H")
            await asyncio.sleep(0.05)

    async with listening(drip) as place:
        with pytest.raises(DeliveryError, match="did not answer") as caught:
            await HttpSender().post(post(place.port))
    assert caught.value.connected


async def test_nobody_listening_is_a_failure_before_anything_was_sent():
    async with listening(b"") as place:
        pass
    with pytest.raises(DeliveryError) as caught:
        await HttpSender().post(post(place.port))
    assert not caught.value.connected


async def test_the_certificate_is_checked_for_the_name(tmp_path):
    server, client = certified(tmp_path, NAME)
    async with listening(b"HTTP/1.1 200 OK\r\n\r\n", server) as place:
        assert await HttpSender(client).post(post(place.port, "https")) == 200
        with pytest.raises(DeliveryError, match="certificate") as caught:
            await HttpSender(client).post(post(place.port, "https", "other.example"))
        assert not caught.value.connected
        with pytest.raises(DeliveryError, match="certificate"):
            await HttpSender().post(post(place.port, "https"))  # whom nobody trusts
    assert len(place.requests) == 1


async def test_a_name_is_resolved_to_each_of_its_addresses_once():
    found = await HttpSender().resolve("localhost", 443)
    assert HERE in found and len(found) == len(set(found))
    with pytest.raises(DeliveryError, match="cannot be resolved"):
        await HttpSender().resolve("no-such-name.invalid", 443)


async def test_a_header_cannot_hold_another():
    async with listening(b"HTTP/1.1 200 OK\r\n\r\n") as place:
        with pytest.raises(DeliveryError):
            await HttpSender().post(Post(Target("http", NAME, place.port, "/"), HERE, {"a": "b\r\nc: d"}, b""))


async def test_names_whose_servers_do_not_answer_hold_up_nothing_else(monkeypatch):
    answer, asked = threading.Event(), threading.Semaphore(0)

    def hang(*words, **more):
        asked.release()
        answer.wait(60)
        raise OSError("no answer")

    monkeypatch.setattr(http, "RESOLVE_S", 0.2)
    monkeypatch.setattr(http.socket, "getaddrinfo", hang)
    sender = HttpSender()
    try:
        calls = [sender.resolve(f"slow{n}.example", 443) for n in range(http.LOOK_UPS)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all("was not resolved within" in str(end) for end in ends)
        assert all([asked.acquire(blocking=False) for _ in calls]), "each was tried"
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 10) == "done"
        with pytest.raises(DeliveryError, match="too many names"):
            await sender.resolve("one.more.example", 443)
    finally:
        answer.set()
    monkeypatch.undo()

    async def again():
        while True:
            try:
                return await sender.resolve("localhost", 443)
            except DeliveryError:
                await asyncio.sleep(0.01)

    assert HERE in await asyncio.wait_for(again(), 10)
