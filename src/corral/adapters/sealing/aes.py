"""Sealing by AES-256-GCM, with a key in a file of the state directory that all its processes share."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from corral.errors import CorralError

KEY_BYTES = 32
NONCE_BYTES = 12
PREFIX = "sealed:1:"


class AesSealer:
    """`ports.sealing.Sealer`. The key is made when it is first needed, by whichever process comes first."""

    def __init__(self, path: str, entropy: Callable[[int], bytes]) -> None:
        self._path = path
        self._entropy = entropy

    def seal(self, text: str, about: str) -> str:
        nonce = self._entropy(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), about.encode())
        return PREFIX + base64.b64encode(sealed).decode()

    def unseal(self, sealed: str, about: str) -> str:
        if not sealed.startswith(PREFIX):
            return sealed
        from cryptography.exceptions import InvalidTag

        try:
            raw = base64.b64decode(sealed.removeprefix(PREFIX), validate=True)
            text: bytes = self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], about.encode())
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise ValueError("it was sealed with another key, or changed") from error
        except CorralError as error:
            raise ValueError(error.detail) from error
        return text.decode()

    def mark(self, text: str) -> str:
        key = hashlib.sha256(b"corral mark\0" + self._key).digest()
        return "mark:1:" + hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    @functools.cached_property
    def _cipher(self) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._key)

    @functools.cached_property
    def _key(self) -> bytes:
        try:
            with suppress(FileNotFoundError):
                return self._read()
            self._make()
            return self._read()
        except OSError as error:
            raise CorralError(
                "infra_error", f"cannot read or make {self._path}: {error.strerror}", retryable=False
            ) from error

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            key = file.read(KEY_BYTES + 1)
        if len(key) != KEY_BYTES:
            hint = "put back the file as it was, or remove it: secrets that were sealed with it are lost then"
            raise CorralError("infra_error", f"{self._path} is damaged", hint=hint, retryable=False)
        return key

    def _make(self) -> None:
        """Whole or not at all, and never over the one that another process has just made."""
        fresh = f"{self._path}.{os.getpid()}.{self._entropy(6).hex()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(self._entropy(KEY_BYTES))
                file.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):
                os.link(fresh, self._path)
            folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # else a sealed row might outlive its key
            finally:
                os.close(folder)
        finally:
            os.unlink(fresh)
