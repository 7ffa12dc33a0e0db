"""A node in memory: execs are little scripts of this test suite, instances are names. No process is ever started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from corral.domain.facts import ExecFacts, StartFailure, StreamFacts, Usage
from corral.domain.fence import Fence
from corral.domain.grade import Check
from corral.domain.limits import LimitModes
from corral.errors import CorralError
from corral.ports.node import (
    Chunk,
    Collected,
    CreateInstance,
    ExecSpec,
    FilePage,
    Gap,
    HostFacts,
    InstanceReport,
)
from corral.ports.runtime import Evidence, RuntimeInfo, Stats

MODES = LimitModes(
    memory="enforced",
    cpu="enforced",
    pids="enforced",
    disk="enforced",
    inodes="enforced",
    tmp="enforced",
)


@dataclass
class FakeExec:
    """argv: `print TEXT…`, `sleep` (until ended), `exit N [TEXT on stderr…]`, `missing`, `die` (the sandbox is lost)."""

    spec: ExecSpec
    instance_id: str
    out: list[Chunk] = field(default_factory=list)
    facts: ExecFacts | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, data: bytes) -> None:
        offset = sum(len(c.data) for c in self.out)
        self.out.append(Chunk("stdout", offset, data, len(self.out), str(len(self.out) + 1)))
        self.ring()

    def end(self, facts: ExecFacts) -> None:
        sizes = [sum(len(c.data) for c in self.out if c.stream == name) for name in ("stdout", "stderr")]
        if self.facts is None:
            stdout, stderr = (StreamFacts(size, size, 0) for size in sizes)
            self.facts = replace(facts, stdout=stdout, stderr=stderr, usage=Usage(), running_ms=3)
        self.ring()

    def ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class FakeNode:
    """Survives the services above it, like a node whose sandboxes outlive a control plane."""

    node_id = "local"

    def __init__(self) -> None:
        self.live: dict[str, CreateInstance] = {}
        self.floor_of: dict[str, Fence] = {}
        self.past = Fence(0, 0)
        """What a sandbox of the same id has had here that is gone."""
        self.fenced: list[tuple[str, Fence, str]] = []
        self.fence_gate: asyncio.Event | None = None
        self.fence_error: CorralError | None = None
        self.event_id = 0
        self.set_back = 0
        self.tmp: dict[str, list[str]] = {}
        """Paths that soft resets find."""
        self.sticky: set[str] = set()
        self.execs: dict[str, FakeExec] = {}
        self.starts: list[str] = []
        self.creates: list[str] = []
        self.destroyed: list[tuple[str, str]] = []
        self.files: dict[str, list[tuple[str, int, bytes]]] = {}
        self.deadlines: dict[str, float] = {}
        self.paused: set[str] = set()
        self.turns: list[tuple[str, Fence]] = []
        self.turn_gate: asyncio.Event | None = None
        self.turn_error: CorralError | None = None
        self.can: dict[str, bool] = {"pause": True}
        self.gone: asyncio.Queue[str] = asyncio.Queue()
        self.create_gate: asyncio.Event | None = None
        self.start_gate: asyncio.Event | None = None
        self.destroy_gate: asyncio.Event | None = None
        self.create_error: CorralError | None = None
        self.usable = True
        self.checks: list[Check] | None = None
        self.profiles: dict[str, str] = {}
        self.more_templates: list[dict[str, Any]] = []
        self.builds: list[tuple[str, bool]] = []
        self.build_gate: asyncio.Event | None = None
        self.build_error: CorralError | None = None
        self.kept: frozenset[str] | None = None
        self.old_bases = 0
        self.sweep_error: CorralError | None = None
        self.more_languages: list[str] = []
        self.there: set[str] = set()
        """Paths that `stat_file` finds in every instance."""
        self.removed: list[tuple[str, str]] = []
        self.remove_error: CorralError | None = None

    async def open(self, progress: Any = None) -> None: ...
    async def close(self) -> None: ...

    async def runtimes(self, *, fresh: bool = False) -> list[RuntimeInfo]:
        reason = None if self.usable else "switched off"
        return [RuntimeInfo("bubblewrap", self.usable, reason, 1, "0.11", {"two_uids": True, **self.can}, MODES, 5.0)]

    async def host(self) -> HostFacts:
        return HostFacts("hybrid", "root", 8 << 30, 2)

    async def templates(self) -> list[dict[str, Any]]:
        languages = ["python", "bash", "javascript", "c", *self.more_languages]
        host = {"name": "host", "digest": "sha256:0", "available": True, "reason": None, "languages": languages}
        return [host, *self.more_templates]

    async def template_seccomp(self, template: str) -> str:
        return self.profiles.get(template, "default")

    async def posture(self, *, fresh: bool = False) -> list[Check]:
        if self.checks is not None:
            return self.checks
        return [Check("seccomp filter", "must", True, "works"), Check("swap", "may", False, "1 in use", "swapoff")]

    async def ensure_template(self, template: str, progress: Any = None) -> str:
        return "sha256:" + "0" * 64

    async def template(self, name: str) -> dict[str, Any]:
        for known in await self.templates():
            if known["name"] == name:
                return {**known, "path": f"/base/{name}", "size_bytes": 1, "packages": {}}
        raise CorralError("not_found", f"there is no template {name!r}")

    async def build_template(self, name: str, progress: Any = None, *, refresh: bool = False) -> str:
        self.builds.append((name, refresh))
        if self.build_gate is not None:
            if progress is not None:
                progress("fetching", 0.5)
            await self.build_gate.wait()
        if self.build_error is not None:
            raise self.build_error
        return "sha256:" + "0" * 64

    async def remove_template(self, name: str, keep: frozenset[str]) -> dict[str, Any]:
        self.kept = keep
        return {"name": name, "digest": "sha256:0", "freed_bytes": 1}

    async def sweep_templates(self, keep: frozenset[str]) -> dict[str, int]:
        if self.sweep_error is not None:
            raise self.sweep_error
        self.kept = keep
        return {"template_build": 0, "base": self.old_bases}

    async def bases(self, keep: frozenset[str]) -> dict[str, Any]:
        return {"count": 1, "size_bytes": 1, "unused": 0, "unused_bytes": 0}

    async def create(self, request: CreateInstance, progress: Any = None) -> InstanceReport:
        self.creates.append(request.instance_id)
        if self.create_gate is not None:
            await self.create_gate.wait()
        if self.create_error is not None:
            raise self.create_error
        if request.fence < self.past:
            raise CorralError("lease_lost", "it has had a higher fence", floor=str(self.past))
        self.live[request.instance_id] = request
        return InstanceReport(request.instance_id, {"fake": True}, "sha256:" + "0" * 64, 1, {"create": 1.0})

    def _check(self, instance_id: str, fence: Fence) -> None:
        if instance_id not in self.live:
            raise CorralError("not_found", f"no instance {instance_id}")
        if fence < self.floor_of.get(instance_id, fence):
            raise CorralError("lease_lost", "an older fence", floor=str(self.floor_of[instance_id]))

    async def fence(self, instance_id: str, fence: Fence, mode: Literal["kill", "adopt"]) -> None:
        self._check(instance_id, fence)
        self.floor_of[instance_id] = fence
        self.fenced.append((instance_id, fence, mode))
        if self.fence_gate is not None:
            await self.fence_gate.wait()
        if self.fence_error is not None:
            raise self.fence_error

    async def floors(self) -> list[tuple[str, str, Fence]]:
        return [(key, made.sandbox_id, self.floor_of.get(key, made.fence)) for key, made in self.live.items()]

    async def remember_event(self, event_id: int, *, accept: bool = False) -> int:
        if accept and event_id < self.event_id:
            self.set_back = self.event_id
        self.event_id = event_id if accept else max(event_id, self.event_id)
        return self.event_id

    async def regressed(self, *, forget: bool = False) -> int:
        known, self.set_back = self.set_back, 0 if forget else self.set_back
        return known

    async def empty_directories(
        self, instance_id: str, fence: Fence, paths: Sequence[str], *, user: str = "sandbox"
    ) -> str | None:
        self._check(instance_id, fence)
        inside = self.tmp.setdefault(instance_id, [])
        found = [name for name in inside if name.startswith(tuple(f"{path}/" for path in paths))]
        for name in found:
            if name in self.sticky:
                return name
            inside.remove(name)
        return None

    async def list_files(self, instance_id: str, path: str, **_: Any) -> FilePage:
        return FilePage((), None)

    async def extend_deadline(self, instance_id: str, fence: Fence, deadline_s: float) -> None:
        self._check(instance_id, fence)
        self.deadlines[instance_id] = deadline_s

    async def pause(self, instance_id: str, fence: Fence) -> None:
        await self._turn("pause", instance_id, fence)
        self.paused.add(instance_id)

    async def resume(self, instance_id: str, fence: Fence) -> None:
        await self._turn("resume", instance_id, fence)
        self.paused.discard(instance_id)

    async def _turn(self, word: str, instance_id: str, fence: Fence) -> None:
        self._check(instance_id, fence)
        self.turns.append((word, fence))
        if self.turn_gate is not None:
            await self.turn_gate.wait()
        if self.turn_error is not None:
            raise self.turn_error
        self._check(instance_id, fence)

    async def put_files(self, instance_id: str, fence: Fence, files: Sequence[tuple[str, int, bytes | None]]) -> None:
        self._check(instance_id, fence)
        self.files.setdefault(instance_id, []).extend(files)

    async def put_tar(
        self, instance_id: str, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str = "sandbox"
    ) -> None:
        self._check(instance_id, fence)
        self.files.setdefault(instance_id, []).append((dest, 0, b"".join([b async for b in tar])))

    async def get_tar(self, instance_id: str, path: str, user: str = "sandbox") -> AsyncIterator[bytes]:
        if path == "/workspace/missing":
            raise CorralError("not_found", f"no {path}")
        yield b"tar of " + path.encode()

    async def start_exec(self, instance_id: str, fence: Fence, spec: ExecSpec) -> None:
        self._check(instance_id, fence)
        if self.start_gate is not None:
            await self.start_gate.wait()
        if instance_id in self.paused:
            raise CorralError("sandbox_paused", "paused")
        if spec.exec_id in self.execs:
            return
        self.starts.append(spec.exec_id)
        made = self.execs[spec.exec_id] = FakeExec(spec, instance_id)
        match spec.argv:
            case ("print", *words):
                made.emit(" ".join(words).encode("utf-8", "surrogateescape"))
                made.end(ExecFacts(True, 0))
            case ("exit", code, *words):
                made.out += [Chunk("stderr", 0, " ".join(words).encode(), 0, "1")] if words else []
                made.end(ExecFacts(True, int(code)))
            case ("missing",):
                made.end(ExecFacts(False, start_failure=StartFailure("argv", "ENOENT", "missing")))
            case ("nocwd",):
                made.end(ExecFacts(False, start_failure=StartFailure("cwd", "ENOENT", "/nope")))
            case ("die",):
                self.lose(instance_id)
            case ("/bin/sh", "-c", _, "run", *_):  # a build and its program in one
                made.end(ExecFacts(True, 1))
            case _:
                pass

    async def stat_file(self, instance_id: str, path: str, *, follow: bool = True, user: str = "sandbox") -> None:
        if not any(path.endswith(known) for known in self.there):
            raise CorralError("not_found", f"there is no {path}")

    async def remove_file(
        self, instance_id: str, fence: Fence, path: str, *, recursive: bool, user: str = "sandbox"
    ) -> None:
        self.removed.append((path, user))
        if self.remove_error is not None:
            raise self.remove_error

    def lose(self, instance_id: str) -> None:
        """The instance ends by itself."""
        self.live.pop(instance_id, None)
        for each in self.execs.values():
            if each.instance_id == instance_id:
                each.end(ExecFacts(True, sandbox_lost=True))
        self.gone.put_nowait(instance_id)

    def _exec(self, exec_id: str) -> FakeExec:
        if exec_id not in self.execs:
            raise CorralError("not_found", f"no exec {exec_id}")
        return self.execs[exec_id]

    async def stream_exec(self, exec_id: str, cursor: str | None = None) -> AsyncIterator[Chunk | Gap]:
        made = self._exec(exec_id)
        at = int(cursor or 0)
        if at < 0:
            raise CorralError("cursor_gone", "gone", bytes=1)
        while True:
            changed = made.changed
            while at < len(made.out):
                yield made.out[at]
                at += 1
            if made.facts is not None:
                return
            await changed.wait()

    async def wait_exec(self, exec_id: str) -> ExecFacts:
        made = self._exec(exec_id)
        while made.facts is None:
            await made.changed.wait()
        return made.facts

    async def stdin_exec(
        self, exec_id: str, data: bytes, eof: bool, offset: int | None = None, *, fence: Fence | None = None
    ) -> bool:
        self._exec(exec_id).emit(data)
        return True

    async def signal_exec(self, exec_id: str, signal: int, *, fence: Fence | None = None) -> None:
        self._exec(exec_id).end(ExecFacts(True, signal=signal))

    async def resize_exec(self, exec_id: str, rows: int, cols: int, *, fence: Fence | None = None) -> None:
        self._exec(exec_id)

    async def end_exec(self, exec_id: str, ended_by: str) -> None:
        self._exec(exec_id).end(ExecFacts(True, signal=9, ended_by=ended_by))  # type: ignore[arg-type]

    async def kept_output(
        self, exec_id: str, stream: Literal["stdout", "stderr"], *, offset: int = 0
    ) -> AsyncIterator[bytes]:
        yield b"".join(c.data for c in self._exec(exec_id).out if c.stream == stream)[offset:]

    async def raw_output(self, exec_id: str, stream: Literal["stdout", "stderr"]) -> AsyncIterator[bytes]:
        async for piece in self.kept_output(exec_id, stream):
            yield piece

    async def timeline(self, exec_id: str) -> list[dict[str, Any]]:
        return [
            {"t_ms": c.t_ms, "stream": c.stream, "offset": c.offset, "bytes": len(c.data)}
            for c in self._exec(exec_id).out
        ]

    async def forget_exec(self, exec_id: str) -> None:
        self.execs.pop(exec_id, None)

    async def mark(self, instance_id: str) -> None: ...

    async def collect(
        self, instance_id: str, *, outputs: Sequence[str], max_bytes: int, into: str | None, mark: bool = False
    ) -> Collected:
        return Collected((), False, ())

    async def stats(self, instance_id: str) -> Stats:
        return Stats()

    async def destroy(self, instance_id: str, reason: str) -> Evidence:
        if self.destroy_gate is not None:
            await self.destroy_gate.wait()
        if self.live.pop(instance_id, None) is not None:
            self.destroyed.append((instance_id, reason))
        for each in self.execs.values():
            if each.instance_id == instance_id:
                each.end(ExecFacts(True, sandbox_lost=True))
        return Evidence(True)

    async def lost(self) -> str:
        return await self.gone.get()

    async def instances(self) -> list[str]:
        return list(self.live)

    async def leftovers(self) -> list[dict[str, Any]]:
        return []

    async def gc(self) -> dict[str, int]:
        return {"process": 0, "failed": 0}
