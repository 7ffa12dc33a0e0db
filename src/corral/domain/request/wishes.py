"""Wishes: how much, where, how soon. What is not said is left to the policy."""

from __future__ import annotations

from typing import Any

from corral.domain.limits import MIB
from corral.domain.quantities import format_bytes, shown
from corral.domain.quota import PRIORITIES
from corral.domain.request.asked import HostCaps, Placement, ResourceWishes
from corral.domain.request.fields import RESOURCE_FIELDS, Fields, seconds_of
from corral.domain.values import MIN_DISK, MIN_MEMORY, cores, count, empty, invalid, nearest, pointer, size_of

ISOLATIONS = ("standard", "strong")


def read_wishes(fields: Fields, host: HostCaps) -> ResourceWishes:
    """The resources, from `resources` and from the same words at top level."""
    given: dict[str, tuple[Any, str]] = {}
    inner = fields.doc.get("resources")
    if inner is not None:
        if not isinstance(inner, dict):
            fields.fail("resources", f"resources is an object, not {shown(inner)}", 'like {"memory": "512M", "cpu": 1}')
        for name, value in inner.items():
            at = pointer("resources", name)
            if name not in RESOURCE_FIELDS:
                guess = nearest(str(name), RESOURCE_FIELDS)
                hint = f"did you mean {guess}?" if guess else f"known: {', '.join(RESOURCE_FIELDS)}"
                invalid(at, f"there is no resource {shown(name)}", hint)
            if value is not None:
                given[name] = (value, at)
    for name in RESOURCE_FIELDS:
        value = fields.doc.get(name)
        if value is None:
            continue
        if name in given and given[name][0] != value:
            fields.fail(name, f"{name} is given twice, with different values", f"leave out /resources/{name}")
        given[name] = (value, pointer(name))

    def size(name: str, least: int = 1) -> int | None:
        return size_of(name, *given[name], least) if name in given else None

    memory = size("memory", MIN_MEMORY)
    if memory is not None and memory > host.memory_bytes:
        invalid(
            given["memory"][1],
            f"memory of {format_bytes(memory)} exceeds this host, which has {format_bytes(host.memory_bytes)}",
            f"ask for at most {host.memory_bytes // MIB}M",
        )
    kept, kill = size("output_limit"), size("output_kill")
    if kept is not None and kill is not None and kill < kept:
        invalid(given["output_kill"][1], "output_kill must not be below output_limit", f"at least {kept}")
    return ResourceWishes(
        memory_bytes=memory,
        cpu=cores(*given["cpu"], host.cpus) if "cpu" in given else None,
        pids=count(*given["pids"]) if "pids" in given else None,
        disk_bytes=size("disk", MIN_DISK),
        tmp_bytes=size("tmp"),
        output_bytes=kept,
        output_kill_bytes=kill,
        timeout_s=fields.seconds("timeout_s", "timeout"),
    )


def read_placement(fields: Fields) -> Placement:
    isolation = fields.name("isolation")
    if isolation is not None and isolation not in ISOLATIONS:
        fields.fail("isolation", f"there is no isolation {shown(isolation)}", " or ".join(ISOLATIONS))
    network = fields.doc.get("network")
    if not empty(network) and network != "none":
        fields.not_yet("network", "this version gives no network to a sandbox")
    fields.refuse_later("session")
    return Placement(runtime=fields.name("runtime"), template=fields.name("template"), isolation=isolation)


def read_priority(fields: Fields) -> str:
    value = fields.doc.get("priority")
    if value is None:
        return "normal"
    if value not in PRIORITIES:
        fields.fail("priority", f"there is no priority {shown(value)}", "high, normal or low")
    return str(value)


def read_wait(fields: Fields) -> float | None:
    value = fields.doc.get("wait")
    if value is None or value is True:
        return None
    if value is False:
        return 0.0
    return seconds_of(value, "/wait", zero=True)
