"""The application on a socket: uvicorn, with limits of time and size on what comes before a request is one."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvicorn.protocols.http.h11_impl  # what it would import later, on the event loop

from corral.errors import CorralError

KEEP_ALIVE_S = 5


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


def make_server(application: Any, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """A server for listening sockets: `await server.serve(sockets=[…])`. Ends by `should_exit`, at once by `force_exit`."""
    return uvicorn.Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            http="h11",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            backlog=1024,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
    )
