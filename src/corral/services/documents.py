"""The documents of the contract (3 and 4) from the rows of the store; output bytes are read from the node only here, when served.

A stored result holds stream *facts* under `stdout` and `stderr` (produced, head, tail), never bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from corral.domain.expiry import is_unlimited
from corral.domain.facts import StreamFacts
from corral.domain.grade import Check, check_dict, grade_host, grade_runtime
from corral.domain.lease import is_system, named
from corral.domain.limits import LimitModes, Limits
from corral.domain.records import EventRecord, ExecRecord, RunRecord, SandboxView
from corral.domain.result import limits_document
from corral.domain.run import public_state
from corral.ports.node import HostFacts, Node
from corral.ports.runtime import RuntimeInfo
from corral.services.output import LARGE, NAMES, LargeStream, Name, glimpse, kept_document, nothing_shown

Json = dict[str, Any]


def moment(milliseconds: int | None) -> str | None:
    """RFC 3339 in UTC with milliseconds."""
    if milliseconds is None:
        return None
    whole = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03d}Z"


def stored_stream(facts: StreamFacts) -> Json:
    """What a stored result keeps of a stream."""
    return {"produced": facts.produced, "head": facts.head, "tail": facts.tail}


def stored_limits(limits: Limits, modes: LimitModes) -> Json:
    """`SandboxRecord.limits`: the numbers, and how they are held."""
    return {"values": limits.as_dict(), "modes": modes.as_dict(), "overshoot": dict(modes.overshoot)}


def read_limits(stored: Mapping[str, Any]) -> tuple[Limits, LimitModes]:
    """The inverse of `stored_limits`."""
    modes = LimitModes.from_dict(stored.get("modes", {}))
    return Limits.from_dict(stored["values"]), replace(modes, overshoot=dict(stored.get("overshoot", {})))


def _decisions(run: RunRecord) -> Json:
    """What was decided; a run that ended before says so, with the limits that its result names."""
    decisions = dict(run.decisions)
    if run.result is None:
        return decisions
    early = {"verdict": "not_reached", "reason": "the run ended before this was decided"}
    if decisions.get("guard") is None:
        limits = run.result.get("limits") or {}
        decisions["guard"] = {**early, "limits": {name: limit["value"] for name, limit in limits.items()}}
    if decisions.get("placement") is None:
        decisions["placement"] = {**early, "runtime": None, "template_digest": None}
    return decisions


class Documents:
    """Builds answers; reads output through the node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # -- runs and execs --------------------------------------------------------------------------------------------------------
    def run_summary(self, run: RunRecord) -> Json:
        """A run in a list: no output, no files."""
        return {
            "id": run.run_id,
            "state": public_state(run.state),
            "sandbox_id": run.sandbox_id,
            "reason": run.reason,
            "exit_code": (run.result or {}).get("exit_code"),
            "created_at": moment(run.created_at),
            "finished_at": moment(run.finished_at),
            "total_ms": run.timings.get("total_ms"),
        }

    async def run(self, run: RunRecord, *, output: bool = True, view: int | None = None, pieces: bool = False) -> Json:
        """The run document; `view` = character budget of the agent view. `pieces`: what is much may be a `LargeStream` in it."""
        document: Json = {
            "id": run.run_id,
            "state": public_state(run.state),
            "sandbox_id": run.sandbox_id,
            "lease_version": run.lease_version,
            "exec_id": run.exec_id,
            "created_at": moment(run.created_at),
            "decisions": _decisions(run),
            "result": None,
        }
        if run.result is not None:
            await self._add_result(document, run.result, run.exec_id, output, view, pieces)
        return document

    async def exec(
        self, record: ExecRecord, *, output: bool = True, view: int | None = None, pieces: bool = False
    ) -> Json:
        """The exec document; see `run`."""
        document: Json = {
            "id": record.exec_id,
            "sandbox_id": record.sandbox_id,
            "lease_version": record.lease_version,
            "incarnation": record.incarnation,
            "state": record.state,
            "created_at": moment(record.created_at),
            "result": None,
        }
        if record.result is not None:
            await self._add_result(document, record.result, record.exec_id, output, view, pieces)
        return document

    async def _add_result(
        self, document: Json, stored: Json, exec_id: str | None, output: bool, view: int | None, pieces: bool
    ) -> None:
        streams = {name: StreamFacts(**stored[name]) for name in NAMES}
        result = document["result"] = {**stored}
        for name, facts in streams.items():
            result[name] = await self._stream(facts, exec_id, name, output, pieces)
        if view is not None:
            # Here, as its regular expressions cost start-up and few calls want them.
            from corral.domain.agent_view import agent_view

            seen = {**result}
            for name, facts in streams.items():
                if not output or isinstance(result[name], LargeStream):
                    seen[name] = await glimpse(self._node, exec_id, name, facts)
            document["agent_view"] = agent_view(seen, view)

    async def _stream(self, facts: StreamFacts, exec_id: str | None, name: Name, output: bool, pieces: bool) -> Any:
        if not output:
            return nothing_shown(facts)
        if pieces and facts.kept > LARGE and exec_id is not None:
            return LargeStream(self._node, exec_id, name, facts)
        return await kept_document(self._node, exec_id, name, facts)

    # -- sandboxes -------------------------------------------------------------------------------------------------------------
    def sandbox(self, view: SandboxView) -> Json:
        """SANDBOX of the contract."""
        row = view.sandbox
        limits, modes = read_limits(row.limits)
        return {
            "id": row.sandbox_id,
            "state": row.state,
            "runtime": row.runtime,
            "template": row.template_id,
            "template_digest": row.template_digest,
            "resource_class": row.resource_class,
            "limits": limits_document(limits, modes),
            "lease_version": view.lease.lease_version if view.lease else 0,
            "incarnation": row.incarnation,
            "lease": _lease(view),
            "session": row.session_id,
            "created_at": moment(row.created_at),
            "expires_at": None if is_unlimited(row.created_at, row.expires_at) else moment(row.expires_at),
            "idle_timeout_s": None if row.idle_timeout_ms is None else row.idle_timeout_ms / 1000,
            "conditions": row.conditions,
            "tainted": row.tainted,
            "failure": row.failure,
        }

    def inspect(self, view: SandboxView, history: Sequence[EventRecord]) -> Json:
        """SANDBOX with its instance and its events."""
        instance = view.instance
        return {
            **self.sandbox(view),
            "instance": None
            if instance is None
            else {
                "id": instance.instance_id,
                "node": instance.node_id,
                "runtime": instance.runtime,
                "state": instance.state,
                "incarnation": instance.incarnation,
                "security_level": instance.security_level,
                "template_digest": instance.template_digest,
                "born_at": moment(instance.born_at),
            },
            "history": [
                {
                    "event_id": event.event_id,
                    "event": event.event_type,
                    "old_state": event.old_state,
                    "new_state": event.new_state,
                    "at": moment(event.timestamp),
                    "metadata": event.metadata,
                }
                for event in history
            ],
        }

    # -- the host, graded ------------------------------------------------------------------------------------------------------
    @staticmethod
    def security(runtimes: Sequence[RuntimeInfo], checks: Sequence[Check], unsafe: Collection[str] = ()) -> Json:
        """Grades with their reasons, and what they rest on."""
        graded = {
            info.name: grade_runtime(
                info.usable, info.reason, info.security_level, info.capabilities, info.limits, checks, unsafe
            ).as_dict()
            for info in runtimes
        }
        return {
            "host": grade_host(checks).as_dict(),
            "runtimes": [{"name": name, **grade} for name, grade in graded.items()],
            "checks": [check_dict(check) for check in checks],
        }

    # -- the host --------------------------------------------------------------------------------------------------------------
    @staticmethod
    def doctor(
        runtimes: Sequence[RuntimeInfo], default: str | None, host: HostFacts, leftovers: Sequence[Json], more: Json
    ) -> Json:
        """What `corral doctor` prints."""
        return {
            "runtimes": [
                {
                    "name": info.name,
                    "usable": info.usable,
                    "reason": info.reason,
                    "security_level": info.security_level,
                    "version": info.version,
                    "capabilities": _capabilities(info),
                    "limits": info.limits.as_dict(),
                    "overshoot": dict(info.limits.overshoot),
                    "start_ms": info.start_ms,
                }
                for info in runtimes
            ],
            "default": default,
            "host": {
                "cgroup": host.cgroup,
                "user": host.user,
                "memory_bytes": host.memory_bytes,
                "cpus": host.cpus,
            },
            "leftovers": list(leftovers),
            **more,
        }


def _lease(view: SandboxView) -> Json | None:
    """Who has a sandbox."""
    lease, row = view.lease, view.sandbox
    if lease is None or lease.lease_owner is None or is_system(lease.lease_owner):
        return None
    return {
        "owner": named(lease.lease_owner),
        "lease": f"{row.incarnation}.{lease.lease_version}",
        "acquired_at": moment(lease.acquired_at),
        "expires_at": moment(lease.expires_at),
    }


def _capabilities(info: RuntimeInfo) -> Json:
    """What is declared, and where it can pause by whom."""
    return {**info.capabilities, "pause_by": info.pause_by if info.capabilities.get("pause") else None}
