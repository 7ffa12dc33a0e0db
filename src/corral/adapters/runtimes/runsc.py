"""gVisor (runsc): each instance on a kernel of its own in user space, which is all that programs inside can talk to.

Two processes of the host are an instance: the *sandbox* (gVisor's kernel, and threads of programs inside as its traced children) and
the *gofer*, which opens files for it. Both, and runsc itself, live in a user namespace over the instance's own range of host ids, so
none of them has an id that anything else has, 0 least of all. Nothing of ours runs beside them.

* The guest's channel is a pair of FIFOs: sockets of the host inside would make snapshots of memory impossible.
* The control socket of this runsc has an abstract name and takes every user of the host for its own. It lies in a network namespace
  that nobody is in, which a mount in the place keeps for `checkpoint`.
* Memory and processors are limited around both processes. A hit of the memory limit ends the sandbox: what programs inside hold
  cannot be freed without it. Processes are limited inside, by gVisor, where nobody counts the hits.
* runsc's own `delete` is not used: its record is a file in the place, and what it would end and remove is ended and removed here, with
  the kernel as witness; it takes seconds to learn what is known by then.

What is made for an instance, and where a later process finds it (everything derives from the directory and the instance id): the
place with the disk, the tree, runsc's record and the network namespace (see `_runsc`), `guest.*`, `launch.log`, `instance.json`; the
control group `corral/<installation>/<instance>`; a range of host ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import select
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from functools import partial
from typing import Any

from corral import faults
from corral.adapters.runtimes import _instance, _probe, _runsc, oci
from corral.domain.limits import MIB, LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, fifos, mounts, netns, process, seccomp, userns
from corral.linux.cgroups import Cgroup
from corral.linux.process import ProcessRef
from corral.ports.runtime import Evidence, HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

_START_S = 20.0
_STOP_S = 20.0
_PROBE_S = 12.0
_PROBE_FORMAT = 1
_CHECKPOINT_S = 120.0
_PROBE_MEMORY = 256 * MIB
_DISK = "disk.img"
_FILES = (fifos.TO_GUEST, fifos.FROM_GUEST, fifos.LOCK)
_WITH_THE_NODE = {"output": "enforced", "wall": "enforced"}
_IN_TREE = {"workspace": "workspace", "home": "home/sandbox", "var_tmp": "var/tmp"}
"""Directory of the disk -> where it appears."""


class RunscRuntime:
    """See the module docstring and `corral.ports.runtime`."""

    name = "runsc"

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        self._state_dir = state_dir
        self._tools = f"{state_dir}/tools"
        self._installation = installation_id
        self._ids = userns.SubordinateRange(installation_id, state_dir=state_dir, configured=subuid_range)
        self._namespaces = userns.Namespaces()
        self._turns = _instance.Turns()

    # -- the port

    async def probe(self) -> RuntimeInfo:
        return await asyncio.to_thread(self._probe)

    def probe_key(self) -> str | None:
        """What an answer of `probe` depends on, beside the host: the program itself. A start takes half a second (`corral.node.probes`)."""
        try:
            program = os.stat(_program())
        except (CorralError, OSError):
            return None
        return f"{program.st_dev} {program.st_ino} {program.st_size} {program.st_mtime_ns} {_PROBE_FORMAT}"

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        # Shielded: a cancelled caller must not meet a half-made instance; `destroy` waits for the thread.
        return await asyncio.shield(asyncio.to_thread(self._create, spec, None))

    async def restore(self, spec: InstanceSpec, image: str) -> Instance:
        return await asyncio.shield(asyncio.to_thread(self._create, spec, image))

    async def checkpoint(self, ref: InstanceRef, into: str) -> None:
        await asyncio.shield(asyncio.to_thread(self._checkpoint, ref, into))

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return InstanceRef(self.name, instance_id, directory, {})

    async def attach(self, ref: InstanceRef) -> Instance | None:
        sandbox = _instance.init_of(ref)
        return _answer(ref) if sandbox is not None and process.is_alive(sandbox) else None

    async def stats(self, ref: InstanceRef) -> Stats:
        return self._stats(ref)  # a few files of the kernel and one statvfs: a change of thread costs more

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        return self._group(ref.instance_id).reset_peak()

    async def processes(self, ref: InstanceRef) -> list[int]:
        return await asyncio.to_thread(self._processes, ref)

    async def kill(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._stop, ref, _STOP_S)

    async def wait_gone(self, ref: InstanceRef) -> None:
        sandbox = _instance.init_of(ref)
        if sandbox is not None:
            await process.wait_gone(sandbox)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        return await asyncio.shield(asyncio.to_thread(self._destroy, ref))

    async def pause(self, ref: InstanceRef) -> None:
        if not await asyncio.to_thread(self._group(ref.instance_id).freeze):
            raise CorralError("infra_error", f"{ref.instance_id} could not be frozen")

    async def resume(self, ref: InstanceRef) -> None:
        await asyncio.to_thread(self._group(ref.instance_id).thaw)

    # -- making

    def _create(self, spec: InstanceSpec, image: str | None) -> Instance:
        if spec.writable_root:
            raise CorralError("not_supported_yet", "runsc instances have no writable root yet", field="/writable_root")
        with self._turns.of(spec.instance_id):
            earlier = _instance.read_record(self.name, spec.directory, spec.instance_id)
            if earlier is not None and (init := _instance.init_of(earlier)) is not None and process.is_alive(init):
                return _answer(earlier)
            partial = self.partial_ref(spec.directory, spec.instance_id)
            if os.path.lexists(_instance.place_of(spec.directory)) and (left := self._clear(partial, [])):
                raise CorralError("infra_error", f"an earlier attempt could not be removed: {', '.join(left)}")
            try:
                return self._make(spec, image)
            except BaseException as error:
                left = self._clear(partial, [])
                if isinstance(error, (OSError, subprocess.SubprocessError, ValueError)):
                    raise CorralError("infra_error", f"runsc could not start the instance: {error}") from error
                if left and isinstance(error, CorralError):
                    error.facts["left"] = left
                raise

    def _make(self, spec: InstanceSpec, image: str | None, timeout_s: float = _START_S) -> Instance:
        clock = _instance.Phases()
        name = f"{self._installation}/{spec.instance_id}"
        base = self._ids.allocate(spec.instance_id)
        faults.point("runtime.create.range")
        group = cgroups.host().create(name, _runsc.host_limits(spec.limits, launching=True))
        faults.point("runtime.create.cgroup")
        place = _instance.make_place(spec.directory)
        faults.point("runtime.create.place")
        namespace = self._namespaces.of(base)
        netns.keep_new(f"{place}/{_runsc.NETWORK}")
        clock.lap("groups")
        tree = self._make_disk(spec, place, namespace, image)
        clock.lap("disk")
        self._make_tree(spec, place, namespace)
        self._write_configuration(spec, place, base)
        if image is not None:
            _instance.show(image, place, _runsc.IMAGE, namespace)
        faults.point("runtime.create.root")
        clock.lap("root")
        to_guest, from_guest = fifos.make(spec.directory)
        try:
            launcher = self._launcher(spec, group, restored=image is not None)
            try:
                faults.point("runtime.create.launching")
                launcher.go(namespace)
                status = launcher.wait(timeout_s)
                if status != 0:
                    how = f"did not end in {timeout_s:.0f} s" if status is None else f"ended with status {status}"
                    raise CorralError("infra_error", f"runsc {how}: {_instance.said(spec.directory)}")
            finally:
                launcher.close()
        finally:
            os.close(to_guest)
            os.close(from_guest)
        faults.point("runtime.create.started")
        sandbox, gofer = self._find(spec, place, group)
        if image is not None:
            mounts.umount(f"{place}/{_runsc.IMAGE}", detach=True)
        group = _instance.narrowed(group, _runsc.host_limits(spec.limits, launching=False))
        group.reset_peak()  # the launcher's own use is not the sandbox's
        clock.lap("run")
        data = {
            "init": sandbox.to_json(),
            "gofer": gofer.to_json(),
            "tree": {"path": tree.path, "uid": tree.uid, "gid": tree.gid},
            "disk_bytes": spec.limits.disk_bytes,
            "held": sorted(group.held - {"pids"}),
            "phases": clock.phases,
        }
        _instance.write_json(f"{spec.directory}/instance.json", data)
        faults.point("runtime.create.recorded")
        return _answer(InstanceRef(self.name, spec.instance_id, spec.directory, data))

    def _make_disk(self, spec: InstanceSpec, place: str, namespace: int, image: str | None) -> HostTree:
        if image is not None:
            return disk.restore(spec.directory, place, f"{image}/{_DISK}", idmap=lambda: namespace)
        size, inodes, inside = spec.limits.disk_bytes, spec.limits.inodes, oci.SANDBOX_UID
        return disk.prepare(
            spec.directory, place, size, inodes, inside, inside, idmap=lambda: namespace, blanks=self._tools
        )

    def _make_tree(self, spec: InstanceSpec, place: str, namespace: int) -> None:
        """The whole of what is seen inside, below `place/root`. It is complete before the launcher gets its view of the place."""
        _instance.show(spec.rootfs, place, "root", namespace)
        root = f"{place}/root"
        mounts.make_shared(root)
        try:
            mounts.idmapped_bind(spec.interpreter, f"{root}/.corral", namespace)
        except OSError:  # not every file system can
            mounts.bind(spec.interpreter, f"{root}/.corral", read_only=True)
        for source, target in _IN_TREE.items():
            mounts.bind(f"{place}/disk/{source}", f"{root}/{target}", read_only=False)

    def _write_configuration(self, spec: InstanceSpec, place: str, base: int) -> None:
        exec_filter: bytes | None = None
        if "unsafe_no_seccomp" not in spec.unsafe:
            with open(_instance.filter_file(self._tools, seccomp.exec_filter(spec.seccomp)), "rb") as file:
                exec_filter = file.read()
        open_files = _instance.open_files(spec.limits)
        view = _instance.VIEW
        configuration = _runsc.configuration(spec, view=view, open_files=open_files, exec_filter=exec_filter)
        path = f"{place}/config.json"
        _instance.write_json(path, configuration)
        os.chmod(path, 0o644)
        records = f"{place}/{_runsc.RECORDS}"
        os.mkdir(records, 0o700)
        os.chown(records, base, base)

    def _launcher(self, spec: InstanceSpec, group: Cgroup, *, restored: bool) -> _instance.Launcher:
        command = _runsc.start_command(
            _program(),
            spec,
            view=_instance.VIEW,
            to_guest=f"{spec.directory}/{fifos.TO_GUEST}",
            from_guest=f"{spec.directory}/{fifos.FROM_GUEST}",
            restored=restored,
        )
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _instance.Launcher(
                spec.directory,
                command,
                nothing,
                groups=group.procs_files,
                log=f"{_instance.VIEW}/disk/{disk.LOG}",
                files={},
                limits=_runsc.host_limits(spec.limits, launching=True),
            )
        finally:
            os.close(nothing)

    def _find(self, spec: InstanceSpec, place: str, group: Cgroup) -> tuple[ProcessRef, ProcessRef]:
        """(sandbox, gofer), alive and in the instance's own groups."""
        records = f"{place}/{_runsc.RECORDS}"
        pids: list[int | None] = []
        with contextlib.suppress(OSError, ValueError):
            with open(f"{records}/pid", encoding="ascii") as file:
                pids.append(int(file.read().strip()))
            for name in os.listdir(records):
                if name.endswith(".state"):
                    with open(f"{records}/{name}", encoding="utf-8") as file:
                        pids.append(_runsc.gofer_pid(file.read()))
        members = group.procs()
        found = [ref for pid in pids if pid in members and (ref := process.ref_of(pid)) and process.is_alive(ref)]
        if len(found) != 2:
            raise CorralError("infra_error", f"the sandbox ended at once: {_instance.said(spec.directory)}")
        return found[0], found[1]

    # -- snapshots of memory

    def _checkpoint(self, ref: InstanceRef, into: str) -> None:
        with self._turns.of(ref.instance_id):
            place = _instance.place_of(ref.directory)
            command = _runsc.checkpoint_command(
                _program(),
                network=f"{place}/{_runsc.NETWORK}",
                records=f"{place}/{_runsc.RECORDS}",
                into=into,
                instance_id=ref.instance_id,
            )
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    env={"PATH": _instance.PATH},
                    cwd="/",
                    start_new_session=True,
                    timeout=_CHECKPOINT_S,
                )
                if done.returncode != 0:
                    why = done.stderr.decode("utf-8", "replace").strip()[-500:]
                    raise CorralError("infra_error", f"runsc could not save the memory: {why or done.returncode}")
                faults.point("runtime.checkpoint.memory")
                if left := self._stop(ref, _STOP_S):
                    raise CorralError("infra_error", f"the sandbox did not stop after its snapshot: {', '.join(left)}")
                _remove_tree(f"{place}/root")
                if left := disk.detach(ref.directory, place):
                    raise CorralError("infra_error", f"the disk is still in use: {', '.join(left)}")
                disk.move(f"{ref.directory}/{_DISK}", f"{into}/{_DISK}")
            except (OSError, subprocess.SubprocessError) as error:
                raise CorralError("infra_error", f"the snapshot could not be made: {error}") from error

    # -- reading

    def _stats(self, ref: InstanceRef) -> Stats:
        seen = self._group(ref.instance_id).stats()
        limit = ref.data.get("disk_bytes")
        free: int | None = None
        inodes: int | None = None
        with contextlib.suppress(OSError):
            free, inodes = disk.free(_instance.place_of(ref.directory))
        # Threads of gVisor are no processes of the sandbox, and what goes on inside no counter of the host shows.
        return Stats(
            memory_bytes=seen.memory_bytes,
            peak_memory_bytes=seen.peak_memory_bytes,
            cpu_seconds=seen.cpu_seconds,
            oom_kills=seen.oom_kills,
            cpu_throttled=seen.cpu_throttled,
            disk_bytes=None if limit is None or free is None else max(0, limit - free),
            disk_free_bytes=free,
            inodes_free=inodes,
        )

    def _group(self, instance_id: str) -> Cgroup:
        return cgroups.host().open(f"{self._installation}/{instance_id}")

    def _processes(self, ref: InstanceRef) -> list[int]:
        """Sandbox and gofer. What the sandbox traces is part of it while it lives; without it, all that is left is told."""
        alive = self._group(ref.instance_id).procs()
        sandbox = _instance.init_of(ref)
        if sandbox is None or not process.is_alive(sandbox):
            return alive
        return [pid for pid in alive if pid in (sandbox.pid, ref.data["gofer"]["pid"])]

    # -- ending

    def _stop(self, ref: InstanceRef, timeout_s: float) -> list[str]:
        """End every process of the instance, one that is just being started too; -> what still lives."""
        group = self._group(ref.instance_id)
        base = self._ids.find(ref.instance_id)
        end = time.monotonic() + timeout_s
        pause = 0.002
        while True:
            sandbox = _instance.init_of(ref)
            if sandbox is not None:
                process.kill(sandbox)  # all that it traces dies with it
            group.kill(max(0.1, end - time.monotonic()))
            if sandbox is not None:
                process.wait_gone_blocking(sandbox, 0.05)  # it leaves the group a while before it is gone
            starting = _instance.starting(ref.directory)  # first: a launcher enters the group before it lets go
            alive = group.procs()
            if not alive and base is not None:
                # The ids are the instance's alone, so whatever runs under one of them is its own, wherever it hides.
                alive = _instance.end_strays(partial(userns.processes_of, base))
            if not alive and not ref.data:
                alive = _instance.end_strays(partial(_forgotten, ref))
            if not alive and not starting:
                if sandbox is not None:
                    process.collect(sandbox)
                return []
            if time.monotonic() > end:
                return [f"process {pid}" for pid in alive] or ["a launcher that has not ended"]
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
        left = self._stop(ref, _STOP_S)
        if left:
            return left  # nothing may be taken from under a living process
        clock.lap("stop")
        faults.point("runtime.destroy.stopped")
        group = self._group(ref.instance_id)
        if not group.exists():  # or it bears the name of an installation that is forgotten
            cgroups.host().remove_empty(ref.instance_id)
        left += [f"cgroup {path}" for path in group.remove()]
        faults.point("runtime.destroy.cgroup")
        clock.lap("cgroup")
        _remove_tree(f"{_instance.place_of(ref.directory)}/root")
        left += _instance.clear_place(ref.directory)
        clock.lap("disk")
        faults.point("runtime.destroy.disk")
        _instance.remove_files(ref.directory, "instance.json", _instance.LOCK, *_FILES)
        if not left:
            self._ids.release(ref.instance_id)
        notes.append(str(clock))
        return left

    # -- probing

    def _probe(self) -> RuntimeInfo:
        version = None
        try:
            version = _version(_program())
            if os.geteuid() != 0:
                raise CorralError("runtime_unavailable", "runsc is used by root only", hint="use bubblewrap")
            limits, start_ms = self._try()
        except (CorralError, OSError, subprocess.SubprocessError) as error:
            reason = error.detail if isinstance(error, CorralError) else str(error)
            return RuntimeInfo(self.name, False, reason, 2, version, {}, LimitModes())
        freezer = "freezer" in cgroups.host().v1 or cgroups.host().v2 is not None
        capabilities = {
            "pause": freezer,
            "snapshot": False,
            "memory_snapshot": True,
            "fork": True,
            "resize": False,
            "two_uids": True,
            "one_uid": False,
            "host_pids": False,
            "cgroup": True,
        }
        return RuntimeInfo(self.name, True, None, 2, version, capabilities, limits, round(start_ms, 1))

    def _try(self) -> tuple[LimitModes, float]:
        """Start a program that runs into the limits which hold inside, and look from the host at the others."""
        with _probe.spec(self._state_dir, self._installation) as spec:
            held: set[str] = set()
            program = _runsc.probe_program(platform.machine())
            if program is not None:
                with open(f"{spec.rootfs}/pause", "wb") as file:
                    file.write(program)
            limits = replace(spec.limits, memory_bytes=_PROBE_MEMORY, pids=1)
            spec = replace(spec, limits=limits)
            try:
                began = time.monotonic()
                with self._turns.of(spec.instance_id):
                    instance = self._make(spec, None, timeout_s=_PROBE_S)
                start_ms = (time.monotonic() - began) * 1000
                if program is not None:
                    held = {_runsc.PROBED[letter] for letter in _heard(spec.directory, 2) if letter in _runsc.PROBED}
                seen = self._seen(instance, limits, held), start_ms
            finally:
                evidence = self._destroy(self.partial_ref(spec.directory, spec.instance_id))
            _probe.must_be_clean(self.name, evidence)
            return seen

    def _seen(self, instance: Instance, limits: Limits, inside: set[str]) -> LimitModes:
        free, inodes = disk.free(_instance.place_of(instance.ref.directory))
        held = {*instance.ref.data["held"], *inside}
        held |= {"disk"} if free <= limits.disk_bytes else set()
        held |= {"inodes"} if inodes <= 4 * limits.inodes else set()

        names = ("memory", "cpu", "pids", "disk", "inodes", "tmp")
        return LimitModes.from_dict({name: "enforced" for name in names if name in held} | _WITH_THE_NODE)


def _answer(ref: InstanceRef) -> Instance:
    tree: dict[str, Any] = ref.data["tree"]
    return Instance(
        ref=ref,
        tree=HostTree(tree["path"], tree["uid"], tree["gid"], "image"),
        exec_uid=oci.SANDBOX_UID,
        guest_uid=0,
        control="fifo",
    )


def _remove_tree(root: str) -> None:
    """Take away what is seen inside: it uses the disk. The instance's processes are dead; what is left shows itself at the disk."""
    for point in reversed(mounts.mounts_below(root)):
        with contextlib.suppress(OSError):
            mounts.umount(point, detach=True)
    if not mounts.mounts_below(root):
        disk.remove_tree(root)  # with the directory go the copies that other mount namespaces have of it


def _forgotten(ref: InstanceRef) -> list[int]:
    """Processes of an instance that nobody remembers: who has this directory's disk mounted (the gofer), and who is in its groups."""
    found = {stray.pid for stray in _instance.holders(ref.directory)}
    for holder in list(found):
        with contextlib.suppress(OSError), open(f"/proc/{holder}/cgroup", encoding="utf-8") as file:
            names = {line.rstrip("\n").partition("/corral/")[2] for line in file}
            for name in names:
                if name.rpartition("/")[2] == ref.instance_id and name.count("/") == 1:
                    found.update(cgroups.host().open(name).procs())
    return sorted(found)


def _heard(directory: str, count: int) -> str:
    """What the program of a probe says, at most for a second."""
    fd = os.open(f"{directory}/{fifos.FROM_GUEST}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        said, end = b"", time.monotonic() + 1.0
        while len(said) < count and select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (part := os.read(fd, count)):
                break
            said += part
        return said.decode("ascii", "replace")
    finally:
        os.close(fd)


def _program() -> str:
    found = shutil.which("runsc", path=_instance.PATH)
    if found is None:
        raise CorralError("runtime_unavailable", "runsc is not installed", hint="install the package runsc (gVisor)")
    return found


def _version(program: str) -> str | None:
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, env={"PATH": _instance.PATH}, cwd="/", timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _runsc.version_of(said.stdout.decode("utf-8", "replace"))
