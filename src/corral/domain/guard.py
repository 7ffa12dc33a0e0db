"""The guard: a plan and a caller's wishes become approved limits, or a refusal that names the smallest change that is allowed.

Deterministic and pure. What a caller asked for is granted exactly or denied, never silently changed; only a default may be lowered,
and the reason says so. The planner's advice cannot widen anything: it picks among the policy's classes, and wishes go on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from corral.domain import expiry
from corral.domain.intent import ResourceIntent
from corral.domain.limits import KIB, MIB, Limits
from corral.domain.placement import Needs
from corral.domain.policy import Policy, ResourceClass
from corral.domain.quantities import format_bytes, format_seconds, shown
from corral.domain.request import Placement, ResourceWishes
from corral.errors import CorralError

CUSTOM_CLASS = "custom"
"""The class of limits that no class of the policy holds, but its caps do."""

_BYTES_PER_INODE = 16 * KIB
_MIN_INODES = 1024
_MAX_INODES = 4 * MIB


@dataclass(frozen=True)
class GuardDecision:
    """`limits` is what would apply even when the verdict is `deny`. `suggested` are fields to change so that it would be allowed."""

    verdict: str
    resource_class: str
    limits: Limits
    reason: str
    hint: str | None = None
    suggested: dict[str, Any] = field(default_factory=dict)
    rule: str | None = None
    """The member of the policy that decided, such as `caps.memory`."""
    template: str = ""
    ttl_s: float = 0.0
    needs: Needs = field(default_factory=Needs)
    """What placement has to find a runtime for."""

    @property
    def allowed(self) -> bool:
        return self.verdict == "allow"

    def as_dict(self) -> dict[str, Any]:
        """`decisions.guard` of a run."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "resource_class": self.resource_class,
            "limits": self.limits.as_dict(),
            "hint": self.hint,
            "suggested": dict(self.suggested),
            "rule": self.rule,
            "template": self.template,
            "ttl_s": self.ttl_s,
            "needs": self.needs.as_dict(),
        }

    def error(self) -> CorralError:
        """The refusal as an error, for calls that make no run."""
        return CorralError("policy_denied", self.reason, hint=self.hint, suggested=dict(self.suggested), rule=self.rule)


@dataclass(frozen=True)
class _Denial:
    reason: str
    hint: str
    suggested: dict[str, Any]
    rule: str


def decide(
    policy: Policy,
    intent: ResourceIntent,
    wishes: ResourceWishes,
    placement: Placement,
    *,
    ttl_s: float | None = None,
    idle_timeout_s: float | None = None,
    user: str = "sandbox",
) -> GuardDecision:
    """The decision; which runtime is good enough for it (`needs`) is found by `domain.placement`."""
    base = policy.classes.get(intent.resource_class) or policy.classes[policy.defaults.resource_class]
    limits, notes = _limits(policy, base, wishes)
    template = placement.template or intent.template or policy.defaults.template
    ttl = ttl_s if ttl_s is not None else min(intent.ttl_seconds or policy.defaults.ttl_s, policy.caps.ttl_s)
    denials = [
        *_over_caps(policy, limits, wishes),
        *_too_long(policy, expiry.Wanted(ttl_s, idle_timeout_s)),
        *_placement(policy, template, placement, user),
    ]
    resource_class = base.name
    if _beyond(base, limits):
        resource_class = (
            policy.smallest_class(limits.cpu, limits.memory_bytes, limits.disk_bytes, limits.pids) or CUSTOM_CLASS
        )
    needs = policy.needs(placement.isolation)
    common = {
        "resource_class": resource_class,
        "limits": limits,
        "template": template,
        "ttl_s": ttl,
        "needs": needs,
    }
    if denials:
        first = denials[0]
        suggested: dict[str, Any] = {}
        for denial in denials:
            suggested.update(denial.suggested)
        return GuardDecision(
            verdict="deny",
            reason="; ".join(denial.reason for denial in denials),
            hint="; ".join(dict.fromkeys(denial.hint for denial in denials)),
            suggested=suggested,
            rule=first.rule,
            **common,  # type: ignore[arg-type]
        )
    reason = "; ".join([f"class {resource_class} of policy {policy.name}", needs.words, *notes])
    return GuardDecision(verdict="allow", reason=reason, **common)  # type: ignore[arg-type]


def exec_limits(
    policy: Policy, sandbox: Limits, timeout_s: float | None, output: int | None, kill: int | None
) -> Limits:
    """The limits of one exec in a sandbox that exists: its own time and output over the sandbox's. `policy_denied` over a cap."""
    wishes = ResourceWishes(timeout_s=timeout_s, output_bytes=output, output_kill_bytes=kill)
    kept = output if output is not None else sandbox.output_bytes
    if kill is None:
        kill = sandbox.output_kill_bytes if output is None else _default_kill(policy, kept)
    elif output is None:
        kept = min(kept, kill)
    wall = timeout_s if timeout_s is not None else sandbox.wall_s
    limits = replace(sandbox, wall_s=wall, output_bytes=kept, output_kill_bytes=kill)
    for denial in _over_caps(policy, limits, wishes):
        raise CorralError(
            "policy_denied", denial.reason, hint=denial.hint, suggested=denial.suggested, rule=denial.rule
        )
    return limits


def check_user(policy: Policy, template: str, user: str) -> None:
    """`user_refused` unless execs in this template may run as `user`."""
    rule = policy.template_rule(template)
    if user == "root" and not (rule and rule.root):
        raise CorralError(
            "user_refused",
            f"the template {shown(template)} does not allow execs as root",
            hint="leave user out: execs run as sandbox",
            field="/user",
        )


def _default_kill(policy: Policy, kept: int) -> int:
    return max(kept, min(kept * policy.defaults.output_kill_factor, policy.caps.output_kill_bytes))


def _limits(policy: Policy, base: ResourceClass, wishes: ResourceWishes) -> tuple[Limits, list[str]]:
    """Class, then wishes on top; and a sentence for each default that had to give way."""
    notes: list[str] = []
    memory = wishes.memory_bytes if wishes.memory_bytes is not None else base.memory_bytes
    disk = wishes.disk_bytes if wishes.disk_bytes is not None else base.disk_bytes
    tmp = wishes.tmp_bytes
    if tmp is None:
        most = max(1, int(memory * policy.caps.tmp_part_of_memory))
        tmp = min(base.tmp_bytes, most)
        if tmp < base.tmp_bytes:
            part = f"{policy.caps.tmp_part_of_memory:.0%} of memory"
            notes.append(f"tmp lowered from {format_bytes(base.tmp_bytes)} to {format_bytes(tmp)}, {part}")
    kept = wishes.output_bytes if wishes.output_bytes is not None else policy.defaults.output_bytes
    kill = wishes.output_kill_bytes
    if kill is None:
        kill = _default_kill(policy, kept)
    elif kill < kept:
        kept = kill
        notes.append(f"output_limit lowered to output_kill, {format_bytes(kill)}")
    return (
        Limits(
            memory_bytes=memory,
            cpu=float(wishes.cpu if wishes.cpu is not None else base.cpu),
            pids=wishes.pids if wishes.pids is not None else base.pids,
            disk_bytes=disk,
            inodes=min(max(disk // _BYTES_PER_INODE, _MIN_INODES), _MAX_INODES),
            tmp_bytes=tmp,
            output_bytes=kept,
            output_kill_bytes=kill,
            wall_s=float(wishes.timeout_s if wishes.timeout_s is not None else policy.defaults.timeout_s),
        ),
        notes,
    )


def _beyond(base: ResourceClass, limits: Limits) -> bool:
    return (
        limits.cpu > base.cpu
        or limits.memory_bytes > base.memory_bytes
        or limits.disk_bytes > base.disk_bytes
        or limits.pids > base.pids
    )


def _too_long(policy: Policy, wanted: expiry.Wanted) -> list[_Denial]:
    found = expiry.denied(policy, wanted)
    return [_Denial(one.reason, one.hint, {one.field: one.most}, one.rule) for one in found]


def _over_caps(policy: Policy, limits: Limits, wishes: ResourceWishes) -> list[_Denial]:
    caps = policy.caps
    rows: tuple[tuple[str, Any, Any, Callable[[Any], str]], ...] = (
        ("memory", wishes.memory_bytes, caps.memory_bytes, format_bytes),
        ("cpu", wishes.cpu, caps.cpu, _number),
        ("pids", wishes.pids, caps.pids, _number),
        ("disk", wishes.disk_bytes, caps.disk_bytes, format_bytes),
        ("tmp", wishes.tmp_bytes, caps.tmp_bytes, format_bytes),
        ("output_limit", wishes.output_bytes, caps.output_bytes, format_bytes),
        ("output_kill", wishes.output_kill_bytes, caps.output_kill_bytes, format_bytes),
        ("timeout_s", wishes.timeout_s, caps.timeout_s, format_seconds),
    )
    denials = [
        _Denial(
            f"{word} of {text(value)} is over the cap of {text(cap)}",
            f"ask for {word} of at most {_plain(cap)}",
            {word: cap},
            f"caps.{word}",
        )
        for word, value, cap, text in rows
        if value is not None and value > cap
    ]
    most = int(limits.memory_bytes * caps.tmp_part_of_memory)
    if wishes.tmp_bytes is not None and most < wishes.tmp_bytes <= caps.tmp_bytes:
        denials.append(
            _Denial(
                f"tmp of {format_bytes(wishes.tmp_bytes)} is over {caps.tmp_part_of_memory:.0%} of the memory of "
                f"{format_bytes(limits.memory_bytes)}",
                f"ask for tmp of at most {_plain(most)}, or for more memory; large files belong in /workspace",
                {"tmp": most},
                "caps.tmp_part_of_memory",
            )
        )
    return denials


def _placement(policy: Policy, template: str, placement: Placement, user: str) -> list[_Denial]:
    denials: list[_Denial] = []
    rule = policy.template_rule(template)
    if rule is None:
        allowed = ", ".join(sorted(policy.templates))
        denials.append(
            _Denial(
                f"the template {shown(template)} is not allowed",
                f"use one of {allowed}",
                {"template": policy.defaults.template},
                "templates",
            )
        )
    elif user == "root" and not rule.root:
        denials.append(
            _Denial(
                f"the template {shown(template)} does not allow execs as root",
                "leave user out: execs run as sandbox",
                {"user": "sandbox"},
                f"templates.{template}.root",
            )
        )
    network = placement.network or "none"
    if network not in policy.networks:
        denials.append(
            _Denial(
                f"the network {shown(network)} is not allowed", "run without network", {"network": "none"}, "networks"
            )
        )
    return denials


def _number(value: float) -> str:
    return f"{value:g}"


def _plain(value: float) -> str:
    """A cap as a caller may write it."""
    if isinstance(value, int):
        for unit, size in (("G", 1024 * MIB), ("M", MIB), ("K", KIB)):
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)
