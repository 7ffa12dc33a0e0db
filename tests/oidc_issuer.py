"""An OpenID Connect issuer of ours on a free port, with TLS by an authority of its own: its keys can be changed, it can be stopped."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import NameOID
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def published(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    """The public half as an issuer shows it."""
    kinds = {
        rsa.RSAPrivateKey: RSAAlgorithm,
        ec.EllipticCurvePrivateKey: ECAlgorithm,
        ed25519.Ed25519PrivateKey: OKPAlgorithm,
    }
    algorithm = next(kinds[kind] for kind in kinds if isinstance(key, kind))
    document = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**document, "kid": kid, "use": "sig", **more}


class Issuer:
    """`url` is its name. `keys`: kid -> (private key, algorithm). `calls`: the paths that were asked for."""

    def __init__(self, place: Path, *, tls: bool = True) -> None:
        self.keys: dict[str, tuple[Any, str]] = {"one": (rsa_key(), "RS256"), "two": (ec_key(), "ES256")}
        self.calls: list[str] = []
        self.changes: dict[str, Any] = {}
        """Members of the discovery document in place of the right ones."""
        self.jwks: Any = None
        """In place of the right keys."""
        self.status = 200
        self.ca_file = place / "issuer-ca.pem"
        self._tls = _certificate(place, self.ca_file) if tls else None
        self._start(0)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def _start(self, port: int) -> None:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.calls.append(self.path)
                answer = issuer._answer(self.path)
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(issuer.status)
                if 300 <= issuer.status < 400:
                    self.send_header("Location", f"{issuer.url}/keys")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that does not trust us hangs up

        self._server = Server(("127.0.0.1", port), Handler)
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Again: nothing."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def go_on(self) -> None:
        """After `stop`, under the same name."""
        self._start(self.port)

    def _answer(self, path: str) -> Any:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.changes}
        return (
            self.jwks
            if self.jwks is not None
            else {"keys": [published(key, kid) for kid, (key, _) in self.keys.items()]}
        )

    def claims(self, **more: Any) -> dict[str, Any]:
        now = int(time.time())
        good = {
            "iss": self.url,
            "aud": "corral",
            "sub": "li",
            "tenant": "acme",
            "scope": "sandboxes",
            "iat": now,
            "exp": now + 600,
        }
        return {name: value for name, value in {**good, **more}.items() if value is not None}

    def token(self, kid: str = "one", *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A token that is good unless `claims` (None = without) or `header` make it bad."""
        key, algorithm = self.keys[kid]
        return jwt.encode(self.claims(**claims), key, algorithm, headers={"kid": kid, **(header or {})})


def signed(key: rsa.RSAPrivateKey, header: dict[str, Any], claims: dict[str, Any]) -> str:
    """A token by RS256 whose header is anything at all."""

    def part(document: bytes | dict[str, Any]) -> str:
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    text = f"{part(header)}.{part(claims)}"
    return f"{text}.{part(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _certificate(place: Path, ca_file: Path) -> ssl.SSLContext:
    now = datetime.datetime.now(datetime.UTC)

    def made(name: str, key: Any, by: Any, signer: Any, *extensions: x509.ExtensionType) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(signer, hashes.SHA256())

    authority, key = ec_key(), ec_key()
    root = made("authority", authority, "authority", authority, x509.BasicConstraints(True, None))
    own = made(
        "127.0.0.1", key, "authority", authority,
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
    )  # fmt: skip
    ca_file.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    both = place / "issuer.pem"
    both.write_bytes(
        own.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return context
