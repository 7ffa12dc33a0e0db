"""The secret of a webhook: where it is kept, for how long, and that nobody sees it again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.sealing.aes import AesSealer
from corral.client import connect
from corral.domain.webhook import ATTEMPTS, BACK_OFF_S
from corral.errors import CorralError
from corral.ports.sealing import Sealer

from .test_webhooks import PRINT, SECRET, URL, Receiver, in_state, receiver, run, shown, verify  # noqa: F401

KEY = b"s" * 24
OWN = "一个自己的秘密，足够长"


@pytest.fixture
def sealer(world: Any, tmp_path: Path) -> Sealer:
    world.services.core.sealer = AesSealer(str(tmp_path / "secret.key"), os.urandom)
    return world.services.core.sealer


async def test_the_row_keeps_it_sealed_until_it_is_delivered_and_then_not_at_all(world, receiver, sealer, until):  # noqa: F811
    receiver.answers = [500]
    run_id = await run(world, {"url": URL, "secret": SECRET})
    await until(in_state(world, run_id, "pending"))
    row = await world.store.delivery_of(run_id, "default")
    assert row.secret and SECRET not in row.secret and sealer.unseal(row.secret, row.delivery_id) == SECRET
    world.offset_ms += BACK_OFF_S[0] * 1000
    await until(in_state(world, run_id, "delivered", 2))
    assert (await world.store.delivery_of(run_id, "default")).secret is None
    assert all(verify(post, KEY) for post in receiver.posts) and len(receiver.posts) == 2


async def test_one_that_was_given_up_has_it_no_more(world, receiver, sealer, until):  # noqa: F811
    receiver.answers = [410]
    run_id = await run(world, {"url": URL, "secret": OWN})
    await until(in_state(world, run_id, "failed"))
    assert (await world.store.delivery_of(run_id, "default")).secret is None
    assert verify(receiver.posts[0], OWN.encode())


async def test_the_tenants_own_is_sealed_too_and_signs(world, receiver, sealer, until):  # noqa: F811
    first = (await world.call("GET", "/v1/webhooks/secret")).document["secret"]
    kept = await world.store.webhook_secrets("default", "x")
    assert first.startswith("whsec_") and kept.secret.startswith("sealed:")
    await until(in_state(world, await run(world), "delivered"))
    second = (await world.call("POST", "/v1/webhooks/secret/rotate")).document["secret"]
    assert (await world.call("GET", "/v1/webhooks/secret")).document["secret"] == second != first
    await until(in_state(world, await run(world), "delivered"))
    old, new = (base64.b64decode(each.removeprefix("whsec_")) for each in (first, second))
    assert verify(receiver.posts[0], old) and verify(receiver.posts[1], new, 0) and verify(receiver.posts[1], old, 1)


async def test_with_another_key_nothing_goes_out_wrongly_signed_and_the_reason_is_shown(
    world,
    receiver,  # noqa: F811
    sealer,
    until,
    tmp_path,
):
    receiver.answers = [500]
    run_id = await run(world, {"url": URL, "secret": SECRET})
    await until(in_state(world, run_id, "pending"))
    (await world.call("GET", "/v1/webhooks/secret")).document["secret"]
    (tmp_path / "other").mkdir()
    world.services.core.sealer = AesSealer(str(tmp_path / "other" / "secret.key"), os.urandom)
    refused = (await world.call("GET", "/v1/webhooks/secret")).document
    assert refused["code"] == "infra_error" and "secret.key" in refused["hint"]
    for attempt in range(2, ATTEMPTS + 1):
        world.offset_ms += BACK_OFF_S[attempt - 2] * 1000
        await until(in_state(world, run_id, "failed" if attempt == ATTEMPTS else "pending", attempt))
    assert len(receiver.posts) == 1 and "another key" in (await shown(world, run_id))["last_error"]
    assert (await world.call("POST", "/v1/webhooks/secret/rotate")).document["secret"].startswith("whsec_")


async def test_a_repeated_run_is_the_same_one_and_another_secret_is_another_request(world, receiver, sealer, until):  # noqa: F811
    async def submit(secret: str) -> Any:
        hook = {**PRINT, "webhook": {"url": URL, "secret": secret}}
        return await world.call("POST", "/v1/runs", hook, wait=10, **{"h_idempotency-key": "once"})

    first, again, other = await submit(SECRET), await submit(SECRET), await submit(OWN)
    assert first.document["id"] == again.document["id"] and other.document["code"] == "idempotency_conflict"
    plain = json.dumps({**PRINT, "webhook": {"url": URL, "secret": SECRET}}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(plain.encode()).hexdigest()
    assert digest not in repr(vars(world.store)), "whoever reads the database could try secrets against it"


def test_no_file_of_an_installation_ever_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Database with its log, spools, artifacts, journal: while it waits to be sent again, and after the run has ended."""
    monkeypatch.setenv("CORRAL_RUNTIMES", "fake")
    monkeypatch.setenv("CORRAL_LOG", "1")
    state = tmp_path / "state"
    transport = connect(state_dir=str(state))
    try:
        for secret in (SECRET, OWN):
            hook = {"url": "https://hooks.invalid/x", "secret": secret}
            document: dict[str, Any] = {"command": ["true"], "runtime": "fake", "webhook": hook}
            key = {"Idempotency-Key": hashlib.sha256(secret.encode()).hexdigest()[:8]}
            answer = transport.request("POST", "/v1/runs", document, {"wait": 60}, key)
            assert answer["result"] is not None
            seen = [answer, transport.request("GET", f"/v1/runs/{answer['id']}"), transport.request("GET", "/v1/runs")]
            assert secret not in repr(seen)
            for bad in ({"secret": 5, "x": secret}, {"more": 1}, {"url": "ftp://x"}):
                with pytest.raises(CorralError) as refused:
                    transport.request("POST", "/v1/runs", {**document, "webhook": {**hook, **bad}})
                assert secret not in str(refused.value) + repr(vars(refused.value))
        files = [file for file in state.rglob("*") if file.is_file() and state / "base" not in file.parents]
        assert any(file.name.startswith("corral.db") for file in files)
        data = b""
        for file in files:
            with suppress(FileNotFoundError):  # of an instance that is being removed
                data = file.read_bytes()
            for secret in (SECRET.encode(), SECRET.removeprefix("whsec_").encode(), OWN.encode()):
                assert secret not in data, file
    finally:
        transport.close()
    with sqlite3.connect(f"file:{state}/corral.db?mode=ro", uri=True) as database:
        rows = database.execute("SELECT secret FROM webhook_delivery WHERE state = 'pending'").fetchall()
    assert rows and all(row[0].startswith("sealed:") for row in rows)
