"""`corral serve`: own the state directory for long, and serve the API on TCP to those who have the key.

The first SIGTERM, SIGINT or SIGHUP drains: new work is refused, calls under way may end, sandboxes and what runs in them live on.
The second one ends the process at once, which costs nothing but the answers under way. On PostgreSQL with Redis the work is done by
processes of their own (`corral.cli.replicas`), and SIGHUP restarts these one at a time.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import click

from corral import config
from corral.cli import leaving, terminal
from corral.errors import CorralError

if TYPE_CHECKING:
    import logging
    import ssl

    from corral.api.keys import AdminKey

DEFAULT_PORT = 8484
DRAIN_S = 10.0
PATIENCE_S = 2.0
"""How long a state directory that is owned is waited for: most commands are over sooner."""
KEY_FILE = "admin.key"
OPEN_FILES = 65_536
REFUSED_SOCKET = "ASGI callable returned without completing handshake."
"""What uvicorn logs of each handshake that was answered with a status of our own."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address or name to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0 picks a free one."
)
@click.option("--tls-cert", metavar="FILE", help="Certificate with its chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate, PEM.")
@click.option(
    "--unsafe-plaintext", is_flag=True, help="Serve beyond this host without TLS: the key can be read on the way."
)
@click.option(
    "--database-url",
    metavar="URL",
    help="PostgreSQL as the store. Better as CORRAL_DATABASE_URL: a password in an argument can be seen by others.",
)
@click.option("--redis-url", metavar="URL", help="Redis, by which replicas wake each other (CORRAL_REDIS_URL).")
@click.option("--replicas", type=click.IntRange(1, 64), help="API processes; more than one needs PostgreSQL and Redis.")
def command(
    host: str,
    port: int,
    tls_cert: str | None,
    tls_key: str | None,
    unsafe_plaintext: bool,
    database_url: str | None,
    redis_url: str | None,
    replicas: int | None,
) -> None:
    """Serve the API until a signal says stop. Each call needs the key: Authorization: Bearer KEY (CORRAL_KEY for clients)."""
    from corral.api.keys import VARIABLE, open_key

    for name, url in (("CORRAL_DATABASE_URL", database_url), ("CORRAL_REDIS_URL", redis_url)):
        if url is not None:
            os.environ[name] = url
    settings = config.load()
    several = _several(settings, replicas or 1, redis_url is not None)
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    files = (tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    tls = _context(files)
    given = os.environ.get(VARIABLE)
    allow_files()
    listener = bind(host, port)
    try:
        check_reach(listener, tls is not None, unsafe_plaintext)
        lock = own(settings.state_dir)
        try:
            opened = open_key(os.path.join(settings.state_dir, KEY_FILE), given, os.urandom)
        except BaseException:
            os.close(lock)
            raise

        def up() -> None:
            terminal.put(f"corral: listening on {url_of(listener, tls is not None)}\n")
            if opened.fresh is not None:
                terminal.put(f"corral: admin key {opened.fresh}\n")
            elif opened.how != "stored":
                terminal.put(f"corral: admin key set by {VARIABLE}\n")

        if several:
            _serve_several(settings, replicas or 1, listener, lock, files, up)
        else:
            _serve_alone(settings, listener, lock, opened.key, tls, up)
    finally:
        listener.close()


def _several(settings: config.Config, replicas: int, redis_asked: bool) -> bool:
    """Whether the work is for processes of their own: with PostgreSQL and Redis. What cannot be is refused with a hint."""
    if settings.database_url is None:
        if replicas > 1:
            hint = (
                "give --database-url and --redis-url; or leave --replicas out: any number of clients share one server"
            )
            raise CorralError("not_supported_yet", "one SQLite file has one server", hint=hint, field="--replicas")
        if redis_asked:
            hint = "give --database-url as well, or leave it out: one server on SQLite has nobody to wake"
            raise CorralError("invalid_value", "Redis is for replicas on PostgreSQL", hint=hint, field="--redis-url")
        return False
    if replicas > 1 and settings.redis_url is None:
        hint = "give --redis-url (CORRAL_REDIS_URL); without it PostgreSQL has one server"
        raise CorralError("invalid_value", "several replicas need Redis", hint=hint, field="--redis-url")
    return settings.redis_url is not None


def _serve_alone(
    settings: config.Config,
    listener: socket.socket,
    lock: int,
    key: AdminKey,
    tls: ssl.SSLContext | None,
    up: Callable[[], None],
) -> None:
    """All in this process."""
    from corral import bootstrap

    show_failures()
    try:
        with terminal.progress() as progress:
            owner = bootstrap.start_owner(settings, progress, _log)
    except BaseException:
        os.close(lock)
        raise
    owner.release.append(lambda: os.close(lock))
    try:
        with Stopping() as stop:
            owner.listen(listener, key, tls)
            up()
            while not stop.wait(0.25):
                pass  # a signal that another thread gets does not wake one that waits for good
            _log("stopping: new work is refused, what runs lives on")
            owner.drain(DRAIN_S)
            owner.close()
            os._exit(0)  # a thread that still builds a template would hold the process, and with it the port
    finally:
        owner.close()


def _serve_several(
    settings: config.Config,
    replicas: int,
    listener: socket.socket,
    lock: int,
    tls: tuple[str, str] | None,
    up: Callable[[], None],
) -> None:
    """A node and replicas, each a process, with this one as their parent."""
    from corral.cli.replicas import Replicas
    from corral.linux.statesocket import bind_socket, unlink_socket

    local = bind_socket(settings.state_dir)
    try:
        absolute = (os.path.abspath(tls[0]), os.path.abspath(tls[1])) if tls is not None else None
        Replicas(replicas, {"tcp": listener, "api": local}, lock, absolute, os.environ, up).run()
    finally:
        unlink_socket(settings.state_dir)
        local.close()
        os.close(lock)


def _context(files: tuple[str, str] | None) -> ssl.SSLContext | None:
    """Of a certificate and its key; without them nothing of TLS is loaded."""
    if files is None:
        return None
    from corral.api.tls import Tls

    return Tls(*files).context()


def allow_files() -> None:
    """Each connection and each exec needs open files; what the system allows is not what a shell gives. Sandboxes have their own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def show_failures() -> None:
    """What the server below the API could not handle is said, where a command would keep quiet."""
    import logging

    handler = logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("corral: %(message)s"))
    handler.addFilter(_without_trace)
    logging.getLogger("uvicorn.error").addHandler(handler)


def _without_trace(record: logging.LogRecord) -> bool:
    """An answer that had to be broken off, because its sandbox was deleted or a file changed, is no failure of the server.

    Nor is a WebSocket that was refused with a problem, which strangers without a key could fill the log with.
    """
    if record.msg == REFUSED_SOCKET:
        return False
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, CorralError):
        record.msg, record.args, record.exc_info, record.exc_text = f"an answer was broken off: {error}", (), None, None
    return True


class Stopping:
    """The first signal sets the event, the second ends the process."""

    def __init__(self, numbers: Sequence[int] = leaving.SIGNALS) -> None:
        self._numbers = numbers

    def __enter__(self) -> threading.Event:
        self._event = threading.Event()
        self._old = {
            number: signal.signal(number, self._arrived)
            for number in self._numbers
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self._event

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            leaving.leave(number)
        self._event.set()


def _log(line: str) -> None:
    terminal.say(f"corral: {line}")


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; what cannot be is refused with a hint."""
    hint = "choose another --host or --port; --port 0 picks a free one"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorralError("invalid_value", f"--host {host}: {reason}", hint=hint, field="--host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        detail = f"cannot listen on {host} port {port}: {error.strerror}"
        raise CorralError("infra_error", detail, hint=hint, field="--port", retryable=False) from error
    return listener


def check_reach(listener: socket.socket, encrypted: bool, unsafe_plaintext: bool) -> None:
    """Beyond loopback only with TLS, or knowingly without."""
    address = str(listener.getsockname()[0])
    if encrypted or is_loopback(address):
        return
    if not unsafe_plaintext:
        raise CorralError(
            "usage",
            f"{address} can be reached from other hosts, which needs TLS",
            hint="give --tls-cert and --tls-key, or listen on 127.0.0.1 behind a proxy that does TLS, or --unsafe-plaintext",
            field="--host",
        )
    _log(f"warning: --unsafe-plaintext: the key and all data can be read and changed on the way to {address}")


def is_loopback(address: str) -> bool:
    """True for a numeric address that no other host can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listener: socket.socket, encrypted: bool) -> str:
    """Where the listener is found."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"{'https' if encrypted else 'http'}://{shown}:{port}"


def own(state_dir: str) -> int:
    """The lock of the state directory; `state_locked` names who has it."""
    from corral.client.embedded import take_lock

    config.prepare_state(state_dir)
    until = time.monotonic() + PATIENCE_S
    while (lock := take_lock(state_dir)) is None:
        if time.monotonic() >= until:
            raise CorralError(
                "state_locked",
                f"the state directory {state_dir} is owned by {_holder(os.path.join(state_dir, 'owner.lock'))}",
                hint="stop that process first, or set CORRAL_STATE_DIR to another directory",
            )
        time.sleep(0.05)
    return lock


def _holder(path: str) -> str:
    """Who holds the lock, as the kernel tells."""
    try:
        inode = os.stat(path).st_ino
        with open("/proc/locks", encoding="ascii") as table:
            rows = [line.split() for line in table]
        pid = next(int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode))
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode("utf-8", "replace").replace("\0", " ").strip()
    except (OSError, ValueError, IndexError, StopIteration):
        return "another process"
    return f"process {pid} ({words[:120]})" if words else f"process {pid}"
