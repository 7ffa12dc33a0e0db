"""Tokens of an issuer: what is taken, what never, and what its silence changes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from corral.adapters.identity import oidc
from corral.adapters.identity.oidc import Oidc
from corral.config import OidcIssuer
from corral.errors import CorralError
from oidc_issuer import Issuer, ec_key, published, rsa_key, signed


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    made = Issuer(tmp_path)
    yield made
    made.stop()


def settings(issuer: Issuer, **more: Any) -> OidcIssuer:
    known: dict[str, Any] = {
        "issuer": issuer.url,
        "audience": ("corral",),
        "tenant_claim": "tenant",
        "scopes": {"sandboxes": ("run",), "managers": ("tenant", "run")},
        "ca_file": str(issuer.ca_file),
        "leeway_s": 5.0,
    }
    return OidcIssuer(**{**known, **more})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def verifier(issuer: Issuer, clock: Clock, logged: list[str]) -> Oidc:
    return Oidc(settings(issuer), logged.append, clock=clock)


async def refused(verifier: Oidc, token: str, code: str = "unauthorized") -> str:
    with pytest.raises(CorralError) as error:
        await verifier.verify(token)
    assert error.value.code == code, error.value
    return error.value.detail


@pytest.mark.parametrize("kid", ["one", "two"])
async def test_a_good_token_says_who_and_what(issuer: Issuer, verifier: Oidc, kid: str) -> None:
    token = issuer.token(kid, scope="other sandboxes managers", exp=int(time.time()) + 100)
    assert verifier.may_be(token)
    claims = await verifier.verify(token)
    assert (claims.tenant_id, claims.user, tuple(claims.scopes)) == ("acme", "li", ("run", "tenant"))
    assert 100_000 <= claims.expires_at - time.time() * 1000 <= 106_000, "with the leeway"
    await verifier.verify(issuer.token(kid, aud=["other", "corral"]))
    assert issuer.calls == ["/.well-known/openid-configuration", "/keys"], "asked once"


@pytest.mark.parametrize("exp", [str(int(time.time()) + 600), 10**17, 1e300], ids=["text", "far", "farther"])
async def test_an_end_in_any_writing_is_a_time(issuer: Issuer, verifier: Oidc, exp: Any) -> None:
    claims = await verifier.verify(issuer.token(exp=exp))
    assert time.time() * 1000 < claims.expires_at <= oidc.LAST_S * 1000


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"aud": ["another", "corral2"]},
        {"exp": None},
        {"exp": int(time.time()) - 60},
        {"exp": "soon"},
        {"nbf": int(time.time()) + 600},
        {"iat": int(time.time()) + 600},
        {"tenant": None},
        {"tenant": "../acme"},
        {"tenant": ["acme"]},
        {"sub": None},
        {"sub": ""},
        {"sub": "x" * 2000},
    ],
    ids=lambda claims: next(iter(claims)),  # not the time: every worker of a run has to collect the same
)
async def test_a_token_that_says_something_wrong_is_refused(issuer: Issuer, verifier: Oidc, claims: Any) -> None:
    token = (
        issuer.token(**claims) if claims.get("sub", "") is not None or "sub" not in claims else issuer.token(sub=None)
    )
    await refused(verifier, token)
    await verifier.verify(issuer.token())


def _b64(raw: bytes | dict[str, Any]) -> str:
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _hmac_token(issuer: Issuer, algorithm: str, secret: bytes, kid: str) -> str:
    """The old trick: a token signed with the public key as if it were a shared secret."""
    signed = f"{_b64({'alg': algorithm, 'kid': kid, 'typ': 'JWT'})}.{_b64(issuer.claims())}"
    return f"{signed}.{_b64(hmac.new(secret, signed.encode(), hashlib.sha256).digest())}"


async def test_no_token_says_how_it_is_to_be_checked(issuer: Issuer, verifier: Oidc) -> None:
    public = issuer.keys["one"][0].public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    unsigned = f"{_b64({'alg': 'none', 'kid': 'one'})}.{_b64(issuer.claims())}."
    for token in (
        unsigned,
        unsigned.replace(_b64({"alg": "none", "kid": "one"}), _b64({"alg": "None", "kid": "one"})),
        _hmac_token(issuer, "HS256", pem, "one"),
        _hmac_token(issuer, "HS256", json.dumps(published(issuer.keys["one"][0], "one")).encode(), "one"),
        _hmac_token(issuer, "RS256", pem, "one"),
        jwt.encode(issuer.claims(), issuer.keys["one"][0], "RS512", headers={"kid": "one"}),
        issuer.token(header={"kid": "two"}),
        signed(issuer.keys["one"][0], {"alg": "RS256"}, issuer.claims()),
        signed(issuer.keys["one"][0], {"alg": "RS256", "kid": 7}, issuer.claims()),
        signed(issuer.keys["one"][0], {"alg": ["RS256"], "kid": "one"}, issuer.claims()),
        issuer.token(header={"kid": "k" * 300}),
        issuer.token(header={"crit": ["b64"], "b64": True}),
    ):
        await refused(verifier, token)
    await verifier.verify(signed(issuer.keys["one"][0], {"alg": "RS256", "kid": "one"}, issuer.claims()))
    # A key that the token brings, or says where to find, is nobody's.
    mine = rsa_key()
    for header in (
        {"jwk": published(mine, "one")},
        {"jku": "https://127.0.0.1:1/keys"},
        {"x5u": "https://127.0.0.1:1"},
    ):
        await refused(verifier, jwt.encode(issuer.claims(), mine, "RS256", headers={"kid": "one", **header}))
    assert set(issuer.calls) == {"/.well-known/openid-configuration", "/keys"}


async def test_a_changed_token_is_refused(issuer: Issuer, verifier: Oidc) -> None:
    head, body, signature = issuer.token().split(".")
    for token in (
        f"{head}.{_b64(issuer.claims(tenant='bolt'))}.{signature}",
        f"{head}.{body}.{signature[:-4]}AAAA",
        f"{head}.{body}.",
        f"{head}.{body}.{issuer.token('two').split('.')[2]}",
        f"{_b64(b'[' * 8000)}.{body}.{signature}",
        f"{_b64(b'{')}.{body}.{signature}",
        f"{head}.{_b64(b'not json')}.{signature}",
        "ey..",
        "eyJ.eyJ.eyJ",
    ):
        await refused(verifier, token)


def test_what_is_no_token_is_not_looked_at() -> None:
    verifier = Oidc(OidcIssuer("https://x", ("corral",), tenant="acme"), print)
    for text in ("", "ck_x", "a.b.c", "ey.a", "ey" + "a" * 20_000 + ".b.c", "ey.a.b.c"):
        assert not verifier.may_be(text)


async def test_a_new_key_is_fetched_when_a_token_names_it_and_an_old_one_goes_with_the_next_look(
    issuer: Issuer, verifier: Oidc, clock: Clock
) -> None:
    old = issuer.token()
    await verifier.verify(old)
    issuer.keys["three"] = (ec_key(), "ES256")
    del issuer.keys["one"]
    await verifier.verify(old)
    await refused(verifier, issuer.token("three"))
    assert len(issuer.calls) == 2, "not so soon after the last time"
    clock.now += oidc.UNKNOWN_S
    await verifier.verify(issuer.token("three"))
    assert len(issuer.calls) == 4
    await refused(verifier, old)


async def test_unknown_keys_make_one_fetch_a_minute_whoever_asks_how_often(
    issuer: Issuer, verifier: Oidc, clock: Clock
) -> None:
    await verifier.verify(issuer.token())
    for _ in range(3):
        clock.now += oidc.UNKNOWN_S
        tokens = [issuer.token(header={"kid": f"k{n}"}) for n in range(20)]
        answers = await asyncio.gather(*(verifier.verify(token) for token in tokens), return_exceptions=True)
        assert all(isinstance(answer, CorralError) and answer.code == "unauthorized" for answer in answers)
    assert issuer.calls.count("/keys") == 4


async def test_keys_are_looked_at_again_beside_the_calls(issuer: Issuer, verifier: Oidc, clock: Clock) -> None:
    await verifier.verify(issuer.token())
    old = issuer.token()
    del issuer.keys["one"]
    clock.now += oidc.REFRESH_S
    await verifier.verify(old)
    async with asyncio.timeout(10):
        while True:
            try:
                await verifier.verify(old)
            except CorralError as error:
                assert error.code == "unauthorized"
                break
            await asyncio.sleep(0.01)


async def test_an_issuer_that_is_silent_changes_nothing_for_keys_that_are_known(
    issuer: Issuer, verifier: Oidc, clock: Clock, logged: list[str]
) -> None:
    await verifier.verify(issuer.token())
    issuer.stop()
    try:
        for _ in range(5):
            clock.now += oidc.REFRESH_S
            await verifier.verify(issuer.token())
            await asyncio.sleep(0.1)
        issuer.keys["new"] = (ec_key(), "ES256")
        clock.now += oidc.UNKNOWN_S
        await refused(verifier, issuer.token("new"), "issuer_unavailable")
        assert len(logged) == 1, "said once"
    finally:
        issuer.go_on()
    clock.now += oidc.UNKNOWN_S
    await verifier.verify(issuer.token("new"))
    assert len(logged) == 2


async def test_an_issuer_that_never_answered_is_asked_again_soon(issuer: Issuer, verifier: Oidc, clock: Clock) -> None:
    issuer.stop()
    await refused(verifier, issuer.token(), "issuer_unavailable")
    issuer.go_on()
    await refused(verifier, issuer.token(), "issuer_unavailable")
    clock.now += oidc.RETRY_S
    await verifier.verify(issuer.token())


@pytest.mark.parametrize(
    "break_it",
    [
        lambda issuer: issuer.changes.update(issuer="https://elsewhere.example"),
        lambda issuer: issuer.changes.update(jwks_uri=None),
        lambda issuer: issuer.changes.update(jwks_uri=f"http://127.0.0.1:{issuer.port}/keys"),
        lambda issuer: issuer.changes.update(jwks_uri="file:///etc/passwd"),
        lambda issuer: issuer.changes.update(jwks_uri="https://user:secret@127.0.0.1/keys"),
        lambda issuer: setattr(issuer, "jwks", b"[" * 50_000),
        lambda issuer: setattr(issuer, "jwks", b" " * 300_000),
        lambda issuer: setattr(issuer, "jwks", {"keys": [published(rsa_key(), "one")] * 2}),
        lambda issuer: setattr(issuer, "jwks", {"keys": [{}] * 200}),
        lambda issuer: setattr(issuer, "jwks", []),
        lambda issuer: setattr(issuer, "status", 302),
        lambda issuer: setattr(issuer, "status", 500),
    ],
    ids=range(12),
)
async def test_what_an_issuer_should_not_say_is_not_taken(issuer: Issuer, verifier: Oidc, break_it: Any) -> None:
    break_it(issuer)
    await refused(verifier, issuer.token(), "issuer_unavailable")


@pytest.mark.filterwarnings("ignore:The RSA key is 1024 bits")
async def test_only_keys_of_the_right_kind_and_strength_count(issuer: Issuer, clock: Clock) -> None:
    weak, edwards, large = rsa_key(1024), ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())
    issuer.keys |= {"weak": (weak, "RS256"), "edwards": (edwards, "EdDSA"), "large": (large, "ES384")}
    key = issuer.keys["one"][0]
    issuer.keys |= {"shared": (b"s" * 32, "HS256")}
    issuer.jwks = {
        "keys": [
            published(key, "one"),
            published(weak, "weak"),
            published(edwards, "edwards"),
            published(large, "large"),
            published(key, "encrypts", use="enc"),
            published(key, "other", alg="RS512"),
            {"kty": "oct", "kid": "shared", "k": _b64(b"s" * 32), "alg": "HS256"},
            {"kty": "RSA", "kid": "half", "n": "AQAB"},
            "no key",
            {"kid": 5},
        ]
    }
    all_of_them = ("RS256", "ES256", "ES384", "EdDSA")
    verifier = Oidc(settings(issuer, algorithms=all_of_them), print, clock=clock)
    for kid in ("one", "edwards", "large"):
        await verifier.verify(issuer.token(kid))
    for token in (
        issuer.token("weak"),
        issuer.token("shared"),
        issuer.token(header={"kid": "encrypts"}),
        issuer.token(header={"kid": "other"}),
        issuer.token(header={"kid": "half"}),
        issuer.token(header={"kid": "large"}),
        issuer.token("large", header={"kid": "one"}),
    ):
        await refused(verifier, token)


async def test_a_certificate_that_nobody_vouches_for_is_not_taken(issuer: Issuer, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "other").mkdir()
    other = Issuer(tmp_path / "other")
    other.stop()
    for ca_file in (None, str(other.ca_file), str(tmp_path / "nowhere.pem")):
        verifier = Oidc(settings(issuer, ca_file=ca_file), lambda line: None, clock=clock)
        await refused(verifier, issuer.token(), "issuer_unavailable")
    assert issuer.calls == []


async def test_without_tls_only_on_this_host_and_only_when_told_so(tmp_path: Path, clock: Clock) -> None:
    plain = Issuer(tmp_path, tls=False)
    try:
        await refused(Oidc(settings(plain), lambda line: None), plain.token(), "issuer_unavailable")
        knowingly = settings(plain, unsafe_http=True)
        await Oidc(knowingly, print).verify(plain.token())
        far = replace(knowingly, issuer="http://issuer.example")
        await refused(Oidc(far, lambda line: None), plain.token(), "issuer_unavailable")
    finally:
        plain.stop()


def test_an_issuer_that_sends_a_byte_at_a_time_keeps_no_thread(monkeypatch: pytest.MonkeyPatch, issuer: Issuer) -> None:
    monkeypatch.setattr(oidc, "FETCH_S", 0.6)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line, suppress(OSError):
            line.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not over.wait(0.05):
                line.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        fetcher = oidc.Fetcher(settings(issuer, unsafe_http=True))
        asked: list[BaseException] = []

        def ask() -> None:
            try:
                fetcher._get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            except BaseException as error:
                asked.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(30)
        over.set()
        thread.join(30)
    assert not asking.is_alive() and isinstance(asked[0], OSError | ValueError | http.client.HTTPException)


async def test_claims_may_lie_deep_and_a_tenant_may_be_fixed(issuer: Issuer) -> None:
    deep = settings(
        issuer,
        tenant_claim=None,
        tenant="acme",
        user_claim="email",
        scope_claim="realm.roles",
        default_scopes=("read",),
    )
    claims = await Oidc(deep, print).verify(
        issuer.token(tenant="bolt", email="li@例.example", realm={"roles": ["sandboxes", 7, "x"]})
    )
    assert (claims.tenant_id, claims.user, tuple(claims.scopes)) == ("acme", "li@例.example", ("read", "run"))
    named = settings(issuer, scope_claim="https://corral/roles")
    assert (await Oidc(named, print).verify(issuer.token(**{"https://corral/roles": "managers"}))).scopes == (
        "tenant",
        "run",
    )
    assert (await Oidc(named, print).verify(issuer.token())).scopes == ()
