"""Keys over several replicas on one database: what one of them is told holds for all within a second."""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.client import Corral, CorralError
from postgres_server import PostgresServer
from redis_server import RedisServer
from replica_server import Replicas

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.fixture(scope="module")
def server() -> Iterator[Replicas]:
    place = Path(tempfile.mkdtemp(prefix="corral-replicas-", dir="/tmp"))
    place.chmod(0o711)
    redis = RedisServer()
    redis.start()
    try:
        with PostgresServer() as postgres:
            made = Replicas(place, postgres.fresh_database(), redis.url)
            try:
                yield made.start().ready()
            finally:
                made.clear()
                made.stop()
    finally:
        redis.close()
        shutil.rmtree(place, ignore_errors=True)


def status(server: Replicas, key: str) -> int:
    """Of a call on a connection of its own, which the kernel gives to either replica."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/v1/whoami", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_key_is_known_to_all_at_once_and_refused_by_all_within_a_second(server: Replicas) -> None:
    with server.client() as admin:
        admin.tenants.create("acme", name="公司")
        for end in ("revoke", "disable", "rotate"):
            made = admin.keys.create(tenant="acme", user="li")
            assert {status(server, made["key"]) for _ in range(20)} == {200}, end
            if end == "revoke":
                admin.keys.revoke(made["id"])
            elif end == "disable":
                admin.tenants.disable("acme")
            else:
                admin.keys.rotate(made["id"], overlap_s=0)
            time.sleep(1.0)
            assert {status(server, made["key"]) for _ in range(20)} <= {401, 429}, end
            admin.tenants.enable("acme")


def test_a_tenant_of_one_replica_is_held_apart_by_the_other(server: Replicas) -> None:
    with server.client() as admin:
        for name in ("one", "two"):
            admin.tenants.create(name)
        keys = [admin.keys.create(tenant=name)["key"] for name in ("one", "two")]
    with Corral(server.url, keys[0]) as one, Corral(server.url, keys[1]) as two:
        try:
            run = one.run(shell="echo one")
        except CorralError as error:
            assert os.geteuid() != 0 and error.code == "isolation_unavailable" and "several tenants" in error.detail
            return  # no kernel holds limits for this user: both replicas know that this is not enough
        assert run.result.stdout.text == "one\n", run.result
        for _ in range(6):
            with pytest.raises(CorralError, match="not_found"):
                two.runs.get(run.id)
            assert one.runs.get(run.id).state == "finished" and two.runs.list() == []
        enforced = run.decisions["guard"]["needs"]["enforced"]
        assert enforced == ["disk", "memory", "pids"], "several tenants: whichever replica took the run"
