"""The key of a server: one, of the tenant `default`, kept as a hash only.

The file holds the SHA-256 of the key, mode 0600. A key of ours has 256 random bits, so a plain hash of it cannot be searched; one
that an operator chooses has to be long (`MIN_LENGTH`). Whoever can write the state directory can set a new key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from corral.errors import CorralError

MIN_LENGTH = 16
MAX_LENGTH = 512
VARIABLE = "CORRAL_ADMIN_KEY"


@dataclass(frozen=True)
class AdminKey:
    """What is known of the key. `accepts` takes the same time for every wrong key of one length."""

    digest: str

    @classmethod
    def of(cls, key: str) -> AdminKey:
        """The key that an operator or a test names."""
        return cls(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())

    def accepts(self, authorization: str) -> bool:
        """True for `Bearer KEY` with this key; the scheme's name in any case (RFC 9110)."""
        scheme, _, given = authorization.partition(" ")
        found = AdminKey.of(given.strip()).digest
        return hmac.compare_digest(found, self.digest) and scheme.lower() == "bearer"


@dataclass(frozen=True)
class Opened:
    """The key of a state directory: `fresh` is the one that was made just now and has to be shown, once."""

    key: AdminKey
    how: Literal["stored", "made", "given", "replaced"]
    fresh: str | None = None


def open_key(path: str, given: str | None, entropy: Callable[[int], bytes], variable: str = VARIABLE) -> Opened:
    """The stored key, else `given` (by `variable`), else a new one. A `given` key that differs from the stored one replaces it."""
    if given is not None:
        _check(given, variable)
    known = _read(path)
    if given is not None:
        key = AdminKey.of(given)
        if key == known:
            return Opened(key, "stored")
        _write(path, key)
        return Opened(key, "given" if known is None else "replaced")
    if known is not None:
        return Opened(known, "stored")
    fresh = "corral_" + base64.urlsafe_b64encode(entropy(32)).decode("ascii").rstrip("=")
    key = AdminKey.of(fresh)
    _write(path, key)
    return Opened(key, "made", fresh)


def _check(given: str, variable: str) -> None:
    good = given.isascii() and given.isprintable() and " " not in given
    if not good or not MIN_LENGTH <= len(given) <= MAX_LENGTH:
        raise CorralError(
            "invalid_value",
            f"{variable} is not a key of {MIN_LENGTH} to {MAX_LENGTH} printable ASCII characters without spaces",
            hint="for example the output of: openssl rand -hex 32",
            field=variable,
        )


def _read(path: str) -> AdminKey | None:
    try:
        with open(path, encoding="utf-8") as file:
            digest = json.load(file)["sha256"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorralError("infra_error", f"cannot read {path}: {error.strerror}", retryable=False) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if not isinstance(digest, str) or len(digest) != 64:
        raise _damaged(path)
    return AdminKey(digest)


def _damaged(path: str) -> CorralError:
    hint = "remove the file: the next start makes a new key"
    return CorralError("infra_error", f"{path} is damaged", hint=hint, retryable=False)


def _write(path: str, key: AdminKey) -> None:
    fresh = f"{path}.{os.getpid()}"
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"sha256": key.digest}, file)
            file.flush()
            os.fsync(descriptor)
        os.replace(fresh, path)
    except OSError as error:
        raise CorralError("infra_error", f"cannot write {path}: {error.strerror}", retryable=False) from error
