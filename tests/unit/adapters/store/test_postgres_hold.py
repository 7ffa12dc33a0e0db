"""One process alone drives a PostgreSQL database, or several that know of each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from corral import bootstrap, config
from corral.adapters.store import postgres_hold
from corral.adapters.store.postgres_hold import PostgresHold
from corral.errors import CorralError
from postgres_server import PostgresServer, postgres_server, running

__all__ = ["postgres_server"]
Make = Callable[..., PostgresHold]
LIMIT_S = 60.0


class Told:
    def __init__(self) -> None:
        self.error: CorralError | None = None
        self.came = threading.Event()

    def __call__(self, error: CorralError) -> None:
        assert self.error is None
        self.error = error
        self.came.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_hold, "LOOK_S", 0.1)
    monkeypatch.setattr(postgres_hold, "TAKE_S", 0.5)
    monkeypatch.setattr(postgres_hold, "PAUSE_S", 0.02)


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.fresh_database(tables=True)


@pytest.fixture
def make(quick: None) -> Iterator[Make]:
    made: list[PostgresHold] = []

    def hold(url: str, *, shared: bool = False, lost: Callable[[CorralError], None] | None = None) -> PostgresHold:
        made.append(PostgresHold(url, shared=shared, lost=lost or Told()))
        return made[-1]

    yield hold
    for each in made:
        each.close()


def backends(url: str) -> list[int]:
    """Who has a session lock on the database."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()"
        )
        return [int(pid) for (pid,) in rows.fetchall()]


def cut(url: str) -> list[int]:
    """Break the connections of all who have one."""
    found = backends(url)
    with psycopg.connect(url, autocommit=True) as connection:
        for pid in found:
            connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def refused(hold: PostgresHold) -> CorralError:
    with pytest.raises(CorralError) as caught:
        hold.take(0.1)
    assert caught.value.code == "state_locked"
    return caught.value


def test_a_second_owner_is_refused_by_name_until_the_first_has_gone(url: str, make: Make) -> None:
    first, second = make(url), make(url)
    first.take()
    error = refused(second)
    assert "corral owner" in str(error) and "serve --replicas" in str(error.hint) and error.retryable
    assert "pass:word" not in str(error)
    first.close()
    second.take(LIMIT_S)


def test_workers_share_what_an_owner_has_alone(url: str, make: Make) -> None:
    workers = [make(url, shared=True) for _ in range(3)]
    for worker in workers:
        worker.take()
    assert "corral worker" in str(refused(make(url)))
    for worker in workers:
        worker.close()
    make(url).take(LIMIT_S)
    assert "corral owner" in str(refused(make(url, shared=True)))


def test_databases_and_schemas_do_not_know_of_each_other(url: str, postgres_server: PostgresServer, make: Make) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA other")
    make(url).take()
    make(postgres_server.fresh_database()).take()
    joined = "&" if "?" in url else "?"
    make(f"{url}{joined}options=-csearch_path%3Dother").take()


def test_who_waits_has_it_as_soon_as_the_other_ends(url: str, make: Make) -> None:
    first, second = make(url), make(url)
    first.take()
    timer = threading.Timer(0.3, first.close)
    timer.start()
    try:
        second.take(LIMIT_S)
    finally:
        timer.join()


def test_a_connection_that_breaks_is_made_again_with_the_lock(url: str, make: Make) -> None:
    told = Told()
    make(url, lost=told).take()
    old = cut(url)
    until(lambda: bool(backends(url)) and backends(url) != old)
    refused(make(url))
    assert told.error is None


def test_a_session_of_our_own_that_the_server_believes_alive_is_ended_by_its_successor(url: str, make: Make) -> None:
    told = Told()
    hold = make(url, lost=told)
    hold.take()
    old = backends(url)
    half_open, hold._connection = hold._connection, None  # as after a cable was pulled
    until(lambda: bool(backends(url)) and backends(url) != old)
    assert told.error is None
    assert half_open is not None
    half_open.close()


def test_who_loses_it_to_another_is_told_once(url: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_hold, "LOOK_S", 2.0)
    told = Told()
    first, second = make(url, lost=told), make(url)
    first.take()
    cut(url)
    second.take(LIMIT_S)
    assert told.came.wait(LIMIT_S) and told.error is not None
    assert told.error.code == "state_locked" and "corral owner" in str(told.error)
    second.close()
    first.close()


def test_one_that_another_has_taken_is_told_at_once(url: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_hold, "TAKE_S", 10 * LIMIT_S)
    told = Told()
    make(url, lost=told).take()
    with psycopg.connect(url, autocommit=True, application_name="corral owner elsewhere 7") as other:
        [key] = other.execute(postgres_hold._KEY).fetchall()
        old = cut(url)
        while not other.execute("SELECT pg_try_advisory_lock(%s)", key).fetchone()[0]:
            cut(url)
        assert old and told.came.wait(LIMIT_S)
    assert told.error is not None and "corral owner elsewhere 7" in str(told.error)


def test_it_outlives_a_restart_of_the_server(make: Make) -> None:
    with running(tcp=True) as server:
        url = server.fresh_database(tables=True)
        told = Told()
        make(url, lost=told).take()
        server.stop()
        time.sleep(0.5)
        server.start()
        until(lambda: bool(backends(url)))
        assert told.error is None


def test_a_server_that_is_away_is_a_store_error(tmp_path: Path, make: Make) -> None:
    with pytest.raises(CorralError) as caught:
        make(f"postgresql:///corral?host={tmp_path}").take()
    assert caught.value.code == "store_error"


def test_a_second_service_on_the_database_does_not_start_and_one_that_lost_it_takes_nothing_new(
    url: str, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORRAL_RUNTIMES", "fake")
    monkeypatch.setenv("CORRAL_DATABASE_URL", url)

    def start(name: str) -> bootstrap.Owner:
        monkeypatch.setenv("CORRAL_STATE_DIR", str(tmp_path / name))
        settings = config.load()
        config.prepare_state(settings.state_dir)
        return bootstrap.start_owner(settings)

    first = start("a")
    try:
        with pytest.raises(CorralError) as caught:
            start("b")
        assert caught.value.code == "state_locked"
        monkeypatch.setattr(postgres_hold, "LOOK_S", 2.0)
        time.sleep(0.2)  # its thread takes the longer pause from its next look on
        cut(url)
        other = PostgresHold(url, shared=False, lost=Told())
        other.take(LIMIT_S)

        def call(method: str, path: str, document: object = None) -> object:
            return first._call(first.dispatch(method, path, None, None, document))

        until(lambda: first._services is not None and first._services.core.refusing is not None)
        with pytest.raises(CorralError) as caught:
            call("POST", "/v1/runs", {"command": ["true"]})
        assert caught.value.code == "state_locked"
        call("GET", "/v1/runs")
        other.close()
    finally:
        first.close()
    start("a").close()


def test_workers_of_another_state_directory_are_refused_while_those_of_the_first_are_there(
    url: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    holds = [PostgresHold(url, shared=True, lost=told, home=home) for home in ("a", "a", "b", "b")]
    try:
        ours, theirs = holds[:2], holds[2:]
        for hold in ours:
            hold.take()
        for hold in theirs:
            assert "corral worker" in str(refused(hold))
        old = cut(url)
        until(lambda: len(backends(url)) == 2 * len(ours) and not set(old) & set(backends(url)))
        assert told.error is None, "who asked in vain takes nothing from those who come back"
        for hold in ours:
            hold.close()
        for hold in theirs:
            hold.take(LIMIT_S)
    finally:
        for hold in holds:
            hold.close()


def test_of_workers_of_two_state_directories_that_come_at_once_those_of_one_stay(url: str, quick: None) -> None:
    for _ in range(5):
        holds = [PostgresHold(url, shared=True, lost=Told(), home=home) for home in ("a", "b") * 2]
        got: list[str] = []

        def take(hold: PostgresHold) -> None:
            try:
                hold.take(2.0)
                got.append(hold._home)
            except CorralError as error:
                assert error.code == "state_locked"

        threads = [threading.Thread(target=take, args=(hold,)) for hold in holds]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(got)) == 1, got
        finally:
            for hold in holds:
                hold.close()
