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
import stat
import subprocess
import time
from dataclasses import replace
from functools import partial
from typing import Any

from corral import faults
from corral.adapters.runtimes import _adapter, _instance, _runsc, oci
from corral.domain.limits import MIB, LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, fifos, guesttree, mounts, netns, process, seccomp, userns
from corral.linux.cgroups import Cgroup
from corral.linux.process import ProcessRef
from corral.ports.runtime import HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

_PROBE_FORMAT = 1
_CHECKPOINT_S = 120.0
_PROBE_MEMORY = 256 * MIB
_DISK = "disk.img"
_RECORD_BYTES = 1024 * 1024
_WITH_THE_NODE = {"output": "enforced", "wall": "enforced"}
_IN_TREE = {"workspace": "workspace", "home": "home/sandbox", "var_tmp": "var/tmp"}
"""Directory of the disk -> where it appears."""


class RunscRuntime(_adapter.Freezing):
    """See the module docstring and `corral.ports.runtime`."""

    name = "runsc"
    _level = 2
    _files = (fifos.TO_GUEST, fifos.FROM_GUEST, fifos.LOCK)
    _init_first = True

    def probe_key(self) -> str | None:
        """What an answer of `probe` depends on, beside the host: the program itself. A start takes half a second (`corral.node.probes`)."""
        try:
            program = os.stat(self._program())
        except (CorralError, OSError):
            return None
        return f"{program.st_dev} {program.st_ino} {program.st_size} {program.st_mtime_ns} {_PROBE_FORMAT}"

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        return await self._begin(spec, partial(self._make, spec, None))

    async def restore(self, spec: InstanceSpec, image: str) -> Instance:
        return await self._begin(spec, partial(self._make, spec, image))

    async def checkpoint(self, ref: InstanceRef, into: str) -> None:
        await asyncio.shield(asyncio.to_thread(self._checkpoint, ref, into))

    async def stats(self, ref: InstanceRef) -> Stats:
        return self._stats(ref)  # a few files of the kernel and one statvfs: a change of thread costs more

    # -- making

    def _make(self, spec: InstanceSpec, image: str | None, timeout_s: float = _adapter.START_S) -> Instance:
        clock = _instance.Phases()
        base = self._ids.allocate(spec.instance_id)
        faults.point("runtime.create.range")
        group = cgroups.host().create(
            self._group_name(spec.instance_id), _runsc.host_limits(spec.limits, launching=True)
        )
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
                self._await_launch(launcher, spec.directory, timeout_s)
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
        return self._answer(InstanceRef(self.name, spec.instance_id, spec.directory, data))

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
            self._program(),
            spec,
            view=_instance.VIEW,
            to_guest=f"{spec.directory}/{fifos.TO_GUEST}",
            from_guest=f"{spec.directory}/{fifos.FROM_GUEST}",
            restored=restored,
        )
        nobody, nothing = os.pipe2(os.O_CLOEXEC)
        os.close(nobody)
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
            pids.append(int(_record(f"{records}/pid").strip()))
            for name in os.listdir(records):
                if name.endswith(".state"):
                    pids.append(_runsc.gofer_pid(_record(f"{records}/{name}")))
        members = group.procs()
        found = [ref for pid in pids if pid in members and (ref := process.ref_of(pid)) and process.is_alive(ref)]
        if len(found) != 2:
            raise CorralError("infra_error", f"the sandbox ended at once: {_instance.said(spec.directory)}")
        return found[0], found[1]

    # -- snapshots of memory

    def _checkpoint(self, ref: InstanceRef, into: str) -> None:
        with self._turns.of(ref.instance_id):
            place = _instance.place_of(ref.directory)
            base = self._ids.find(ref.instance_id)
            if base is None:
                raise CorralError("infra_error", f"{ref.instance_id} has no host ids: there is nothing to save")
            # What runsc writes is its own until it is whole: below the instance, with which it goes, and seen by nothing else.
            saved, point = f"{ref.directory}/{_runsc.SAVED}", f"{place}/{_runsc.SAVED}"
            try:
                if left := _remove_saved(saved, point):
                    raise CorralError("infra_error", f"an earlier snapshot is in the way: {', '.join(left)}")
                for path in (saved, point):
                    os.mkdir(path, 0o700)
                os.chown(saved, base, base)
                mounts.bind(saved, point, read_only=False)
                self._save_memory(ref, place)
                faults.point("runtime.checkpoint.memory")
                if left := self._stop(ref):
                    raise CorralError("infra_error", f"the sandbox did not stop after its snapshot: {', '.join(left)}")
                _remove_tree(point)
                _remove_tree(f"{place}/root")
                if left := disk.detach(ref.directory, place):
                    raise CorralError("infra_error", f"the disk is still in use: {', '.join(left)}")
                _hand_over(saved, into)
                faults.point("runtime.checkpoint.moved")
                disk.move(f"{ref.directory}/{_DISK}", f"{into}/{_DISK}")
            except BaseException as error:
                # The instance may go on for long: half a memory would cost the host as much as a whole one.
                with contextlib.suppress(OSError):
                    _remove_saved(saved, point)
                if isinstance(error, (OSError, subprocess.SubprocessError)):
                    raise CorralError("infra_error", f"the snapshot could not be made: {error}") from error
                raise

    def _save_memory(self, ref: InstanceRef, place: str) -> None:
        gofer = ProcessRef.from_json(ref.data["gofer"])
        # The instance's own user namespace, which it was made in: one of a later process has the same ids and no power over it.
        namespace = os.open(f"/proc/{gofer.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not process.is_alive(gofer):  # then that was another's
                raise CorralError("infra_error", f"{ref.instance_id} has ended")
            where = f"/proc/{os.getpid()}/fd/{namespace}"
            command = _runsc.checkpoint_command(
                self._program(), view=_instance.VIEW, user_namespace=where, instance_id=ref.instance_id
            )
            self._run_saving(command, place)
        finally:
            os.close(namespace)

    def _run_saving(self, command: list[str], place: str) -> None:
        saving = _instance.in_view(place, None, (), partial(_start, command))
        running = process.ref_of(saving.pid)
        try:
            _, said = saving.communicate(timeout=_CHECKPOINT_S)
        finally:
            if running is not None:
                process.kill(running)
            saving.wait()
        if saving.returncode != 0:
            why = said.decode("utf-8", "replace").strip()[-500:]
            raise CorralError("infra_error", f"runsc could not save the memory: {why or saving.returncode}")

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

    def _processes(self, ref: InstanceRef) -> list[int]:
        """Sandbox and gofer. What the sandbox traces is part of it while it lives; without it, all that is left is told."""
        alive = self._group(ref.instance_id).procs()
        sandbox = _instance.init_of(ref)
        if sandbox is None or not process.is_alive(sandbox):
            return alive
        return [pid for pid in alive if pid in (sandbox.pid, ref.data["gofer"]["pid"])]

    # -- ending

    def _forgotten(self, ref: InstanceRef) -> list[int]:
        """Who has this directory's disk mounted (the gofer), and who is in its groups."""
        found = set(super()._forgotten(ref))
        for holder in list(found):
            with contextlib.suppress(OSError), open(f"/proc/{holder}/cgroup", encoding="utf-8") as file:
                names = {line.rstrip("\n").partition("/corral/")[2] for line in file}
                for name in names:
                    if name.rpartition("/")[2] == ref.instance_id and name.count("/") == 1:
                        found.update(cgroups.host().open(name).procs())
        return sorted(found)

    def _unmake(self, ref: InstanceRef) -> None:
        base = self._ids.find(ref.instance_id)
        if base is not None:
            process.collect_of(base, userns.SIZE)  # gofer, traced programs and whatever else came to us as orphans
        _remove_tree(f"{_instance.place_of(ref.directory)}/root")

    # -- trying

    def _usable(self, version: str | None) -> RuntimeInfo:
        """Start a program that runs into the limits which hold inside, and look from the host at the others."""
        program = _runsc.probe_program(platform.machine())

        def make(spec: InstanceSpec) -> Instance:
            if program is not None:
                with open(f"{spec.rootfs}/pause", "wb") as file:
                    file.write(program)
            limits = replace(spec.limits, memory_bytes=_PROBE_MEMORY, pids=1)
            return self._make(replace(spec, limits=limits), None, _adapter.PROBE_START_S)

        with self._trial(make) as (instance, spec, took):
            held: set[str] = set()
            if program is not None:
                held = {_runsc.PROBED[letter] for letter in _heard(spec.directory, 2) if letter in _runsc.PROBED}
            modes = self._seen(instance, spec.limits, held)
        can = _adapter.capabilities(
            pause=_adapter.can_freeze(), memory_snapshot=True, fork=True, two_uids=True, cgroup=True
        )
        return RuntimeInfo(self.name, True, None, self._level, version, can, modes, round(took, 1))

    def _seen(self, instance: Instance, limits: Limits, inside: set[str]) -> LimitModes:
        free, inodes = disk.free(_instance.place_of(instance.ref.directory))
        held = {*instance.ref.data["held"], *inside}
        held |= {"disk"} if free <= limits.disk_bytes else set()
        held |= {"inodes"} if inodes <= 4 * limits.inodes else set()

        names = ("memory", "cpu", "pids", "disk", "inodes", "tmp")
        return LimitModes.from_dict({name: "enforced" for name in names if name in held} | _WITH_THE_NODE)

    def _answer(self, ref: InstanceRef) -> Instance:
        tree: dict[str, Any] = ref.data["tree"]
        return Instance(
            ref=ref,
            tree=HostTree(tree["path"], tree["uid"], tree["gid"], "image"),
            exec_uid=oci.SANDBOX_UID,
            guest_uid=0,
            control="fifo",
        )

    def _program(self) -> str:
        found = shutil.which("runsc", path=_instance.PATH)
        if found is None:
            hint = "install the package runsc (gVisor)"
            raise CorralError("runtime_unavailable", "runsc is not installed", hint=hint)
        return found


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Its standard streams are pipes, never a device of the host: what starts sandboxes gives such things to their users."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": _instance.PATH}, cwd="/", start_new_session=True
    )


def _record(path: str) -> str:
    """A file of the directory that belongs to the sandbox's own ids: no link is followed, no pipe waited for. OSError or ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is no file")
        return file.read(_RECORD_BYTES)


def _hand_over(saved: str, into: str) -> None:
    """Move the files of a memory out of the directory that runsc wrote them in; `infra_error` where anything else is in it.

    It was the sandbox's own: whoever captured gVisor leaves links, devices or pipes there, and names that mean something to us.
    Its processes are dead.
    """
    directory = os.open(saved, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        names = sorted(os.listdir(directory))
        if strange := [name for name in names if name not in (_runsc.MEMORY, *_runsc.MEMORY_PARTS)]:
            raise CorralError("infra_error", f"among the files of the memory is {strange[0]!r:.80}")
        if _runsc.MEMORY not in names:
            raise CorralError("infra_error", "runsc saved no memory")
        for name in names:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                seen = os.fstat(file)
                if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
                    raise CorralError("infra_error", f"{name} of the memory is not a file of its own")
                os.fchown(file, os.geteuid(), os.getegid())
                os.fchmod(file, 0o600)
            finally:
                os.close(file)
            disk.move(f"{saved}/{name}", f"{into}/{name}")
    finally:
        os.close(directory)


def _remove_saved(saved: str, point: str) -> list[str]:
    """Take away where runsc writes a memory, with what is there; -> what is left. The sandbox may live: nothing it does leads us out."""
    _remove_tree(point)
    with contextlib.suppress(FileNotFoundError):
        directory = os.open(saved, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(directory, os.geteuid(), os.getegid())  # from now on it makes nothing there
        finally:
            os.close(directory)
    return mounts.mounts_below(point) or guesttree.remove_tree(saved)


def _remove_tree(root: str) -> None:
    """Take away what is seen inside: it uses the disk. The instance's processes are dead; what is left shows itself at the disk."""
    for point in reversed(mounts.mounts_below(root)):
        with contextlib.suppress(OSError):
            mounts.umount(point, detach=True)
    if not mounts.mounts_below(root):
        disk.remove_tree(root)  # with the directory go the copies that other mount namespaces have of it


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
