"""Both kinds of coordination keep what the port promises, with a Redis server that is killed, restarted, flushed and hung."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator

import pytest

from corral.adapters.coordination.inprocess import InProcess
from corral.adapters.coordination.redis import AT_ONCE, RedisCoordination
from corral.adapters.coordination.windows import Windows
from corral.errors import CorralError
from corral.testing.coordination import Place, until
from corral.testing.pytest_suites import CoordinationConformance
from redis_server import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


class TestInProcess(CoordinationConformance):
    @pytest.fixture
    def place(self) -> Place:
        return Place(lambda log: InProcess())


class TestRedis(CoordinationConformance):
    @pytest.fixture
    def place(self, server: RedisServer) -> Place:
        return Place(lambda log: RedisCoordination(server.url, "one", log), server)


async def test_installations_on_one_server_hear_and_count_apart(server: RedisServer) -> None:
    ours, others = RedisCoordination(server.url, "ours"), RedisCoordination(server.url, "others")
    heard: list[str] = []
    await ours.open(heard.append, lambda: None)
    await others.open(lambda key: None, lambda: None)
    again = RedisCoordination(server.url, "ours")
    await again.open(lambda key: None, lambda: None)
    try:
        others.ring(["theirs"])
        again.ring(["mine"])
        await until(lambda: "mine" in heard)
        assert "theirs" not in heard
        assert (await ours.count("k", 1, 1, 60_000)).allowed
        assert (await others.count("k", 1, 1, 60_000)).allowed
    finally:
        for each in (ours, others, again):
            await each.close()


async def test_what_a_stranger_says_on_the_channel_harms_nobody(server: RedisServer) -> None:
    one = RedisCoordination(server.url, "one")
    heard: list[str] = []
    await one.open(heard.append, lambda: None)
    try:
        for said in ("x", "\\xff\\xfe", "a\\n" + "k" * 10_000, "a\\n\\n\\n", "a\\ngood"):
            server.command("PUBLISH", "corral:one:wake", f'"{said}"')
        await until(lambda: "good" in heard)
        assert heard == ["good"] and one.healthy
    finally:
        await one.close()


async def test_a_counter_that_is_no_number_is_counted_alone(server: RedisServer) -> None:
    one = RedisCoordination(server.url, "one")
    await one.open(lambda key: None, lambda: None)
    try:
        server.command("LPUSH", f"corral:one:count:{b'k'.hex()}", "x")
        assert (await one.count("k", 1, 1, 60_000)).allowed
        assert not (await one.count("k", 1, 1, 60_000)).allowed
    finally:
        await one.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@host",
        "redis://:secret/x@host:6379/0",
        "redis://:secret#x@host:6379/0",
        "redis://:12/secret@host:6379/0",
        "redis://:12?secret@host:6379/0",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(CorralError) as refused:
        RedisCoordination(url)
    assert refused.value.code == "invalid_value" and "secret" not in f"{refused.value} {refused.value.hint}"
    assert "secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("refuse", "why"),
    [(("ACL", "SETUSER", "default", "-eval"), "NoPermission"), (("CONFIG", "SET", "maxmemory", "1"), "OutOfMemory")],
)
async def test_a_server_that_refuses_to_count_still_wakes(
    server: RedisServer, refuse: tuple[str, ...], why: str
) -> None:
    logged: list[str] = []
    heard: list[str] = []
    one, two = RedisCoordination(server.url, "one", logged.append), RedisCoordination(server.url, "one")
    await two.open(heard.append, lambda: None)
    await one.open(lambda key: None, lambda: None)
    try:
        assert (await one.count("k", 1, 10, 60_000)).allowed
        assert server.command(*refuse).startswith(b"+OK")
        answers = [await one.count("k", 1, 2, 60_000) for _ in range(3)]
        assert [each.allowed for each in answers] == [True, True, False], "counted here alone"
        for number in range(5):  # over several of its looks
            one.ring([f"key{number}"])
            await until(lambda n=number: f"key{n}" in heard)
            await asyncio.sleep(0.5)
        assert one.healthy and len(logged) == 1 and why in logged[0]
    finally:
        await one.close()
        await two.close()


async def test_a_server_that_becomes_a_replica_is_not_healthy_until_it_leads_again(server: RedisServer) -> None:
    logged: list[str] = []
    one = RedisCoordination(server.url, "one", logged.append)
    await one.open(lambda key: None, lambda: None)
    try:
        await until(lambda: one.healthy)
        server.command("REPLICAOF", "127.0.0.1", "1")
        await until(lambda: not one.healthy)
        for _ in range(20):
            assert (await one.count("k", 1, 100, 60_000)).allowed and not one.healthy
            await asyncio.sleep(0.1)
        assert len(logged) == 1, "told once, however often it is tried"
        server.command("REPLICAOF", "NO", "ONE")
        await until(lambda: one.healthy)
    finally:
        await one.close()


async def test_a_count_whose_turn_does_not_come_breaks_nothing(server: RedisServer) -> None:
    logged: list[str] = []
    one = RedisCoordination(server.url, "one", logged.append)
    await one.open(lambda key: None, lambda: None)
    try:
        await until(lambda: one.healthy)
        for _ in range(AT_ONCE):  # as by so many callers before
            await one._turns.acquire()
        assert (await one.count("k", 1, 1, 60_000)).allowed
        assert not one._broken.is_set() and one.healthy and logged == []
    finally:
        await one.close()


async def test_a_wrong_password_is_logged_without_being_shown(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "right")
    logged: list[str] = []
    one = RedisCoordination(server.url.replace("unix://", "unix://:topsecret@"), "one", logged.append)
    await one.open(lambda key: None, lambda: None)
    await until(lambda: logged)
    await asyncio.sleep(0.5)
    await one.close()
    assert len(logged) == 1 and "topsecret" not in logged[0]


def test_counters_end_with_their_windows_and_are_bounded() -> None:
    now = [0]
    windows = Windows(lambda: now[0], kept=5000)
    for number in range(20_000):
        assert windows.count(f"stranger {number}", 1, 1, 1000).allowed
    assert len(windows) <= 5000 + 1024
    now[0] = 1001
    for number in range(2000):
        windows.count(f"other {number}", 1, 1, 1000)
    assert len(windows) <= 2500 or len(windows) <= 5000 + 1024
    now[0] = 3000
    for number in range(8000):
        windows.count(f"{number}", 1, 1, 10)
        now[0] += 1
    assert len(windows) < 5000
