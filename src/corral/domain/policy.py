"""The policy: what an operator allows, as checked values of one document (`policy/default.yaml` is the shipped one).

`Policy.from_dict` reads the decoded document and raises `CorralError("invalid_value")` whose detail begins with the path of the
member that is wrong, so that a broken policy never half applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from corral.domain.addresses import Network, parse_network
from corral.domain.grade import ACCEPTABLE, Letter
from corral.domain.limits import LIMIT_NAMES
from corral.domain.placement import STRONG, Needs
from corral.domain.quantities import parse_seconds, parse_size, shown
from corral.domain.quota import EVERYBODY, PRIORITIES, Ceiling, QuotaRules, TenantLimits
from corral.domain.webhook import WebhookRules
from corral.errors import CorralError

T = TypeVar("T")
_NOTHING: tuple[str, ...] = ()
SECCOMP_PROFILES = ("default", "debug", "browser")
"""Profiles of system calls; each after the first opens something (`corral.linux.seccomp`)."""
MEND = "mend the policy file; policy/default.yaml of the distribution shows every member"


GRADES: Mapping[str, Letter] = {"standard": "C", "strong": "A"}
"""The least grade of a runtime for each isolation, where a policy does not say."""
SHARED_ENFORCED = frozenset({"memory", "pids", "disk"})
"""What one tenant could take from another where it is only watched."""
ANY_TEMPLATE = "*"
"""In `templates`: whatever recipe the operator has added; a caller's first use of one builds it."""


@dataclass(frozen=True)
class ResourceClass:
    """An approved size."""

    name: str
    cpu: float
    memory_bytes: int
    disk_bytes: int
    pids: int
    tmp_bytes: int


@dataclass(frozen=True)
class Caps:
    """The most that anybody may ask for."""

    memory_bytes: int
    cpu: float
    pids: int
    disk_bytes: int
    tmp_bytes: int
    tmp_part_of_memory: float
    """The directory /tmp is memory: it may never take more than this part of the memory limit."""
    output_bytes: int
    output_kill_bytes: int
    timeout_s: float
    ttl_s: float
    unlimited_ttl: bool = False
    """Whether `ttl_s: none` may be asked for: a sandbox that no time ends."""
    idle_timeout_s: float | None = None
    """The most that a sandbox may be without activity; None = it need not end for that."""


@dataclass(frozen=True)
class Defaults:
    """What a caller gets who says nothing."""

    resource_class: str
    template: str
    timeout_s: float
    ttl_s: float
    output_bytes: int
    output_kill_factor: int
    idle_timeout_s: float | None = None


@dataclass(frozen=True)
class TemplateRule:
    """`root`: execs may ask for user root. `seccomp`: the profiles of system calls that its recipe may ask for; `default` always."""

    root: bool = False
    seccomp: frozenset[str] = frozenset({"default"})


@dataclass(frozen=True)
class QueueRule:
    """How long a run may wait: what a caller gets who says nothing, and the most that may be asked for."""

    timeout_s: float = 600.0
    max_timeout_s: float = 86400.0


RUNS_PER_CPU = 32
LEAST_RUNS = 64
MOST_QUEUED = 1000
"""Runs at once on a host, and runs that may wait for each tenant, where a policy does not say."""


@dataclass(frozen=True)
class Policy:
    """A checked policy; `classes` in the document's order, smallest first by `smallest_class`."""

    name: str
    version: int
    defaults: Defaults
    classes: dict[str, ResourceClass]
    caps: Caps
    templates: dict[str, TemplateRule]
    isolation_floor: int = 0
    require_enforced: frozenset[str] | None = None
    """Limits that the kernel must hold. None: what `shared` says."""
    shared: bool = False
    """There are several tenants: then `SHARED_ENFORCED`, where the policy does not say."""
    grades: Mapping[str, Letter] = field(default_factory=lambda: dict(GRADES))
    """Isolation -> the least grade of a runtime for it."""
    networks: frozenset[str] = field(default_factory=lambda: frozenset({"none"}))
    capacity: Mapping[str, int | None] = field(default_factory=dict)
    """What all tenants together may hold; `running` depends on the host if it is not in here."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    queue: QueueRule = field(default_factory=QueueRule)
    webhooks: WebhookRules = field(default_factory=WebhookRules)
    calls_per_minute: int | None = None
    """Of each key; None = any number."""

    def quota(self, cpus: float) -> QuotaRules:
        """The rules of queue and quota on a host with so many CPUs."""
        runs = max(LEAST_RUNS, int(RUNS_PER_CPU * cpus))
        return QuotaRules(Ceiling(**{"running": runs, **self.capacity}), dict(self.tenants))

    def needs(self, isolation: str | None) -> Needs:
        """What a runtime must be for a request of this isolation (None = the caller said nothing)."""
        asked = isolation or "standard"
        level = max(self.isolation_floor, STRONG if asked == "strong" else 0)
        if self.require_enforced is not None:
            return Needs(asked, level, self.grades[asked], self.require_enforced)
        return Needs(asked, level, self.grades[asked], SHARED_ENFORCED if self.shared else frozenset(), self.shared)

    def template_rule(self, name: str) -> TemplateRule | None:
        """What callers may do with a template: its own rule, else that of `*`, else None: not allowed."""
        return self.templates.get(name) or self.templates.get(ANY_TEMPLATE)

    def smallest_class(self, cpu: float, memory_bytes: int, disk_bytes: int, pids: int) -> str | None:
        """The class with the least memory, then CPU, that holds all of this; of equals the first in the document."""
        fitting = [
            c
            for c in self.classes.values()
            if c.cpu >= cpu and c.memory_bytes >= memory_bytes and c.disk_bytes >= disk_bytes and c.pids >= pids
        ]
        return min(fitting, key=lambda c: (c.memory_bytes, c.cpu, c.disk_bytes)).name if fitting else None

    @classmethod
    def from_dict(cls, doc: Any) -> Policy:
        """See the module docstring."""
        top = _Node(
            doc,
            "policy",
            {"name", "version", "defaults", "classes", "caps", "templates", "isolation", "networks"}
            | {"capacity", "tenants", "queue", "webhooks", "rate"},
        )
        version = top.get("version", _integer)
        if version != 1:
            top.fail("version", f"this program reads version 1, not {version}")
        caps = _caps(top.node("caps", set(_CAPS)))
        classes = _classes(top, caps)
        templates = {
            name: TemplateRule(
                root=entry.get("root", _flag, False),
                seccomp=frozenset({"default", *entry.get("seccomp", _profiles, _NOTHING)}),
            )
            for name, entry in top.nodes("templates", {"root", "seccomp"}).items()
        }
        defaults = _defaults(top.node("defaults", set(_DEFAULTS)), classes, templates, caps)
        isolation = top.node("isolation", {"floor", "require_enforced", "grades"})
        floor = isolation.get("floor", _integer, 0)
        if not 0 <= floor <= 3:
            isolation.fail("floor", f"a security level is from 0 to 3, not {floor}")
        enforced: tuple[str, ...] | None = isolation.get("require_enforced", _words, None)
        if unknown := sorted(set(enforced or ()) - set(LIMIT_NAMES)):
            isolation.fail(
                "require_enforced", f"there is no limit {shown(unknown[0])}; known: {', '.join(LIMIT_NAMES)}"
            )
        grades = isolation.get("grades", _grades, dict(GRADES))
        if ACCEPTABLE.index(grades["strong"]) > ACCEPTABLE.index(grades["standard"]):
            isolation.fail("grades", "strong may not take less than standard")
        networks = top.get("networks", _words)
        if unknown := sorted(set(networks) - {"none"}):
            top.fail("networks", f"this version knows the network none only, not {shown(unknown[0])}")
        return cls(
            name=top.get("name", _word),
            version=version,
            defaults=defaults,
            classes=classes,
            caps=caps,
            templates=templates,
            isolation_floor=floor,
            require_enforced=None if enforced is None else frozenset(enforced),
            grades=grades,
            networks=frozenset(networks),
            capacity=_amounts(top.part("capacity", set(_CAPACITY)), _CAPACITY),
            tenants=_tenants(top),
            queue=_queue(top.part("queue", {"timeout_s", "max_timeout_s"})),
            webhooks=_webhooks(top.part("webhooks", {"allow", "http", "ports", "private"})),
            calls_per_minute=top.part("rate", {"per_minute"}).get("per_minute", _most(_count), None),
        )


_CAPS = (
    "memory",
    "cpu",
    "pids",
    "disk",
    "tmp",
    "tmp_part_of_memory",
    "output_limit",
    "output_kill",
    "timeout_s",
    "ttl_s",
    "unlimited_ttl",
    "idle_timeout_s",
)
_DEFAULTS = ("class", "template", "timeout_s", "ttl_s", "output_limit", "output_kill_factor", "idle_timeout_s")


def _caps(node: _Node) -> Caps:
    part = node.get("tmp_part_of_memory", _positive, 0.25)
    if part > 0.5:
        node.fail("tmp_part_of_memory", "all temporary file systems together must stay below half of the memory limit")
    return Caps(
        memory_bytes=node.get("memory", _size),
        cpu=node.get("cpu", _positive),
        pids=node.get("pids", _count),
        disk_bytes=node.get("disk", _size),
        tmp_bytes=node.get("tmp", _size),
        tmp_part_of_memory=part,
        output_bytes=node.get("output_limit", _size),
        output_kill_bytes=node.get("output_kill", _size),
        timeout_s=node.get("timeout_s", _time),
        ttl_s=node.get("ttl_s", _time),
        unlimited_ttl=node.get("unlimited_ttl", _flag, False),
        idle_timeout_s=node.get("idle_timeout_s", _time, None),
    )


def _classes(top: _Node, caps: Caps) -> dict[str, ResourceClass]:
    classes: dict[str, ResourceClass] = {}
    for name, node in top.nodes("classes", {"cpu", "memory", "disk", "pids", "tmp"}).items():
        made = ResourceClass(
            name=name,
            cpu=node.get("cpu", _positive),
            memory_bytes=node.get("memory", _size),
            disk_bytes=node.get("disk", _size),
            pids=node.get("pids", _count),
            tmp_bytes=node.get("tmp", _size),
        )
        for word, value, cap in (
            ("cpu", made.cpu, caps.cpu),
            ("memory", made.memory_bytes, caps.memory_bytes),
            ("disk", made.disk_bytes, caps.disk_bytes),
            ("pids", made.pids, caps.pids),
            ("tmp", made.tmp_bytes, min(caps.tmp_bytes, int(made.memory_bytes * caps.tmp_part_of_memory))),
        ):
            if value > cap:
                node.fail(word, f"{value} is over the cap of {cap}")
        classes[name] = made
    return classes


def _defaults(
    node: _Node, classes: Mapping[str, ResourceClass], templates: Mapping[str, TemplateRule], caps: Caps
) -> Defaults:
    made = Defaults(
        resource_class=node.get("class", _word),
        template=node.get("template", _word),
        timeout_s=node.get("timeout_s", _time),
        ttl_s=node.get("ttl_s", _time),
        output_bytes=node.get("output_limit", _size),
        output_kill_factor=node.get("output_kill_factor", _count),
        idle_timeout_s=node.get("idle_timeout_s", _time, None),
    )
    if made.resource_class not in classes:
        node.fail("class", f"there is no class {shown(made.resource_class)}")
    if made.template not in templates:
        # By name even beside "*": a misspelt default would else be met by the first caller.
        node.fail("template", f"the template {shown(made.template)} is not named in templates")
    for word, value, cap in (
        ("timeout_s", made.timeout_s, caps.timeout_s),
        ("ttl_s", made.ttl_s, caps.ttl_s),
        ("output_limit", made.output_bytes, caps.output_bytes),
        ("idle_timeout_s", made.idle_timeout_s or 0, caps.idle_timeout_s or math.inf),
    ):
        if value > cap:
            node.fail(word, f"{value:g} is over the cap of {cap:g}")
    return made


_CAPACITY = ("running", "sandboxes", "cpu", "memory")
_HELD = ("queue", *_CAPACITY)


def _amounts(node: _Node, names: tuple[str, ...]) -> dict[str, int | None]:
    """The ceilings that the document names; `none` is a ceiling that nothing passes."""
    readers: dict[str, Callable[[Any], int]] = {"cpu": _millicores, "memory": _size}
    field_of = {"queue": "queued"}
    given = {name: node.get(name, _most(readers.get(name, _count))) for name in names if name in node}
    return {field_of.get(name, name): most for name, most in given.items()}


def _tenants(top: _Node) -> dict[str, TenantLimits]:
    """Each tenant's limits; what one does not name it has from `*`."""
    nodes = top.nodes("tenants", {*_HELD, "weight", "priorities"}) if "tenants" in top else {}
    common: dict[str, int | None] = {"queued": MOST_QUEUED}
    made: dict[str, TenantLimits] = {}
    everybody = TenantLimits(Ceiling(queued=MOST_QUEUED))
    for name, node in sorted(nodes.items(), key=lambda item: item[0] != EVERYBODY):
        held = {**common, **_amounts(node, _HELD)}
        weight = node.get("weight", _positive, everybody.weight)
        if not 0.01 <= weight <= 1000:
            node.fail("weight", f"a weight is from 0.01 to 1000, not {weight:g}")
        allowed = frozenset(node.get("priorities", _priorities, tuple(everybody.priorities)))
        made[name] = TenantLimits(Ceiling(**held), weight, allowed)
        if name == EVERYBODY:
            common, everybody = held, made[name]
    return {EVERYBODY: everybody, **made}


def _queue(node: _Node) -> QueueRule:
    rule = QueueRule()
    most = node.get("max_timeout_s", _time, rule.max_timeout_s)
    usual = node.get("timeout_s", _time, min(rule.timeout_s, most))
    if usual > most:
        node.fail("timeout_s", f"{usual:g} is over the max_timeout_s of {most:g}")
    return QueueRule(usual, most)


def _webhooks(node: _Node) -> WebhookRules:
    rule = WebhookRules()
    return WebhookRules(
        ports=frozenset(node.get("ports", _ports, tuple(rule.ports))),
        http=node.get("http", _flag, rule.http),
        private=node.get("private", _networks, ()),
        allow=node.get("allow", _flag, rule.allow),
    )


class _Node:
    """A mapping of the document with its path."""

    _MISSING: Any = object()

    def __init__(self, value: Any, path: str, known: set[str] | None) -> None:
        if not isinstance(value, Mapping):
            raise CorralError("invalid_value", f"{path}: must be a mapping, not {shown(value)}", hint=MEND)
        self._value = value
        self._path = path
        for name in value:
            if not isinstance(name, str) or (known is not None and name not in known):
                hint = f"known: {', '.join(sorted(known))}" if known else MEND
                raise CorralError("invalid_value", f"{path}.{name}: unknown member", hint=hint)

    def fail(self, name: str, detail: str) -> NoReturn:
        raise CorralError("invalid_value", f"{self._path}.{name}: {detail}", hint=MEND)

    def get(self, name: str, read: Callable[[Any], T], default: T = _MISSING) -> T:
        if name not in self._value:
            if default is not self._MISSING:
                return default
            self.fail(name, "is missing")
        try:
            return read(self._value[name])
        except ValueError as error:
            self.fail(name, str(error))

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def part(self, name: str, known: set[str]) -> _Node:
        """A mapping that may be missing."""
        return _Node(self._value.get(name) or {}, f"{self._path}.{name}", known)

    def node(self, name: str, known: set[str]) -> _Node:
        return _Node(self.get(name, lambda value: value), f"{self._path}.{name}", known)

    def nodes(self, name: str, known: set[str]) -> dict[str, _Node]:
        """A mapping of names to mappings; a null one is empty."""
        outer = self.node_of_names(name)
        return {key: _Node(value or {}, f"{self._path}.{name}.{key}", known) for key, value in outer.items()}

    def node_of_names(self, name: str) -> Mapping[str, Any]:
        value = _Node(self.get(name, lambda item: item), f"{self._path}.{name}", None)._value
        if not value:
            self.fail(name, "is empty")
        return value


def _size(value: Any) -> int:
    size = parse_size(value)
    if size == 0:
        raise ValueError("must be greater than 0")
    return size


def _time(value: Any) -> float:
    if isinstance(value, str):
        raise ValueError("must be a number of seconds")
    seconds = parse_seconds(value)
    if seconds == 0:
        raise ValueError("must be greater than 0")
    return seconds


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, not {shown(value)}")
    return value


def _count(value: Any) -> int:
    if _integer(value) < 1:
        raise ValueError(f"must be at least 1, not {shown(value)}")
    return int(value)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, not {shown(value)}")
    if not 0 < value < float("inf"):
        raise ValueError(f"must be a finite number greater than 0, not {shown(value)}")
    return value


def _most(read: Callable[[Any], int]) -> Callable[[Any], int | None]:
    """`none`, or what `read` reads."""
    return lambda value: None if value is None or value == "none" else read(value)


def _millicores(value: Any) -> int:
    return max(1, round(_positive(value) * 1000))


def _ports(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"must be a list of ports, not {shown(value)}")
    if wrong := [port for port in value if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536]:
        raise ValueError(f"a port is from 1 to 65535, not {shown(wrong[0])}")
    return tuple(value)


def _networks(value: Any) -> tuple[Network, ...]:
    return tuple(parse_network(word) for word in _words(value))


def _priorities(value: Any) -> tuple[str, ...]:
    words = _words(value)
    if unknown := sorted(set(words) - set(PRIORITIES)):
        raise ValueError(f"there is no priority {shown(unknown[0])}; known: {', '.join(PRIORITIES)}")
    if not words:
        raise ValueError("name at least one priority")
    return words


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be text, not {shown(value)}")
    return value


def _grades(value: Any) -> dict[str, Letter]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of isolation to grade, not {shown(value)}")
    if unknown := [name for name in value if name not in GRADES]:
        raise ValueError(f"there is no isolation {shown(unknown[0])}; known: {', '.join(GRADES)}")
    for letter in value.values():
        if letter not in ACCEPTABLE:
            raise ValueError(f"a grade is {', '.join(ACCEPTABLE)}, not {shown(letter)}")
    return {**GRADES, **value}


def _profiles(value: Any) -> tuple[str, ...]:
    words = _words(value)
    if unknown := sorted(set(words) - set(SECCOMP_PROFILES)):
        raise ValueError(f"there is no profile {shown(unknown[0])}; known: {', '.join(SECCOMP_PROFILES)}")
    return words


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of text, not {shown(value)}")
    return tuple(_word(item) for item in value)
