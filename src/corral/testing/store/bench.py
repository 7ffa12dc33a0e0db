"""What the checks of a store share: a clock in their hands, records to fill it with, and the register of the checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    AuditRecord,
    CommandRecord,
    Committed,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceRecord,
    LeaseChange,
    RunRecord,
    SandboxRecord,
    Transition,
)
from corral.errors import CorralError
from corral.ports.store import Store

START_MS = 1_700_000_000_000
HARD_JSON: dict[str, Any] = {
    "chinese": "你好，世界",
    "emoji": "🦬👩‍👩‍👧",
    "lone": "a\udc80b\udcff\ud83d",
    "nul": "a\0b",
    "separators": "\u2028\u2029\x7f\x1b[0m",
    "large": 2**200,
    "negative": -(2**63) - 1,
    "float": 0.1,
    "tiny": 5e-324,
    "nested": [[], {}, [None, True, False, [{"a": [1, {"b": ["c"]}]}]]],
    "clé\udcfe": "key",
    "": "empty",
}


class Clock:
    """The store's clock in the hands of a check."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        return self.now


MakeStore = Callable[[Callable[[], int]], Store]


@dataclass
class Bench:
    """A store under test with its clock, and records to fill it."""

    store: Store
    clock: Clock = field(default_factory=Clock)

    def run(self, run_id: str = "run_1", **columns: Any) -> RunRecord:
        known: dict[str, Any] = {"tenant_id": "default", "owner": "me", "state": "requested", "request": {}}
        return RunRecord(run_id=run_id, **{**known, "created_at": self.clock.now, **columns})

    def sandbox(self, sandbox_id: str = "sbx_1", **columns: Any) -> SandboxRecord:
        known: dict[str, Any] = {
            "tenant_id": "default",
            "state": "requested",
            "runtime": "fake",
            "template_id": "host",
            "template_digest": "sha256:00",
            "resource_class": "python-small",
            "limits": {"memory_bytes": 1},
            "created_at": self.clock.now,
            "last_active_at": self.clock.now,
            "expires_at": self.clock.now + 3_600_000,
        }
        return SandboxRecord(sandbox_id=sandbox_id, **{**known, **columns})

    def instance(self, instance_id: str = "ins_1", **columns: Any) -> InstanceRecord:
        known: dict[str, Any] = {
            "node_id": "node_1",
            "runtime": "fake",
            "template_digest": "sha256:00",
            "resource_class": "python-small",
            "security_level": 1,
            "state": "warming",
            "sandbox_id": None,
            "incarnation": 0,
            "born_at": self.clock.now,
        }
        return InstanceRecord(instance_id=instance_id, **{**known, **columns})

    def exec(self, exec_id: str = "exe_1", sandbox_id: str = "sbx_1", **columns: Any) -> ExecRecord:
        known: dict[str, Any] = {"incarnation": 0, "lease_version": 1, "state": "starting", "spec": {"argv": ["true"]}}
        return ExecRecord(exec_id=exec_id, sandbox_id=sandbox_id, **{**known, "created_at": self.clock.now, **columns})

    def command(self, command_id: str, sandbox_id: str = "sbx_1", **columns: Any) -> CommandRecord:
        known: dict[str, Any] = {"incarnation": 0, "token": 1, "kind": "fence"}
        return CommandRecord(command_id=command_id, sandbox_id=sandbox_id, **{**known, **columns})

    async def made(self, sandbox_id: str = "sbx_1", **columns: Any) -> SandboxRecord:
        """A sandbox in the store, at version 1."""
        record, _ = await self.store.create_sandbox(self.sandbox(sandbox_id, **columns), EVENT, audit())
        return record

    async def step(self, sandbox_id: str = "sbx_1", state: str = "locking", **parts: Any) -> Committed:
        """A transition from whatever version the sandbox has."""
        view = await self.store.get_sandbox(sandbox_id, None)
        assert view is not None
        version = parts.pop("expect_version", view.sandbox.version)
        event = parts.pop("event", replace(EVENT, event_type=state))
        return await self.store.commit_transition(Transition(sandbox_id, version, state, event, **parts))

    async def leased(self, sandbox_id: str = "sbx_1", ttl_ms: int = 30_000) -> Fence:
        """A sandbox in the store whose lease `me/1` holds with token 1."""
        await self.made(sandbox_id)
        done = await self.step(sandbox_id, "leased", lease=LeaseChange("take", "me/1", ttl_ms))
        return Fence(done.sandbox.incarnation, done.lease.lease_version)


EVENT = EventRecord("", "create", None, None)
Check = Callable[[Bench], Awaitable[None]]
CHECKS: list[tuple[str, Check]] = []


def audit(subject: str = "run_1", **columns: Any) -> AuditRecord:
    return AuditRecord(
        **{"tenant_id": "default", "actor": "me", "kind": "run.submitted", "subject": subject, **columns}
    )


def check(run: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS.append((run.__name__, run))
    return run


async def run_check(run: Check, make: MakeStore) -> None:
    """Open, run, close; the store is closed also when the check fails."""
    clock = Clock()
    bench = Bench(make(clock), clock)
    await bench.store.open()
    try:
        await run(bench)
    finally:
        await bench.store.close()


async def refused(code: str, call: Awaitable[Any]) -> CorralError:
    """The error with which the call is refused; AssertionError if it is not, or by another code."""
    try:
        result = await call
    except CorralError as error:
        assert error.code == code, f"expected {code}, got {error}"
        return error
    raise AssertionError(f"expected {code}, got {result!r}")


def key_of(key: str = "k", digest: str = "d1", **parts: str) -> Idempotency:
    return Idempotency(**{"tenant_id": "default", "route": "POST /v1/runs", "key": key, "body_digest": digest, **parts})


async def everything(b: Bench) -> list[Any]:
    """All that a refused call must leave as it was."""
    return [
        await b.store.list_sandboxes(None),
        await b.store.list_instances("node_1"),
        await b.store.list_execs("sbx_1"),
        await b.store.open_commands(),
        await b.store.history("sbx_1"),
        await b.store.list_audit("default"),
    ]
