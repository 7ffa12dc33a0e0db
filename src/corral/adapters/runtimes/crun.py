"""crun: each instance in a user namespace of its own over an id-mapped, read-only base, with kernel limits.

What is made for an instance, and where a later process finds it (everything derives from the directory and the instance id):

* `DIRECTORY/m`, a mount of itself, with `disk.img`, `disk` (mount), `root` and `corral` (id-mapped mounts of base and interpreter);
  beside it `config.json`, `exec.bpf`, `crun.pid`, `launch.log`, `instance.json`;
* the control group `corral/<installation>/<instance>`; crun's own record `STATE/node/crun/<instance>`; a range of host ids.

The launcher, a shell that becomes crun, runs in a mount namespace of its own. It holds an exclusive lock on `launch.log` until it
is crun, and has entered the groups by then; so at each moment a later process sees whether somebody may still be starting. Output
of crun and of the guest goes to `disk/guest.log`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corral import faults
from corral.adapters.runtimes import oci
from corral.domain.limits import MIB, LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, mounts, process, seccomp, userns
from corral.linux.cgroups import Cgroup
from corral.linux.process import ProcessRef
from corral.ports.runtime import Evidence, HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 20.0
_STOP_S = 20.0
_CONTROL_FD, _FILTER_FD = 3, 4
_LOCK = "launch.log"
_FILTER = "exec.bpf"
_PLACE = "m"

_VIEW = f"{userns.RUN}/i"

# Enters the groups, which costs a wait of the kernel's, while the disk is being made; goes on when told to, ends when we end.
# crun refuses a host that shows it v1 controllers and a v2 hierarchy: the latter leaves its private view.
# The socket comes as standard output, so that just it becomes descriptor 3, and the filter for execs 4: --preserve-fds demands that
# they follow each other and that nothing is above.
_ENTER = """
log=$1 filter=$2 hide=$3 count=$4
shift 4
while [ "$count" -gt 0 ]; do echo 0 >"$1" || exit 90; shift; count=$((count - 1)); done
[ -z "$hide" ] || umount "$hide" || exit 91
read -r go || exit 92
exec 3>&1 </dev/null >>"$log" 2>&1 || exit 93
[ -z "$filter" ] || exec 4<"$filter" || exit 94
exec "$@"
"""


class CrunRuntime:
    """See the module docstring and `corral.ports.runtime`."""

    name = "crun"

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        self._state_dir = state_dir
        self._installation = installation_id
        self._records = f"{state_dir}/node/crun"
        self._ids = userns.SubordinateRange(installation_id, state_dir=state_dir, configured=subuid_range)
        self._namespaces: dict[int, int] = {}
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
        if init is None or not process.is_alive(init):
            return None
        return _instance(ref)

    async def stats(self, ref: InstanceRef) -> Stats:
        return await asyncio.to_thread(self._stats, ref)

    async def reset_peaks(self, ref: InstanceRef) -> None:
        self._group(ref.instance_id).reset_peak()

    async def processes(self, ref: InstanceRef) -> list[int]:
        return await asyncio.to_thread(self._group(ref.instance_id).procs)

    async def kill(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._stop, ref, _STOP_S)

    async def wait_gone(self, ref: InstanceRef) -> None:
        init = _init(ref)
        if init is not None:
            await process.wait_gone(init)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        return await asyncio.shield(asyncio.to_thread(self._destroy, ref))

    async def pause(self, ref: InstanceRef) -> None:
        if not await asyncio.to_thread(self._group(ref.instance_id).freeze):
            raise CorralError("infra_error", f"{ref.instance_id} could not be frozen")

    async def resume(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._group(ref.instance_id).thaw)

    # -- making

    def _create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        if spec.writable_root:
            raise CorralError("not_supported_yet", "crun instances have no writable root yet", field="/writable_root")
        with self._alone(spec.instance_id):
            earlier = _read_record(spec.directory, spec.instance_id)
            if earlier is not None and (init := _init(earlier)) is not None and process.is_alive(init):
                return _instance(earlier)
            unused = self._ids.find(spec.instance_id) is None and not os.path.lexists(f"{spec.directory}/{_PLACE}")
            if not unused and (left := self._clear(self.partial_ref(spec.directory, spec.instance_id), [])):
                raise CorralError("infra_error", f"an earlier attempt could not be removed: {', '.join(left)}")
            try:
                return self._make(spec, control)
            except BaseException as error:
                left = self._clear(self.partial_ref(spec.directory, spec.instance_id), [])
                if isinstance(error, (OSError, subprocess.SubprocessError, ValueError)):
                    raise CorralError("infra_error", f"crun could not start the instance: {error}") from error
                if left and isinstance(error, CorralError):
                    error.facts["left"] = left
                raise

    def _make(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        clock = _Phases()
        base = None if "unsafe_one_uid" in spec.unsafe else self._ids.allocate(spec.instance_id)
        faults.point("runtime.create.range")
        group = cgroups.host().create(f"{self._installation}/{spec.instance_id}", spec.limits)
        faults.point("runtime.create.cgroup")
        clock.lap("groups")
        os.makedirs(self._records, 0o700, exist_ok=True)
        place = f"{spec.directory}/{_PLACE}"
        os.makedirs(place, 0o711)
        # Shared, so that what is mounted here appears in the launcher's namespace too; private first, so that nobody else sees it.
        mounts.bind(place, place, read_only=False)
        mounts.make_shared(place)
        faults.point("runtime.create.place")
        launcher = _Launcher(spec.directory, self._command(spec, group), control)
        try:
            faults.point("runtime.create.launching")
            clock.lap("launcher")
            tree = self._make_disk(spec, place, base, clock)
            self._show_base(spec, place, base)
            faults.point("runtime.create.root")
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            files = max(4096, spec.limits.open_files)
            configuration = oci.configuration(
                spec,
                view=_VIEW,
                base_uid=base,
                open_files=files if hard == resource.RLIM_INFINITY else min(files, hard),
                control_fd=_CONTROL_FD,
                filter_fd=None if "unsafe_no_seccomp" in spec.unsafe else _FILTER_FD,
            )
            with open(f"{spec.directory}/{_FILTER}", "wb") as file:
                file.write(seccomp.compile("exec"))
            _write_json(f"{spec.directory}/config.json", configuration)
            faults.point("runtime.create.config")
            clock.lap("config")
            launcher.go()
        finally:
            launcher.close()
        faults.point("runtime.create.started")
        init = self._find_init(spec, group)
        group.reset_peak()  # the launcher's own use is not the sandbox's
        clock.lap("run")
        data = {
            "init": init.to_json(),
            "tree": {"path": tree.path, "uid": tree.uid, "gid": tree.gid},
            "disk_bytes": spec.limits.disk_bytes,
            "one_uid": base is None,
            "held": sorted(group.held),
            "phases": clock.phases,
        }
        _write_json(f"{spec.directory}/instance.json", data)
        faults.point("runtime.create.recorded")
        return _instance(InstanceRef(self.name, spec.instance_id, spec.directory, data))

    def _make_disk(self, spec: InstanceSpec, place: str, base: int | None, clock: _Phases) -> HostTree:
        inside = oci.SANDBOX_UID
        limits = spec.limits
        if base is not None and mounts.idmap_supported(spec.rootfs):
            namespace = self._namespace(base)
            clock.lap("ids")
            tree = disk.prepare(place, limits.disk_bytes, limits.inodes, inside, inside, idmap_fd=namespace)
        else:
            owner = inside + (base or 0)
            tree = disk.prepare(place, limits.disk_bytes, limits.inodes, owner, owner)
        clock.lap("disk")
        return tree

    def _show_base(self, spec: InstanceSpec, place: str, base: int | None) -> None:
        """Base and interpreter, read-only; root's files are root's inside where the kernel can map ids."""
        for source, name in ((spec.rootfs, "root"), (spec.interpreter, "corral")):
            target = f"{place}/{name}"
            os.makedirs(target, exist_ok=True)
            if base is not None and mounts.idmap_supported(source):
                mounts.idmapped_bind(source, target, self._namespace(base))
            else:
                mounts.bind(source, target, read_only=True)

    def _command(self, spec: InstanceSpec, group: Cgroup) -> list[str]:
        crun = [_find_crun(), "--root", self._records, "--cgroup-manager", "disabled"]
        filter_path = "" if "unsafe_no_seccomp" in spec.unsafe else f"{spec.directory}/{_FILTER}"
        crun += ["run", "--detach", "--preserve-fds", "2" if filter_path else "1", "--bundle", spec.directory]
        crun += ["--pid-file", f"{spec.directory}/crun.pid", spec.instance_id]
        files = group.procs_files
        return [
            "sh",
            "-c",
            _ENTER,
            "sh",
            f"{_VIEW}/disk/{disk.LOG}",
            filter_path,
            _unused_v2(),
            str(len(files)),
            *files,
            *crun,
        ]

    def _find_init(self, spec: InstanceSpec, group: Cgroup) -> ProcessRef:
        with open(f"{spec.directory}/crun.pid", encoding="ascii") as file:
            pid = int(file.read().strip())
        init = process.ref_of(pid)
        if init is None or not process.is_alive(init) or pid not in group.procs():
            raise CorralError("infra_error", f"the guest ended at once: {_said(spec.directory)}")
        return init

    # -- reading

    def _stats(self, ref: InstanceRef) -> Stats:
        seen = self._group(ref.instance_id).stats()
        limit = ref.data.get("disk_bytes")
        free: int | None = None
        inodes: int | None = None
        try:
            free, inodes = disk.free(f"{ref.directory}/{_PLACE}")
        except OSError:
            pass
        return Stats(
            memory_bytes=seen.memory_bytes,
            peak_memory_bytes=seen.peak_memory_bytes,
            cpu_seconds=seen.cpu_seconds,
            pids=seen.pids,
            peak_pids=seen.peak_pids,
            oom_kills=seen.oom_kills,
            pids_limit_hits=seen.pids_limit_hits,
            disk_bytes=None if limit is None or free is None else max(0, limit - free),
            disk_free_bytes=free,
            inodes_free=inodes,
        )

    def _group(self, instance_id: str) -> Cgroup:
        return cgroups.host().open(f"{self._installation}/{instance_id}")

    # -- ending

    def _stop(self, ref: InstanceRef, timeout_s: float) -> list[str]:
        """End every process of the instance, one that is just being started too; -> what still lives."""
        group = self._group(ref.instance_id)
        base = self._ids.find(ref.instance_id)
        end = time.monotonic() + timeout_s
        pause = 0.002
        while True:
            group.kill(max(0.1, end - time.monotonic()))
            if (init := _init(ref)) is not None:
                process.kill(init)
            starting = _locked(f"{ref.directory}/{_LOCK}")  # first: a launcher enters the group before it lets go
            alive = group.procs()
            if not alive and base is not None:
                # The ids are the instance's alone, so whatever runs under one of them is its own, wherever it hides.
                alive = userns.processes_of(base)
                for pid in alive:
                    if pid > 1 and (stray := process.ref_of(pid)) is not None:
                        process.kill(stray)
            if not alive and not starting:
                return []
            if time.monotonic() > end:
                return [f"process {pid}" for pid in alive] or ["a launcher that has not ended"]
            time.sleep(pause)
            pause = min(0.05, pause * 2)

    def _destroy(self, ref: InstanceRef) -> Evidence:
        notes: list[str] = []
        with self._alone(ref.instance_id):
            left = self._clear(ref, notes)
            if not left:
                faults.point("runtime.destroy.directory")
                left = [f"mount {point}" for point in mounts.mounts_below(ref.directory)]
                if not left:
                    disk.remove_tree(ref.directory)
        return Evidence(clean=not left, left=tuple(left), notes=tuple(notes))

    def _clear(self, ref: InstanceRef, notes: list[str]) -> list[str]:
        """End and remove all that belongs to the instance except its directory itself; -> what is left."""
        clock = _Phases()
        left = self._stop(ref, _STOP_S)
        if left:
            return left  # nothing may be taken from under a living process
        clock.lap("stop")
        faults.point("runtime.destroy.stopped")
        disk.remove_tree(f"{self._records}/{ref.instance_id}")
        left += [f"cgroup {path}" for path in self._group(ref.instance_id).remove()]
        faults.point("runtime.destroy.cgroup")
        clock.lap("cgroup")
        place = f"{ref.directory}/{_PLACE}"
        left += [f"disk {name}" for name in disk.discard(place)]
        left += [f"mount {point}" for point in mounts.umount_below(place)]
        left += [f"loop device {device}" for device in disk.stray_loops(ref.directory)]
        clock.lap("disk")
        faults.point("runtime.destroy.disk")
        for name in ("instance.json", "crun.pid", "config.json", _FILTER, _LOCK):
            try:
                os.unlink(f"{ref.directory}/{name}")
            except FileNotFoundError:
                pass
        if not left:
            disk.remove_tree(place)
            self._ids.release(ref.instance_id)
        notes.append(", ".join(f"{name} {ms} ms" for name, ms in clock.phases.items()))
        return left

    # -- probing

    def _probe(self) -> RuntimeInfo:
        version = _version()
        try:
            if version is None:
                raise CorralError("runtime_unavailable", "crun is not installed", hint="install the package crun")
            if os.geteuid() != 0:
                raise CorralError("runtime_unavailable", "crun is used by root only", hint="use bubblewrap")
            limits, two_uids, start_ms = self._try()
        except (CorralError, OSError, subprocess.SubprocessError) as error:
            reason = error.detail if isinstance(error, CorralError) else str(error)
            return RuntimeInfo(self.name, False, reason, 1, version, {}, LimitModes())
        freezer = "freezer" in cgroups.host().v1 or cgroups.host().v2 is not None
        capabilities = {
            "pause": freezer,
            "snapshot": False,
            "memory_snapshot": False,
            "fork": False,
            "resize": False,
            "two_uids": two_uids,
            "host_pids": True,
            "cgroup": True,
        }
        return RuntimeInfo(self.name, True, None, 1, version, capabilities, limits, round(start_ms, 1))

    def _try(self) -> tuple[LimitModes, bool, float]:
        """Start the smallest program there is with everything on, and look from the host at what holds it."""
        aside = f"{self._state_dir}/tmp"  # noqa: S108
        os.makedirs(aside, exist_ok=True)
        place = tempfile.mkdtemp(prefix="crun-", dir=aside)
        instance_id = f"probe-{os.path.basename(place)}"
        directory, rootfs = f"{place}/i", f"{place}/root"
        ref = self.partial_ref(directory, instance_id)
        try:
            os.mkdir(directory, 0o711)
            _probe_tree(rootfs)
            limits = Limits(memory_bytes=64 * MIB, pids=16, disk_bytes=4 * MIB, inodes=64, tmp_bytes=MIB)
            spec = InstanceSpec(
                instance_id, "probe", 1, self._installation, directory, rootfs, rootfs, ("/pause",), limits
            )
            mounts.idmap_supported(rootfs)
            began = time.monotonic()
            with socket.socket(socket.AF_UNIX) as control:
                instance = self._create(spec, control)
            start_ms = (time.monotonic() - began) * 1000
            modes = self._seen(instance, limits)
            return modes, instance.guest_uid == 0, start_ms
        finally:
            evidence = self._destroy(ref)
            if evidence.clean:
                shutil.rmtree(place, ignore_errors=True)

    def _seen(self, instance: Instance, limits: Limits) -> LimitModes:
        group = self._group(instance.ref.instance_id)
        free, inodes = disk.free(f"{instance.ref.directory}/{_PLACE}")
        init = _init(instance.ref)
        assert init is not None
        with open(f"/proc/{init.pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            tmp = any(" /tmp " in line and f"size={limits.tmp_bytes // 1024}k" in line for line in file)
        held = instance.ref.data["held"] if init.pid in group.procs() else []
        return LimitModes(
            memory="enforced" if "memory" in held else "absent",
            cpu="enforced" if "cpu" in held else "absent",
            pids="enforced" if "pids" in held else "absent",
            disk="enforced" if free <= limits.disk_bytes else "absent",
            inodes="enforced" if inodes <= 4 * limits.inodes else "absent",
            tmp="enforced" if tmp else "absent",
        )

    # -- small parts

    def _namespace(self, base: int) -> int:
        """A user namespace with the instance's map, for id-mapped mounts; one per range, kept for the next user of it."""
        with self._guard:
            if base not in self._namespaces:
                self._namespaces[base] = userns.create(base)
            return self._namespaces[base]

    @contextmanager
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


class _Launcher:
    """The process that becomes crun. It holds the lock of `launch.log` until it is crun, in the instance's groups before that."""

    def __init__(self, directory: str, command: list[str], control: socket.socket) -> None:
        self._directory = directory
        log = os.open(f"{directory}/{_LOCK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = mounts.in_own_namespace(lambda: self._start(command, control.fileno(), log))
        finally:
            os.close(log)

    def _start(self, command: list[str], control: int, log: int) -> subprocess.Popen[bytes]:
        # crun acts as root of the user namespace, who may not pass through a state directory that is closed to others:
        # it finds everything at one open place, which in this namespace is this instance's.
        os.makedirs(_VIEW, exist_ok=True)
        mounts.bind(f"{self._directory}/{_PLACE}", _VIEW, read_only=False, recursive=True, private=False)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=control,
            stderr=log,
            env={"PATH": _PATH},
            cwd="/",
            start_new_session=True,
        )

    def go(self) -> None:
        """Let it start the container, and wait until that is done."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its exit status tells why
        ref = process.ref_of(self._process.pid)
        in_time = ref is None or process.wait_gone_blocking(ref, _START_S)  # `wait(timeout)` would sleep in steps
        if ref is not None and not in_time:
            process.kill(ref)
        status = self._process.wait()
        if status != 0:
            what = f"ended with status {status}" if in_time else f"did not end in {_START_S:.0f} s"
            raise CorralError("infra_error", f"crun {what}: {_said(self._directory)}")

    def close(self) -> None:
        """End it, if it still waits for its `go`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()


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
    tree, one_uid = ref.data["tree"], bool(ref.data["one_uid"])
    return Instance(
        ref=ref,
        tree=HostTree(tree["path"], tree["uid"], tree["gid"], "image"),
        exec_uid=oci.SANDBOX_UID,
        guest_uid=oci.SANDBOX_UID if one_uid else 0,
        same_uid=one_uid,
    )


def _init(ref: InstanceRef) -> ProcessRef | None:
    try:
        return ProcessRef.from_json(ref.data["init"])
    except (KeyError, ValueError):
        return None


def _read_record(directory: str, instance_id: str) -> InstanceRef | None:
    try:
        with open(f"{directory}/instance.json", encoding="utf-8") as file:
            data: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return None
    return InstanceRef(CrunRuntime.name, instance_id, directory, data)


def _write_json(path: str, value: dict[str, Any]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(value))  # `dump` would use the slow encoder
    os.replace(f"{path}.new", path)


def _locked(path: str) -> bool:
    """Whether a launcher that is not yet in its groups may be alive."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _said(directory: str, size: int = 2000) -> str:
    """The end of what launcher, crun and guest wrote."""
    found = []
    for name in (_LOCK, f"{_PLACE}/disk/{disk.LOG}"):
        try:
            with open(f"{directory}/{name}", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                found.append(file.read(size).decode("utf-8", "replace").strip())
        except OSError:
            continue
    return " ".join(filter(None, found)) or "it said nothing"


def _find_crun() -> str:
    found = shutil.which("crun", path=_PATH)
    if found is None:
        raise CorralError("runtime_unavailable", "crun is not installed", hint="install the package crun")
    return found


def _version() -> str | None:
    found = shutil.which("crun", path=_PATH)
    if found is None:
        return None
    try:
        said = subprocess.run([found, "--version"], capture_output=True, env={"PATH": _PATH}, cwd="/", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb"version ([0-9][^\s]*)", said.stdout)
    return match[1].decode("ascii", "replace") if match else None


def _unused_v2() -> str:
    """Where a v2 hierarchy lies beside v1 controllers, "" where there is none: crun refuses to start when it sees both."""
    point = ""
    v1 = False
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind = right.split(" ", 1)[0]
            if kind == "cgroup2":
                point = left.split(" ")[4]
            v1 = v1 or kind == "cgroup"
    return point if v1 else ""


# A static program of one system call, `pause`: a probe depends on nothing that the host has installed.
_PAUSE = {
    "x86_64": (62, bytes.fromhex("b8220000000f05ebf7")),  # mov eax, 34; syscall; again
    "aarch64": (183, bytes.fromhex("000080d2010080d2020080d2030080d2280980d2010000d4faffff17")),  # ppoll
}


def _probe_tree(rootfs: str) -> None:
    found = _PAUSE.get(platform.machine())
    if found is None:
        raise CorralError("runtime_unavailable", f"{platform.machine()} is not supported")
    machine, code = found
    for name in (".corral", "workspace", "home/sandbox", "tmp", "var/tmp", "dev", "proc", "run"):
        os.makedirs(f"{rootfs}/{name}")
    start, size = 0x400000, 64 + 56 + len(code)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += b"".join(
        value.to_bytes(width, "little")
        for value, width in (
            *((2, 2), (machine, 2), (1, 4), (start + 120, 8), (64, 8), (0, 8), (0, 4)),
            *((64, 2), (56, 2), (1, 2), (0, 2), (0, 2), (0, 2)),  # sizes and counts of the tables
            *(
                (1, 4),
                (5, 4),
                (0, 8),
                (start, 8),
                (start, 8),
                (size, 8),
                (size, 8),
                (0x1000, 8),
            ),  # load, read + execute
        )
    )
    with open(f"{rootfs}/pause", "wb") as file:
        file.write(header + code)
    os.chmod(f"{rootfs}/pause", 0o755)  # noqa: S103
