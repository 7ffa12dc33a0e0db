"""Templates as the operator sees them: a build goes on without its caller, a removal asks who lives."""

from __future__ import annotations

import asyncio

from corral.errors import CorralError

from .conftest import turns

FAILURE = CorralError("template_unavailable", "template host: usr/x looks like a credential")


async def test_templates_are_listed_with_what_policy_says(world):
    world.node.more_templates = [{"name": "mine", "digest": None, "available": True, "reason": None, "languages": []}]
    items = (await world.call("GET", "/v1/templates")).document["items"]
    assert [(item["name"], item["allowed"], item["build"]) for item in items] == [
        ("host", True, None),
        ("mine", True, None),
    ]


async def test_a_template_names_the_sandboxes_that_have_it(world):
    made = (await world.call("POST", "/v1/sandboxes", {})).document["id"]
    assert (await world.call("GET", "/v1/templates/host")).document["sandboxes"] == [made]
    assert (await world.call("GET", "/v1/templates/nosuch")).document["code"] == "not_found"


async def test_a_build_goes_on_when_the_call_gives_up_and_callers_share_it(world, until):
    world.node.build_gate = asyncio.Event()
    first = await world.call("POST", "/v1/templates", {"name": "host", "refresh": True}, wait=0)
    await until(lambda: world.node.builds)
    second = await world.call("POST", "/v1/templates", {"name": "host"}, wait=0.01)
    assert (first.status, second.status) == (202, 202)
    assert second.document["build"] == {"state": "building", "text": "fetching", "part": 0.5, "error": None}
    refused = await world.call("DELETE", "/v1/templates/host")
    assert (refused.status, refused.document["code"]) == (409, "conflict")
    waiting = asyncio.create_task(world.call("GET", "/v1/templates/host", wait=60))
    await turns()
    world.node.build_gate.set()
    assert (await waiting).document["build"] is None
    assert world.node.builds == [("host", True)]
    assert (await world.call("POST", "/v1/templates", {"name": "host"})).status == 200


async def test_why_a_build_failed_is_raised_to_who_waited_and_kept_for_who_asks_later(world):
    world.node.build_error = FAILURE
    told = await world.call("POST", "/v1/templates", {"name": "host"})
    assert (told.status, told.document["code"]) == (503, "template_unavailable")
    state = (await world.call("GET", "/v1/templates/host")).document["build"]
    assert (state["state"], state["error"]["detail"]) == ("failed", FAILURE.detail)
    world.node.build_error = None
    assert (await world.call("POST", "/v1/templates", {"name": "host"})).document["build"] is None


async def test_a_build_of_what_is_no_recipe_of_the_operator_is_refused(world):
    for body, code, field in (
        ({"name": "nosuch"}, "not_found", None),
        ({"name": "host", "archive": "/etc"}, "invalid_value", "/archive"),
        ({"name": 1}, "invalid_value", "/name"),
        ({}, "invalid_value", "/name"),
        ({"name": "host", "refresh": "yes"}, "invalid_value", "/refresh"),
        ([], "invalid_value", ""),
    ):
        told = (await world.call("POST", "/v1/templates", body)).document
        assert (told["code"], told.get("field")) == (code, field)
    assert world.node.builds == []


async def test_removal_is_refused_while_a_sandbox_lives_and_names_it(world):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    refused = await world.call("DELETE", "/v1/templates/host")
    assert (refused.status, refused.document["code"]) == (409, "template_in_use")
    assert refused.document["sandboxes"] == [made["id"]]
    assert made["id"] in refused.document["hint"]
    assert (await world.call("DELETE", f"/v1/sandboxes/{made['id']}")).document["state"] == "terminated"
    gone = await world.call("DELETE", "/v1/templates/host")
    assert (gone.status, gone.document["freed_bytes"]) == (200, 1)
    assert world.node.kept == frozenset()


async def test_gc_spares_the_bases_of_living_sandboxes_and_doctor_tells_their_use(world):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    world.node.old_bases = 2
    removed = (await world.call("POST", "/v1/gc")).document["removed"]
    assert removed["base"] == 2
    assert world.node.kept == frozenset({made["template_digest"]})
    assert (await world.call("GET", "/v1/doctor")).document["bases"]["count"] == 1


async def test_a_refresh_during_a_plain_build_follows_it_and_both_are_told_their_own_end(world, until):
    world.node.build_gate = asyncio.Event()
    plain = asyncio.create_task(world.call("POST", "/v1/templates", {"name": "host"}, wait=60))
    await until(lambda: world.node.builds)
    refresh = asyncio.create_task(world.call("POST", "/v1/templates", {"name": "host", "refresh": True}, wait=60))
    again = asyncio.create_task(world.call("POST", "/v1/templates", {"name": "host", "refresh": True}, wait=60))

    async def told() -> bool:
        build = (await world.call("GET", "/v1/templates/host")).document["build"]
        return "waiting for the build that runs" in build["text"]

    await until(told)
    assert world.node.builds == [("host", False)]
    world.node.build_error = FAILURE
    world.node.build_gate.set()
    assert [(await call).status for call in (plain, refresh, again)] == [503, 503, 503]
    assert world.node.builds == [("host", False), ("host", True)]


async def test_bases_that_nobody_needs_go_once_an_hour_while_the_service_runs(world, until):
    made = (await world.call("POST", "/v1/sandboxes", {"ttl_s": 86400})).document
    world.node.old_bases = 2
    world.node.kept = None
    await world.services.upkeep.sweep()
    await turns()
    assert world.node.kept is None
    world.offset_ms += 3_600_000
    await until(lambda: world.node.kept is not None)
    assert world.node.kept == frozenset({made["template_digest"]})
    await until(lambda: world.logged)
    assert "2 base" in world.logged[0]
    world.node.kept = None
    world.offset_ms -= 7_200_000  # set back: the next look is an hour from then
    await world.services.upkeep.sweep()
    world.offset_ms += 3_600_000
    await until(lambda: world.node.kept is not None)


async def test_a_look_at_bases_that_fails_is_told_and_the_next_one_comes(world, until):
    world.node.sweep_error = FAILURE
    world.offset_ms += 3_600_000
    await until(lambda: world.logged)
    assert FAILURE.detail in world.logged[0]
    world.node.sweep_error = None
    world.offset_ms += 3_600_000
    await until(lambda: world.node.kept is not None)
