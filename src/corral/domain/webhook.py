"""Webhooks of runs: what a caller may name, how a delivery is signed (Standard Webhooks), when it is tried again.

A target is a URL that the caller names and the service opens, so it is read strictly here, and its addresses are judged by
`domain.addresses` each time before a connection is made.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.domain.addresses import Network, host_of, is_local_name, judge, read_host
from corral.domain.quantities import shown
from corral.errors import CorralError

MAX_URL = 2048
MAX_SECRET = 256
PREFIX = "whsec_"
BACK_OFF_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800, 28800)
"""Between the attempts of a delivery: about 24 hours in all, then it has failed."""
ATTEMPTS = len(BACK_OFF_S) + 1


@dataclass(frozen=True)
class WebhookRules:
    """What the policy says of targets."""

    ports: frozenset[int] = frozenset({443})
    http: bool = False
    """Plain HTTP is allowed."""
    private: tuple[Network, ...] = ()
    """Private ranges that the operator has named: a target may be there."""
    allow: bool = True


@dataclass(frozen=True)
class Target:
    """A checked URL in its parts. `host` is lower-case ASCII, without brackets."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The `Host` of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"


@dataclass(frozen=True)
class NewWebhook:
    """A webhook as it comes with a run. The secret is shown to nobody."""

    delivery_id: str
    url: str
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Delivery:
    """A webhook's row. `state`: waiting (the run has not ended), pending, delivered, failed."""

    delivery_id: str
    run_id: str
    tenant_id: str
    url: str
    secret: str | None = field(repr=False)
    state: str
    attempts: int
    created_at: int
    next_at: int | None = None
    claimed_by: str | None = None
    claim_until: int | None = None
    last_status: int | None = None
    last_error: str | None = None
    done_at: int | None = None


def parse_target(url: str, rules: WebhookRules) -> Target:
    """The parts of a URL, or ValueError with what is wrong with it. Nothing is repaired: what two readers may read differently is refused."""
    if not url or len(url) > MAX_URL:
        raise ValueError(f"a URL has at most {MAX_URL} characters")
    if any(c <= " " or c in '\\\x7f<>"{}|^`' for c in url) or not url.isascii():
        raise ValueError("a URL has no spaces, control characters, backslashes or characters outside ASCII")
    scheme, mark, rest = url.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in ("https", "http"):
        raise ValueError("a webhook is an https URL" + (" (or http)" if rules.http else ""))
    if scheme == "http" and not rules.http:
        raise ValueError("plain http is not allowed by the policy (webhooks.http); use https")
    if "#" in rest:
        raise ValueError("a webhook's URL has no fragment")
    cut = min((i for i in (rest.find("/"), rest.find("?")) if i >= 0), default=len(rest))
    authority, path = rest[:cut], rest[cut:]
    if "@" in authority:
        raise ValueError("a webhook's URL has no user or password; sign it with a secret instead")
    host, port = host_of(authority)
    port = port if port is not None else 443 if scheme == "https" else 80
    if port not in rules.ports:
        allowed = ", ".join(map(str, sorted(rules.ports)))
        raise ValueError(f"port {port} is not allowed by the policy (webhooks.ports: {allowed})")
    if not path.startswith("/"):
        path = f"/{path}"
    return Target(scheme, host, port, path)


def parse_webhook(value: object, rules: WebhookRules, delivery_id: str) -> NewWebhook:
    """The field `webhook` of a run: a URL, or an object with `url` and perhaps `secret`. `invalid_value` names the member."""
    if not rules.allow:
        raise CorralError(
            "policy_denied", "webhooks are not allowed by the policy", hint="poll the run instead", field="/webhook"
        )
    at, secret = "/webhook", None
    if isinstance(value, dict):
        for name in value:
            if name not in ("url", "secret"):
                raise CorralError(
                    "invalid_value", f"a webhook has no field {shown(name)}", hint="url and secret", field=at
                )
        secret = value.get("secret")
        value, at = value.get("url"), "/webhook/url"
    if not isinstance(value, str):
        raise CorralError(
            "invalid_value", "a webhook is a URL, as text", hint='"https://…", or {"url", "secret"}', field=at
        )
    try:
        parse_target(value, rules)
    except ValueError as error:
        raise CorralError(
            "invalid_value", str(error), hint="like https://example.com/hooks/corral", field=at
        ) from error
    if secret is not None:
        if not isinstance(secret, str):
            raise CorralError(
                "invalid_value", "the secret of a webhook is text", hint="whsec_…", field="/webhook/secret"
            )
        try:
            key_of(secret)
        except ValueError as error:
            raise CorralError(
                "invalid_value", str(error), hint="whsec_ and 24 to 64 bytes in base64", field="/webhook/secret"
            ) from error
    return NewWebhook(delivery_id, value, secret)


def check_literal(target: Target, rules: WebhookRules) -> None:
    """ValueError for a target that is an address, or a name of this host, that no delivery would be made to."""
    host = read_host(target.host)
    if isinstance(host, str):
        if is_local_name(host):
            raise ValueError(f"{host} is this host itself")
    elif (refusal := judge(host, rules.private)) is not None:
        raise ValueError(str(refusal))


def key_of(secret: str) -> bytes:
    """The bytes that a secret stands for: `whsec_` and base64 of them, or any other text as it is. ValueError for a weak one."""
    if secret.startswith(PREFIX):
        try:
            key = base64.b64decode(secret[len(PREFIX) :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError("the secret is not base64 after whsec_") from error
    else:
        try:
            key = secret.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the secret is not valid Unicode text") from error
    if not 16 <= len(key) <= MAX_SECRET:
        raise ValueError(f"a secret has 16 to {MAX_SECRET} bytes")
    return key


def new_secret(entropy24: bytes) -> str:
    """A secret from 24 random bytes."""
    return PREFIX + base64.b64encode(entropy24).decode()


def signature(secrets: Sequence[str], delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """`webhook-signature`: one `v1,` signature for each secret (two while one is being replaced)."""
    signed = f"{delivery_id}.{timestamp_s}.".encode() + body
    made = (base64.b64encode(hmac.new(key_of(secret), signed, hashlib.sha256).digest()).decode() for secret in secrets)
    return " ".join(f"v1,{each}" for each in made)


def next_attempt_ms(attempts: int) -> int | None:
    """How long to wait after this many attempts that failed; None = there is no other."""
    return BACK_OFF_S[attempts - 1] * 1000 if attempts < ATTEMPTS else None
