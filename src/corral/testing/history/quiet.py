"""What is there when all is quiet again: results, what programs wrote, quota, old fences sent straight to guests, leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from corral.channel import GuestClient
from corral.domain.fence import Fence as NodeFence
from corral.domain.ids import new_id
from corral.errors import CorralError
from corral.linux import sockets
from corral.ports.node import ExecSpec, Node
from corral.testing.history.checker import History
from corral.testing.history.client import ENDED, HISTORY, Line, result_facts
from corral.testing.history.endings import forgotten
from corral.testing.history.events import Event, Fence, Recorder
from corral.testing.history.installation import Installation
from corral.testing.history.plan import Plan

Door = Callable[[str], Node]
"""The node that serves a socket."""
FINISH_S = 120.0
LEFT_S = 60.0
SETTLED_S = 30.0
GC_S = 60.0
OUT = "done "


def warm(installation: Installation, progress: Callable[[str], None]) -> None:
    """Templates are built and the first sandbox has been made before anything is measured or broken."""
    progress("the first sandbox")
    line = Line((installation.url,), installation.key, 120.0)
    document = {"command": ["/bin/true"], "runtime": "bubblewrap"}
    told = line.call("POST", "/v1/runs?wait=110", document, headers={"Idempotency-Key": "warm"}, wait_s=110)
    if told is None or not told.ok or told.document["result"] is None or told.document["result"]["reason"] != "ok":
        raise CorralError("infra_error", f"no sandbox can be made here: {told}", retryable=False)


def collect(
    installation: Installation,
    plan: Plan,
    events: list[Event],
    final: Recorder,
    progress: Callable[[str], None],
    door: Door | None,
) -> dict[str, int]:
    """Note everything; -> what became of old fences that were sent straight to guests, and to the node by its `door`."""
    line = Line((installation.url,), installation.key, 60.0)
    lines = [Line((installation.url,), key, 60.0) for key in installation.keys]
    theirs = [[event for event in events if _tenant_of(event, plan) == number] for number in range(plan.tenants)]
    for mine, told in zip(lines, theirs, strict=True):
        _runs(mine, told, final)
    progress("what sandboxes hold")
    living: dict[str, str] = {}
    for mine, told in zip(lines, theirs, strict=True):
        living |= _sandboxes(mine, told, final)
    straight = Straight(installation.state, door)
    asyncio.run(straight.try_all(_old_fences(events), living))
    for text in straight.done:
        final.note("left", what="an old fence was obeyed", text=text)
    everybody = {"default": line, **{f"chaos-{number}": mine for number, mine in enumerate(lines)}}
    for name, mine in everybody.items():
        _quota(mine, line, final, name, "while sandboxes live")
    progress("removing all")
    for mine in lines:
        _remove(mine)
    for name, mine in everybody.items():
        _quota(mine, line, final, name, "at the end")
    history = History(events)
    _left(installation, line, final, history, forgotten(history))
    progress("corral gc")
    done = line.call("POST", "/v1/gc?unknown=true", wait_s=GC_S)
    if done is None or not done.ok:
        raise CorralError("infra_error", f"POST /v1/gc: {done}", retryable=False)
    _left(installation, line, final, history, set(), after="gc")
    return dict(straight.counts)


def abandon(installation: Installation) -> None:
    """After a failure of the harness itself: what was made is removed as far as that goes; the rest ends with its time."""
    with contextlib.suppress(CorralError, OSError, AssertionError):
        if installation.server is None or installation.server.poll() is not None:
            installation.start_server()
        installation.wait_ready(30.0)
        for key in (installation.key, *installation.keys):
            _remove(Line((installation.url,), key, 30.0))
        # Also what a restored database knows nothing of: a body that is frozen would stay for ever.
        Line((installation.url,), installation.key, 30.0).call("POST", "/v1/gc?unknown=true", wait_s=GC_S)


def _remove(line: Line) -> None:
    for sandbox in _pages(line, "/v1/sandboxes"):
        line.call("DELETE", f"/v1/sandboxes/{sandbox['id']}?wait=30", wait_s=30)


def _tenant_of(event: Event, plan: Plan) -> int | None:
    """Of what a client noted."""
    number = event.by.removeprefix("c")
    return plan.tenant(int(number)) if number.isdigit() else None


def _pages(line: Line, path: str) -> Iterable[dict[str, Any]]:
    after = ""
    while True:
        told = line.call("GET", f"{path}?limit=500{after}")
        if told is None or not told.ok:
            raise CorralError("infra_error", f"GET {path}: {told}")
        yield from told.document["items"]
        if told.document["next"] is None:
            return
        after = f"&after={quote(told.document['next'])}"


def _runs(line: Line, events: list[Event], final: Recorder) -> None:
    """Every run that anybody was told of, and every one that there is."""
    of = {str(event["run"]): str(event["of"]) for event in events if event.get("run") and event.get("of")}
    known = dict.fromkeys([*of, *(str(run["id"]) for run in _pages(line, "/v1/runs"))])
    end = time.monotonic() + FINISH_S
    for run in known:
        while True:
            told = line.call("GET", f"/v1/runs/{run}?wait=5", wait_s=5)
            if told is None or not told.ok or _over(told.document) or time.monotonic() > end:
                break
            if told.document["result"] is not None:
                time.sleep(0.2)  # its end is still to be told
        if told is None or not told.ok:
            continue  # it is not there: the checker knows who was told of it
        facts = {} if told.document["result"] is None else result_facts(told.document["result"])
        name = of.get(run) or _named(facts.get("out"))
        if name is not None:  # the first sandbox's is nobody's
            final.note("run", run=run, of=name, state=told.document["state"], **facts)


def _over(document: dict[str, Any]) -> bool:
    """It has ended, and its webhook was tried with success, or never will be."""
    hook = document["webhook"]
    return document["result"] is not None and (hook is None or hook["state"] in ("delivered", "failed"))


def _named(out: str | None) -> str | None:
    """What a program that nobody was told of says of itself."""
    return out[len(OUT) :].strip() if out is not None and out.startswith(OUT) else None


def _sandboxes(line: Line, events: list[Event], final: Recorder) -> dict[str, str]:
    """-> the instance of each that lives. Notes their states and what programs wrote inside."""
    living = {}
    known = {str(event["sandbox"]) for event in events if event.kind == "return" and event.get("sandbox")}
    for sandbox in sorted(known | {str(one["id"]) for one in _pages(line, "/v1/sandboxes")}):
        told = line.call("GET", f"/v1/sandboxes/{sandbox}")
        if told is None or not told.ok:
            continue
        final.note("sandbox", sandbox=sandbox, state=told.document["state"])
        if told.document["state"] in ENDED:
            continue
        if told.document["state"] in ("pausing", "paused"):  # its client went away
            final.note("invoke", op=f"final.{sandbox}", call="resume", sandbox=sandbox)
            line.call("POST", f"/v1/sandboxes/{sandbox}/resume", wait_s=30)
        if told.document.get("instance") is not None:
            living[sandbox] = str(told.document["instance"]["id"])
        read = line.call("GET", f"/v1/sandboxes/{sandbox}/files?path={quote(HISTORY, safe='')}")
        for text in read.document["raw"].splitlines() if read is not None and read.ok else ():
            with contextlib.suppress(ValueError):
                event = Event.parse(text)
                final.put(replace(event, facts={**event.facts, "sandbox": sandbox}))
    return living


def _old_fences(events: list[Event]) -> dict[str, tuple[Fence, Fence]]:
    """Of each instance: a fence that was good once, and the floor now."""
    seen: dict[str, list[Fence]] = defaultdict(list)
    for event in events:
        if event.by.startswith("node") and event.kind in ("create", "fenced") and event.fence is not None:
            seen[str(event["instance"])].append(event.fence)
    return {instance: (min(found), max(found)) for instance, found in seen.items() if min(found) < max(found)}


class Straight:
    """Old fences past every check of ours: over the sockets of node and guest, as a stray replica or node would send them."""

    def __init__(self, state: Path, door: Door | None) -> None:
        self._state = state
        self._door = door
        self.counts: Counter[str] = Counter()
        self.done: list[str] = []
        """What was obeyed, and must not have been."""

    async def try_all(self, fences: dict[str, tuple[Fence, Fence]], living: dict[str, str]) -> None:
        path = self._state / "node.sock"
        node = self._door(str(path)) if self._door is not None and path.exists() else None
        try:
            for instance in living.values():
                if instance not in fences:
                    continue
                old = NodeFence(fences[instance][0].incarnation, fences[instance][0].token)
                if node is not None:
                    await self._node(node, instance, old)
                await self._guest(instance, old)
        finally:
            if node is not None:
                await node.close()

    async def _node(self, node: Node, instance: str, old: NodeFence) -> None:
        spec = ExecSpec(new_id("exe", time.time_ns() // 1_000_000, os.urandom(10)), ("/bin/true",), {})
        await self._refused(
            f"the node, {instance}",
            old,
            {
                "start_exec": lambda: node.start_exec(instance, old, spec),
                "fence": lambda: node.fence(instance, old, "kill"),
                "extend_deadline": lambda: node.extend_deadline(instance, old, 1.0),
                "remove_file": lambda: node.remove_file(instance, old, HISTORY, recursive=False, user="sandbox"),
            },
        )

    async def _guest(self, instance: str, old: NodeFence) -> None:
        place = self._state / "i" / instance.removeprefix("ins_")
        try:
            client = await GuestClient.connect(sockets.connect(str(place), "s", timeout_s=5.0))
        except (CorralError, OSError) as error:
            self.counts[f"unreachable: {type(error).__name__}"] += 1
            return
        try:
            await self._refused(
                f"the guest, {instance}",
                old,
                {
                    "kill_all": lambda: client.kill_all(fence=old),
                    "extend_deadline": lambda: client.extend_deadline(1.0, fence=old),
                    "fence": lambda: client.fence(old, "kill"),
                    "shutdown": lambda: client.shutdown(fence=old),
                },
            )
        finally:
            await client.close()

    async def _refused(self, whom: str, old: NodeFence, calls: dict[str, Callable[[], Awaitable[Any]]]) -> None:
        for name, call in calls.items():
            try:
                await call()
            except CorralError as error:
                self.counts[error.code] += 1
                if error.code != "lease_lost":
                    self.done.append(f"{whom}: {name} with {old} was answered by {error}")
            else:
                self.counts["obeyed"] += 1
                self.done.append(f"{whom}: {name} with {old}")


def _quota(line: Line, admin: Line, final: Recorder, tenant: str, when: str) -> None:
    """What is reserved of a tenant against what lives of it. What just ended may take its moment; what is then not right is noted so."""
    end = time.monotonic() + SETTLED_S
    while True:
        queue, doctor = line.call("GET", "/v1/queue"), admin.call("GET", "/v1/doctor")
        if queue is None or not queue.ok or doctor is None or not doctor.ok:
            raise CorralError("infra_error", f"GET /v1/queue: {queue}; GET /v1/doctor: {doctor}")
        live = list(_pages(line, "/v1/sandboxes"))
        used = {
            "sandboxes": len(live),
            "memory": sum(int(one["limits"]["memory"]["value"]) for one in live),
            "running": 0,
            "queued": 0,
        }
        reserved = {name: int(queue.document["use"][name]) for name in used}
        drift = doctor.document["quota"]
        if (reserved == used and not drift) or time.monotonic() > end:
            break
        time.sleep(0.2)
    for name, count in used.items():
        final.note("quota", tenant=tenant, of=f"{name} {when}", reserved=reserved[name], used=count)
    final.note("quota", tenant=tenant, of=f"drift {when}", reserved=json.dumps(drift), used="[]")


def _instance_in(text: str) -> str | None:
    """Whose it is, where that can be read."""
    found = re.search(r"(?:^|/i/|ins_)([0-9a-z]{26})", text)
    return None if found is None else f"ins_{found.group(1)}"


def _left(
    installation: Installation,
    line: Line,
    final: Recorder,
    history: History,
    spared: set[str],
    after: str | None = None,
) -> None:
    """Looked at until nothing is left or the time is over; what is left then is noted. Nobody waits for what is `spared`.

    A process shows its op only, which shows its instance.
    """
    place = {str(start["op"]): str(start["instance"]) for start in history.of("start") if start.get("op") is not None}

    def instance(text: str) -> str | None:
        return _instance_in(text) or next((place[word] for word in text.split() if word in place), None)

    end = time.monotonic() + LEFT_S
    while True:
        found = installation.remains()
        told = line.call("GET", "/v1/doctor")
        found["leftover"] = [json.dumps(one) for one in told.document["leftovers"]] if told and told.ok else ["unknown"]
        waited_for = [text for texts in found.values() for text in texts if instance(text) not in spared]
        if not waited_for or time.monotonic() > end:
            break
        time.sleep(0.5)
    for what, texts in found.items():
        if not texts:
            final.note("left", what=what, after=after)
        for text in texts:
            final.note("left", what=what, text=text, instance=instance(text), after=after)
