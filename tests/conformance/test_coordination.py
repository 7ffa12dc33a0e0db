"""Both kinds of coordination keep what the port promises, with a Redis server that is killed, restarted, flushed and hung."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from corral.adapters.coordination.inprocess import InProcess
from corral.adapters.coordination.redis import RedisCoordination
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


def test_a_url_that_is_none_is_refused_without_being_shown() -> None:
    with pytest.raises(CorralError) as refused:
        RedisCoordination("http://:secret@host")
    assert refused.value.code == "invalid_value" and "secret" not in f"{refused.value} {refused.value.hint}"


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
