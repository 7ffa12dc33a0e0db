"""One connection to PostgreSQL as the store uses it: named parameters, statements prepared once, several in one message.

Statements are sent in libpq's pipeline mode: what needs no answer waits in a list until something does, and then all of it goes in one
message (`BEGIN`, the clock and the first statement are one round trip). Nothing waits for ever: each answer has a limit, after which
the connection is given up.
"""

from __future__ import annotations

import re
import select
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import error_from_result

from corral.errors import CorralError

from .rows import conflict

CONNECT_S = 5
STATEMENT_S = 20
"""What the server gives a statement; and how long it lets a transaction of ours do nothing."""
LOCK_S = 10
ANSWER_S = STATEMENT_S + 5
"""What we give the server."""
PREPARED = 500
CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_MANY_PARAMETERS = 40

_SETTINGS = (
    ("client_encoding", "UTF8"),
    ("statement_timeout", f"{STATEMENT_S}s"),
    ("lock_timeout", f"{LOCK_S}s"),
    ("idle_in_transaction_session_timeout", f"{STATEMENT_S}s"),
    ("jit", "off"),
    # Statements are planned once and kept, perhaps when a table was still empty: then a scan of all of it looks cheapest. Every
    # statement of the store has an index that serves it (a test asks for the plans), so a scan is never what is wanted.
    ("enable_seqscan", "off"),
)
_TEXT, _INT8, _BOOL, _FLOAT8 = 25, 20, 16, 701
_NAMED = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|::|:([a-z_][a-z0-9_]*)""", re.IGNORECASE)


# What a refused connection says has no code.
_REFUSED = re.compile(r"password|role .* does not exist|pg_hba\.conf")
_ABSENT = re.compile(r"database .* (does not exist|is not currently accepting connections)")


class Unanswered(psycopg.OperationalError):
    """The server did not answer within the limit."""


class Interrupted(Exception):
    """The connection broke while a COMMIT was under way: whether it happened is unknown."""


@lru_cache(maxsize=4096)
def translated(text: str) -> tuple[str, tuple[str, ...]]:
    """`:name` -> `$1`; -> (text, names in order). Quoted text and casts stay."""
    names: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        name = found.group(1)
        return found.group(0) if name is None else f"${names.setdefault(name, len(names) + 1)}"

    return _NAMED.sub(numbered, text), tuple(names)


def _encoded(value: Any) -> tuple[bytes | None, int]:
    if value is None:
        return None, 0
    if isinstance(value, str):
        try:
            raw = value.encode()
        except UnicodeEncodeError:
            raw = b"\0"
        # What is written was checked before, so this is a key to look for, and no text in the database equals it: nor NULL.
        return (None, _TEXT) if b"\0" in raw else (raw, _TEXT)
    if isinstance(value, bool):
        return b"t" if value else b"f", _BOOL
    if isinstance(value, int):
        return b"%d" % value, _INT8
    if isinstance(value, float):
        return repr(value).encode(), _FLOAT8
    raise TypeError(f"no value for a database: {type(value).__name__}")


def parsed(url: str) -> dict[str, Any]:
    """The parts of a database URL. What is wrong is told without repeating it: it may hold a password."""
    try:
        found = conninfo_to_dict(url)
    except psycopg.Error:
        found = None
    parts = {name: value for name, value in (found or {}).items() if value is not None}
    if found is None or _misread(url, parts):
        raise CorralError(
            "invalid_value",
            "the database URL cannot be read",
            hint="write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with % for special characters in the password",
            field="database_url",
            retryable=False,
        )
    return parts


def _misread(url: str, parts: Mapping[str, Any]) -> bool:
    """Whether a special character of a password, written as it is, has made a port or a database of what follows it."""
    if not all(port.isdigit() for port in str(parts.get("port", "0")).split(",") if port):
        return True
    at_signs = url.count("@") - ("user" in parts)
    return "://" in url and at_signs > 0 and any("@" in str(parts.get(name, "")) for name in ("host", "port", "dbname"))


def described(url: str) -> str:
    """The URL without what is secret."""
    parts = parsed(url)
    user = f"{parts['user']}@" if "user" in parts else ""
    place = str(parts.get("host", parts.get("hostaddr", "")))
    port = f":{parts['port']}" if "port" in parts and not place.startswith("/") else ""
    where = f"{user}{port}/{parts.get('dbname', '')}?host={place}" if place.startswith("/") else ""
    return f"postgresql://{where or f'{user}{place}{port}/' + str(parts.get('dbname', ''))}"


def is_read_only(error: psycopg.Error) -> bool:
    """Whether nothing can be written there now. A standby refuses the very BEGIN, in words of its own language."""
    setting = (error.diag.source_function or "").endswith("bool_check_hook")
    return error.sqlstate == "25006" or (error.sqlstate == "0A000" and setting)


def refusal(error: psycopg.Error, where: str) -> CorralError:
    """The error of ours for one of the driver."""
    told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    state = error.sqlstate or ""
    if state == "23505":
        return conflict(f"it exists already ({told})")
    if state in ("3D000", "55000") or (not state and "FATAL" in told and _ABSENT.search(told)):
        # Not for good: this is what a database that is being restored looks like.
        return CorralError(
            "store_error",
            f"{where} is not there: {told}",
            hint="does the database URL name the right one?",
            field="database_url",
        )
    if state in ("28P01", "28000") or (not state and "FATAL" in told and _REFUSED.search(told)):
        return CorralError(
            "store_error",
            f"{where} refuses the connection: {told}",
            hint="check user, password and database in the database URL",
            retryable=False,
        )
    if state == "42501":
        return CorralError(
            "store_error",
            f"{where} forbids it: {told}",
            hint="the user of the database URL has to own the database and its tables",
            retryable=False,
        )
    if state in ("42P01", "42703"):
        return CorralError(
            "store_error",
            f"{where} has other tables than this version: {told}",
            hint="corral db check --database-url URL says which version it is of",
            retryable=False,
        )
    if is_read_only(error):
        return CorralError("store_error", f"{where} is read-only: {told}", hint="is it a standby?")
    if state in ("57014", "55P03", "25P03") or isinstance(error, Unanswered):
        return CorralError("store_error", f"{where} does not answer in time: {told}", hint="is it overloaded?")
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or state[:2] in ("08", "53", "57", "40"):
        return CorralError("store_error", f"{where} does not answer: {told}", hint="is PostgreSQL running there?")
    return CorralError("store_error", f"{where} refuses: {told}", retryable=False)


def connected(url: str, **more: Any) -> psycopg.Connection[Any]:
    """A connection that notices a dead server, in autocommit. Raises psycopg's errors."""
    parts: dict[str, Any] = {
        "application_name": "corral",
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
        "connect_timeout": CONNECT_S,
        **parsed(url),
        **more,
    }
    return psycopg.connect(make_conninfo(**parts), autocommit=True, prepare_threshold=None)


@dataclass
class _Asked:
    """A statement whose answer is on its way: one that prepares (`key`, `name`), one that reads the clock, or one that is wanted."""

    wanted: bool = True
    clock: bool = False
    key: tuple[str, tuple[int, ...]] | None = None
    name: bytes = b""


_WANTED = _Asked()
_QUIET = _Asked(wanted=False)
_CLOCK = _Asked(wanted=False, clock=True)


class Session:
    """A connection: `begin`, then `rows` and `send`, then `commit`, `leave` or `roll_back`. Raises psycopg's errors."""

    def __init__(self, url: str) -> None:
        self._connection = connected(url)
        try:
            calls = ", ".join("set_config(%s, %s, false)" for _ in _SETTINGS)
            self._connection.execute(f"SELECT {calls}", [word for pair in _SETTINGS for word in pair])
            self._pg = self._connection.pgconn
            self._transformer = Transformer(self._connection)
            self._pg.enter_pipeline_mode()
            self._pg.nonblocking = 1
            self._poll = select.poll()
            self._poll.register(self._pg.socket, select.POLLIN)
        except BaseException:
            self._connection.close()
            raise
        self.clock = 0
        """The server's clock when the transaction began, known after its first answer: Unix epoch milliseconds."""
        self._prepared: OrderedDict[tuple[str, tuple[int, ...]], bytes] = OrderedDict()
        self._count = 0
        self._answered = False
        """Whether the transaction has had an answer."""
        self._asked: list[_Asked] = []
        self._owed = 0
        """Messages whose answers nobody has waited for."""

    def close(self) -> None:
        """Raises nothing."""
        try:
            self._connection.close()
        except psycopg.Error:
            pass

    @property
    def broken(self) -> bool:
        return bool(self._pg.status != pq.ConnStatus.OK)

    # -- transactions ----------------------------------------------------------------------------------------------------------
    def begin(self, text: str, *, clock: bool) -> None:
        """Open a transaction with the next message; `clock`: ask for the server's."""
        if len(self._prepared) > PREPARED:
            _, oldest = self._prepared.popitem(last=False)
            self._send(b"DEALLOCATE " + oldest, _QUIET)
            self._leave()
        self._answered = False
        self._execute(text, (), [], [], _QUIET)
        if clock:
            self._execute(CLOCK, (), [], [], _CLOCK)

    def commit(self) -> None:
        """COMMIT, with what waits before it. `Interrupted` if the connection breaks before the answer."""
        if not self._answered:
            self.answers()  # a connection that broke long ago must be found out by something that may be repeated
        try:
            self.send("COMMIT")
            answer = self.answers()[-1]
        except psycopg.Error as error:
            # A refusal while the connection lives (of a statement before it, of a deferred constraint): nothing was committed.
            if self.broken or isinstance(error, Unanswered):
                raise Interrupted from error
            raise
        if answer.command_status != b"COMMIT":
            raise psycopg.InternalError(f"COMMIT was answered by {answer.command_status!r}")

    def leave(self) -> None:
        """End a transaction that has read, without waiting for the answer."""
        self._execute("COMMIT", (), [], [], _QUIET)
        self._leave()

    def _leave(self) -> None:
        self._pg.pipeline_sync()
        self._asked.clear()
        self._owed += 1
        self._pg.flush()

    def roll_back(self) -> None:
        """After any failure while the connection lives."""
        if self._asked:
            try:
                self.answers()
            except psycopg.Error:
                if self.broken:
                    raise
        self.send("ROLLBACK")
        self.answers()

    # -- statements ------------------------------------------------------------------------------------------------------------
    def send(self, text: str, params: Mapping[str, Any] = {}) -> None:
        """Add a statement to the next message. If it is refused, whatever asks next raises that."""
        query, names = translated(text)
        values: list[bytes | None] = []
        types: list[int] = []
        for name in names:
            value, kind = _encoded(params[name])
            values.append(value)
            types.append(kind)
        self._execute(query, names, values, types, _WANTED)

    def _execute(
        self, query: str, names: Sequence[str], values: list[bytes | None], types: list[int], asked: _Asked
    ) -> None:
        if len(names) > _MANY_PARAMETERS:  # its text depends on how many there are
            self._send(query.encode(), asked, values, types)
            return
        key = (query, tuple(types))
        name = self._prepared.get(key)
        if name is None:
            self._count += 1
            name = b"s%d" % self._count
            self._pg.send_prepare(name, query.encode(), types)
            self._asked.append(_Asked(False, key=key, name=name))
        else:
            self._prepared.move_to_end(key)
        self._pg.send_query_prepared(name, values)
        self._asked.append(asked)

    def _send(
        self, query: bytes, asked: _Asked, values: Sequence[bytes | None] = (), types: Sequence[int] = ()
    ) -> None:
        self._pg.send_query_params(query, values, types)
        self._asked.append(asked)

    def rows(self, text: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        """The rows of a statement, after everything sent before it."""
        self.send(text, params)
        return self._rows(self.answers()[-1])

    def _rows(self, result: Any) -> list[tuple[Any, ...]]:
        if result.status != pq.ExecStatus.TUPLES_OK or not result.ntuples:
            return []
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def answers(self) -> list[Any]:
        """Send what waits; -> the results that are wanted, in order. Raises the first refusal."""
        asked, self._asked = self._asked, []
        if not asked:
            return []
        self._pg.pipeline_sync()
        failed = None
        wanted = []
        received = self._received(len(asked))
        self._answered = True
        for what, result in zip(asked, received, strict=True):
            status = result.status
            if status == pq.ExecStatus.FATAL_ERROR:
                failed = failed or result
            elif what.wanted:
                wanted.append(result)
            elif what.clock and status == pq.ExecStatus.TUPLES_OK:
                self.clock = int(result.get_value(0, 0))
            elif what.key is not None and status == pq.ExecStatus.COMMAND_OK:
                self._prepared[what.key] = what.name
        if failed is not None:
            raise error_from_result(failed, "utf-8")
        return wanted

    def _received(self, count: int) -> list[Any]:
        pg = self._pg
        deadline = time.monotonic() + ANSWER_S
        results: list[Any] = []
        sent = pg.flush() == 0
        while True:
            while pg.is_busy() or not sent:
                left = deadline - time.monotonic()
                self._poll.modify(pg.socket, select.POLLIN if sent else select.POLLIN | select.POLLOUT)
                if left <= 0 or not (ready := self._poll.poll(left * 1000)):
                    raise Unanswered(f"no answer within {ANSWER_S} s")
                if ready[0][1] & ~select.POLLOUT:
                    pg.consume_input()
                if not sent:
                    sent = pg.flush() == 0
            result = pg.get_result()
            if result is None:
                if self.broken:
                    raise psycopg.OperationalError(pg.get_error_message())
            elif result.status != pq.ExecStatus.PIPELINE_SYNC:
                if result.status == pq.ExecStatus.FATAL_ERROR and self.broken:
                    raise error_from_result(result, "utf-8")
                results.append(result)
            elif self._owed:
                self._owed -= 1
                results.clear()
            else:
                if len(results) != count:
                    raise psycopg.InternalError(f"{len(results)} answers to {count} statements")
                return results
