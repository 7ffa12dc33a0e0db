import copy
from pathlib import Path

import pytest
import yaml

from corral.domain import guard
from corral.domain.intent import ResourceIntent
from corral.domain.limits import Limits
from corral.domain.plan import PLANNER_VERSION, plan_by_rules
from corral.domain.policy import SECCOMP_PROFILES, Policy
from corral.domain.request import ExecRequest, Placement, ResourceWishes, RunRequest, SandboxRequest
from corral.domain.runner import Names
from corral.errors import CorralError
from corral.linux.seccomp import PROFILES

DOCUMENT = yaml.safe_load((Path(__file__).parents[3] / "policy" / "default.yaml").read_text("utf-8"))
SHIPPED = Policy.from_dict(DOCUMENT)
del DOCUMENT["templates"]["*"]
POLICY = Policy.from_dict(DOCUMENT)
RUN = RunRequest(code="1", language="python")


def decide(wishes=None, placement=None, policy=POLICY, **more):
    return guard.decide(policy, plan_by_rules(RUN), wishes or ResourceWishes(), placement or Placement(), **more)


def changed(*path, value):
    doc = copy.deepcopy(DOCUMENT)
    place = doc
    for name in path[:-1]:
        place = place[name]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return doc


def test_who_says_nothing_gets_the_defaults_of_the_contract():
    made = decide()
    assert made.allowed and made.resource_class == "default" and made.template == "host" and made.ttl_s == 3600
    assert made.limits == Limits()


def test_the_shipped_classes():
    sizes = {name: (c.cpu, c.memory_bytes >> 30, c.disk_bytes >> 30) for name, c in POLICY.classes.items()}
    assert sizes["python-small"] == (1, 2, 10)
    assert sizes["python-medium"] == (2, 4, 20)
    assert sizes["build-medium"] == sizes["browser-medium"] == (4, 8, 30)
    assert sizes["compute-large"] == (8, 16, 50)
    assert {f"{name}-s" for name in sizes if not name.endswith("-s") and name != "default"} <= set(sizes)


def test_a_wish_is_granted_exactly():
    made = decide(ResourceWishes(2**30, 2.0, 7, 10 * 2**20, 2**20, 1000, 2000, 5.5), ttl_s=7)
    assert made.allowed and made.ttl_s == 7
    limits = made.limits
    assert (limits.memory_bytes, limits.cpu, limits.pids, limits.disk_bytes, limits.tmp_bytes) == (
        2**30,
        2.0,
        7,
        10 * 2**20,
        2**20,
    )
    assert (limits.output_bytes, limits.output_kill_bytes, limits.wall_s) == (1000, 2000, 5.5)
    assert made.resource_class == "build-medium-s"


def test_what_no_class_holds_but_the_caps_do_is_custom():
    assert decide(ResourceWishes(pids=4096)).resource_class == guard.CUSTOM_CLASS


@pytest.mark.parametrize(
    "wishes, word, cap",
    [
        (ResourceWishes(memory_bytes=17 * 2**30), "memory", 16 * 2**30),
        (ResourceWishes(cpu=64), "cpu", 8),
        (ResourceWishes(pids=10**6), "pids", 4096),
        (ResourceWishes(disk_bytes=2**50), "disk", 50 * 2**30),
        (ResourceWishes(memory_bytes=16 * 2**30, tmp_bytes=5 * 2**30), "tmp", 4 * 2**30),
        (ResourceWishes(output_bytes=2**30), "output_limit", 256 * 2**20),
        (ResourceWishes(output_kill_bytes=2**40), "output_kill", 2**30),
        (ResourceWishes(timeout_s=86400), "timeout_s", 3600),
    ],
)
def test_a_wish_over_a_cap_is_denied_and_the_smallest_change_named(wishes, word, cap):
    made = decide(wishes)
    assert (made.verdict, made.rule, made.suggested) == ("deny", f"caps.{word}", {word: cap})
    assert word in made.reason and made.hint.startswith(f"ask for {word} of at most ")
    fixed = ResourceWishes(**{**vars(wishes), FIELDS[word]: cap})
    assert decide(fixed).allowed


def test_the_guard_says_what_isolation_takes():
    assert decide().needs == POLICY.needs("standard") == POLICY.needs(None)
    assert decide().needs.grade == "C" and decide().needs.level == 0
    assert "isolation standard takes grade C or better" in decide().reason
    strong = decide(placement=Placement(isolation="strong"))
    assert (strong.needs.level, strong.needs.grade) == (2, "A") and "isolation strong takes grade A" in strong.reason
    assert strong.as_dict()["needs"]["grade"] == "A"


def test_a_policy_may_ask_for_more_and_what_it_leaves_out_is_as_shipped():
    asked = Policy.from_dict(changed("isolation", "grades", value={"standard": "A"}))
    assert (asked.needs(None).grade, asked.needs("strong").grade) == ("A", "A")
    silent = Policy.from_dict(changed("isolation", "grades", value=...))
    assert (silent.needs(None).grade, silent.needs("strong").grade) == ("C", "A")
    high = Policy.from_dict(changed("isolation", "floor", value=3))
    assert (high.needs(None).level, high.needs("strong").level) == (3, 3)


FIELDS = {
    "memory": "memory_bytes",
    "cpu": "cpu",
    "pids": "pids",
    "disk": "disk_bytes",
    "tmp": "tmp_bytes",
    "output_limit": "output_bytes",
    "output_kill": "output_kill_bytes",
    "timeout_s": "timeout_s",
}


def test_every_cap_that_is_crossed_is_named_at_once():
    made = decide(ResourceWishes(cpu=64, pids=10**6), ttl_s=10**6)
    assert made.suggested == {"cpu": 8, "pids": 4096, "ttl_s": 86400}


def test_a_default_tmp_gives_way_to_a_quarter_of_memory_and_says_so():
    made = decide(ResourceWishes(memory_bytes=64 * 2**20))
    assert made.allowed and made.limits.tmp_bytes == 16 * 2**20 and "tmp lowered from 64 MiB to 16 MiB" in made.reason


def test_a_wished_tmp_over_a_quarter_of_memory_is_denied():
    made = decide(ResourceWishes(memory_bytes=64 * 2**20, tmp_bytes=17 * 2**20))
    assert (made.verdict, made.suggested) == ("deny", {"tmp": 16 * 2**20})


def test_output_kill_follows_output_limit():
    assert decide(ResourceWishes(output_bytes=2**20)).limits.output_kill_bytes == 10 * 2**20
    assert decide(ResourceWishes(output_bytes=200 * 2**20)).limits.output_kill_bytes == 2**30
    small = decide(ResourceWishes(output_kill_bytes=2**20))
    assert small.limits.output_bytes == 2**20 and "output_limit lowered" in small.reason


@pytest.mark.parametrize(
    "placement, more, rule",
    [
        (Placement(template="nosuch"), {}, "templates"),
        (Placement(network="pypi"), {}, "networks"),
        (Placement(), {"user": "root"}, "templates.host.root"),
    ],
)
def test_what_is_not_on_a_list_is_denied(placement, more, rule):
    made = decide(placement=placement, **more)
    assert (made.verdict, made.rule) == ("deny", rule)


def test_the_shipped_policy_takes_what_the_operator_has_built_and_no_root_in_it():
    assert decide(placement=Placement(template="mine"), policy=SHIPPED).allowed
    made = decide(placement=Placement(template="mine"), policy=SHIPPED, user="root")
    assert (made.verdict, made.rule) == ("deny", "templates.mine.root")


def test_a_planner_cannot_ask_for_what_the_policy_does_not_know():
    intent = ResourceIntent("x", "compute-huge", cpu=64, memory_mb=10**6, ttl_seconds=10**9)
    made = guard.decide(POLICY, intent, ResourceWishes(), Placement())
    assert made.resource_class == "default" and made.limits == Limits() and made.ttl_s == POLICY.caps.ttl_s


def test_a_decision_is_plain_data():
    made = decide().as_dict()
    assert made["limits"]["memory"] == 512 * 2**20 and made["verdict"] == "allow"
    assert Limits.from_dict(made["limits"]) == decide().limits


def test_limits_of_an_exec_are_the_sandboxs_with_its_own_time_and_output():
    sandbox = decide(ResourceWishes(memory_bytes=2**30, timeout_s=9)).limits
    assert guard.exec_limits(POLICY, sandbox, None, None, None) == sandbox
    made = guard.exec_limits(POLICY, sandbox, 3, 100, None)
    assert (made.wall_s, made.output_bytes, made.output_kill_bytes, made.memory_bytes) == (3, 100, 1000, 2**30)
    with pytest.raises(CorralError, match="policy_denied") as caught:
        guard.exec_limits(POLICY, sandbox, 10**6, None, None)
    assert caught.value.facts["suggested"] == {"timeout_s": 3600}


def test_root_needs_the_templates_leave():
    guard.check_user(POLICY, "host", "sandbox")
    with pytest.raises(CorralError, match="user_refused"):
        guard.check_user(POLICY, "host", "root")
    guard.check_user(Policy.from_dict(changed("templates", "host", value={"root": True})), "host", "root")


@pytest.mark.parametrize(
    "path, value, named",
    [
        (("version",), 2, "policy.version"),
        (("name",), "", "policy.name"),
        (("caps",), [], "policy.caps"),
        (("caps", "memory"), "1.5G", "policy.caps.memory"),
        (("caps", "memory"), ..., "policy.caps.memory"),
        (("caps", "cpu"), True, "policy.caps.cpu"),
        (("caps", "cpu"), float("nan"), "policy.caps.cpu"),
        (("caps", "pids"), 0, "policy.caps.pids"),
        (("caps", "timeout_s"), "60", "policy.caps.timeout_s"),
        (("caps", "tmp_part_of_memory"), 0.9, "policy.caps.tmp_part_of_memory"),
        (("caps", "extra"), 1, "policy.caps.extra"),
        (("classes",), {}, "policy.classes"),
        (("classes", "default", "memory"), "32G", "policy.classes.default.memory"),
        (("classes", "default", "tmp"), "256M", "policy.classes.default.tmp"),
        (("classes", "default", "gpu"), 1, "policy.classes.default.gpu"),
        (("defaults", "class"), "nosuch", "policy.defaults.class"),
        (("defaults", "template"), "nosuch", "policy.defaults.template"),
        (("defaults", "timeout_s"), 10**6, "policy.defaults.timeout_s"),
        (("isolation", "floor"), 4, "policy.isolation.floor"),
        (("isolation", "require_enforced"), ["memori"], "policy.isolation.require_enforced"),
        (("isolation", "grades"), "A", "policy.isolation.grades"),
        (("isolation", "grades"), {"weak": "A"}, "policy.isolation.grades"),
        (("isolation", "grades"), {"standard": "D"}, "policy.isolation.grades"),
        (("isolation", "grades"), {"standard": "A", "strong": "B"}, "policy.isolation.grades"),
        (("templates", "host"), {"root": "yes"}, "policy.templates.host.root"),
        (("templates", "host"), {"seccomp": ["open"]}, "policy.templates.host.seccomp"),
        (("templates", "host"), {"seccomp": "debug"}, "policy.templates.host.seccomp"),
        (("networks",), ["pypi"], "policy.networks"),
        (("surprise",), 1, "policy.surprise"),
    ],
)
def test_a_broken_policy_is_refused_with_the_path(path, value, named):
    with pytest.raises(CorralError) as caught:
        Policy.from_dict(changed(*path, value=value))
    assert caught.value.code == "invalid_value" and caught.value.detail.startswith(f"{named}: ")


@pytest.mark.parametrize("doc", [None, [], "x", 1, {}])
def test_what_is_no_policy_is_refused(doc):
    with pytest.raises(CorralError, match="invalid_value"):
        Policy.from_dict(doc)


@pytest.mark.parametrize(
    "request_, workload",
    [
        (RUN, "python"),
        (RunRequest(code="x", language="c"), "build"),
        (RunRequest(command=("/usr/bin/make", "-j")), "build"),
        (RunRequest(command=("python3.11", "x.py")), "python"),
        (RunRequest(command=("ls",)), "command"),
        (RunRequest(shell="ls"), "shell"),
        (SandboxRequest(), "session"),
        (ExecRequest(argv=("ls",)), "command"),
    ],
)
def test_rules_say_what_they_saw(request_, workload):
    made = plan_by_rules(request_, Names(programs={"python": "python"}))
    assert (made.workload, made.resource_class, made.planner) == (workload, "default", PLANNER_VERSION)
    assert made.reason and set(made.as_dict()) >= {
        "cpu",
        "memory_mb",
        "disk_gb",
        "requires_browser",
        "requires_gpu",
        "confidence",
    }


def test_a_template_may_have_the_default_profile_and_those_that_are_named():
    assert all(rule.seccomp == {"default"} for rule in POLICY.templates.values())
    policy = Policy.from_dict(changed("templates", "host", value={"seccomp": ["debug"]}))
    assert policy.templates["host"].seccomp == {"default", "debug"}


def test_the_policy_knows_the_profiles_that_there_are():
    assert SECCOMP_PROFILES == PROFILES


def test_the_default_template_is_named_even_where_any_is_allowed():
    document = changed("defaults", "template", value="hsot")
    document["templates"]["*"] = None
    with pytest.raises(CorralError, match="hsot"):
        Policy.from_dict(document)
    document["templates"]["hsot"] = None
    assert Policy.from_dict(document).defaults.template == "hsot"
