"""The members of a policy that bound tenants, the queue, webhooks and calls; and the words in which a limit is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.domain.addresses import parse_network
from corral.domain.limits import Limits
from corral.domain.policy import Policy
from corral.domain.quota import Amounts, Ceiling, exceeded, sandbox_amounts, too_large
from corral.domain.webhook import WebhookRules, key_of, next_attempt_ms, parse_target, signature
from corral.errors import CorralError

SHIPPED = yaml.safe_load((Path(__file__).resolve().parents[3] / "policy" / "default.yaml").read_text(encoding="utf-8"))


def policy(**members: Any) -> Policy:
    return Policy.from_dict({**copy.deepcopy(SHIPPED), **members})


def test_the_shipped_policy_bounds_runs_at_once_and_the_queue_only() -> None:
    rules = policy().quota(2)
    assert rules.host == Ceiling(running=64)
    assert policy().quota(16).host.running == 512
    assert rules.of("whoever").ceiling == Ceiling(queued=1000)
    two_hundred = Amounts(sandboxes=200, cpu=200_000, memory=200 << 29)
    assert rules.passed("default", Amounts(), Amounts(), two_hundred) is None


def test_a_policy_without_these_members_is_the_same() -> None:
    bare = {
        name: value
        for name, value in SHIPPED.items()
        if name not in ("capacity", "tenants", "queue", "webhooks", "rate")
    }
    assert Policy.from_dict(bare).quota(4) == policy().quota(4)
    assert Policy.from_dict(bare).webhooks == policy().webhooks and Policy.from_dict(bare).queue == policy().queue


def test_a_named_tenant_has_from_everybody_what_it_does_not_say() -> None:
    tenants = {
        "lab": {"running": 9, "weight": 2.5},
        "*": {"running": 3, "cpu": 1.5, "memory": "1G", "queue": "none", "priorities": ["low", "normal"]},
        "guest": {"running": None, "priorities": ["low"]},
    }
    rules = policy(tenants=tenants, capacity={"running": "none", "memory": "4G"}).quota(2)
    assert rules.of("lab").ceiling == Ceiling(running=9, cpu=1500, memory=1 << 30)
    assert rules.of("lab").weight == 2.5 and rules.of("lab").priorities == {"low", "normal"}
    assert rules.of("guest").ceiling.running is None and rules.of("guest").priorities == {"low"}
    assert rules.of("else").ceiling == Ceiling(running=3, cpu=1500, memory=1 << 30)
    assert rules.host == Ceiling(memory=4 << 30)


@pytest.mark.parametrize(
    "members, where",
    [
        ({"tenants": {"*": {"running": 0}}}, "tenants.*.running"),
        ({"tenants": {"*": {"runs": 1}}}, "tenants.*.runs"),
        ({"tenants": {"*": {"weight": 0}}}, "tenants.*.weight"),
        ({"tenants": {"*": {"weight": 1e9}}}, "tenants.*.weight"),
        ({"tenants": {"a": {"priorities": []}}}, "tenants.a.priorities"),
        ({"tenants": {"a": {"priorities": ["urgent"]}}}, "tenants.a.priorities"),
        ({"tenants": {"a": {"memory": "much"}}}, "tenants.a.memory"),
        ({"tenants": []}, "tenants"),
        ({"capacity": {"cpu": -1}}, "capacity.cpu"),
        ({"capacity": {"queue": 5}}, "capacity.queue"),
        ({"queue": {"timeout_s": 10, "max_timeout_s": 5}}, "queue.timeout_s"),
        ({"queue": {"timeout_s": "10"}}, "queue.timeout_s"),
        ({"webhooks": {"ports": []}}, "webhooks.ports"),
        ({"webhooks": {"ports": [70000]}}, "webhooks.ports"),
        ({"webhooks": {"private": ["10.0.0.1/8"]}}, "webhooks.private"),
        ({"webhooks": {"private": "10.0.0.0/8"}}, "webhooks.private"),
        ({"webhooks": {"http": "yes"}}, "webhooks.http"),
        ({"rate": {"per_minute": 0}}, "rate.per_minute"),
    ],
)
def test_a_wrong_member_is_named(members: dict[str, Any], where: str) -> None:
    with pytest.raises(CorralError) as caught:
        policy(**members)
    assert caught.value.code == "invalid_value" and caught.value.detail.startswith(f"policy.{where}")


def test_the_other_members_are_read() -> None:
    made = policy(
        queue={"max_timeout_s": 60}, webhooks={"http": True, "ports": [80], "private": ["10.0.0.0/8", "fd00::/8"]}, rate={"per_minute": 7}
    )  # fmt: skip
    assert (made.queue.timeout_s, made.queue.max_timeout_s, made.calls_per_minute) == (60, 60, 7)
    private = (parse_network("10.0.0.0/8"), parse_network("fd00::/8"))
    assert made.webhooks == WebhookRules(frozenset({80}), True, private)


def test_what_a_sandbox_holds_comes_from_its_limits() -> None:
    limits = Limits(memory_bytes=512 << 20, cpu=0.5)
    assert sandbox_amounts(limits) == Amounts(sandboxes=1, cpu=500, memory=512 << 20)


def test_a_refusal_says_what_is_asked_for_what_there_is_and_who_holds_it() -> None:
    rules = policy(tenants={"*": {"memory": "1G", "queue": 2}}).quota(2)
    use = Amounts(sandboxes=2, running=1, memory=1 << 30)
    error = exceeded(rules, "t", "tenants.memory", use, Amounts(memory=512 << 20))
    assert error.code == "quota_exceeded" and "512 MiB" in error.detail and "1 GiB" in error.detail
    assert error.hint is not None and "2 sandboxes and 1 runs" in error.hint
    full = exceeded(rules, "t", "tenants.queued", Amounts(queued=2), Amounts(queued=1))
    assert full.code == "queue_full" and full.facts["retry_after_s"] > 0
    why, hint = too_large(rules, "t", "tenants.memory", Amounts(memory=2 << 30))
    assert "tenants.memory" in why and "1 GiB" in hint


def test_signatures_are_those_of_the_standard() -> None:
    """The example of the specification's reference library."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    made = signature([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    both = signature([secret, "a plain text of ours"], "m", 1, b"")
    assert [each[:3] for each in both.split(" ")] == ["v1,", "v1,"]


@pytest.mark.parametrize("secret", ["", "short", "whsec_", "whsec_!!!", "whsec_c2hvcnQ=", "x" * 257, "\ud800" * 20])
def test_secrets_that_are_none(secret: str) -> None:
    with pytest.raises(ValueError):
        key_of(secret)


def test_attempts_end() -> None:
    pauses = [next_attempt_ms(attempt) for attempt in range(1, 12)]
    assert pauses[0] == 5000 and pauses[-1] is None and all(pauses[:-1])


def test_targets_in_their_parts() -> None:
    rules = WebhookRules(frozenset({443, 80, 8443}), http=True)
    assert parse_target("HTTPS://Example.COM", rules).authority == "example.com"
    assert parse_target("https://example.com?x=/y", rules).path == "/?x=/y"
    made = parse_target("http://[2606:4700::1]:8443/a%20b?c", rules)
    assert (made.host, made.port, made.path, made.authority) == (
        "2606:4700::1",
        8443,
        "/a%20b?c",
        "[2606:4700::1]:8443",
    )
    for wrong in (
        "https://example.com/\r\nX: y",
        "https://例え.example/",
        "https:example.com",
        "https:///x",
        "https://a:443:443/",
        "https://a/" + "x" * 2050,
    ):
        with pytest.raises(ValueError):
            parse_target(wrong, rules)
