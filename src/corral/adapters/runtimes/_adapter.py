"""What the adapters have in common: how an instance is begun once, found again, ended, removed, and tried.

An adapter adds what is its own: `create` by way of `_begin`, `stats`, and what is abstract here. Everything that it makes for an
instance derives from the directory and the instance id (see `corral.ports.runtime`): the place with the disk, the control group, the
range of host ids, the files of `_files`, and whatever `_unmake` removes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from corral import faults
from corral.adapters.runtimes import _instance, _probe
from corral.domain.limits import LimitModes
from corral.errors import CorralError
from corral.linux import cgroups, disk, mounts, process, userns
from corral.linux.cgroups import Cgroup
from corral.ports.runtime import Evidence, Instance, InstanceRef, InstanceSpec, RuntimeInfo

START_S = 20.0
STOP_S = 20.0
PROBE_START_S = 10.0
_CAPABILITIES = (
    *("pause", "snapshot", "memory_snapshot", "fork", "resize"),
    *("two_uids", "one_uid", "host_pids", "cgroup"),
)


class Adapter(ABC):
    """See the module docstring and `corral.ports.runtime`."""

    name: str
    _level = 1
    """Security level of what does not work here."""
    _root_only = True
    _files: tuple[str, ...] = ()
    """Names in an instance's directory, beside those that every adapter has."""
    _init_first = False
    """The first process is killed before the group: what else runs is part of it."""

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        self._state_dir = os.path.abspath(state_dir)
        self._tools = f"{self._state_dir}/tools"
        self._installation = installation_id
        self._ids = userns.SubordinateRange(installation_id, state_dir=state_dir, configured=subuid_range)
        self._namespaces = userns.Namespaces()
        self._turns = _instance.Turns()

    # -- what an adapter adds

    @abstractmethod
    def _answer(self, ref: InstanceRef) -> Instance:
        """Of a finished instance, from its record."""

    @abstractmethod
    def _program(self) -> str:
        """The program to run. Raises `runtime_unavailable`."""

    @abstractmethod
    def _usable(self, version: str | None) -> RuntimeInfo:
        """Try it with everything on; -> what works. Raises what went wrong, as CorralError, OSError, ValueError or SubprocessError."""

    def _strays(self, ref: InstanceRef) -> list[int]:
        """Live processes of the instance that its group does not tell, those of one that nobody remembers (`ref.data` empty) too."""
        base = self._ids.find(ref.instance_id) if os.geteuid() == 0 else None
        # The ids are the instance's alone, so whatever runs under one of them is its own, wherever it hides.
        found = [] if base is None else userns.processes_of(base)
        return found if found or ref.data else self._forgotten(ref)

    def _forgotten(self, ref: InstanceRef) -> list[int]:
        """Live processes of an instance without any record of it."""
        return [stray.pid for stray in _instance.holders(ref.directory)]

    def _unmake(self, ref: InstanceRef) -> None:  # noqa: B027 - most have nothing
        """Remove what else was made for the instance; its processes are dead, its disk is still there."""

    def _forget(self, instance_id: str) -> None:  # noqa: B027
        """The instance is gone: so is what was kept of it in memory."""

    # -- the port

    async def probe(self) -> RuntimeInfo:
        return await asyncio.to_thread(self._probe)

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return InstanceRef(self.name, instance_id, directory, {})

    async def attach(self, ref: InstanceRef) -> Instance | None:
        init = _instance.init_of(ref)
        return self._answer(ref) if init is not None and process.is_alive(init) else None

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        return self._group(ref.instance_id).reset_peak()

    async def processes(self, ref: InstanceRef) -> list[int]:
        return await asyncio.to_thread(self._processes, ref)

    async def kill(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._stop, ref)

    async def wait_gone(self, ref: InstanceRef) -> None:
        init = _instance.init_of(ref)
        if init is not None:
            await process.wait_gone(init)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        return await asyncio.shield(asyncio.to_thread(self._destroy, ref))

    def _processes(self, ref: InstanceRef) -> list[int]:
        return self._group(ref.instance_id).procs()

    def _group(self, instance_id: str) -> Cgroup:
        return cgroups.host().open(self._group_name(instance_id))

    def _group_name(self, instance_id: str) -> str:
        return f"{self._installation}/{instance_id}"

    # -- beginning

    async def _begin(self, spec: InstanceSpec, make: Callable[[], Instance]) -> Instance:
        """The finished instance of this id, else that which `make` makes, with nothing left when it fails. See `Runtime.create`."""
        # Shielded: a cancelled caller must not meet a half-made instance; `destroy` waits for the thread.
        return await asyncio.shield(asyncio.to_thread(self._create, spec, make))

    def _create(self, spec: InstanceSpec, make: Callable[[], Instance]) -> Instance:
        if spec.writable_root:
            why = f"{self.name} instances have no writable root yet"
            raise CorralError("not_supported_yet", why, field="/writable_root")
        with self._turns.of(spec.instance_id):
            earlier = _instance.read_record(self.name, spec.directory, spec.instance_id)
            if earlier is not None and (init := _instance.init_of(earlier)) is not None and process.is_alive(init):
                return self._answer(earlier)
            partial_ref = self.partial_ref(spec.directory, spec.instance_id)
            clear = partial(self._clear, partial_ref, [])
            if os.path.lexists(_instance.place_of(spec.directory)) and (left := _left_by(clear)):
                raise CorralError("infra_error", f"an earlier attempt could not be removed: {', '.join(left)}")
            try:
                return make()
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                failed = CorralError("infra_error", f"{self.name} could not start the instance: {error}")
                _tell(failed, _left_by(clear))
                raise failed from error
            except BaseException as error:
                _tell(error, _left_by(clear))
                raise

    def _await_launch(self, launcher: _instance.Launcher, directory: str, timeout_s: float) -> None:
        """Return when the runtime's program has done its part well. Raises `infra_error`, with what it said."""
        status = launcher.wait(timeout_s)
        if status != 0:
            how = f"did not end in {timeout_s:.0f} s" if status is None else f"ended with status {status}"
            raise CorralError("infra_error", f"{self.name} {how}: {_instance.said(directory)}")

    # -- ending

    def _stop(self, ref: InstanceRef) -> list[str]:
        """End every process of the instance, one that is just being started too; -> what still lives."""
        group, init = self._group(ref.instance_id), _instance.init_of(ref)
        end = time.monotonic() + STOP_S
        pause = 0.001
        while True:
            if init is not None and self._init_first:
                process.kill(init)
            group.kill(max(0.1, end - time.monotonic()))
            going = []
            if init is not None:
                process.kill(init)
                if not process.wait_gone_blocking(init, 0.05):  # it leaves the group a while before it is gone
                    going = [init.pid]
            starting = _instance.starting(ref.directory)  # first: a launcher enters the group before it lets go
            alive = group.procs() or _instance.end_strays(partial(self._strays, ref)) or going
            if not alive and not starting:
                if init is not None:
                    process.collect(init)
                return []
            if time.monotonic() > end:
                return [f"process {pid}" for pid in sorted(alive)] or ["a launcher that has not ended"]
            time.sleep(pause)
            pause = min(0.05, pause * 2)

    def _destroy(self, ref: InstanceRef) -> Evidence:
        notes: list[str] = []
        with self._turns.of(ref.instance_id):
            left = self._clear(ref, notes)
            if not left:
                faults.point("runtime.destroy.directory")
                left = [f"mount {point}" for point in mounts.mounts_below(ref.directory)]
                if not left:
                    disk.remove_tree(ref.directory)
        return Evidence(clean=not left, left=tuple(left), notes=tuple(notes))

    def _clear(self, ref: InstanceRef, notes: list[str]) -> list[str]:
        """End and remove all that belongs to the instance except its directory itself; -> what is left."""
        clock = _instance.Phases()
        if left := self._stop(ref):
            return left  # nothing may be taken from under a living process
        clock.lap("stop")
        faults.point("runtime.destroy.stopped")
        group = self._group(ref.instance_id)
        if not group.exists():  # or it bears the name of an installation that is forgotten
            cgroups.host().remove_empty(ref.instance_id)
        left = [f"cgroup {path}" for path in group.remove()]
        faults.point("runtime.destroy.cgroup")
        clock.lap("cgroup")
        self._unmake(ref)
        left += _instance.clear_place(ref.directory)
        clock.lap("disk")
        faults.point("runtime.destroy.disk")
        _instance.remove_files(ref.directory, "instance.json", _instance.LOCK, *self._files)
        notes.append(str(clock))
        if not left:
            if os.geteuid() == 0:
                self._ids.release(ref.instance_id)
            self._forget(ref.instance_id)
        return left

    # -- trying

    def _probe(self) -> RuntimeInfo:
        version = None
        try:
            program = self._program()
            if self._root_only and os.geteuid() != 0:
                raise CorralError("runtime_unavailable", f"{self.name} is used by root only", hint="use bubblewrap")
            version = _probe.version(program)
            return self._usable(version)
        except (CorralError, OSError, ValueError, subprocess.SubprocessError) as error:
            reason = error.detail if isinstance(error, CorralError) else str(error)
            return RuntimeInfo(self.name, False, reason, self._level, version, {}, LimitModes())

    @contextmanager
    def _trial(self, make: Callable[[InstanceSpec], Instance]) -> Iterator[tuple[Instance, InstanceSpec, float]]:
        """(instance, its specification, milliseconds) of the smallest program there is; removed at the end, and nothing may be left."""
        with _probe.spec(self._state_dir, self._installation) as spec:
            ref = self.partial_ref(spec.directory, spec.instance_id)
            try:
                began = time.monotonic()
                with self._turns.of(spec.instance_id):
                    instance = make(spec)
                ref = instance.ref
                yield instance, spec, (time.monotonic() - began) * 1000
            except BaseException as error:
                _tell(error, _left_by(lambda: self._destroy(ref).left))
                raise
            _probe.must_be_clean(self.name, self._destroy(ref))


def _left_by(clear: Callable[[], Sequence[str]]) -> list[str]:
    """What is left after clearing; an error of that is among it, as it must not take the place of the one for which it is done."""
    try:
        return list(clear())
    except (CorralError, OSError, subprocess.SubprocessError, ValueError) as error:
        return [f"not cleared: {error}"]


def _tell(error: BaseException, left: list[str]) -> None:
    if left and isinstance(error, CorralError):
        error.facts["left"] = left


class Freezing(Adapter):
    """One whose instances are wholly in their control group, where there is one that can be frozen: they can be paused from outside."""

    async def pause(self, ref: InstanceRef) -> None:
        if not await asyncio.to_thread(self._group(ref.instance_id).freeze):
            raise CorralError("infra_error", f"{ref.instance_id} could not be frozen")

    async def resume(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._group(ref.instance_id).thaw)


def can_freeze() -> bool:
    """Whether control groups of this host can be paused."""
    return "freezer" in cgroups.host().v1 or cgroups.host().v2 is not None


def capabilities(**those: bool) -> dict[str, bool]:
    """Every capability that there is, False where it is not told."""
    return dict.fromkeys(_CAPABILITIES, False) | those
