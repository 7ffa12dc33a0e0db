"""What only the PostgreSQL store has: connections that break, a server that is away, several stores on one database."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from corral import faults
from corral.adapters.store import postgres_session, workers
from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.postgres_session import described, translated
from corral.domain.quota import Amounts, Ceiling
from corral.domain.records import LeaseChange, Transition
from corral.errors import CorralError
from corral.ports.workers import Beat
from corral.testing.store import Bench, Clock, audit, refused
from corral.testing.store.bench import EVENT, key_of
from corral.testing.store.queue import ROOM, finished, held, placed, rules, submitted
from postgres_server import PASSWORD, PostgresServer, postgres_server, running

__all__ = ["postgres_server"]


@pytest.fixture
async def bench(postgres_server: PostgresServer) -> AsyncIterator[Bench]:
    clock = Clock()
    bench = Bench(PostgresStore(postgres_server.fresh_database(tables=True), clock), clock)
    await bench.store.open()
    yield bench
    await bench.store.close()


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.fresh_database(tables=True)


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that the tests of this module may stop."""
    with running(tcp=True) as server:
        yield server


@pytest.fixture
async def own(own_server: PostgresServer) -> AsyncIterator[tuple[Bench, PostgresServer, str]]:
    own_server.start()
    url = own_server.fresh_database(tables=True)
    clock = Clock()
    bench = Bench(PostgresStore(url, clock), clock)
    await bench.store.open()
    yield bench, own_server, url
    await bench.store.close()
    own_server.start()


@pytest.fixture
def fault():
    armed: list[str] = []

    def arm(name: str, action) -> None:
        armed.append(name)
        faults.arm(name, action)

    yield arm
    for name in armed:
        faults.arm(name, None)


def test_names_become_numbers_but_in_quoted_text_and_casts() -> None:
    text = "SELECT ':no', \"a:no\", x::bigint, 'it''s :no' FROM t WHERE a = :one AND b = :two AND c = :one"
    assert translated(text) == (
        "SELECT ':no', \"a:no\", x::bigint, 'it''s :no' FROM t WHERE a = $1 AND b = $2 AND c = $1",
        ("one", "two"),
    )


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://corral:seCret/x@host/db",  # read as the port "seCret" of the host "corral"
        "postgresql://corral:123/seCret@host/db",  # as the database "seCret@host/db"
        "postgresql://corral:12/seCret@host:5432/db",
        "postgresql://corral:x@seCret@host/db",
        "postgresql://corral:seCret/",
        "postgresql://corral:se Cret@host/db",
    ],
)
def test_a_password_that_is_not_encoded_is_not_taken_for_a_place_and_shown(url: str) -> None:
    for ask in (described, PostgresStore):
        with pytest.raises(CorralError) as caught:
            ask(url)
        assert caught.value.code == "invalid_value" and "with % for special characters" in (caught.value.hint or "")
        told = (str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__))
        assert not any("Cret" in text for text in told), told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://a:p%40q%2F@h:1/d", "postgresql://a@h:1/d"),
        ("postgresql://a:p?q#@h/d", "postgresql://a@h/d"),
        ("postgresql://a@h1:1,h2:2/d", "postgresql://a@h1,h2:1,2/d"),
        ("postgresql://a@h/d%40e", "postgresql://a@h/d@e"),
        ("host=h dbname=a@b password=p", "postgresql://h/a@b"),
        ("postgresql://", "postgresql:///"),
    ],
)
def test_other_urls_are_shown_without_what_is_secret(url: str, shown: str) -> None:
    assert described(url) == shown


def test_a_password_is_never_shown(own_server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    url = own_server.url("corral_none", tcp=True)
    assert described(url) == f"postgresql://corral@127.0.0.1:{own_server.port}/corral_none"
    store = PostgresStore(url)
    wrong = PostgresStore(url.replace("@127", "x@127"))
    for each in (store, wrong):
        with pytest.raises(CorralError) as caught:
            asyncio.run(each.open())
        assert caught.value.code == "store_error" and caught.value.hint
        told = [
            repr(each),
            str(caught.value),
            str(caught.value.to_problem()),
            repr(caught.value.__cause__),
            caplog.text,
        ]
        assert not any(PASSWORD in text or "pass%3A" in text for text in told)
    with pytest.raises(CorralError) as caught:
        PostgresStore("postgresql://me:geheim@[::1/db?x=%zz")
    assert caught.value.code == "invalid_value" and "geheim" not in str(caught.value.to_problem())
    assert "geheim" not in repr(caught.value.__cause__)


def test_what_the_server_refuses_for_good_is_not_retryable(own_server: PostgresServer) -> None:
    own_server.start()
    good = own_server.url("postgres", tcp=True)
    for url, again in ((good.replace("@127", "x@127"), False), (good.replace("/postgres", "/corral_none"), True)):
        with pytest.raises(CorralError) as caught:
            asyncio.run(PostgresStore(url).open())
        assert caught.value.code == "store_error" and caught.value.hint
        assert caught.value.retryable is again, "a database that is being restored is away for a moment only"


async def test_it_works_over_tcp_with_a_password(own_server: PostgresServer) -> None:
    own_server.start()
    name = own_server.name_of(own_server.fresh_database(tables=True))
    clock = Clock()
    bench = Bench(PostgresStore(own_server.url(name, tcp=True), clock), clock)
    await bench.store.open()
    assert (await bench.store.submit_run(bench.run(), audit()))[1]
    await bench.store.close()


async def test_the_clock_is_that_of_the_database(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    before = time.time() * 1000
    await store.add_audit(audit())
    [row] = await store.list_audit("default")
    assert before - 1000 <= row.timestamp <= time.time() * 1000 + 1000
    await store.close()


async def test_a_failure_before_the_commit_takes_everything_back(bench: Bench, fault) -> None:
    def fail() -> None:
        raise RuntimeError("struck")

    fault("store.commit.before", fail)
    with pytest.raises(RuntimeError, match="struck"):
        await bench.store.submit_run(bench.run(), audit())
    faults.arm("store.commit.before", None)
    assert await bench.store.open_runs() == [] and await bench.store.list_audit("default") == []
    assert (await bench.store.submit_run(bench.run(), audit()))[1]


async def test_one_that_waits_for_a_row_holds_up_nobody_else(bench: Bench, fault) -> None:
    await bench.made("sbx_1")
    await bench.made("sbx_2")
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        faults.arm("store.commit.before", None)
        reached.set()
        assert go.wait(60)

    fault("store.commit.before", hold)
    first = asyncio.ensure_future(bench.step("sbx_1", "ready"))
    await asyncio.to_thread(reached.wait, 60)
    second = asyncio.ensure_future(bench.store.commit_transition(Transition("sbx_1", 1, "leased", EVENT)))
    view = await bench.store.get_sandbox("sbx_1", None)
    assert view is not None and view.sandbox.version == 1, "readers see what is committed"
    assert (await bench.step("sbx_2", "ready")).sandbox.version == 2
    go.set()
    assert (await first).sandbox.state == "ready"
    await refused("conflict", second)


async def test_a_tenant_whose_sums_are_held_holds_up_no_other(bench: Bench) -> None:
    limits = rules(host=Ceiling(running=100))
    await placed(bench, "run_a", limits, tenant_id="a")
    with psycopg.connect(bench.store._url) as other:  # as a transaction that is not committed yet
        other.execute("SELECT 1 FROM tenant_use WHERE tenant_id = 'a' FOR UPDATE")
        slow = asyncio.create_task(placed(bench, "run_a2", limits, tenant_id="a"))
        async with asyncio.timeout(8):  # less than what a lock is waited for
            run = await placed(bench, "run_b", limits, tenant_id="b")
            assert run.state == "starting"
            await finished(bench, "run_b")
        assert not slow.done()
    assert (await slow).state == "starting"
    assert await held(bench, "*") == Amounts(running=2) + ROOM + ROOM


async def test_giving_back_waits_for_nobody_who_lets_something_in(bench: Bench) -> None:
    limits = rules(host=Ceiling(running=100))
    await placed(bench, "run_a", limits, tenant_id="a")
    with psycopg.connect(bench.store._url) as other:
        other.execute("SELECT 1 FROM tenant_use WHERE tenant_id = '*' FOR UPDATE")
        async with asyncio.timeout(8):
            await submitted(bench, "run_b", limits, tenant_id="b")
            await finished(bench, "run_b", "run_a")
    assert await held(bench, "*") == Amounts()


async def test_transactions_that_wait_for_each_other_are_run_again(bench: Bench, url: str) -> None:
    await bench.made("sbx_1")
    await bench.made("sbx_2")
    barrier = threading.Barrier(2)
    attempts: list[str] = []

    def crosswise(tx, first: str, second: str) -> None:
        attempts.append(first)
        text = "UPDATE sandbox SET last_active_at = last_active_at + 1 WHERE sandbox_id = :id"
        tx.rows(text, {"id": first})
        if len(attempts) <= 2:
            barrier.wait(60)
        tx.rows(text, {"id": second})

    write = bench.store._write  # type: ignore[attr-defined]
    await asyncio.gather(write(crosswise, "sbx_1", "sbx_2"), write(crosswise, "sbx_2", "sbx_1"))
    assert len(attempts) >= 3
    for view in await bench.store.list_sandboxes(None):
        assert view.sandbox.last_active_at == bench.clock.now + 2


async def test_a_refused_statement_that_nobody_waited_for_undoes_all(bench: Bench) -> None:
    await bench.store.submit_run(bench.run(), audit())

    def twice(tx) -> None:
        tx.rows("UPDATE run SET owner = 'x'")
        tx.send("INSERT INTO worker (worker_id, started_at, alive_until, facts) VALUES ('w', 1, 1, '{}')")
        tx.send("INSERT INTO worker (worker_id, started_at, alive_until, facts) VALUES ('w', 1, 1, '{}')")

    await refused("conflict", bench.store._write(twice))  # type: ignore[attr-defined]
    assert await bench.store.get_run("run_1", "default") == bench.run() and await bench.store.workers() == []


async def test_statements_of_every_length_are_kept_within_bounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_session, "PREPARED", 10)
    for number in range(30):
        states = [f"s{i}" for i in range(number)]
        assert await bench.store.list_runs("default", states=states) == []
        assert await bench.store.list_sandboxes(None, states=states) == []
        await bench.store.add_audit(audit())
    assert len(await bench.store.list_audit("default")) == 30
    assert await bench.store.list_runs("default", states=[f"s{i}" for i in range(3000)]) == []


async def test_connections_that_broke_while_idle_are_not_noticed(bench: Bench, postgres_server: PostgresServer) -> None:
    url = bench.store._url  # type: ignore[attr-defined]
    for number in range(12):
        await bench.store.submit_run(bench.run(f"run_{number}"), audit())
        await bench.store.open_runs()
        if number % 3 == 2:
            await asyncio.to_thread(postgres_server.disconnect, url)
    assert len(await bench.store.open_runs()) == 12


async def test_a_connection_that_breaks_before_the_commit_is_run_again(
    bench: Bench, postgres_server: PostgresServer
) -> None:
    await bench.store.submit_run(bench.run(), audit())
    seen: list[int] = []

    def work(tx) -> int:
        tx.rows("UPDATE run SET version = version + 1")
        if not seen:
            seen.append(1)
            postgres_server.disconnect(bench.store._url)  # type: ignore[attr-defined]
        [(version,)] = tx.rows("SELECT version FROM run")
        return int(version)

    assert await bench.store._write(work) == 2, "once, though it was run twice"  # type: ignore[attr-defined]


async def test_a_commit_without_an_answer_is_told_as_unknown(
    bench: Bench, postgres_server: PostgresServer, fault
) -> None:
    def strike() -> None:
        faults.arm("store.commit.before", None)
        postgres_server.disconnect(bench.store._url)  # type: ignore[attr-defined]

    fault("store.commit.before", strike)
    error = await refused("store_error", bench.store.submit_run(bench.run(), audit(), key_of()))
    assert error.retryable and "unknown" in error.detail
    run, _ = await bench.store.submit_run(bench.run("run_2"), audit(), key_of())
    assert [r.run_id for r in await bench.store.open_runs()] == [run.run_id], "repeated under its key: once"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
async def test_a_server_that_is_away_is_told_at_once_and_found_again(own, how: int) -> None:
    bench, server, _ = own
    await bench.store.submit_run(bench.run(), audit())
    await asyncio.to_thread(server.stop, how)
    started = time.monotonic()
    for call in (bench.store.get_run("run_1", "default"), bench.store.submit_run(bench.run("run_2"), audit())):
        error = await refused("store_error", call)
        assert error.retryable and error.hint
    assert time.monotonic() - started < 20
    await asyncio.to_thread(server.start)
    assert await bench.store.get_run("run_1", "default") == bench.run(), "what was committed is there"
    assert (await bench.store.submit_run(bench.run("run_2"), audit()))[1]


async def test_a_standby_is_a_retryable_error_and_left_for_the_primary(own) -> None:
    bench, server, _ = own
    await bench.store.submit_run(bench.run("run_1"), audit())
    signal_file = server.data / "standby.signal"
    server.stop()
    signal_file.touch()
    owner = server.data.stat()
    os.chown(signal_file, owner.st_uid, owner.st_gid)
    server.start()
    error = await refused("store_error", bench.store.submit_run(bench.run("run_2"), audit()))
    assert error.retryable and "read-only" in str(error) and "standby" in str(error.hint)
    assert await bench.store.get_run("run_1", "default") is not None
    server.stop()
    signal_file.unlink()
    server.start()
    await bench.store.submit_run(bench.run("run_2"), audit())


async def test_a_connection_that_leads_to_a_standby_now_is_left_for_the_primary(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.store._write(lambda tx: tx.rows("SET default_transaction_read_only = on"))
    begin = postgres_session.Session.begin
    standbys: list[object] = []

    def as_on_a_standby(self: Any, text: str, *, clock: bool) -> None:
        if not standbys:
            standbys.append(self)
        begin(self, text.replace("READ WRITE", "READ ONLY") if self is standbys[0] else text, clock=clock)

    monkeypatch.setattr(postgres_session.Session, "begin", as_on_a_standby)
    for i in range(8):
        await bench.store.submit_run(bench.run(f"run_{i}"), audit())
    assert standbys and standbys[0].broken


async def test_what_was_prepared_and_is_gone_is_prepared_again(bench: Bench) -> None:
    await bench.store.submit_run(bench.run("run_1"), audit())
    for _ in range(20):
        await bench.store._write(lambda tx: tx.rows("DEALLOCATE ALL"))
        await bench.store._read(lambda tx: tx.rows("DEALLOCATE ALL"))
    for i in range(2, 10):
        await bench.store.submit_run(bench.run(f"run_{i}"), audit())
        assert await bench.store.get_run(f"run_{i}", "default") is not None


async def test_callers_that_gave_up_a_slow_database_do_not_keep_it_slow(bench: Bench) -> None:
    begun: list[int] = []
    go = threading.Event()

    def slow(tx: Any, number: int) -> None:
        begun.append(number)
        go.wait(60)

    calls = [asyncio.create_task(bench.store._read(slow, number)) for number in range(30)]
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    go.set()
    assert await bench.store.get_run("run_1", "default") is None
    assert len(begun) == 2, "only what had begun goes on"


async def test_a_server_that_does_not_answer_is_given_up(own, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, server, _ = own
    await bench.store.submit_run(bench.run(), audit())
    await bench.store.get_run("run_1", "default")
    monkeypatch.setattr(postgres_session, "ANSWER_S", 1)
    monkeypatch.setattr(postgres_session, "CONNECT_S", 2)
    with server.frozen():
        for call in (bench.store.get_run("run_1", "default"), bench.store.submit_run(bench.run("run_2"), audit())):
            error = await asyncio.wait_for(refused("store_error", call), 60)
            assert error.retryable and error.hint
    monkeypatch.setattr(postgres_session, "ANSWER_S", 60)
    monkeypatch.setattr(postgres_session, "CONNECT_S", 60)
    assert await bench.store.get_run("run_1", "default") == bench.run()
    assert (await bench.store.submit_run(bench.run("run_2"), audit(), key_of()))[1]


async def test_a_server_that_swallows_connections_is_not_waited_for_by_everybody_in_turn(
    own, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, server, url = own
    tried: list[float] = []

    class Counted(postgres_session.Session):
        def __init__(self, url: str) -> None:
            tried.append(time.monotonic())
            super().__init__(url)

    monkeypatch.setattr("corral.adapters.store.postgres.Session", Counted)
    monkeypatch.setattr(postgres_session, "CONNECT_S", 2)
    await asyncio.to_thread(server.disconnect, url)
    with server.frozen():
        calls = [refused("store_error", bench.store.get_run("run_1", "default")) for _ in range(40)]
        errors = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert all(error.retryable for error in errors)
        assert len(tried) <= 4, "each of the two readers tries, and the rest had asked before that failed"
    monkeypatch.setattr(postgres_session, "CONNECT_S", 60)
    assert await bench.store.get_run("run_1", "default") is None


async def test_a_row_that_is_locked_for_too_long_is_a_retryable_error(
    bench: Bench, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.made()
    await bench.store.close()
    short = tuple((name, "50ms" if name == "lock_timeout" else value) for name, value in postgres_session._SETTINGS)
    monkeypatch.setattr(postgres_session, "_SETTINGS", short)
    await bench.store.open()
    with psycopg.connect(bench.store._url) as other:  # type: ignore[attr-defined]
        other.execute("SELECT 1 FROM sandbox FOR UPDATE")
        error = await refused("store_error", bench.step(state="ready"))
        assert error.retryable
        other.rollback()
    assert (await bench.step(state="ready")).sandbox.state == "ready"


async def test_stores_of_several_replicas_have_one_winner_for_each_key(url: str) -> None:
    clock = Clock()
    benches = [Bench(PostgresStore(url, clock), clock) for _ in range(3)]
    for each in benches:
        await each.store.open()
    try:
        assert len({await each.store.installation_id() for each in benches}) == 1
        for number in range(20):
            key = key_of(f"k{number}")
            answers = await asyncio.gather(
                *(each.store.submit_run(each.run(f"run_{number}_{i}"), audit(), key) for i, each in enumerate(benches))
            )
            assert sum(made for _, made in answers) == 1 and len({run.run_id for run, _ in answers}) == 1
        await benches[0].made()
        takes = [
            each.store.commit_transition(
                Transition("sbx_1", 1, "leased", EVENT, lease=LeaseChange("take", f"w/{i}", 1000))
            )
            for i, each in enumerate(benches)
        ]
        answers = await asyncio.gather(*takes, return_exceptions=True)
        assert sum(not isinstance(answer, CorralError) for answer in answers) == 1
    finally:
        for each in benches:
            await each.store.close()


async def test_many_that_open_an_empty_database_at_once_make_its_tables_once(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    stores = [PostgresStore(url, Clock()) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    assert len({await store.installation_id() for store in stores}) == 1
    for store in stores:
        await store.close()


async def test_closing_finishes_what_is_queued(bench: Bench) -> None:
    tasks = [asyncio.ensure_future(bench.store.submit_run(bench.run(f"run_{i}"), audit())) for i in range(50)]
    await asyncio.sleep(0)
    await bench.store.close()
    assert all(made for _, made in await asyncio.gather(*tasks))
    assert not [t for t in threading.enumerate() if t.name.startswith("store-") and t.is_alive()]
    await bench.store.open()
    assert len(await bench.store.open_runs()) == 50


async def test_a_restored_older_copy_goes_on(own) -> None:
    bench, server, url = own
    await bench.store.submit_run(bench.run(), audit())
    copy = await asyncio.to_thread(server.copy_of, url)
    await bench.store.submit_run(bench.run("run_2"), audit())
    await asyncio.to_thread(server.restore, url, copy)
    assert [run.run_id for run in await bench.store.open_runs()] == ["run_1"]
    assert (await bench.store.submit_run(bench.run("run_2"), audit()))[1]


def test_the_server_of_a_test_leaves_nothing(tmp_path: Path) -> None:
    with running() as server:
        pid, root = server.pid, server.sockets.parent
        server.restart(signal.SIGKILL)
        assert server.pid != pid and root.exists()
        pid = server.pid
    assert not root.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_workers_that_beat_at_once_for_clients_of_the_same_runs_wait_for_each_other_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, attempts, real = Clock(), 0, workers.beat

    def counted(*arguments: Any) -> Beat:
        nonlocal attempts
        attempts += 1
        return real(*arguments)

    monkeypatch.setattr(workers, "beat", counted)
    stores = [PostgresStore(url, clock), PostgresStore(url, clock)]
    bench = Bench(stores[0], clock)
    for store in stores:
        await store.open()
    try:
        for name in ("run_a", "run_z"):
            await bench.store.submit_run(bench.run(name), audit(), None)
        # A row is updated so slowly that both beats are under way at once, each with another row first.
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(
                "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END $$"
            )
            admin.execute("CREATE TRIGGER slowly BEFORE UPDATE ON run FOR EACH ROW EXECUTE FUNCTION slowly()")
        others = [f"run_m{n}" for n in range(499)]
        await asyncio.gather(
            stores[0].beat("w_1", 60_000, {}, ["run_a", *others, "run_z"], 60_000),
            stores[1].beat("w_2", 60_000, {}, ["run_z", *others, "run_a"], 60_000),
        )
        assert attempts == 2, "one was ended for a deadlock and run again"
        for name in ("run_a", "run_z"):
            row = await bench.store.get_run(name, "default")
            assert row is not None and row.watched_until > 0
    finally:
        for store in stores:
            await store.close()
