"""Black-box harness: `corral` as a person types it, as root and as an ordinary user, on every runtime that can run here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from furnished import furnish, once

if TYPE_CHECKING:
    from .serving import Server

REPOSITORY = Path(__file__).resolve().parents[2]
ORDINARY_UID = 54321


@dataclass
class Box:
    """One state directory and one way of calling the command line on one runtime."""

    name: str
    runtime: str
    state: Path
    prefix: list[str]
    program: list[str]
    env: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def own_kernel(self) -> bool:
        """Programs inside are no processes of the host, and what they use of one another the host does not count."""
        return self.runtime == "runsc"

    def command(self, *args: str) -> list[str]:
        return [*self.prefix, *self.program, *args]

    def __call__(
        self, *args: str, input: bytes | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[bytes]:
        stdin: Any = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        return subprocess.run(self.command(*args), capture_output=True, timeout=timeout, env=self.env, cwd="/", **stdin)

    def popen(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        } | options
        process = subprocess.Popen(self.command(*args), env=self.env, cwd="/", **options)
        self.started.append(process)
        return process

    def document(self, *args: str, **options: Any) -> tuple[int, dict[str, Any]]:
        done = self(*args, **options)
        try:
            return done.returncode, json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"not one JSON document: {done.stdout[:500]!r} {done.stderr[-2000:]!r}") from None

    def run_json(self, *args: str, **options: Any) -> dict[str, Any]:
        """`corral run --json` on this box's runtime -> the document."""
        return self.document("run", "--json", "--runtime", self.runtime, *args, **options)[1]

    def sandbox(self, *args: str) -> str:
        done = self("sandbox", "create", "--runtime", self.runtime, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().strip()

    def exec_json(self, sandbox: str, *args: str, options: tuple[str, ...] = (), **kw: Any) -> dict[str, Any]:
        return self.document("exec", sandbox, "--json", *options, "--", *args, **kw)[1]


def marked(marker: str) -> list[int]:
    """Host pids whose command line holds `marker`: the host's own witness of what lives."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                state = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if marker.encode() in line and state != b"Z":
                found.append(int(entry))
    return found


def living(box: Box, marker: str) -> list[Any]:
    """What the host sees of running programs that have `marker` in their command line and write to `beat` in their workspace.

    With a kernel of its own, a sandbox shows none of its processes; its disk shows what each of them writes (to `beat.NAME`), and
    goes with it.
    """
    if box.own_kernel:
        return [path for path in (box.state / "i").glob("*/m/disk/workspace/beat.*") if path.stat().st_size]
    return marked(marker)


def workspace(box: Box, instance_id: str) -> Path:
    """Where the host has the workspace of a live instance."""
    return box.state / "i" / instance_id.removeprefix("ins_") / "m" / "disk" / "workspace"


def of_instance(instance_id: str) -> list[int]:
    """Host pids in the control groups of an instance, or with its id on their command line: whatever it runs, on whichever kernel."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = Path(f"/proc/{entry}/cgroup").read_text().splitlines()
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if instance_id.encode() in words or any(line.endswith(f"/{instance_id}") for line in groups):
            found.append(int(entry))
    return found


def holding(directory: Path) -> dict[int, str]:
    """Host pids that are named after a directory or hold something open below it, and what: nothing started there may live on."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [f"/proc/{entry}/cwd", *(f"/proc/{entry}/fd/{fd}" for fd in os.listdir(f"/proc/{entry}/fd"))]
            named = [Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace"), *map(os.readlink, links)]
        except OSError:
            continue
        if hits := [name for name in named if f"{directory}/" in f"{name}/"]:
            found[int(entry)] = hits[0][:200]
    return found


def eventually(condition: Callable[[], Any], within: float = 20.0, what: str = "condition") -> Any:
    """Poll until true; fails with `what` when the time is over."""
    end = time.monotonic() + within
    while True:
        if value := condition():
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {what}")
        time.sleep(0.05)


def owner_of(state: Path) -> int | None:
    """Pid that holds the lock of a state directory, by the kernel's own list."""
    inode = os.stat(state / "owner.lock").st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            return int(words[4])
    return None


@pytest.fixture
def marker() -> str:
    return "mark" + uuid.uuid4().hex


def _environment(state: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LANG": "C.UTF-8",
        "CORRAL_STATE_DIR": str(state),
        **more,
    }


def root_box(state: Path, shared: Path, runtime: str) -> Box:
    """A state directory of this user with its template."""
    furnish(state, shared)
    env = _environment(state, HOME=os.environ.get("HOME", "/root"))
    return Box(f"{runtime}-root", runtime, state, [], [str(REPOSITORY / "corral")], env)


def user_checkout(shared: Path) -> tuple[Path, list[str]]:
    """A copy of the tracked files that the ordinary user may read -> (checkout, command prefix that becomes this user)."""
    place = shared / "user"

    def make() -> None:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout.split(
            b"\0"
        )
        for name in map(os.fsdecode, filter(None, files)):
            if (REPOSITORY / name).is_file():
                target = place / "checkout" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, target)
        home = place / "home"
        home.mkdir(exist_ok=True)
        home.chmod(0o700)
        os.chown(home, ORDINARY_UID, ORDINARY_UID)

    once(place, make)
    prefix = ["setpriv", "--reuid", str(ORDINARY_UID), "--regid", str(ORDINARY_UID), "--clear-groups"]
    return place / "checkout", prefix


def user_box(state: Path, shared: Path) -> Box:
    """A state directory of an ordinary user with its template, below a checkout that this user may read."""
    if os.geteuid() != 0:
        box = root_box(state, shared, "bubblewrap")
        box.name = "bubblewrap-user"
        return box
    checkout, prefix = user_checkout(shared)
    home = shared / "user" / "home"
    furnish(state, shared, ORDINARY_UID)
    keep = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_", "SSL_"))}
    env = _environment(state, HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"), **keep)
    box = Box("bubblewrap-user", "bubblewrap", state, prefix, [str(checkout / "corral")], env)

    def set_up() -> None:
        subprocess.run(box.command("--version"), env=env, cwd="/", check=True, capture_output=True, timeout=600)

    once(shared / "user-venv", set_up)
    return box


MODES = ("bubblewrap-root", "bubblewrap-user", "crun-root") if os.geteuid() == 0 else ("bubblewrap-user",)
STRONG = ("runsc-root",) if os.geteuid() == 0 and shutil.which("runsc") else ()
"""Runtimes with a kernel of their own inside: each start takes half a second, so they have the cases of `ON_STRONG` only."""
ON_STRONG = ("test_k01", "test_k03", "test_k07", "test_k08", "test_k17", "test_k19", "test_languages", "test_pause")
RUNC = ("runc-root",) if os.geteuid() == 0 and shutil.which("runc") else ()
ON_RUNC = (*ON_STRONG, "test_causes", "test_host_devices")
"""runc is called by the code that calls crun: what only this code, the guest or the file calls decide is shown on crun."""
TOO_DEAR = (
    "test_five_hundred_short_outputs_without_newline_arrive_whole",
    "test_pass_through_writes_the_exact_bytes",
    "test_names_are_names_whatever_they_hold",
)
SHOWN_ON_CRUN = (
    *TOO_DEAR,
    "test_a_file_that_is_not_a_program_is_126",
    "test_a_missing_working_directory_is_an_error_with_a_code",
    "test_a_path_that_is_swapped_for_a_link_meanwhile_leads_no_write_out",
    "test_a_program_that_is_not_there_is_127_and_the_hint_names_it",
    "test_archives_that_lead_out_are_refused_naming_the_entry",
    "test_death_by_a_signal_names_it",
    "test_each_exit_code_is_reported_as_it_is",
    "test_floods_and_hogs_leave_the_service_small_and_the_neighbour_fast",
    "test_links_and_dots_lead_no_call_to_the_host",
    "test_paths_of_urls_lead_to_no_file_of_the_service",
    "test_what_is_no_path_is_refused_with_its_name",
)


RACES_ON_STRONG = (
    "test_created_and_deleted_twice_at_once",
    "test_a_delete_at_any_moment_of_an_exec_leaves_one_true_result",
    "test_a_delete_wins_against_pause_and_resume_at_any_moment",
    "test_of_many_who_pause_resume_and_delete_at_once_the_delete_wins",
    "test_a_renewal_after_the_time_is_lost",
    "test_what_a_stopped_holder_does_afterwards_is_refused_and_the_next_ones_data_is_untouched",
)
RACES_ON_RUNC = (
    *RACES_ON_STRONG,
    "test_the_sandbox_of_a_run_can_be_deleted_under_it",
    "test_a_paused_sandbox_is_deleted_as_fast_as_any_other",
)
"""Of K11 and K16 what the runtime has a part in, with fewer rounds; the rest is decided by the service, whatever runs below it."""


def rounds(box: Box, count: int) -> int:
    """How often a race is run: all the rounds on the usual runtimes, some on those that are shown beside them."""
    return count if box.name in MODES else max(4, count // 10)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is shown by another runtime, and of what is for the strong ones that which costs them minutes."""

    def too_dear(item: pytest.Item) -> bool:
        modes = getattr(item, "callspec", None)
        given = [] if modes is None else list(modes.params.values())  # not only names: some are lists
        if item.path.name.startswith(("test_k11", "test_k16")) and any(mode in given for mode in (*RUNC, *STRONG)):
            return not item.name.startswith(RACES_ON_RUNC if any(mode in given for mode in RUNC) else RACES_ON_STRONG)
        if any(mode in given for mode in RUNC):
            return not item.path.name.startswith(ON_RUNC) or item.name.startswith(SHOWN_ON_CRUN)
        if not any(mode in given for mode in STRONG):
            return False
        return not item.path.name.startswith(ON_STRONG) or item.name.startswith(TOO_DEAR)

    left_out = [item for item in items if too_dear(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _box_of(mode: str, state: Path, shared: Path) -> Box:
    return user_box(state, shared) if mode == "bubblewrap-user" else root_box(state, shared, mode.partition("-")[0])


def _empty(box: Box) -> None:
    """End what lives on a state directory, and search the host for what is left of it."""
    for process in box.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    listed = box.document("sandbox", "ls", "--json")[1]["items"]
    live = [item["id"] for item in listed if item["state"] != "terminated"]
    if live:
        box("sandbox", "rm", *live)
    gone = box("gc")
    assert gone.returncode == 0, gone.stderr
    found = box.document("doctor", "--json")[1]
    assert found.get("leftovers") == [], found  # an error has none, and tells what it is
    assert not holding(box.state), "a process of this state directory lives on"
    assert str(box.state) not in Path("/proc/self/mountinfo").read_text()
    shutil.rmtree(box.state, ignore_errors=True)


@pytest.fixture(scope="session", params=(*MODES, *RUNC, *STRONG))
def box(request: pytest.FixtureRequest, shared: Path) -> Iterator[Box]:
    """Parametrised over runtime and user; one state directory per worker and mode, searched for leftovers at the end."""
    mode = request.param
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    box = _box_of(mode, shared / f"s-{mode}-{worker}", shared)
    made = box("run", "--runtime", box.runtime, "-c", "print(1)", timeout=600)
    assert (made.returncode, made.stdout) == (0, b"1\n"), made.stderr
    yield box
    _empty(box)


@pytest.fixture(scope="session")
def serve(shared: Path) -> Iterator[Callable[[str], Server]]:
    """`corral serve` of a mode, one per worker, started when it is asked for; searched for leftovers and failures at the end."""
    from .serving import Server

    servers: dict[str, Server] = {}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")

    def of(mode: str) -> Server:
        if mode not in servers:
            servers[mode] = Server(_box_of(mode, shared / f"v-{mode}-{worker}", shared))
        return servers[mode]

    yield of
    for server in servers.values():
        server.stop()
        _empty(server.box)
    for server in servers.values():
        assert "Traceback" not in server.said, server.said[-4000:]


@pytest.fixture(params=(*MODES, *RUNC, *STRONG))
def server(request: pytest.FixtureRequest, serve: Callable[[str], Server]) -> Server:
    """A server of each runtime and user."""
    return serve(request.param)
