"""Runtimes that are a program of the OCI family: one adapter, told by `Program` what differs from one program to the next.

Each instance lives in a user namespace of its own over an id-mapped, read-only base, with kernel limits. What is made for an
instance, and where a later process finds it (everything derives from the directory and the instance id):

* the place with the disk, and `launch.log` (see `_instance`); `config.json`, `runtime.pid`, `instance.json`;
* the control group `corral/<installation>/<instance>`; the program's own record `STATE/node/<runtime>/<instance>`; a range of host ids.

Output of the program and of the guest goes to `disk/guest.log`. The program runs in the instance's own groups from its first moment
and makes none itself. Where it needs more than the instance may have (`launch_memory`, `launch_pids`), the groups are that much wider
until it has ended; only the guest runs in them by then, and nothing of a caller's does before `create` has answered.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from corral import faults
from corral.adapters.runtimes import _adapter, _instance, _probe, oci
from corral.domain.limits import LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, process, seccomp
from corral.linux.cgroups import Cgroup
from corral.linux.process import ProcessRef
from corral.ports.runtime import HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats


@dataclass(frozen=True)
class Program:
    """What is called, and what is peculiar to it."""

    command: str
    """A name to be found in the system's directories, or an absolute path."""
    package: str
    """What to install where it is missing."""
    options: tuple[str, ...] = ()
    """Words before `run`."""
    security_level: int = 1
    filter: Literal["compiled", "rules"] = "rules"
    """How it takes the filter around guest and execs: `compiled` in an annotation of its own, or the rules of the specification."""
    groups: Literal["as they are", "read-only", "without v2"] = "as they are"
    """What it sees of the control groups' file systems: read-only where it would else make groups of its own, without v2 where it
    refuses to start beside v1."""
    user_namespace: bool = True
    """False for programs that have no user namespaces because they have something stronger: guest and execs then share one id."""
    joins_user_namespace: bool = True
    """It can start in a user namespace that is there, which belongs to the instance's own ids. One that the program makes belongs to
    root, and what the kernel counts per owner (watches of files, pending signals, message queues, locked memory) is then one account of
    all such instances and of the host's root."""
    modes_from_below: bool = True
    """It gives a tmpfs the mode of the directory that it covers, whatever mode is asked for. Where it does not, this costs a little."""
    launch_memory: int = 0
    """Bytes that it needs for itself, beside what the instance may have."""
    launch_pids: int = 0


class OciRuntime(_adapter.Freezing):
    """See the module docstring and `corral.ports.runtime`."""

    _files = ("runtime.pid", "config.json")

    def __init__(
        self,
        name: str,
        called: Program,
        state_dir: str,
        *,
        installation_id: str,
        subuid_range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(state_dir, installation_id=installation_id, subuid_range=subuid_range)
        self.name = name
        self._called = called
        self._level = called.security_level
        self._records = f"{state_dir}/node/{name}"

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        return await self._begin(spec, partial(self._make, spec, control))

    async def stats(self, ref: InstanceRef) -> Stats:
        return self._stats(ref)  # a few files of the kernel and one statvfs: a change of thread costs more

    # -- making

    def _make(self, spec: InstanceSpec, control: socket.socket, timeout_s: float = _adapter.START_S) -> Instance:
        clock = _instance.Phases()
        two_uids = self._called.user_namespace and "unsafe_one_uid" not in spec.unsafe
        base = self._ids.allocate(spec.instance_id) if two_uids else None
        faults.point("runtime.create.range")
        with ThreadPoolExecutor(1) as side:
            # Made beside the rest. Leaving the block waits for it.
            namespace = None if base is None else side.submit(self._namespaces.of, base)
            group = cgroups.host().create(self._group_name(spec.instance_id), self._while_launching(spec.limits))
            faults.point("runtime.create.cgroup")
            os.makedirs(self._records, 0o700, exist_ok=True)
            place = _instance.make_place(spec.directory)
            faults.point("runtime.create.place")
            clock.lap("groups")
            launcher = self._launcher(spec, control, group)
            try:
                faults.point("runtime.create.launching")
                clock.lap("launcher")
                tree = self._make_disk(spec, place, namespace)
                clock.lap("disk")
                self._write_configuration(spec, base, None if namespace is None else namespace.result())
                faults.point("runtime.create.config")
                clock.lap("config")
                for source, name in ((spec.rootfs, "root"), (spec.interpreter, "corral")):
                    _instance.show(source, place, name, None if namespace is None else namespace.result())
                faults.point("runtime.create.root")
                clock.lap("root")
                launcher.go()
                self._await_launch(launcher, spec.directory, timeout_s)
            finally:
                launcher.close()
        faults.point("runtime.create.started")
        init = self._find_init(spec, group)
        if self._while_launching(spec.limits) != spec.limits:
            group = _instance.narrowed(group, spec.limits)
        # The launcher's own use is not the sandbox's.
        group.reset_peak()
        launch_pids = group.stats().peak_pids
        clock.lap("run")
        data = {
            "init": init.to_json(),
            "tree": {"path": tree.path, "uid": tree.uid, "gid": tree.gid},
            "disk_bytes": spec.limits.disk_bytes,
            "one_uid": base is None,
            "held": sorted(group.held),
            "launch_pids": launch_pids,
            "phases": clock.phases,
        }
        _instance.write_json(f"{spec.directory}/instance.json", data)
        faults.point("runtime.create.recorded")
        return self._answer(InstanceRef(self.name, spec.instance_id, spec.directory, data))

    def _make_disk(self, spec: InstanceSpec, place: str, namespace: Future[int] | None) -> HostTree:
        inside = oci.SANDBOX_UID
        size, inodes = spec.limits.disk_bytes, spec.limits.inodes
        if namespace is not None:
            return disk.prepare(
                spec.directory, place, size, inodes, inside, inside, idmap=namespace.result, blanks=self._tools
            )
        return disk.prepare(spec.directory, place, size, inodes, inside, inside, blanks=self._tools)

    def _while_launching(self, limits: Limits) -> Limits:
        return replace(
            limits,
            memory_bytes=limits.memory_bytes + self._called.launch_memory,
            pids=limits.pids + self._called.launch_pids,
        )

    def _write_configuration(self, spec: InstanceSpec, base: int | None, namespace: int | None) -> None:
        joined = namespace is not None and self._called.joins_user_namespace
        filtered = "unsafe_no_seccomp" not in spec.unsafe
        around, annotations = self._filter(spec) if filtered else (None, {})
        configuration = oci.configuration(
            spec,
            view=_instance.VIEW,
            base_uid=base,
            open_files=_instance.open_files(spec.limits),
            control_fd=_instance.CONTROL_FD,
            filter_fd=_instance.EXEC_FILTER_FD if filtered else None,
            seccomp=around,
            annotations=annotations,
            modes_from_below=self._called.modes_from_below,
            user_namespace=f"/proc/{os.getpid()}/fd/{namespace}" if joined else None,
        )
        _instance.write_json(f"{spec.directory}/config.json", configuration)

    def _filter(self, spec: InstanceSpec) -> tuple[dict[str, Any], dict[str, str]]:
        """(`linux.seccomp`, annotations) of the filter around guest and execs."""
        if self._called.filter == "rules":
            return seccomp.to_oci(spec.seccomp), {}
        # The rules beside it stand for what may never be: a program that did not know the annotation would kill the guest at its first
        # call. Compiled by the program itself, the real rules would cost five milliseconds.
        with open(_instance.filter_file(self._tools, spec.seccomp), "rb") as file:
            compiled = base64.b64encode(file.read()).decode()
        return {"defaultAction": "SCMP_ACT_KILL_PROCESS"}, {"run.oci.seccomp_bpf_data": compiled}

    def _launcher(self, spec: InstanceSpec, control: socket.socket, group: Cgroup) -> _instance.Launcher:
        files = {}
        if "unsafe_no_seccomp" not in spec.unsafe:
            files[_instance.EXEC_FILTER_FD] = _instance.filter_file(self._tools, seccomp.exec_filter(spec.seccomp))
        command = [self._program(), "--root", self._records, *self._called.options]
        command += ["run", "--detach", "--preserve-fds", str(1 + len(files)), "--bundle", spec.directory]
        command += ["--pid-file", f"{spec.directory}/runtime.pid", spec.instance_id]
        return _instance.Launcher(
            spec.directory,
            command,
            control.fileno(),
            groups=group.procs_files,
            log=f"{_instance.VIEW}/disk/{disk.LOG}",
            files=files,
            limits=spec.limits,
            leave=_unused_v2() if self._called.groups == "without v2" else "",
            read_only=_group_mounts() if self._called.groups == "read-only" else (),
        )

    def _find_init(self, spec: InstanceSpec, group: Cgroup) -> ProcessRef:
        try:
            with open(f"{spec.directory}/runtime.pid", encoding="ascii") as file:
                pid = int(file.read().strip())
        except (OSError, ValueError):
            why = f"{self.name} ended well and named no process of the guest: {_instance.said(spec.directory)}"
            raise CorralError("infra_error", why) from None
        init = process.ref_of(pid)
        if init is None or not process.is_alive(init) or pid not in group.procs():
            raise CorralError("infra_error", f"the guest ended at once: {_instance.said(spec.directory)}")
        if self._level < 2:  # in a kernel of its own, /proc is that kernel's
            self._check_view(init)
        return init

    def _check_view(self, init: ProcessRef) -> None:
        """Ends the making of an instance whose /proc is not shut as it was told: the word of the program is not taken for it."""
        try:
            with open(f"/proc/{init.pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                seen = file.read()
        except OSError as error:
            raise CorralError("infra_error", f"the guest ended at once: {error}") from error
        left = oci.left_open(seen, lambda path: os.path.lexists(f"/proc/{init.pid}/root{path}"))
        if left:
            raise CorralError("infra_error", f"{self.name} left open what it was told to shut: {', '.join(left)}")

    # -- reading

    def _stats(self, ref: InstanceRef) -> Stats:
        seen = self._group(ref.instance_id).stats()
        # No kernel starts this peak anew: what is not above the launch's is not known to be the sandbox's.
        peak_pids = seen.peak_pids if (seen.peak_pids or 0) > (ref.data.get("launch_pids") or 0) else None
        limit = ref.data.get("disk_bytes")
        free: int | None = None
        inodes: int | None = None
        try:
            free, inodes = disk.free(_instance.place_of(ref.directory))
        except OSError:
            pass
        return Stats(
            memory_bytes=seen.memory_bytes,
            peak_memory_bytes=seen.peak_memory_bytes,
            cpu_seconds=seen.cpu_seconds,
            pids=seen.pids,
            peak_pids=peak_pids,
            oom_kills=seen.oom_kills,
            pids_limit_hits=seen.pids_limit_hits,
            cpu_throttled=seen.cpu_throttled,
            disk_bytes=None if limit is None or free is None else max(0, limit - free),
            disk_free_bytes=free,
            inodes_free=inodes,
        )

    def _answer(self, ref: InstanceRef) -> Instance:
        tree, one_uid = ref.data["tree"], bool(ref.data["one_uid"])
        return Instance(
            ref=ref,
            tree=HostTree(tree["path"], tree["uid"], tree["gid"], "image"),
            exec_uid=oci.SANDBOX_UID,
            guest_uid=oci.SANDBOX_UID if one_uid else 0,
            same_uid=one_uid,
        )

    # -- ending

    def _unmake(self, ref: InstanceRef) -> None:
        disk.remove_tree(f"{self._records}/{ref.instance_id}")

    # -- trying

    def _program(self) -> str:
        found = shutil.which(self._called.command, path=_instance.PATH)
        if found is None:
            hint = f"install the package {self._called.package}"
            raise CorralError("runtime_unavailable", f"{self.name} is not installed", hint=hint)
        return found

    def _usable(self, version: str | None) -> RuntimeInfo:
        """Start the smallest program there is with everything on, and look from the host at what holds it."""
        start_ms, (limits, two_uids) = _probe.fastest(self._once)
        can = _adapter.capabilities(
            pause=_adapter.can_freeze(), two_uids=two_uids, one_uid=True, host_pids=True, cgroup=True
        )
        return RuntimeInfo(self.name, True, None, self._level, version, can, limits, round(start_ms, 1))

    def _once(self) -> tuple[float, tuple[LimitModes, bool]]:
        def make(spec: InstanceSpec) -> Instance:
            with socket.socket(socket.AF_UNIX) as control:
                return self._make(spec, control, _adapter.PROBE_START_S)

        with self._trial(make) as (instance, spec, took):
            return took, (self._seen(instance, spec.limits), instance.guest_uid == 0)

    def _seen(self, instance: Instance, limits: Limits) -> LimitModes:
        group = self._group(instance.ref.instance_id)
        free, inodes = disk.free(_instance.place_of(instance.ref.directory))
        init = _instance.init_of(instance.ref)
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


def _group_mounts() -> tuple[str, ...]:
    """Where control groups are mounted."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            if right.split(" ", 1)[0] in ("cgroup", "cgroup2"):
                found.append(left.split(" ")[4])
    return tuple(found)


def _unused_v2() -> str:
    """Where a v2 hierarchy lies beside v1 controllers, "" where there is none."""
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
