"""What the adapters of namespaces share: an instance's place on the host, the launcher that starts it, its records.

* The *place*, `DIRECTORY/m`, carries `disk`, `root` (the base) and `corral` (the interpreter). For root it is a mount of
  itself, made private and then shared: nobody else sees what is mounted in it, and copies that later mount namespaces take along
  as slaves go when the originals go.
* The *view*: ids of a sandbox cannot pass through a state directory that is closed to others. So a launcher of root has a mount
  namespace of its own, in which the place appears at `VIEW` and the tools of the installation at `TOOLS_VIEW`, open all the way.
* The *launcher* is a shell that enters the groups while the disk is being made, waits for its `go`, and becomes the runtime's
  program. It holds an exclusive lock on `launch.log` until it is told to go, and has entered the groups by then; so at each moment
  another process can see whether somebody may still be starting. It ends by itself when its creator dies before the `go`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.linux import cgroups, disk, mounts, nsproc, process, seccomp, userns
from corral.linux.cgroups import Cgroup
from corral.linux.process import ProcessRef
from corral.ports.runtime import InstanceRef

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VIEW = f"{userns.RUN}/i"
TOOLS_VIEW = f"{userns.RUN}/t"
LOCK = "launch.log"
CONTROL_FD, EXEC_FILTER_FD, STATUS_FD, FILTER_FD, NAMESPACE_FD = 3, 4, 5, 6, 7
"""Descriptors of the program that the launcher becomes; those that it was given no file for are closed."""

# The socket comes as standard output, so that just it becomes descriptor 3: crun's --preserve-fds demands that what is passed begins
# there without a gap, and that nothing is above.
# Its standard input is an empty pipe, not /dev/null: crun gives what it finds there to root of the user namespace, and so would make
# over the host's device.
# $1 open files, $2 file size in blocks of 512 bytes or 0, $3 log, $4 mount to leave or "", $5 number of group files, then these, then
# the files for descriptors 4, 5 and 6 or "", then the command. Standard input is an empty pipe, never the host's /dev/null: crun gives
# the standard streams to the sandbox's user, and that device file is everybody's.
_SCRIPT = """
umask 022
ulimit -c 0
ulimit -n "$1" || exit 91
[ "$2" = 0 ] || ulimit -f "$2" || exit 92
log=$3 leave=$4 count=$5
shift 5
while [ "$count" -gt 0 ]; do echo 0 >"$1" || exit 93; shift; count=$((count - 1)); done
[ -z "$leave" ] || umount "$leave" || exit 94
read -r go namespace && [ "$go" = go ] || exit 90
exec 3>&1 >>"$log" 2>&1 <<'END'
END
[ -z "$1" ] || exec 4<"$1"
[ -z "$2" ] || exec 5>>"$2"
[ -z "$3" ] || exec 6<"$3"
[ -z "$namespace" ] || exec 7<"$namespace"
shift 3
exec "$@"
"""


def place_of(directory: str) -> str:
    """Where the place of an instance lies."""
    return f"{directory}/m"


def make_place(directory: str) -> str:
    """Make the place; -> its path. For an ordinary user it is a plain directory."""
    place = place_of(directory)
    os.mkdir(place)
    os.chmod(place, 0o711)  # noqa: S103 - the sandbox's own uid passes through, and may not list
    if os.geteuid() == 0:
        mounts.bind(place, place, read_only=False)
        mounts.make_shared(place)
    return place


def show(source: str, place: str, name: str, namespace: int | None) -> None:
    """Make a tree appear in the place, read-only; with a user namespace its owners are translated by that where the kernel can."""
    target = f"{place}/{name}"
    os.mkdir(target)
    if namespace is not None:
        with contextlib.suppress(OSError):  # not every file system can
            mounts.idmapped_bind(source, target, namespace)
            return
    mounts.bind(source, target, read_only=True)


def clear_place(directory: str) -> list[str]:
    """Remove the place with the disk in it, whatever state it is in; -> what is left. No process of the instance may be alive."""
    place = place_of(directory)
    left = [f"disk {name}" for name in disk.discard(directory, place)]
    if not mounts.mounts_below(f"{place}/disk"):
        # What remains is bound from elsewhere. One call takes the place and all in it; every further one would wait for the kernel.
        for point in mounts.mounts_below(place):
            with contextlib.suppress(OSError):
                mounts.umount(point, detach=True)
    left += [f"mount {point}" for point in mounts.mounts_below(place)]
    if not mounts.mounts_below(place):
        disk.remove_tree(place)
    return left or [f"loop device {device}" for device in disk.stray_loops(directory)]


def open_files(limits: Limits) -> int:
    """The hard limit of open files inside, within what this process may give."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = max(4096, limits.open_files)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def filter_file(tools: str, profile: str) -> str:
    """A compiled system call filter as a file; compiled once per version of the rules."""
    path = f"{tools}/seccomp-{profile}-{seccomp.version()}.bpf"
    if not os.path.exists(path):
        os.makedirs(tools, exist_ok=True)
        aside = f"{path}.{os.getpid()}.{threading.get_ident()}"
        with open(aside, "wb") as file:
            file.write(seccomp.compile(profile))
        os.replace(aside, path)
    return path


class Launcher:
    """See the module docstring. `go` once, `close` always."""

    def __init__(
        self,
        directory: str,
        command: list[str],
        control: int,
        *,
        groups: tuple[str, ...],
        log: str,
        files: dict[int, str],
        limits: Limits,
        leave: str = "",
        read_only: tuple[str, ...] = (),
        file_blocks: int = 0,
        tools: str | None = None,
    ) -> None:
        """`log` and `files` (descriptor -> path) are opened at the `go`, in the view. `tools` is the host's directory of them.

        For root only: `leave` is a mount that the program does not see, `read_only` are mounts that it may not write to.
        """
        if read_only:  # as the host sees them, where they can be written
            groups = tuple(f"/proc/{os.getpid()}/root{path}" for path in groups)
        words = ["/bin/sh", "-c", _SCRIPT, "sh", str(open_files(limits)), str(file_blocks), log, leave]
        words += [str(len(groups)), *groups, *(files.get(fd, "") for fd in (EXEC_FILTER_FD, STATUS_FD, FILTER_FD))]
        words += command
        self._went = False
        lock = os.open(f"{directory}/{LOCK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=control,
                    stderr=lock,
                    env={"PATH": PATH},
                    cwd="/",
                    start_new_session=True,
                )

            self._process = in_view(place_of(directory), tools, read_only, start) if os.geteuid() == 0 else start()
        finally:
            os.close(lock)
        found = process.ref_of(self._process.pid)
        assert found is not None  # not reaped yet, so it is there
        self.ref = found

    def go(self, namespace: int | None = None) -> None:
        """Let it become the program; `namespace` is a user namespace of ours that it gets as `NAMESPACE_FD`."""
        assert self._process.stdin is not None
        self._went = True
        where = "" if namespace is None else f" /proc/{os.getpid()}/fd/{namespace}"
        with contextlib.suppress(BrokenPipeError):  # its exit status tells why
            self._process.stdin.write(f"go{where}\n".encode())
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, None when it did not end in time. `Popen.wait` would sleep in steps."""
        return self._process.wait() if process.wait_gone_blocking(self.ref, timeout_s) else None

    def close(self) -> None:
        """End what it still is, and collect it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._went:
            process.kill(self.ref)
        self._process.wait()


def in_view(place: str, tools: str | None, read_only: tuple[str, ...], start: Any) -> Any:
    """What `start` gives, which begins a process that has the view of an instance (see the module docstring). For root."""

    def work() -> Any:
        for point in read_only:
            mounts.make_read_only(point)
        for target, source, closed in ((VIEW, place, False), (TOOLS_VIEW, tools, True)):
            if source is not None:
                userns.make_run_directory(target)
                mounts.bind(source, target, read_only=closed, recursive=True, private=False)
        return start()

    return mounts.in_own_namespace(work)


def starting(directory: str) -> bool:
    """Whether a launcher that was not yet told to go may be alive."""
    try:
        fd = os.open(f"{directory}/{LOCK}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holders(directory: str) -> list[ProcessRef]:
    """Processes inside a sandbox that have the disk of this instance mounted: found without any record of it.

    For an instance that nobody remembers: with a store that was lost its control group and ids have an installation's name that is
    not known any more. The kernel ties a mount to this very directory, so a copy of a state directory never names another's guests.
    """
    wanted = {(_device(device), "/workspace") for device in disk.stray_loops(directory)}
    path = f"{os.path.realpath(place_of(directory))}/disk/workspace"
    above = [one for one in mounts.sources("self") if path.startswith(one[2].rstrip("/") + "/")]
    if (
        above
    ):  # a disk that is a plain directory: the last mount at the longest point is the one that the path leads through
        device, root, point = max(enumerate(above), key=lambda found: (len(found[1][2]), found[0]))[1]
        wanted.add((device, root.rstrip("/") + path[len(point.rstrip("/")) :]))
    ours, found = nsproc.depth(os.getpid()), []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        ref = process.ref_of(pid)
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            seen = any(one[:2] in wanted for one in mounts.sources(str(pid)))
            if seen and ref is not None and nsproc.depth(pid) > ours and process.is_alive(ref):
                found.append(ref)
    return found


def end_strays(scan: Callable[[], list[int]]) -> list[int]:
    """Kill the processes that a scan finds; -> their pids.

    Scanned again once they are held fast: a number that has passed to a stranger in between is left alone.
    """
    found = scan()
    held = [stray for pid in found if pid > 1 and (stray := process.ref_of(pid)) is not None]
    still = set(scan()) if held else set()
    for stray in held:
        if stray.pid in still:
            with contextlib.suppress(PermissionError):  # then it is told as what is left
                process.kill(stray)
    return found


def narrowed(launching: Cgroup, limits: Limits) -> Cgroup:
    """The group with the instance's own limits in place of those of its launch. `infra_error` when the kernel does not take one."""
    try:
        return cgroups.host().create(launching.name, limits)
    except OSError as error:
        raise CorralError(
            "infra_error",
            f"{error.strerror}: what has started uses more already",
            hint="ask for more memory and more processes",
        ) from error


def _device(path: str) -> str:
    number = os.stat(path).st_rdev
    return f"{os.major(number)}:{os.minor(number)}"


def said(directory: str, size: int = 2000) -> str:
    """The end of what launcher, runtime and guest wrote, as words of one line: they may have written anything, and people read it."""
    found = []
    for path in (f"{directory}/{LOCK}", f"{place_of(directory)}/disk/{disk.LOG}"):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                text = file.read(size).decode("utf-8", "replace")
        except OSError:
            continue
        found += "".join(sign if sign.isprintable() else " " for sign in text).split()
    return " ".join(found) or "it said nothing"


class Phases:
    """Milliseconds per step."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases[name] = round((now - self._since) * 1000, 2)
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {ms} ms" for name, ms in self.phases.items())


class Turns:
    """One creation or removal of an instance at a time."""

    def __init__(self) -> None:
        self._busy: dict[str, tuple[threading.Lock, int]] = {}
        self._guard = threading.Lock()

    @contextmanager
    def of(self, instance_id: str) -> Iterator[None]:
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


def init_of(ref: InstanceRef) -> ProcessRef | None:
    """PID 1 of a finished instance."""
    try:
        return ProcessRef.from_json(ref.data["init"])
    except (KeyError, ValueError):
        return None


def read_record(runtime: str, directory: str, instance_id: str) -> InstanceRef | None:
    """The finished instance that an earlier `create` recorded in a directory."""
    try:
        with open(f"{directory}/instance.json", encoding="utf-8") as file:
            data: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return None
    return InstanceRef(runtime, instance_id, directory, data)


def write_json(path: str, value: dict[str, Any]) -> None:
    """The file appears whole or not at all."""
    aside = f"{path}.{os.getpid()}.{threading.get_ident()}"
    with open(aside, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(value))  # `dump` would use the slow encoder
    os.replace(aside, path)


def remove_files(directory: str, *names: str) -> None:
    """Unlink records that are there, and what a death left of their making."""
    for name in names:
        for found in [name, *(entry for entry in _listdir(directory) if entry.startswith(f"{name}."))]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{found}")


def _listdir(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
