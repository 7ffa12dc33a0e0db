"""Services of the host, other addresses and sockets by name: a sandbox has `lo` and nothing else."""

from __future__ import annotations

import json
from typing import Any

from corral.testing.certify.bench import Bench, Canaries, unlisted
from corral.testing.certify.register import attack, opened
from corral.testing.certify.verdict import Seen, Trial
from corral.testing.hostile.network import OUTSIDE, REACH


@attack(
    "network",
    "services of the host",
    "connects to the host: loopback, its own address, abstract and path sockets",
    "host",
)
async def services(bench: Bench) -> list[Trial]:
    canaries = Canaries()
    try:
        targets = await canaries.listen()
        code, words = unlisted(REACH, json.dumps(targets))
        answers = await (await bench.held()).ask(code, stdin=words)
        control = await bench.outside(code, stdin=words) or {}
        trials = []
        for target in targets:
            key = " ".join(map(str, target))
            control_seen = opened(control.get(key), "on the bare host")
            trials.append(Trial(_shown(target), opened(answers[key]), control_seen))
        return trials
    finally:
        await canaries.close()


@attack(
    "network", "addresses beyond", "reaches metadata services, other networks, names; learns of interfaces and routes"
)
async def beyond(bench: Bench) -> list[Trial]:
    outside: list[list[Any]] = json.loads(json.dumps(OUTSIDE))
    answers = await (await bench.held()).ask(REACH, json.dumps(outside))
    control = await bench.outside(REACH, "[]") or {}
    interfaces, host = set(answers["interfaces"]), set(control.get("interfaces", ()))
    reached = [" ".join(map(str, target)) for target in outside if answers[" ".join(map(str, target))] == "ok"]
    quick = answers["slowest"] < 2.5
    routes = answers["route"][1:] if isinstance(answers["route"], list) else []
    known = control.get("route", ())
    return [
        Trial("interfaces", Seen(interfaces != {"lo"}, ", ".join(sorted(interfaces))), Seen(bool(host - {"lo"}), f"the host has {len(host)}")),
        Trial("routes", Seen(bool(routes), f"{len(routes)} routes"), Seen(isinstance(known, list) and len(known) > 1, "the host has some")),
        Trial(
            "other addresses",
            Seen(bool(reached), f"reached: {', '.join(reached)}" if reached else f"{len(outside)} refused{', at once' if quick else ''}"),
            Seen(None, "no control: whether anybody answers there is not known here"),
        ),
    ]  # fmt: skip


def _shown(target: list[Any]) -> str:
    """A target without a name or address of the host."""
    if target[0] in ("abstract", "path"):
        return f"{target[0]} socket"
    return f"{target[0]} {target[1] if target[1] in ('127.0.0.1', '::1') else 'own address'}"
