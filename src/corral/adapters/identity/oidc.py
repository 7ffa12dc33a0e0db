"""Bearer tokens of an OpenID Connect issuer, judged here by the keys that it publishes: a call asks nobody.

What is trusted is the configuration: which issuer, for which audience, signed how. A token says which of the issuer's keys signed it
and nothing more about how it is to be checked: the algorithm has to be one of the configured ones, all of which need a private key,
and of the kind of the key. Keys are fetched over TLS, from where the issuer's discovery document says, kept, and looked at again
from time to time; a key that is not known has them fetched at most once in `UNKNOWN_S`, whoever asks how often. An issuer that does
not answer changes nothing for keys that are known.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from corral.config import OidcIssuer
from corral.errors import CorralError
from corral.ports.identity import Claims

Json = dict[str, Any]
Fetch = Callable[[str], Awaitable[bytes]]

REFRESH_S = 900.0
"""How old keys may be before they are looked at again, beside the calls."""
UNKNOWN_S = 60.0
"""Between two fetches because of a key that is not known."""
RETRY_S = 5.0
"""Between two attempts at an issuer that has never answered."""
FETCH_S = 10.0
LAST_S = 4_102_444_800
"""2100: the end of a token that names a later one."""
MAX_DOCUMENT = 256 * 1024
MAX_KEYS = 100
MAX_TOKEN = 16 * 1024
LEAST_RSA_BITS = 2048
KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521", "EdDSA": "Ed25519"}


def refuse(why: str) -> CorralError:
    """For the log; the caller hears the same of every key."""
    return CorralError("unauthorized", why)


class Oidc:
    """`ports.identity.TokenVerifier` over one issuer."""

    def __init__(
        self,
        issuer: OidcIssuer,
        log: Callable[[str], None],
        *,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuer = issuer
        self._log = log
        self._fetch = fetch or Fetcher(issuer).fetch
        self._clock = clock
        self._keys: dict[str, Json] = {}
        self._made: dict[tuple[str, str], Any] = {}
        self._fetched: float | None = None
        self._tried: float | None = None
        self._failed = False
        self._loaded = False
        self._fetching: asyncio.Task[None] | None = None

    def may_be(self, text: str) -> bool:
        return text.startswith("ey") and text.count(".") == 2 and len(text) <= MAX_TOKEN

    async def verify(self, text: str) -> Claims:
        if not self._loaded:
            await asyncio.to_thread(importlib.import_module, "jwt")  # with its cryptography it takes a while
            self._loaded = True
        import jwt

        try:
            header = jwt.get_unverified_header(text)
        except Exception as error:  # whatever a stranger's text does to a parser, it is no token
            raise refuse(f"its header cannot be read: {type(error).__name__}") from error
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._issuer.algorithms:
            raise refuse(f"it is signed by {str(algorithm)[:20]!r}, which is not configured")
        if not isinstance(kid, str) or not 0 < len(kid) <= 200:
            raise refuse("it does not say which key signed it")
        if "crit" in header:
            raise refuse("it demands an extension")
        key = await self._key(kid, algorithm)
        try:
            payload: Json = jwt.decode(
                text,
                key,
                algorithms=[algorithm],
                audience=list(self._issuer.audience),
                issuer=self._issuer.issuer,
                leeway=self._issuer.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise refuse(f"{type(error).__name__}: {error}"[:200]) from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refuse(f"its claims cannot be read: {type(error).__name__}") from error
        return self._claims(payload)

    def _claims(self, payload: Mapping[str, Any]) -> Claims:
        from corral.domain.identity import check_tenant_id

        given = self._issuer
        tenant = given.tenant if given.tenant_claim is None else claim(payload, given.tenant_claim)
        try:
            tenant = check_tenant_id(tenant)
        except CorralError as error:
            raise refuse(f"it names no tenant in {given.tenant_claim}") from error
        user = claim(payload, given.user_claim)
        if not isinstance(user, str) or not user.strip() or len(user) > 1000:
            raise refuse(f"it names no user in {given.user_claim}")
        said = claim(payload, given.scope_claim)
        words = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
        scopes = [*given.default_scopes]
        for word in words:
            scopes += given.scopes.get(word, ()) if isinstance(word, str) else ()
        # Its number may be written as text, and be beyond any calendar.
        ends_s = min(int(payload["exp"]) + given.leeway_s, LAST_S)
        return Claims(tenant, user, tuple(dict.fromkeys(scopes)), int(ends_s * 1000))

    # -- keys ------------------------------------------------------------------------------------------------------------------
    async def _key(self, kid: str, algorithm: str) -> Any:
        """The issuer's key of that name, for that algorithm."""
        now = self._clock()
        if kid not in self._keys:
            pause = UNKNOWN_S if self._fetched is not None else RETRY_S
            if self._fetching is None and (self._tried is None or now - self._tried >= pause):
                self._begin(now)
            if self._fetching is not None:
                await asyncio.shield(self._fetching)
            if kid not in self._keys:
                if self._failed:
                    hint = "try again in a moment; keys of the store go on"
                    raise CorralError("issuer_unavailable", "the keys of the issuer cannot be fetched", hint=hint)
                raise refuse("its key is not one of the issuer's")
        elif self._fetching is None and now - max(self._fetched or now, self._tried or now) >= REFRESH_S:
            self._begin(now)
        made = self._made.get((kid, algorithm))
        if made is None:
            made = self._made[kid, algorithm] = usable(self._keys[kid], algorithm)
        return made

    def _begin(self, now: float) -> None:
        self._tried = now
        self._fetching = asyncio.get_running_loop().create_task(self._refresh())
        self._fetching.add_done_callback(self._over)

    def _over(self, _: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _refresh(self) -> None:
        """Never raises: what was known stays known."""
        try:
            async with asyncio.timeout(2 * FETCH_S):
                keys = await self._ask()
        except (CorralError, OSError, ValueError, TypeError, RecursionError, http.client.HTTPException) as error:
            if not self._failed:
                self._log(f"the issuer {self._issuer.issuer} cannot be asked for its keys: {error}")
            self._failed = True
            return
        if self._failed:
            self._log(f"the issuer {self._issuer.issuer} answers again")
        self._failed = False
        self._keys, self._made, self._fetched = keys, {}, self._clock()

    async def _ask(self) -> dict[str, Json]:
        where = self._issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"
        about = _object(await self._fetch(where))
        if about.get("issuer") != self._issuer.issuer:
            raise ValueError("its discovery document is another issuer's")
        place = about.get("jwks_uri")
        if not isinstance(place, str):
            raise ValueError("its discovery document has no jwks_uri")
        listed = _object(await self._fetch(place)).get("keys")
        if not isinstance(listed, list) or len(listed) > MAX_KEYS:
            raise ValueError(f"its keys are not a list of at most {MAX_KEYS}")
        found: dict[str, Json] = {}
        for one in listed:
            if isinstance(one, dict) and isinstance(one.get("kid"), str) and one.get("use", "sig") == "sig":
                if one["kid"] in found:
                    raise ValueError("two of its keys have one name")
                found[one["kid"]] = one
        return found


def usable(published: Json, algorithm: str) -> Any:
    """The key for `algorithm`; refused unless it is of its kind, meant for it, and strong enough."""
    import jwt

    if published.get("kty") != KINDS[algorithm[:2]] or published.get("alg", algorithm) != algorithm:
        raise refuse("its algorithm is not that of its key")
    if published.get("crv") != CURVES.get(algorithm):
        raise refuse("the curve of its key is not that of its algorithm")
    try:
        made = jwt.PyJWK({**published, "alg": algorithm}, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        raise refuse(f"the issuer's key cannot be read: {error}"[:200]) from error
    if getattr(made.key, "key_size", LEAST_RSA_BITS) < LEAST_RSA_BITS and published["kty"] == "RSA":
        raise refuse(f"the issuer's key has fewer than {LEAST_RSA_BITS} bits")
    return made


def claim(payload: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or, where there is none, by a path of names with dots."""
    if name in payload:
        return payload[name]
    found: Any = payload
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return found


def _object(raw: bytes) -> Json:
    document = json.loads(raw)
    if not isinstance(document, dict):
        raise ValueError("its document is not an object")
    return document


class Fetcher:
    """GET over TLS: bounded in time and size, no redirects, one connection each."""

    def __init__(self, issuer: OidcIssuer) -> None:
        self._issuer = issuer
        self._context: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> bytes:
        """The body of a 200, else OSError or ValueError."""
        return await asyncio.to_thread(self._get, url)

    def _get(self, url: str) -> bytes:
        parts = urlsplit(url)
        if parts.username or not parts.hostname:
            raise ValueError(f"{url[:200]} is not an address to ask")
        if parts.scheme == "https":
            if self._context is None:
                self._context = ssl.create_default_context(cafile=self._issuer.ca_file)
            line: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=FETCH_S / 2, context=self._context
            )
        elif parts.scheme == "http" and self._issuer.unsafe_http and _is_here(parts.hostname):
            line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=FETCH_S / 2)
        else:
            raise ValueError(f"{url[:200]} is without TLS")
        until = time.monotonic() + FETCH_S
        # Each read has its own limit, and one who sends a byte at a time keeps within it for ever: the thread would not come back.
        cut = threading.Timer(FETCH_S, _shut, (line,))
        cut.daemon = True
        cut.start()
        try:
            target = parts.path or "/"
            line.request(
                "GET", f"{target}?{parts.query}" if parts.query else target, headers={"Accept": "application/json"}
            )
            answer = line.getresponse()
            if answer.status != 200:
                raise ValueError(f"{url[:200]} answers {answer.status}")
            got = bytearray()
            while block := answer.read1(65536):
                got += block
                if len(got) > MAX_DOCUMENT:
                    break
            if len(got) > MAX_DOCUMENT or time.monotonic() >= until:
                raise ValueError(f"{url[:200]} answers too much, or too slowly")
            return bytes(got)
        finally:
            cut.cancel()
            line.close()


def _shut(line: http.client.HTTPConnection) -> None:
    """Whoever reads from it hears that it is over."""
    connection: socket.socket | None = line.sock
    if connection is not None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
