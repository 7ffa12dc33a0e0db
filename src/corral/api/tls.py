"""Certificate and key of a server; checked by its parent too, which loads nothing that serves."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from corral.errors import CorralError


@dataclass(frozen=True)
class Tls:
    """Files in PEM form: the certificate with its chain, and its key."""

    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        """A context for TLS 1.2 and later; `invalid_value` for files that do not serve."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["http/1.1"])
        for path, field in ((self.certificate, "--tls-cert"), (self.key, "--tls-key")):
            if not os.access(path, os.R_OK):
                raise CorralError("invalid_value", f"cannot read {path}", field=field)
        try:
            made.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise CorralError(
                "invalid_value",
                f"{self.certificate} and {self.key} are no certificate with its key: {reason}",
                hint="give the chain as PEM, and its key as PEM without a passphrase",
                field="--tls-cert",
            ) from error
        return made
