"""Where a request runs: what the node found of its host and runtimes, graded, and the choice among them (`domain.placement`)."""

from __future__ import annotations

import asyncio

from corral.domain.grade import ANY_GRADE, grade_runtime
from corral.domain.placement import Needs, PlacementChoice, RuntimeFacts
from corral.domain.placement import choose as choose_among
from corral.domain.request import Placement
from corral.errors import CorralError
from corral.services.control import Core


async def choose(core: Core, placement: Placement, needs: Needs) -> PlacementChoice:
    """Which runtime; raises what makes the wish impossible here, a template that policy allows and nobody can build too."""
    if placement.template is not None and core.policy.template_rule(placement.template) is not None:
        known = [str(template["name"]) for template in await core.node.templates()]
        if placement.template not in known:
            raise CorralError(
                "not_supported_yet",
                f"this version has no template {placement.template}",
                hint=f"use one of {', '.join(known)}" if known else "no template is installed",
                field="/template",
            )
    # A host that could not be looked at just now is no bad host: its error is one to try again, and nothing runs meanwhile.
    infos, checks = await asyncio.gather(core.node.runtimes(), core.node.posture())
    facts = []
    for info in infos:
        graded = (info.usable, info.reason, info.security_level, info.capabilities, info.limits, checks, core.unsafe)
        known_by = (info.name, info.usable, info.reason, info.security_level, info.start_ms, info.limits)
        facts.append(RuntimeFacts(*known_by, grade_runtime(*graded)))
    return choose_among(facts, placement.runtime, needs, any_grade=ANY_GRADE in core.unsafe)


async def place(core: Core, placement: Placement, needs: Needs, whose: str) -> PlacementChoice:
    """`choose` for what is made now: an opt-out that lets the runtime through is logged for it."""
    choice = await choose(core, placement, needs)
    if choice.let_through:
        core.log(f"{whose}: {choice.runtime} {choice.let_through}")
    return choice


async def seccomp_profile(core: Core, template: str) -> str:
    """The profile of system calls of a built template; `policy_denied` where policy does not allow it for this template."""
    wanted = await core.node.template_seccomp(template)
    rule = core.policy.template_rule(template)
    if wanted not in (rule.seccomp if rule is not None else ("default",)):
        raise CorralError(
            "policy_denied",
            f"the template {template} asks for the seccomp profile {wanted}",
            hint=f"the policy has to allow it: templates.{template}.seccomp: [{wanted}]",
            field="/template",
        )
    return wanted
