"""Webhooks over a node in memory: what is sent to whom, signed by what, how often, and what is never sent."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from dataclasses import replace
from ipaddress import ip_address

import pytest

from corral.domain.addresses import parse_network
from corral.domain.webhook import ATTEMPTS, BACK_OFF_S
from corral.ports.delivery import DeliveryError

PRINT = {"command": ["print", "a secret of the program"]}
URL = "https://hooks.example/done?x=1"
SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()


class Receiver:
    """A sender whose answers are set by the test."""

    def __init__(self) -> None:
        self.names = {"hooks.example": ["93.184.216.34", "2606:2800::1"]}
        self.answers: list = []
        self.posts: list = []
        self.resolved = 0

    async def resolve(self, host, port):
        self.resolved += 1
        return [ip_address(each) for each in self.names.get(host, [])]

    async def post(self, request):
        self.posts.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
async def receiver(world):
    made = world.services.core.sender = Receiver()
    world.services.webhooks.begin()
    return made


async def run(world, hook=URL, **more):
    reply = await world.call("POST", "/v1/runs", {**PRINT, "webhook": hook, **more}, wait=10)
    assert reply.status == 200, reply.document
    return reply.document["id"]


async def shown(world, run_id):
    return (await world.call("GET", f"/v1/runs/{run_id}")).document["webhook"]


def in_state(world, run_id, state, attempts=1):
    async def check():
        row = await world.store.delivery_of(run_id, "default")
        return (row.state, row.attempts, row.claimed_by) == (state, attempts, None)

    return check


def verify(post, secret_key, used=0):
    signed = f"{post.headers['webhook-id']}.{post.headers['webhook-timestamp']}.".encode() + post.body
    expected = base64.b64encode(hmac.new(secret_key, signed, hashlib.sha256).digest()).decode()
    return post.headers["webhook-signature"].split()[used] == f"v1,{expected}"


async def test_the_end_of_a_run_is_told_signed_and_without_output(world, receiver, until):
    run_id = await run(world, {"url": URL, "secret": SECRET})
    await until(in_state(world, run_id, "delivered"))
    [post] = receiver.posts
    assert (
        str(post.address) == "93.184.216.34" and post.target.host == "hooks.example" and post.target.path == "/done?x=1"
    )
    assert verify(post, b"s" * 24) and post.headers["webhook-id"].startswith("whd_")
    document = json.loads(post.body)
    assert document["id"] == run_id and document["result"]["reason"] == "ok" and document["state"] == "finished"
    assert document["result"]["stdout"]["text"] is None and b"a secret of" not in post.body
    told = await shown(world, run_id)
    assert told["url"] == URL and told["last_status"] == 200 and told["done_at"]


async def test_a_secret_is_nowhere_but_in_the_delivery(world, receiver, until):
    run_id = await run(world, {"url": URL, "secret": SECRET})
    await until(in_state(world, run_id, "delivered"))
    row = await world.store.get_run(run_id, "default")
    assert row.request["webhook"] == {"url": URL}
    everything = json.dumps((await world.call("GET", f"/v1/runs/{run_id}")).document) + repr(row) + repr(world.logged)
    assert (
        SECRET not in everything
        and SECRET not in repr(receiver.posts)
        and SECRET.encode() not in receiver.posts[0].body
    )
    assert SECRET not in repr(await world.store.list_audit("default"))


async def test_without_a_secret_the_tenants_signs_and_both_while_it_is_replaced(world, receiver, until):
    first = (await world.call("GET", "/v1/webhooks/secret")).document
    assert first["secret"] == (await world.call("GET", "/v1/webhooks/secret")).document["secret"]
    key = base64.b64decode(first["secret"].removeprefix("whsec_"))
    await until(in_state(world, await run(world), "delivered"))
    assert verify(receiver.posts[0], key)
    second = (await world.call("POST", "/v1/webhooks/secret/rotate")).document
    assert second["secret"] != first["secret"] and second["old_secret_until"]
    await until(in_state(world, await run(world), "delivered"))
    new = base64.b64decode(second["secret"].removeprefix("whsec_"))
    assert verify(receiver.posts[1], new, 0) and verify(receiver.posts[1], key, 1)


@pytest.mark.parametrize(
    "failure", [500, 302, 404, DeliveryError("cannot be reached"), DeliveryError("broke", connected=True)]
)
async def test_what_was_not_heard_is_told_again_under_the_same_id(world, receiver, until, failure):
    both = isinstance(failure, DeliveryError) and not failure.connected  # then the other address is tried at once
    receiver.answers = [failure] * (4 if both else 2) + [204]
    run_id = await run(world)
    await until(in_state(world, run_id, "pending", 1))
    world.offset_ms += BACK_OFF_S[0] * 1000
    await until(in_state(world, run_id, "pending", 2))
    told = await shown(world, run_id)
    assert (
        told["last_error"]
        and told["next_at"]
        and told["last_status"] == (failure if isinstance(failure, int) else None)
    )
    world.offset_ms += BACK_OFF_S[1] * 1000
    await until(in_state(world, run_id, "delivered", 3))
    assert len({post.headers["webhook-id"] for post in receiver.posts}) == 1


async def test_it_is_given_up_after_about_a_day(world, receiver, until):
    assert 22 * 3600 < sum(BACK_OFF_S) < 26 * 3600
    receiver.answers = [500] * 99
    run_id = await run(world)
    for attempt in range(1, ATTEMPTS):
        await until(in_state(world, run_id, "pending", attempt))
        world.offset_ms += BACK_OFF_S[attempt - 1] * 1000
        world.services.core.wakes.heard("webhooks")
    await until(in_state(world, run_id, "failed", ATTEMPTS))
    assert [row.kind for row in await world.store.list_audit("default")][-1] == "webhook.failed"


async def test_a_receiver_that_is_gone_is_not_asked_again(world, receiver, until):
    receiver.answers = [410]
    run_id = await run(world)
    await until(in_state(world, run_id, "failed"))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "::ffff:10.0.0.1", "fe80::1", "fd00:ec2::254", "100.64.0.1",
     "0.0.0.0", "224.0.0.1", "64:ff9b::7f00:1", "2002:a00:1::"],
)  # fmt: skip
async def test_a_name_that_stands_for_a_refused_address_is_never_connected_to(world, receiver, until, address):
    receiver.names["hooks.example"] = ["93.184.216.34", address]  # one bad address among good ones is enough
    run_id = await run(world)
    await until(in_state(world, run_id, "pending"))
    assert receiver.posts == [] and "refused" in (await shown(world, run_id))["last_error"]


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example/", "https://127.0.0.1/", "https://0x7f.1/", "https://2130706433/", "https://[::1]/", "https://[::ffff:7f00:1]/",
     "https://localhost/", "https://a.localhost/", "https://169.254.169.254/latest", "https://10.0.0.1/", "https://hooks.example:22/",
     "https://user:pw@hooks.example/", "https://hooks.example/#x", "ftp://hooks.example/", "https://", "hooks.example", "https://a b/",
     "https://[fe80::1%25eth0]/", "https://hooks.example\\@127.0.0.1/", 7, [], {"url": URL, "secret": "short"}, {"url": URL, "more": 1},
     {"url": URL, "secret": 5}, {"secret": SECRET}],
)  # fmt: skip
async def test_a_target_that_cannot_be_is_refused_at_once(world, receiver, url):
    reply = await world.call("POST", "/v1/runs", {**PRINT, "webhook": url}, wait=10)
    assert reply.status == 422 and reply.document["code"] == "invalid_value", reply.document
    assert reply.document["field"].startswith("/webhook") and SECRET not in json.dumps(reply.document)
    assert await world.store.open_runs() == [] and receiver.resolved == 0


async def test_an_operator_may_name_a_private_range_and_plain_http(world, receiver, until):
    core = world.services.core
    rules = replace(
        core.policy.webhooks, private=(parse_network("10.20.0.0/16"),), http=True, ports=frozenset({80, 443, 8080})
    )
    core.policy = replace(core.policy, webhooks=rules)
    receiver.names["inner"] = ["10.20.1.1"]
    for url in ("http://inner:8080/x", "https://10.20.3.4/"):
        run_id = await run(world, url)
        await until(in_state(world, run_id, "delivered"))
    assert [str(post.address) for post in receiver.posts] == ["10.20.1.1", "10.20.3.4"]
    receiver.names["inner"] = ["10.21.1.1"]
    run_id = await run(world, "http://inner:8080/x")
    await until(in_state(world, run_id, "pending"))
    core.policy = replace(core.policy, webhooks=replace(rules, allow=False))
    reply = await world.call("POST", "/v1/runs", {**PRINT, "webhook": URL}, wait=10)
    assert reply.status == 403 and reply.document["code"] == "policy_denied"


async def test_a_receiver_that_is_slow_holds_up_no_other(world, receiver, until, monkeypatch):
    real, begun, let = receiver.post, asyncio.Event(), asyncio.Event()

    async def post(request):
        if not begun.is_set():
            begun.set()
            await let.wait()
        return await real(request)

    monkeypatch.setattr(receiver, "post", post)
    slow = await run(world)
    await begun.wait()
    for _ in range(10):
        await until(in_state(world, await run(world), "delivered"))
    assert (await shown(world, slow))["state"] == "pending"
    let.set()
    await until(in_state(world, slow, "delivered"))
    assert len(receiver.posts) == 11


async def test_a_killed_owner_leaves_deliveries_to_the_next_one(world, until):
    run_id = await run(world)  # nobody delivers here
    assert (await shown(world, run_id))["state"] == "pending"
    await world.crash()
    await world.start()
    made = world.services.core.sender = Receiver()
    world.services.webhooks.begin()
    await until(in_state(world, run_id, "delivered"))
    assert len(made.posts) == 1


async def test_a_run_that_never_started_is_told_too(world, receiver, until):
    reply = await world.call("POST", "/v1/runs", {**PRINT, "webhook": URL, "timeout_s": 10**6}, wait=10)
    run_id = reply.document["id"]
    await until(in_state(world, run_id, "delivered"))
    assert json.loads(receiver.posts[0].body)["result"]["reason"] == "policy_denied"
