"""Templates as the operator sees them: a build goes on without its caller, a removal asks who lives."""

from __future__ import annotations

import asyncio

from corral.errors import CorralError

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
    await asyncio.sleep(0)
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
