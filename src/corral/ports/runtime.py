"""The runtime port: makes, finds and ends *instances* (live environments on this host). Small required core, declared capabilities.

Contract for every adapter (`corral.testing.runtime` is the conformance suite):

* `__init__` and `name` do no I/O. `probe` tells by trying (a real start of `true`, not a version string) whether the runtime works
  here, what it can and how it holds each limit; it is cached by the caller and must end within 20 s whatever happens.
* `create` is idempotent by `spec.instance_id`. Everything that it makes on the host (processes, mounts, loop devices, cgroups,
  files) is findable from `spec.directory` and the instance id alone, *before* it is made: after `kill -9` in the middle of
  `create`, `destroy(partial_ref(spec.directory))` removes all of it. It starts the guest as PID 1 of the sandbox with the listening
  control socket as an inherited descriptor, detached (own session, not a child that dies with us), and returns when the launcher
  has done its part; it does not talk to the guest.
* A runtime that passes no socket inside may have its guest talk over two FIFOs instead (`corral.linux.fifos.make`, before the start):
  they are its standard input and output, the guest gets `--control-fifo`, and `Instance.control` says so, after `attach` too.
  Such a pair knows no end of file: only `wait_gone` tells that the guest has ended.
* Nothing of the host's environment, working directory, descriptors or credentials reaches the inside.
* `InstanceRef.data` is JSON and is all that a later process needs to `attach`, `stats`, `destroy`. A process is referred to by
  (pid, start time, boot id), never by number alone.
* `destroy` is idempotent, ends every process first, then removes everything and says what it saw; it works on a half-made or
  half-removed instance. `Evidence.clean` is True only when the host itself shows that nothing is left.
* `attach` never starts anything: it answers whether the instance of a ref is alive.
* A capability or limit that is declared must hold under attack; one that does not work on this host is declared `absent`/False.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from corral.domain.limits import LimitModes, Limits


@dataclass(frozen=True)
class InstanceSpec:
    """What to make. Paths are absolute host paths; `directory` exists (made by the node, short, 0711) and belongs to this instance."""

    instance_id: str
    sandbox_id: str
    incarnation: int
    installation_id: str
    directory: str
    rootfs: str
    """Immutable base tree (root file system), never written."""
    interpreter: str
    """Projected interpreter tree, to appear read-only at /.corral: `bin/python3`, `lib/ld.so`, `guest/` (see node/interpreter.py)."""
    guest_argv: tuple[str, ...]
    """Command of PID 1 inside, without its control channel; the adapter appends `--control-fd N` or `--control-fifo`."""
    limits: Limits = field(default_factory=Limits)
    hostname: str = "sandbox"
    writable_root: bool = False
    seccomp: str = "default"
    """Profile of system calls (`corral.linux.seccomp.PROFILES`): for the filter around all, where there is one, and that of execs."""
    unsafe: frozenset[str] = frozenset()
    """Names of defences that are switched off: `unsafe_no_seccomp`, `unsafe_one_uid`, `unsafe_dumpable_guest`, ... Tests only, logged."""


@dataclass(frozen=True)
class HostTree:
    """Where and as whom the node reaches a sandbox's writable disk: `path/workspace`, `path/home`, `path/var_tmp` on the host.

    `uid`/`gid` are the *host* ids that own files of the sandbox's user as seen at `path`. `mode` says who limits it.
    """

    path: str
    uid: int
    gid: int
    mode: Literal["image", "directory"]


@dataclass(frozen=True)
class InstanceRef:
    """A live environment, as JSON: `data` is the adapter's own."""

    runtime: str
    instance_id: str
    directory: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Instance:
    """Answer of `create`."""

    ref: InstanceRef
    tree: HostTree
    exec_uid: int = 1000
    """uid and gid of execs *inside*; the guest is `guest_uid` inside (0 where two ids are mapped, else the same)."""
    guest_uid: int = 0
    same_uid: bool = False
    """True when guest and execs share one uid: the five measures must be on."""
    control: Literal["socket", "fifo"] = "socket"
    """How the node reaches the guest: the listening socket that `create` got, or the FIFOs `guest.in` and `guest.out` of `ref.directory`."""


@dataclass(frozen=True)
class Stats:
    """Counters read on the host, since the instance began. None = not measurable here, never 0 instead."""

    memory_bytes: int | None = None
    memory_whole: bool = True
    """False: not all that counts could be looked at, and `memory_bytes` is a lower bound."""
    peak_memory_bytes: int | None = None
    cpu_seconds: float | None = None
    pids: int | None = None
    peak_pids: int | None = None
    oom_kills: int | None = None
    pids_limit_hits: int | None = None
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    inodes_free: int | None = None
    cpu_throttled: int | None = None
    """How many times the kernel held the instance back for its share of the processors."""


@dataclass(frozen=True)
class Evidence:
    """What `destroy` saw. `left` names what could not be removed (empty iff `clean`)."""

    clean: bool
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuntimeInfo:
    """What `doctor` prints of a runtime and what placement reads."""

    name: str
    usable: bool
    reason: str | None
    security_level: int
    version: str | None
    capabilities: dict[str, bool]
    """`pause snapshot memory_snapshot fork resize two_uids host_pids cgroup` ..."""
    limits: LimitModes
    start_ms: float | None = None
    """Measured by the probe; placement prefers the fastest of a level."""
    pause_by: Literal["host", "guest"] = "host"
    """Where `pause` is declared: the adapter `SupportsPause`, or the guest stops the tree below it, and the adapter has no part in it."""


class Runtime(Protocol):
    """See the module docstring. All methods are async and may be called from many tasks; heavy system calls run in a thread."""

    name: str

    async def probe(self) -> RuntimeInfo: ...

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        """Start the instance with `control` (a listening unix socket) inherited by its PID 1. Raises `infra_error` after cleaning up."""
        ...

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        """A ref good enough for `destroy` when `create` never answered."""
        ...

    async def attach(self, ref: InstanceRef) -> Instance | None:
        """The live instance of a ref (after a restart of this process), or None when its PID 1 is gone."""
        ...

    async def stats(self, ref: InstanceRef) -> Stats: ...

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        """Start the peak of memory anew (serial execs); False where the host cannot, then nothing was done."""
        ...

    async def processes(self, ref: InstanceRef) -> list[int]:
        """Host pids of every live process of the instance, PID 1 included: read on the host (cgroup.procs or pid namespace)."""
        ...

    async def kill(self, ref: InstanceRef) -> None:
        """End every process now, whatever state they are in; leaves files for `destroy`. Idempotent."""
        ...

    async def wait_gone(self, ref: InstanceRef) -> None:
        """Return when PID 1 of the instance has ended (pidfd); cancellable."""
        ...

    async def destroy(self, ref: InstanceRef) -> Evidence: ...


class SupportsPause(Protocol):
    """Optional: freeze and thaw every process of an instance, PID 1 included. Both are idempotent; `kill` and `destroy` need no thaw."""

    async def pause(self, ref: InstanceRef) -> None:
        """No process of it runs when this returns. `infra_error` when that cannot be had in time; all of it runs again then."""
        ...

    async def resume(self, ref: InstanceRef) -> None: ...


class SupportsMemorySnapshot(Protocol):
    """Optional: an instance with its memory as files, to go on from as often as wanted. The guest was asked to quiesce before."""

    async def checkpoint(self, ref: InstanceRef, into: str) -> None:
        """Write the instance under `into` (a directory of ours, 0700, with nothing in it but `snapshot.partial`, which stays as it is).

        It has stopped when this returns, and only `destroy` is left. Raises `infra_error` when it failed; what is under `into` is then of
        no use, and the instance may have stopped too: `attach` tells. `kill` while it runs makes it fail.
        """
        ...

    async def restore(self, spec: InstanceSpec, image: str) -> Instance:
        """Go on from the files of a `checkpoint`, as the instance of `spec`; as idempotent and as findable as `create`.

        An image may be restored many times, at the same time too, and for the instance that it was made of. The guest inside still
        believes itself to be that one, until `identify`.
        """
        ...
