"""What makes a process one of several: where the settings come from, what they lead to, and that no password is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from corral import bootstrap, config
from corral.adapters.coordination.inprocess import InProcess
from corral.adapters.coordination.redis import RedisCoordination
from corral.adapters.nodes.remote import RemoteNode
from corral.node.service import LocalNode

URL = "postgresql://corral:geheim@db/corral"


def test_the_environment_comes_before_the_file_and_nothing_before_sqlite(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"database_url = {URL!r}\nredis_url = 'redis://cache/1'\n")
    found = config.load(str(tmp_path), {})
    assert (found.database_url, found.redis_url) == (URL, "redis://cache/1")
    given = {"CORRAL_DATABASE_URL": "postgresql:///other", "CORRAL_REDIS_URL": "redis://other/1"}
    found = config.load(str(tmp_path), given)
    assert (found.database_url, found.redis_url) == ("postgresql:///other", "redis://other/1")
    found = config.load(str(tmp_path / "none"), {})
    assert (found.database_url, found.redis_url, found.node_socket, found.worker) == (None, None, None, None)


def test_settings_shown_in_a_traceback_hold_no_password(tmp_path: Path) -> None:
    shown = repr(
        config.load(str(tmp_path), {"CORRAL_DATABASE_URL": URL, "CORRAL_REDIS_URL": "redis://:geheim@cache/1"})
    )
    assert "geheim" not in shown


class Store:
    async def installation_id(self) -> str:
        return "of the database"


async def test_a_worker_has_the_node_on_a_socket_and_redis_and_a_process_alone_has_neither(tmp_path: Path) -> None:
    store: Any = Store()
    alone = config.load(str(tmp_path), {"CORRAL_REDIS_URL": "redis://cache/1"})
    assert isinstance(bootstrap.make_coordination(alone, "x", print), InProcess)
    assert isinstance(await bootstrap.reach_node(alone, store), LocalNode)
    worker = replace(alone, worker="w_1", node_socket=str(tmp_path / "node.sock"))
    assert isinstance(bootstrap.make_coordination(worker, "x", print), RedisCoordination)
    assert isinstance(await bootstrap.reach_node(worker, store), RemoteNode)


async def test_a_host_keeps_its_own_name_whatever_database_it_works_with(tmp_path: Path) -> None:
    """Processes and groups carry it: with another one nobody would find what is left over."""
    store: Any = Store()
    settings = config.load(str(tmp_path), {})
    local = bootstrap.make_store(settings)
    await local.open()
    here = await local.installation_id()
    await local.close()
    assert await bootstrap._installation(settings, local) == here
    assert not (tmp_path / "node" / "installation").exists()
    with_database = replace(settings, database_url=URL)
    assert await bootstrap._installation(with_database, store) == here
    assert await bootstrap._installation(with_database, None) == here
    (tmp_path / "corral.db").unlink()
    assert await bootstrap._installation(with_database, store) == here


async def test_a_host_without_a_past_takes_the_name_of_its_database_or_makes_one(tmp_path: Path) -> None:
    store: Any = Store()
    first = replace(config.load(str(tmp_path / "a"), {}), database_url=URL)
    assert await bootstrap._installation(first, store) == "of the database"
    second = replace(config.load(str(tmp_path / "b"), {}), database_url=URL)
    made = await bootstrap._installation(second, None)
    assert len(made) == 32
    assert await bootstrap._installation(second, store) == made
