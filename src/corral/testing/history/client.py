"""One client of a chaos run, a process of its own: does what the plan says, notes what it asks and what it is told.

It speaks HTTP by itself, not through the SDK, so that each request is what the note says. What was cut off is repeated under the same
key; what got no answer at all within the patience stays without a `return`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from corral.testing.history.events import Event, Recorder, read
from corral.testing.history.plan import Act, Plan, Work

Json = dict[str, Any]
PATIENCE_S = 40.0
ANSWER_S = 15.0
"""How long one request may take beyond what it asks to wait."""
WAIT_S = 10.0
TTL_S = 1800
"""Of a sandbox: what a chaos run that is killed leaves behind is over by then."""
OVER = frozenset({"not_found", "sandbox_deleted", "sandbox_lost", "illegal_transition"})
"""Refusals that say that the sandbox of a slot is no use any more."""
ENDED = frozenset({"sanitizing", "terminated", "lost", "failed"})
FOREIGN: dict[str, tuple[tuple[str, str, Json | None], ...]] = {
    "sandbox": (
        ("GET", "/v1/sandboxes/{}", None),
        ("POST", "/v1/sandboxes/{}/attach", {"owner": "thief", "ttl_s": 5}),
        ("POST", "/v1/sandboxes/{}/execs?wait=0", {"argv": ["true"]}),
        ("POST", "/v1/sandboxes/{}/pause", None),
        ("GET", "/v1/sandboxes/{}/files?path=%2Fworkspace%2Fhistory", None),
        ("DELETE", "/v1/sandboxes/{}", None),
    ),
    "run": (("GET", "/v1/runs/{}", None), ("POST", "/v1/runs/{}/cancel?wait=0", None)),
    "exec": (("GET", "/v1/execs/{}", None), ("POST", "/v1/execs/{}/cancel?wait=0", None)),
}
"""What is tried with ids of another tenant."""
HISTORY = "/workspace/history"
PROGRAM = f"""
import fcntl, json, sys, time
op, fence, ticks = sys.argv[1:4]
def line(what):
    with open({HISTORY!r}, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        told = {{"at": time.monotonic_ns(), "by": "guest", "kind": "line", "op": op, "fence": fence, "what": what}}
        file.write(json.dumps(told) + "\\n")
line("begin")
for _ in range(int(ticks)):
    time.sleep(0.1)
    line("tick")
line("end")
print("done", op)
"""
"""What runs inside: its own witness, one line per step under a lock."""


@dataclass(frozen=True)
class Spec:
    """What the harness tells a client."""

    plan: Plan
    client: int
    begin: int
    urls: tuple[str, ...]
    key: str
    history: str
    runtime: str
    token: str
    """On the command line of every program, so that it is known as one of this run."""
    leases: bool
    """Whether the server has leases with owners."""
    receiver: str | None = None
    """Where webhooks may go; None: nowhere here."""
    others: tuple[str, ...] = ()
    """Histories of clients of other tenants."""

    def document(self) -> Json:
        return {**vars(self), "plan": vars(self.plan)}

    @classmethod
    def parse(cls, document: Json) -> Spec:
        plan = document["plan"]
        only = None if plan["only"] is None else tuple(plan["only"])
        lists = {name: tuple(document[name]) for name in ("urls", "others")}
        return cls(**{**document, **lists, "plan": Plan(**{**plan, "only": only})})


@dataclass(frozen=True)
class Told:
    """An answer: of a 2xx its document, else the problem."""

    status: int
    document: Json
    tries: int = 1
    """How often it was sent: of one that was sent twice the first may come late."""

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def code(self) -> str:
        return str(self.document.get("code"))

    @property
    def refusal(self) -> Json:
        return {"code": self.code, "detail": str(self.document.get("detail"))[:300]}


def rest(seconds: float) -> None:
    """Sleep, also where the process's clock is moved: `time.sleep` waits for a moment of a clock, which libfaketime does not bear."""
    select.select([], [], [], seconds)


class Line:
    """Calls that are repeated while nothing, or nothing but "later", is answered."""

    def __init__(self, urls: tuple[str, ...], key: str, patience_s: float = PATIENCE_S) -> None:
        self._hosts = [url.removeprefix("http://") for url in urls]
        self._key = key
        self._patience = patience_s
        self._next = 0

    def call(
        self,
        method: str,
        path: str,
        document: Json | None = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Told | None:
        """None: nobody knows what became of it."""
        body = json.dumps(document).encode() if document is not None else raw
        fields = {"Authorization": f"Bearer {self._key}", **(headers or {})}
        if document is not None:
            fields["Content-Type"] = "application/json"
        end = time.monotonic() + self._patience
        pause, tries = 0.02, 0
        while True:
            told = self._try(method, path, body, fields, wait_s)
            tries += 1
            later = told is None or told.status in (429, 503) or (told.status >= 500 and told.document.get("retryable"))
            if told is not None and not later:
                return replace(told, tries=tries)
            if time.monotonic() > end:
                return None
            rest(pause)
            pause = min(pause * 1.6, 0.5)

    def _try(self, method: str, path: str, body: bytes | None, fields: dict[str, str], wait_s: float) -> Told | None:
        host = self._hosts[self._next % len(self._hosts)]
        connection = http.client.HTTPConnection(host, timeout=ANSWER_S + wait_s)
        try:
            connection.request(method, path, body, fields)
            answer = connection.getresponse()
            if answer.length is None and not answer.chunked:
                raise http.client.IncompleteRead(b"")  # its head was cut short, which http.client takes for its end
            content = answer.read()
            kind = answer.getheader("content-type", "")
            if "json" in kind and "files" not in path:
                return Told(answer.status, json.loads(content))
            if answer.status >= 300:
                return Told(answer.status, json.loads(content))
            return Told(answer.status, {"raw": content.decode("utf-8", "replace")})
        except (OSError, http.client.HTTPException, ValueError):
            self._next += 1
            return None
        finally:
            connection.close()


class Client:
    """See the module docstring."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._name = f"c{spec.client}"
        self._tenant = spec.plan.tenant(spec.client)
        self._line = Line(spec.urls, spec.key)
        self._notes = Recorder(spec.history, self._name)
        self._guard = threading.Lock()
        self._ops = 0
        self._act = 0
        self._generation: dict[int, int] = {}
        self._known: dict[int, str] = {}
        self._old: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
        """Leases that this client has had of a slot: (sandbox, fence, owner)."""
        self.stopping = threading.Event()

    def live(self) -> None:
        """Until told to stop."""
        for act in self._spec.plan.acts(self._spec.client):
            if act.index < self._spec.begin:
                continue
            if self.stopping.is_set():
                return
            self._act = act.index
            self._notes.note("act", index=act.index)
            self._do(act)

    def _do(self, act: Act) -> None:
        match act.what:
            case "lease":
                self._lease(act)
            case "run":
                self._run(act)
            case "create":
                self._both(act.twice, lambda: self._create(act.slot))
            case "stale":
                self._stale(act)
            case "delete":
                self._delete(act)
            case "burst":
                self._burst(act)
            case "foreign":
                self._foreign(act)

    # -- notes -------------------------------------------------------------------------------------------------------------
    def _ask(self, call: str, **facts: Any) -> str:
        with self._guard:
            self._ops += 1
            op = f"{self._name}.{self._act}.{self._ops}"
        self._notes.note("invoke", op=op, call=call, tenant=self._tenant, **facts)
        return op

    def _tell(self, op: str, told: Told | None, **facts: Any) -> None:
        if told is None:
            self._notes.note("unknown", op=op)
        elif told.ok:
            self._notes.note("return", op=op, ok=True, tries=told.tries, **facts)
        else:
            self._notes.note("return", op=op, ok=False, **told.refusal)

    def _both(self, twice: bool, work: Callable[[], Any]) -> None:
        """The same in two threads at once."""
        other = threading.Thread(target=work) if twice else None
        if other is not None:
            other.start()
        work()
        if other is not None:
            other.join()

    # -- sandboxes ---------------------------------------------------------------------------------------------------------
    def _sandbox(self, slot: int) -> str | None:
        """The sandbox of a slot: all clients make it under the same key, so that they have the same one."""
        for _ in range(20):
            if slot in self._known:
                return self._known[slot]
            self._create(slot)
            if self.stopping.is_set():
                return None
        return None

    def _create(self, slot: int) -> None:
        generation = self._generation.get(slot, 0)
        # Tenants use the same keys, each for a sandbox of its own.
        key = f"{self._spec.plan.seed}-slot{slot // self._spec.plan.tenants}-{generation}"
        document = {"runtime": self._spec.runtime, "memory": "64M", "disk": "32M", "ttl_s": TTL_S}
        op = self._ask("create", key=key)
        told = self._line.call("POST", "/v1/sandboxes", document, headers={"Idempotency-Key": key}, wait_s=30)
        if told is None or not told.ok:
            self._tell(op, told)
            if told is not None:
                self._over(slot, generation)
            return
        self._tell(op, told, sandbox=told.document["id"], state=told.document["state"])
        if told.document["state"] in ENDED:
            self._over(slot, generation)
        else:
            with self._guard:
                self._known[slot] = told.document["id"]

    def _over(self, slot: int, generation: int | None = None) -> None:
        """The next one, unless another thread has seen it already."""
        with self._guard:
            current = self._generation.get(slot, 0)
            if generation is None or generation == current:
                self._generation[slot] = current + 1
            self._known.pop(slot, None)

    def _look(self, slot: int, told: Told | None) -> None:
        """A refusal that says that the sandbox is no more: the slot gets another, if that is so."""
        if told is None or told.ok or told.code not in OVER or slot not in self._known:
            return
        found = self._line.call("GET", f"/v1/sandboxes/{self._known[slot]}")
        if found is not None and (not found.ok or found.document["state"] in ENDED):
            self._over(slot)

    def _awake(self, told: Told | None, sandbox: str) -> None:
        """What a client that is gone has left paused goes on."""
        if told is not None and not told.ok and told.code == "sandbox_paused":
            self._resume(sandbox, None, None)

    def _delete(self, act: Act) -> None:
        sandbox = self._sandbox(act.slot)
        if sandbox is None:
            return
        self.read(sandbox)
        op = self._ask("delete", sandbox=sandbox)
        told = self._line.call("DELETE", f"/v1/sandboxes/{sandbox}?wait=20", wait_s=20)
        self._tell(op, told)
        self._over(act.slot)

    def read(self, sandbox: str) -> None:
        """What programs have written inside so far."""
        told = self._line.call("GET", f"/v1/sandboxes/{sandbox}/files?path={quote(HISTORY, safe='')}")
        if told is None or not told.ok:
            return
        for text in told.document["raw"].splitlines():
            with contextlib.suppress(ValueError):
                line = Event.parse(text)
                self._notes.put(replace(line, facts={**line.facts, "sandbox": sandbox}))

    # -- leases ------------------------------------------------------------------------------------------------------------
    def _lease(self, act: Act) -> None:
        sandbox = self._sandbox(act.slot)
        if sandbox is None:
            return
        owner = f"{self._name}/{act.index}"
        fence: str | None = None
        if self._spec.leases:
            fence = self._acquire(act, sandbox, owner)
            if fence is None:
                return
            self._old[act.slot].append((sandbox, fence, owner))
        for work in act.work:
            if self.stopping.is_set():
                break
            match work.what:
                case "exec":
                    self._exec(act.slot, sandbox, fence, owner, work.ticks)
                case "write":
                    self._write(act.slot, sandbox, fence, owner)
                case "renew" if fence is not None:
                    self._renew(act.slot, sandbox, fence, owner, act.ttl_s)
                case "sleep":
                    rest(work.sleep_s)
                case "pause":
                    self._paused(act.slot, sandbox, fence, owner, work)
        self._end(act, sandbox, fence, owner)

    def _acquire(self, act: Act, sandbox: str, owner: str) -> str | None:
        document = {"owner": owner, "ttl_s": act.ttl_s, "contention": act.contention, "session": f"slot{act.slot}"}
        if act.contention == "wait":
            document["wait_s"] = act.wait_s
        op = self._ask("acquire", sandbox=sandbox, owner=owner, ttl_s=act.ttl_s)
        path, headers = f"/v1/sandboxes/{sandbox}/attach", {"Idempotency-Key": op}
        told = self._line.call("POST", path, document, headers=headers, wait_s=act.wait_s)
        if told is None or not told.ok:
            self._tell(op, told)
            self._look(act.slot, told)
            self._awake(told, sandbox)
            return None
        lease = told.document
        self._tell(op, told, sandbox=lease["sandbox_id"], fence=lease["lease"], ttl_ms=lease["ttl_ms"], owner=owner)
        return str(lease["lease"])

    def _end(self, act: Act, sandbox: str, fence: str | None, owner: str) -> None:
        match act.ending:
            case "crash":
                signal.raise_signal(signal.SIGKILL)
            case "release" if fence is not None:
                op = self._ask("release", sandbox=sandbox, fence=fence, owner=owner)
                told = self._line.call(
                    "POST", f"/v1/sandboxes/{sandbox}/release", {"owner": owner}, headers={"Corral-Lease": fence}
                )
                self._tell(op, told)
            case "oversleep" if fence is not None:
                rest(act.ttl_s + 1.0)
                self._try_old(act.slot, sandbox, fence, owner)

    def _stale(self, act: Act) -> None:
        """With a lease of the sandbox that is there now, any that this client has had; else with the last one of the slot."""
        old = self._old[act.slot]
        fit = [one for one in old if one[0] == self._known.get(act.slot)] or old[-1:]
        if fit:
            self._try_old(act.slot, *fit[act.index % len(fit)])

    def _try_old(self, slot: int, sandbox: str, fence: str, owner: str) -> None:
        """All that a holder does, by one who may be none any more."""
        renewed = self._renew(slot, sandbox, fence, owner, 1.0)
        self._exec(slot, sandbox, fence, owner, 0)
        self._write(slot, sandbox, fence, owner)
        if renewed is None or renewed.ok:
            return  # it is theirs after all
        if self._pause(sandbox, fence, owner):
            self._resume(sandbox, fence, owner)
        op = self._ask("delete", sandbox=sandbox, fence=fence, owner=owner)
        told = self._line.call("DELETE", f"/v1/sandboxes/{sandbox}?wait=20", headers={"Corral-Lease": fence}, wait_s=20)
        self._tell(op, told)
        if told is not None and told.ok:
            self._over(slot)

    def _renew(self, slot: int, sandbox: str, fence: str, owner: str, ttl_s: float) -> Told | None:
        op = self._ask("renew", sandbox=sandbox, fence=fence, owner=owner)
        path, document = f"/v1/sandboxes/{sandbox}/renew", {"owner": owner, "ttl_s": ttl_s}
        told = self._line.call("POST", path, document, headers={"Corral-Lease": fence})
        self._tell(op, told, **({"ttl_ms": told.document["ttl_ms"]} if told is not None and told.ok else {}))
        self._look(slot, told)
        return told

    def _exec(
        self,
        slot: int,
        sandbox: str,
        fence: str | None,
        owner: str,
        ticks: int,
        between: Callable[[], None] | None = None,
    ) -> None:
        """`between`: what is done while it runs."""
        op = self._ask("exec", sandbox=sandbox, fence=fence, owner=owner)
        argv = ["python3", "-c", PROGRAM, op, fence or "-", str(ticks), self._spec.token]
        document = {"argv": argv, "env": {"CORRAL_OP": op}, "timeout_s": 30}
        headers = {"Idempotency-Key": op} | ({"Corral-Lease": fence} if fence is not None else {})
        wait = WAIT_S if between is None else 0.0
        path = f"/v1/sandboxes/{sandbox}/execs?wait={wait:g}"
        told = self._line.call("POST", path, document, headers=headers, wait_s=wait)
        if between is not None and told is not None and told.ok:
            between()
        end = time.monotonic() + PATIENCE_S
        while told is not None and told.ok and told.document["result"] is None and time.monotonic() < end:
            path = f"/v1/execs/{told.document['id']}?wait={WAIT_S:g}"
            told = self._line.call("GET", path, wait_s=WAIT_S)
        self._tell(op, told, exec=_id_of(told), **_facts(told))
        self._look(slot, told)
        self._awake(told, sandbox)

    def _paused(self, slot: int, sandbox: str, fence: str | None, owner: str, work: Work) -> None:
        """A program that is paused in its middle."""

        def between() -> None:
            if self._pause(sandbox, fence, owner):
                rest(work.sleep_s)
                self._resume(sandbox, fence, owner)

        self._exec(slot, sandbox, fence, owner, work.ticks, between)

    def _pause(self, sandbox: str, fence: str | None, owner: str | None) -> bool:
        """Whether it may be paused now."""
        return self._turn("pause", sandbox, fence, owner)

    def _resume(self, sandbox: str, fence: str | None, owner: str | None) -> None:
        self._turn("resume", sandbox, fence, owner)

    def _turn(self, call: str, sandbox: str, fence: str | None, owner: str | None) -> bool:
        op = self._ask(call, sandbox=sandbox, fence=fence, owner=owner)
        headers = {} if fence is None else {"Corral-Lease": fence}
        told = self._line.call("POST", f"/v1/sandboxes/{sandbox}/{call}", headers=headers, wait_s=WAIT_S)
        self._tell(op, told)
        return told is None or told.ok

    def _write(self, slot: int, sandbox: str, fence: str | None, owner: str) -> None:
        op = self._ask("write", sandbox=sandbox, fence=fence, owner=owner)
        path = f"/v1/sandboxes/{sandbox}/files?path={quote('/workspace/owner', safe='')}"
        headers = {} if fence is None else {"Corral-Lease": fence}
        told = self._line.call("PUT", path, raw=f"{fence} {op}\n".encode(), headers=headers)
        self._tell(op, told)
        self._look(slot, told)

    # -- runs --------------------------------------------------------------------------------------------------------------
    def _run(self, act: Act) -> None:
        name = f"{self._name}.{act.index}"
        document = self._document(name, act.ticks, act.hook)
        wait = WAIT_S if act.attached else 0
        self._both(act.twice, lambda: self._submit(document, name, wait, act.cancel_after_s))

    def _document(self, name: str, ticks: int, hook: str, priority: str | None = None) -> Json:
        document: Json = {
            "command": ["python3", "-c", PROGRAM, name, "-", str(ticks), self._spec.token],
            "env": {"CORRAL_OP": name},
            "runtime": self._spec.runtime,
            "memory": "64M",
            "disk": "32M",
            "timeout_s": 30,
        }
        if hook and self._spec.receiver is not None:
            document["webhook"] = {"url": f"{self._spec.receiver}/{self._tenant}/{name}/{hook}"}
            if hook == "own":
                document["webhook"]["secret"] = secret_of(self._spec.plan.seed, name)
        if priority is not None:
            document["priority"] = priority
        return document

    def _burst(self, act: Act) -> None:
        """More runs at once than there is room for; each is looked at until it has ended."""
        runs: dict[str, str] = {}
        for number, priority in enumerate(act.priorities):
            name = f"{self._name}.{act.index}-{number}"
            document = self._document(name, act.ticks, act.hook, priority)
            op = self._ask("submit", key=name, of=name, priority=priority, hook=document.get("webhook") and act.hook)
            told = self._line.call("POST", "/v1/runs?wait=0", document, headers={"Idempotency-Key": name})
            self._tell(op, told, run=_id_of(told), of=name, **_run_facts(told))
            if told is not None and told.ok:
                runs[str(told.document["id"])] = name
        end = time.monotonic() + PATIENCE_S
        while runs and time.monotonic() < end and not self.stopping.is_set():
            for run, name in list(runs.items()):
                told = self._result(run, name, 0)
                if told is None or not told.ok or told.document["result"] is not None:
                    del runs[run]
            rest(0.1)

    def _submit(self, document: Json, name: str, wait_s: float, cancel_after_s: float | None) -> None:
        hook = str(document["webhook"]["url"]).rpartition("/")[2] if "webhook" in document else None
        op = self._ask("submit", key=name, of=name, hook=hook)
        path = f"/v1/runs?wait={wait_s:g}"
        told = self._line.call("POST", path, document, headers={"Idempotency-Key": name}, wait_s=wait_s)
        self._tell(op, told, run=_id_of(told), of=name, **_run_facts(told))
        if told is None or not told.ok:
            return
        run = told.document["id"]
        if cancel_after_s is not None:
            rest(cancel_after_s)
            op = self._ask("cancel", run=run)
            self._tell(op, self._line.call("POST", f"/v1/runs/{run}/cancel?wait=0"))
        self._result(run, name, 2)

    def _result(self, run: str, name: str, wait_s: float) -> Told | None:
        op = self._ask("result", run=run, of=name)
        told = self._line.call("GET", f"/v1/runs/{run}?wait={wait_s:g}", wait_s=wait_s)
        self._tell(op, told, run=run, of=name, **_run_facts(told))
        return told

    # -- other tenants -----------------------------------------------------------------------------------------------------
    def _foreign(self, act: Act) -> None:
        """What another tenant has, and what nobody has: the answers are the same."""
        known = self._of_others()
        for kind, routes in FOREIGN.items():
            if not known[kind]:
                continue
            found = known[kind][int(act.dice * len(known[kind]))]
            nobodys = found[:-8] + "0" * 8
            for method, route, document in routes:
                for whose, name in (("another", found), ("nobody", nobodys)):
                    op = self._ask("foreign", route=f"{method} {route}", whose=whose, id=name)
                    told = self._line.call(method, route.format(name), document)
                    detail = None if told is None else str(told.document.get("detail")).replace(name, "ID")
                    if told is None or told.ok:
                        self._tell(op, told)
                    else:
                        self._notes.note("return", op=op, ok=False, code=told.code, detail=detail)

    def _of_others(self) -> dict[str, list[str]]:
        """Ids that clients of other tenants have been told, oldest first."""
        found: dict[str, dict[str, None]] = {kind: {} for kind in FOREIGN}
        for path in self._spec.others:
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
                for event in read(file):
                    for kind in FOREIGN if event.kind == "return" and event.get("ok") else ():
                        if event.get(kind) is not None:
                            found[kind][str(event[kind])] = None
        return {kind: list(ids) for kind, ids in found.items()}


def secret_of(seed: int, name: str) -> str:
    """What a run's webhook is signed with, if not by its tenant's secret."""
    return "whsec_" + base64.b64encode(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:24]).decode()


def _id_of(told: Told | None) -> str | None:
    return str(told.document["id"]) if told is not None and told.ok else None


def _run_facts(told: Told | None) -> Json:
    """`waits`: it is in the queue."""
    if told is None or not told.ok:
        return {}
    return {"state": told.document["state"], "waits": told.document["queue"] is not None, **_facts(told)}


def _facts(told: Told | None) -> Json:
    result = told.document.get("result") if told is not None and told.ok else None
    return {} if result is None else result_facts(result)


def result_facts(result: Json) -> Json:
    """Of a result, what is compared. That nobody knows of the start is told as None, which a note must not leave out."""
    return {
        "reason": result["reason"],
        "exit_code": result["exit_code"],
        "started": "unknown" if result["started"] is None else result["started"],
        "out": (result["stdout"] or {}).get("text"),
        "hint": result["hint"],
    }


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = Spec.parse(json.load(file))
    client = Client(spec)
    signal.signal(signal.SIGTERM, lambda *_: client.stopping.set())
    client.live()


if __name__ == "__main__":
    main()
