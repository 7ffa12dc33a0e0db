"""What is left: for the next tenant in the same place, for a neighbour, and on the host after everything."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.testing.certify.bench import Bench, Box, status_of
from corral.testing.certify.register import attack
from corral.testing.certify.verdict import AFTERWARDS, Finding, Seen, Trial, find
from corral.testing.hostile.prelude import PRELUDE, TELL
from corral.testing.hostile.residue import CLEAN, LEAVE, LOOK_FOR_MARKS, PLACES

if TYPE_CHECKING:
    from collections.abc import Iterator

TENANTS = 6
"""How many next tenants are asked until one has the same ids and the same device."""
MOUNTS = PRELUDE + 'answers["rows"] = open("/proc/self/mountinfo").read().splitlines()\n' + TELL


def _word() -> str:
    return f"mark{os.urandom(8).hex()}"


def _marks(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: answers[name] for name in CLEAN}


def _trials(found: dict[str, Any], planted: dict[str, Any]) -> list[Trial]:
    told = {
        "files": "marks in files",
        "shm": "System V memory",
        "msg": "System V queues",
        "sem": "System V semaphores",
        "tcp": "a listening port",
        "abstract": "an abstract socket",
        "processes": "a daemon",
    }
    return [
        Trial(
            told[name],
            Seen(found[name] != clean, "found" if found[name] != clean else "nothing"),
            Seen(planted[name] != clean, "a later exec of the same sandbox finds it"),
        )
        for name, clean in CLEAN.items()
    ]


@dataclass(frozen=True)
class _Place:
    """Who and where a sandbox is on the host: ids of its processes, directory, device of its disk."""

    ids: frozenset[str]
    directory: str
    device: str | None

    def shared(self, other: _Place) -> set[str]:
        """What both have."""
        same = {"directory"} if self.directory == other.directory else set()
        same |= {"ids"} if self.ids & other.ids else set()
        return same | ({"device"} if self.device and self.device == other.device else set())


async def _place(box: Box) -> _Place:
    ids = frozenset(uid for pid in await box.pids() for uid in status_of(pid).get("Uid", "").split())
    device = None
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            left, _, right = line.partition(" - ")
            if left.split()[4] == str(box.tree):
                device = right.split()[1]
    return _Place(ids, box.instance.ref.directory, device)


@attack(
    "residue",
    "the next tenant",
    "finds files, memory, ports, sockets or processes of the one before in the same place",
    "host",
)
async def next_tenant(bench: Bench) -> list[Trial]:
    await bench.let_go("small", "roomy", "bare", "unfiltered")
    word = _word()
    box = await bench.create()
    await box.ask(LEAVE, word, *PLACES)
    planted = _marks(await box.ask(LOOK_FOR_MARKS, word, *PLACES))
    before, name = await _place(box), box.instance_id
    await box.destroy()
    found: dict[str, Any] = dict(CLEAN)
    same: set[str] = set()
    missing: set[str] = set()
    for _ in range(TENANTS):
        # The same name: the same directory and the same control group.
        async with bench.box(instance_id=name) as tenant:
            answers = _marks(await tenant.ask(LOOK_FOR_MARKS, word, *PLACES))
            found.update({key: value for key, value in answers.items() if value != CLEAN[key]})
            same |= before.shared(await _place(tenant))
        missing = ({"ids", "directory"} | ({"device"} if before.device else set())) - same
        if not missing:
            break
    return [met(trial, same, missing) for trial in _trials(found, planted)]


def met(trial: Trial, same: set[str], missing: set[str]) -> Trial:
    """What a tenant shows by finding nothing: something only where it met everything of the one before."""
    where = f"with the same {', '.join(sorted(same))}" if same else "in another place"
    if missing:
        where += f", never the same {', '.join(sorted(missing))}"
    broke = None if missing and not trial.attack.broke else trial.attack.broke
    return Trial(trial.way, Seen(broke, f"{trial.attack.how} {where}"), trial.control)


@attack(
    "residue", "a neighbour", "finds the same of a sandbox that lives beside it, or shares a writable mount", "host"
)
async def neighbour(bench: Bench) -> list[Trial]:
    word = _word()
    async with bench.box() as one, bench.box() as two:
        await one.ask(LEAVE, word, *PLACES)
        planted = _marks(await one.ask(LOOK_FOR_MARKS, word, *PLACES))
        found = _marks(await two.ask(LOOK_FOR_MARKS, word, *PLACES))
        mounts = [set(_writable((await box.ask(MOUNTS))["rows"])) for box in (one, one, two)]
    shared = mounts[1] & mounts[2]
    how = f"{len(mounts[0])} writable mounts, {len(shared)} shared"
    control = Seen(mounts[0] == mounts[1] and bool(mounts[0]), "of one sandbox the look gives the same twice")
    if await bench.own_kernel():
        why = "each kernel numbers its own devices; the marks are the witness"
        return [*_trials(found, planted), Trial("writable mounts", Seen(None, why), control)]
    return [*_trials(found, planted), Trial("writable mounts", Seen(bool(shared), how), control)]


def _writable(rows: list[str]) -> Iterator[str]:
    """(device, directory in it) of every writable mount, as the kernel names them."""
    for line in rows:
        fields = line.partition(" - ")[0].split()
        if "rw" in fields[5].split(",") and not fields[4].startswith(("/proc", "/dev/")):
            yield f"{fields[2]} {fields[3]}"


# -- on the host -----------------------------------------------------------------------------------------------------------------


def traces(state: str, installation: str) -> list[str]:
    """Everything of the host that still speaks of a trial: looked for without node and adapter."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        found += ["a mount" for line in table if f"{state}/" in line]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if f"{state}/" in backing.read_text():
                found.append("a loop device")
    for path, names, _ in os.walk("/sys/fs/cgroup"):
        found += ["a control group" for name in names if installation in f"{path}/{name}"]
    mine = {os.getpid(), os.getppid()}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) not in mine:
            with contextlib.suppress(OSError):
                line = (place / "cmdline").read_bytes()
                if os.fsencode(f"{state}/") in line or installation.encode() in line:
                    found.append("a process")
    for instance in Path(state).glob("i/*"):
        found.append(f"a directory {'of an instance' if instance.is_dir() else 'entry'}")
    return found


async def while_living(bench: Bench) -> int:
    """How many traces the same look finds while a sandbox lives: its control."""
    await bench.held()
    return len(traces(str(bench.state), bench.installation))


def remove(state: str) -> bool:
    """Remove the directory of the trial, unless something is mounted there still: what that shows is not ours to remove."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        if not any(f"{Path(state).name}/" in line for line in table):
            shutil.rmtree(state, ignore_errors=True)
    return not os.path.lexists(state)


def after_all(state: str, installation: str, living: int) -> list[Finding]:
    """The last finding, once everything is closed: nothing of the trial is on the host any more."""
    left = traces(state, installation)
    if not remove(state):
        left.append("the directory of the trial")
    found = sorted({f"{name} x{left.count(name)}" for name in left})
    seen = Seen(bool(left), ", ".join(found) if found else "no mount, loop device, control group, process or directory")
    control = Seen(living > 0, f"while a sandbox lived the same look found {living}")
    trial = Trial("after everything", seen, control)
    return [find(*AFTERWARDS, "mounts, devices, groups, processes and files of the trial are gone", "host", [trial])]  # fmt: skip
