"""The node port: what the control plane may ask of one host. `corral.node` serves it in process (embedded) and later over a wire.

Contract:

* Every mutating call carries the fence; one below the instance's floor raises `lease_lost`, whose `floor` says which that is. Calls are idempotent by
  `instance_id` / `exec_id`: a second `create` of a live instance returns it, a second `start_exec` attaches, never starts twice.
* Facts are journalled in the state directory before their effect, so that `open` after `kill -9` adopts every live instance and
  every exec whose guest still knows it (output resumes by offset), or says `lost`.
* The guest is never trusted for limits, kills, usage or files: the node's own view of the host decides.
* `destroy` always ends with evidence. `gc` removes what no journalled instance owns and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.grade import Check
from corral.domain.limits import Limits
from corral.ports.runtime import Evidence, RuntimeInfo, Stats


@dataclass(frozen=True)
class CreateInstance:
    """What the control plane asks for; the node knows paths. `deadline_s` is the dead man's switch, from now."""

    instance_id: str
    sandbox_id: str
    incarnation: int
    fence: Fence
    runtime: str
    template: str
    limits: Limits
    deadline_s: float
    unsafe: frozenset[str] = frozenset()
    seccomp: str = "default"
    """Profile of system calls, as policy allowed it."""


@dataclass(frozen=True)
class InstanceReport:
    """A live instance: `ref` is opaque JSON for the instance row; `phases` are milliseconds per step of the creation."""

    instance_id: str
    ref: dict[str, Any]
    template_digest: str
    security_level: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecSpec:
    """One exec. Strings may hold lone surrogates (surrogateescape) for bytes that are not UTF-8.

    `argv[0]` is looked up on PATH inside. `stdin`: bytes given at once then end of file, or None = end of file at once.
    `background`: what happens to processes left when main exits: `keep` or `kill`.
    """

    exec_id: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    user: str = "sandbox"
    stdin: bytes | None = None
    stdin_open: bool = False
    pty: tuple[int, int] | None = None
    limits: Limits = field(default_factory=Limits)
    grace_s: float = 2.0
    background: Literal["keep", "kill"] = "keep"


@dataclass(frozen=True)
class Chunk:
    """Bytes of one stream; `offset` counts bytes produced on that stream, `cursor` is opaque and rises; `t_ms` since exec start."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes
    t_ms: int
    cursor: str


@dataclass(frozen=True)
class Gap:
    """Bytes `[offset, offset + bytes)` of a stream are no longer kept."""

    stream: Literal["stdout", "stderr"]
    offset: int
    bytes: int


@dataclass(frozen=True)
class FileChange:
    """One change under /workspace found by looking from the host."""

    path: str
    change: Literal["created", "modified", "deleted"]
    type: Literal["file", "dir", "symlink"]
    size: int
    mode: str
    digest: str | None


@dataclass(frozen=True)
class Collected:
    """Answer of `collect`. `artifacts`: path, size, digest of what was copied out; `skipped` names matches over a cap."""

    files: tuple[FileChange, ...]
    files_truncated: bool
    artifacts: tuple[dict[str, Any], ...]
    skipped: tuple[str, ...] = ()
    complete: bool = True
    """False when the tree could not be read whole; then nothing is claimed about what is missing."""


@dataclass(frozen=True)
class FileInfo:
    """One entry of a sandbox's file system, as a process inside saw it: checked in shape, not in truth.

    Paths are absolute inside; strings may hold lone surrogates. `error`: why what is below a directory could not be listed.
    """

    path: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "device"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    inode: int
    target: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class FilePage:
    """Entries in the order of the bytes of their paths; `next` goes into `after`, None at the end."""

    items: tuple[FileInfo, ...]
    next: str | None


class FileBlocks(Protocol):
    """Bytes of a file on their way. Whoever has one reads it to the end or closes it."""

    info: FileInfo
    offset: int
    length: int

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def __anext__(self) -> bytes: ...
    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class FileEvent:
    """created, modified, deleted, moved (then `source` is where it was) or overflow: changes were lost."""

    kind: Literal["created", "modified", "deleted", "moved", "overflow"]
    path: str
    directory: bool
    source: str | None = None


class FileEvents(Protocol):
    """Changes as they happen; ends when what is watched is gone. Whoever has one closes it."""

    def __aiter__(self) -> AsyncIterator[FileEvent]: ...
    async def __anext__(self) -> FileEvent: ...
    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class HostFacts:
    """`doctor`'s host part."""

    cgroup: Literal["v1", "v2", "hybrid", "none"]
    user: Literal["root", "user"]
    memory_bytes: int
    cpus: int


Progress = Callable[[str, float | None], None]
"""(sentence, fraction 0..1 or None): long work tells where it is."""


class Node(Protocol):
    """See the module docstring."""

    node_id: str

    async def open(self, progress: Progress | None = None) -> None:
        """Take the journal, adopt what lives."""
        ...

    async def close(self) -> None:
        """Let go of everything; sandboxes live on."""
        ...

    async def runtimes(self, *, fresh: bool = False) -> list[RuntimeInfo]:
        """Every registered runtime, probed once per boot and version (cached in the state directory)."""
        ...

    async def host(self) -> HostFacts: ...

    async def posture(self, *, fresh: bool = False) -> list[Check]:
        """What behaviour probes of the host see, for its grade (`domain.grade`); kept like what the probes of runtimes find."""
        ...

    async def templates(self) -> list[dict[str, Any]]:
        """`{"name","digest"|None,"available":bool,"reason","languages":[..]}` for each known template."""
        ...

    async def ensure_template(self, template: str, progress: Progress | None = None) -> str:
        """Build it if it is not there; -> digest. `template_unavailable` when it cannot be."""
        ...

    async def template_seccomp(self, template: str) -> str:
        """The profile of system calls that a built template asks for. As cheap as reading one small file."""
        ...

    async def template(self, name: str) -> dict[str, Any]:
        """All that is known of one template: the members of `templates` and its recipe, size, packages, path; `not_found`."""
        ...

    async def build_template(self, name: str, progress: Progress | None = None, *, refresh: bool = False) -> str:
        """Build it if it is not there by its present recipe, or anyway; -> digest. Bases that are there stay what they are."""
        ...

    async def remove_template(self, name: str, keep: frozenset[str]) -> dict[str, Any]:
        """Remove its base; -> `name digest freed_bytes`.

        `template_in_use` if that is one of `keep` (digests) or under an instance, `conflict` while one is built: it does not wait.
        """
        ...

    async def sweep_templates(self, keep: frozenset[str]) -> dict[str, int]:
        """Remove bases that no template has any more, after a time, but those of `keep`; -> counts."""
        ...

    async def bases(self, keep: frozenset[str]) -> dict[str, Any]:
        """Disk use: `count size_bytes unused unused_bytes`; those of `keep` are used."""
        ...

    async def create(self, request: CreateInstance, progress: Progress | None = None) -> InstanceReport:
        """A live instance whose empty workspace is the base of the first `collect`."""
        ...

    async def fence(self, instance_id: str, fence: Fence, mode: Literal["kill", "adopt"]) -> None:
        """Journal the floor, then have the guest acknowledge it; `kill` ends execs of older fences first.

        Returns when nothing of an older fence acts any more. `infra_error` if something cannot be killed.
        """
        ...

    async def floors(self) -> list[tuple[str, str, Fence]]:
        """(instance, its sandbox, its floor) of all that is alive or being made."""
        ...

    async def remember_event(self, event_id: int, *, accept: bool = False) -> int:
        """The store has this event: -> the highest that any store in use here has had, this one included.

        More than `event_id`: the store was set back, if it still has no more. `accept`: it goes on from there, see `regressed`.
        """
        ...

    async def regressed(self, *, forget: bool = False) -> int:
        """The event from which a store was set back, 0 if none was since somebody said `forget`: it may not know what lives here."""
        ...

    async def extend_deadline(self, instance_id: str, fence: Fence, deadline_s: float) -> None: ...

    async def pause(self, instance_id: str, fence: Fence) -> None:
        """Nothing inside runs when this returns; memory stays. Idempotent. Not where the runtime cannot: `not_supported_yet`.

        Until `resume` whatever would begin is `sandbox_paused`; output is silent, the wall time of execs stands still, the deadline of
        the instance does not. A fence is journalled and told to the guest later, `end_exec` returns once it runs again; `destroy` works
        at once. After an error all of it runs.
        """
        ...

    async def resume(self, instance_id: str, fence: Fence) -> None:
        """It runs again, with `fence` as the floor; execs that were to end meanwhile end first. Idempotent.

        After an error it is of no further use.
        """
        ...

    async def put_files(self, instance_id: str, fence: Fence, files: Sequence[tuple[str, int, bytes | None]]) -> None:
        """(path relative to /workspace, mode, content): parents made, owned by the sandbox's user; never follows a link out."""
        ...

    async def put_tar(
        self, instance_id: str, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str = "sandbox"
    ) -> None:
        """Unpack inside, in a process with the exec's user. A bad archive is `invalid_value` naming the entry."""
        ...

    def get_tar(self, instance_id: str, path: str, user: str = "sandbox") -> AsyncIterator[bytes]:
        """Pack inside, streamed. `not_found` before the first byte when the path does not exist."""
        ...

    # Files, one at a time, by a process inside with the user's rights: every path is resolved there. Refusals carry `entry`:
    # not_found, permission_denied, is_a_directory, not_a_directory, not_a_file, already_exists, not_empty, disk_full, invalid_value.
    async def stat_file(self, instance_id: str, path: str, *, follow: bool = True, user: str = "sandbox") -> FileInfo:
        """One entry; of a link itself unless `follow`."""
        ...

    async def list_files(
        self,
        instance_id: str,
        path: str,
        *,
        recursive: bool = False,
        limit: int = 1000,
        after: str = "",
        user: str = "sandbox",
    ) -> FilePage:
        """One page of what is in a directory, or below it; links are not followed."""
        ...

    async def read_file(
        self,
        instance_id: str,
        path: str,
        *,
        first: int | None = None,
        last: int | None = None,
        user: str = "sandbox",
    ) -> FileBlocks:
        """Bytes `first` to `last` (included), streamed; without `first` the last `last` bytes. `range_not_satisfiable` has `size`.

        A file that becomes shorter meanwhile ends in an error, never in other bytes.
        """
        ...

    async def write_file(
        self,
        instance_id: str,
        fence: Fence,
        path: str,
        blocks: AsyncIterator[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
        overwrite: bool = True,
        size: int | None = None,
        user: str = "sandbox",
    ) -> tuple[FileInfo, bool]:
        """A whole new content at once, or nothing; -> the entry, and whether it is new. An error in `blocks` leaves all as it was."""
        ...

    async def move_file(
        self, instance_id: str, fence: Fence, source: str, target: str, *, overwrite: bool, user: str = "sandbox"
    ) -> FileInfo: ...

    async def make_directory(
        self, instance_id: str, fence: Fence, path: str, *, parents: bool, mode: int, user: str = "sandbox"
    ) -> FileInfo:
        """An existing directory is fine."""
        ...

    async def remove_file(
        self, instance_id: str, fence: Fence, path: str, *, recursive: bool, user: str = "sandbox"
    ) -> None:
        """Links are removed, never followed."""
        ...

    async def empty_directories(
        self, instance_id: str, fence: Fence, paths: Sequence[str], *, user: str = "sandbox"
    ) -> str | None:
        """Remove what is in these directories, as far as the user may; -> the first entry that stays, None: none. Absent ones are empty."""
        ...

    async def watch_files(
        self, instance_id: str, path: str, *, recursive: bool = False, user: str = "sandbox"
    ) -> FileEvents:
        """Returns once every change from now on is seen."""
        ...

    async def start_exec(self, instance_id: str, fence: Fence, spec: ExecSpec) -> None:
        """Returns when the guest acknowledged (or refused: then `wait_exec` has the start failure)."""
        ...

    def stream_exec(self, exec_id: str, cursor: str | None = None) -> AsyncIterator[Chunk | Gap]:
        """Output from the cursor to the end of the exec, live. `cursor_gone` when it is older than the spool."""
        ...

    async def wait_exec(self, exec_id: str) -> ExecFacts:
        """The facts, once the exec has ended; answers again later, also after a restart, until `forget_exec`."""
        ...

    # A fence of the next three is the caller's; without one it is the node's own, of whoever holds the sandbox now.
    async def stdin_exec(
        self, exec_id: str, data: bytes, eof: bool, offset: int | None = None, *, fence: Fence | None = None
    ) -> bool:
        """Hand over all of `data`, waiting while the program does not read; False = it reads no more.

        `offset` counts from the start of all input; bytes that arrived already are skipped, a hole is `bad_request`.
        """
        ...

    async def signal_exec(self, exec_id: str, signal: int, *, fence: Fence | None = None) -> None: ...

    async def resize_exec(self, exec_id: str, rows: int, cols: int, *, fence: Fence | None = None) -> None: ...

    async def end_exec(self, exec_id: str, ended_by: str) -> None:
        """Kill the whole tree (TERM, grace, KILL) and let `wait_exec` tell `ended_by`. Returns when it is ended. Idempotent."""
        ...

    def kept_output(
        self, exec_id: str, stream: Literal["stdout", "stderr"], *, offset: int = 0
    ) -> AsyncIterator[bytes]:
        """What is kept, from the `offset`th byte of it: head, then tail (`StreamFacts` says how much of each), in pieces.

        There may be much, so nobody on the way holds all of it. Of an exec that has ended it is the same at any time.
        """
        ...

    def raw_output(self, exec_id: str, stream: Literal["stdout", "stderr"]) -> AsyncIterator[bytes]:
        """Everything spooled, up to the kill limit."""
        ...

    async def timeline(self, exec_id: str) -> list[dict[str, Any]]: ...

    async def forget_exec(self, exec_id: str) -> None:
        """Drop spool and journal entries."""
        ...

    async def mark(self, instance_id: str) -> None:
        """Remember the workspace as it is now: the base of the next `collect`."""
        ...

    async def collect(
        self, instance_id: str, *, outputs: Sequence[str], max_bytes: int, into: str | None, mark: bool = False
    ) -> Collected:
        """Changes under /workspace since `mark` (files that we put count as there before), artifacts copied to directory `into`.

        With `mark` what is found becomes the base of the next `collect`.
        """
        ...

    async def stats(self, instance_id: str) -> Stats: ...

    async def destroy(self, instance_id: str, reason: str) -> Evidence:
        """End it and remove everything; an unknown instance is clean. Needs no fence: callers hold the lease or condemned it."""
        ...

    async def lost(self) -> str:
        """Wait for and return the id of the next instance that ended without being destroyed."""
        ...

    async def instances(self) -> list[str]: ...

    async def leftovers(self) -> list[dict[str, Any]]:
        """`{"kind": process|mount|cgroup|loop|directory|..., "id", "instance_id"}` of ours that no live instance owns."""
        ...

    async def gc(self) -> dict[str, int]:
        """Remove leftovers; -> counts per kind, and `failed`."""
        ...


class SupportsMemorySnapshots(Protocol):
    """Optional: an instance with its memory as files, and instances that go on from them."""

    async def checkpoint_instance(self, instance_id: str, fence: Fence, into: str) -> Evidence:
        """Write the instance under `into` (an empty or new directory) and remove it: what goes on is made by `restore_instance`.

        `illegal_transition` while a program, a transfer or another snapshot is under way, and for all of these while this one is; what
        programs left behind goes on in each copy. After an error, a cancellation, or the death of the node at any moment there is the
        instance, which goes on, and no file; or no instance, and the snapshot is whole or there is no file of it. A call that is
        cancelled while the memory is being written leaves the writing to its end.
        """
        ...

    async def restore_instance(
        self, request: CreateInstance, image: str, progress: Progress | None = None
    ) -> InstanceReport:
        """`create`, from the files of a snapshot. Fence, ids and deadline are the request's; `conflict` where base, limits or runtime differ."""
        ...
