"""Escape by files: the host's own, those of the kernel, links laid for the host, set-uid programs; and who the processes are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from corral.errors import CorralError
from corral.testing.certify.bench import (
    FENCE,
    NOBODY,
    Bench,
    Box,
    Canaries,
    create,
    eventually,
    marked,
    status_of,
    unlisted,
)
from corral.testing.certify.register import NO_CONTROL, attack, first, of_its_own, opened
from corral.testing.certify.verdict import Seen, Trial
from corral.testing.hostile.files import ESCAPE, HUNT, KERNEL_FILES, PLANT, RAISED, TARGETS, WRITABLE, WRITE, who_am_i
from corral.testing.hostile.identity import GUEST_CAPABILITIES, STATUS
from corral.testing.hostile.residue import PLACES

USUAL_DEVICES = frozenset(
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")
)


@attack("files", "file of the host", "reads and writes a file of the host, by every path that could lead out", "host")
async def host_file(bench: Bench) -> list[Trial]:
    canaries = Canaries()
    try:
        box = await bench.held()
        code, words = unlisted(ESCAPE, str(canaries.file), canaries.word)
        answers = await box.ask(code, stdin=words)
        untouched = canaries.untouched()
        control = await bench.outside(code, stdin=words)
        trials = [
            Trial(name, opened(answer), opened((control or {}).get("directly"), "on the bare host"))
            for name, answer in answers.items()
        ]
        changed = not canaries.untouched()
        seen = Seen(not untouched, "the file was as before" if untouched else "the file was changed")
        return [*trials, Trial("the file itself", seen, Seen(changed, "changed from the bare host"))]
    finally:
        await canaries.close()


@attack(
    "files",
    "links laid for the host",
    "has the host follow a link or a special file while it copies files in and out",
    "host",
)
async def planted_links(bench: Bench) -> list[Trial]:
    canaries = Canaries()
    into = Path(tempfile.mkdtemp(prefix="corral-certify-into-"))
    try:
        async with bench.box() as box:
            code, words = unlisted(PLANT, str(canaries.file), str(canaries.place))
            planted = await box.ask(code, stdin=words)
            if set(planted.values()) != {"ok"}:
                raise CorralError("infra_error", f"the links could not be laid: {planted}")
            with contextlib.suppress(CorralError):
                await bench.node.collect(
                    box.instance_id, outputs=["/workspace/**"], max_bytes=1 << 25, into=str(into / "taken")
                )
            taken, fine = _holds(into, canaries.word), _holds(into, "mine")
            naive_read, naive_write = _naive(box, canaries)
            for path in (
                "out/link",
                "out/directory/new",
                "linked/file",
                "main.py",
                "root/tmp/x",
                "../file",
                "out/fifo",
                "plain",
            ):
                with contextlib.suppress(CorralError):
                    await bench.node.put_files(box.instance_id, FENCE, [(path, 0o644, b"written by the host")])
            written = not canaries.untouched()
            arrived = (
                await box.python("raise SystemExit(open('/workspace/plain').read() != 'written by the host')")
            ).facts
        return [
            Trial("copied out", copied(taken, "taken along", fine), naive_read),
            Trial("copied in", copied(written, "written", arrived.exit_code == 0), naive_write),
        ]
    finally:
        shutil.rmtree(into, ignore_errors=True)
        await canaries.close()


def copied(led_out: bool, how: str, plain: bool) -> Seen:
    """What a copy shows: one that takes nothing along at all leaves links alone too."""
    if led_out:
        return Seen(True, how)
    return Seen(False, "left alone") if plain else Seen(None, "not even a plain file was copied")


def _holds(place: Path, word: str) -> bool:
    files = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return any(word.encode() in path.read_bytes() for path in files)


def _naive(box: Box, canaries: Canaries) -> tuple[Seen, Seen]:
    """The same links, followed by a program of the host that thinks of nothing."""
    where = "a naive program of the host"
    try:
        read = (box.tree / "workspace/out/link").read_text() == canaries.word
        os.close(create(box.tree / "workspace/linked/new"))
        written = (canaries.place / "new").exists()
        (canaries.place / "new").unlink(missing_ok=True)
    except OSError as error:
        unseen = Seen(None, f"{where} cannot look there: {error.strerror}")
        return unseen, unseen
    return Seen(read, f"{where} is led out"), Seen(written, f"{where} is led out")


@attack("files", "writable places", "writes anywhere but in the places that are the sandbox's own")
async def writable(bench: Bench) -> list[Trial]:
    answers = await (await bench.held()).ask(WRITE)
    outside = sorted(path for path, answer in answers.items() if answer == "ok" and path not in WRITABLE)
    own = [path for path in PLACES if answers.get(path) == "ok"]
    how = f"writable: {', '.join(outside)}" if outside else f"{len(answers) - len(own)} directories refused"
    return [Trial("every directory", Seen(bool(outside), how), Seen(bool(own), f"the same look writes in {len(own)} places of its own"))]  # fmt: skip


@attack("files", "files of the kernel", "reads, writes and enters doors of /proc, /sys and /dev")
async def kernel_files(bench: Bench) -> list[Trial]:
    words = json.dumps(TARGETS)
    answers = await (await bench.held()).ask(KERNEL_FILES, words)
    root = await bench.outside(KERNEL_FILES, words, who="root")
    plain = await bench.outside(KERNEL_FILES, words)
    trials, own = [], await bench.own_kernel()
    for name, answer in answers.items():
        seen = of_its_own(opened(answer)) if own else opened(answer)
        controls = [opened(place.get(name), "on the bare host") for place in (plain, root) if place is not None]
        if not any(control.broke for control in controls) and not bench.root:
            controls.append(NO_CONTROL)
        trials.append(Trial(name, seen, first(*controls)))
    return trials


@attack("files", "core pattern", "has the host's kernel start a program of its choice, or leaves a core")
async def core_pattern(bench: Bench) -> list[Trial]:
    answers = await (await bench.held()).ask(CORES)
    control = await bench.outside(CORES, who="root")
    cores = await bench.outside(CORES)
    return [
        Trial("core_pattern", opened(answers["pattern"]), opened(control["pattern"], "for root of the host") if control else NO_CONTROL),
        Trial("a core", opened(answers["core"]), opened((cores or {}).get("core"), "on the bare host")),
    ]  # fmt: skip


CORES = """
import errno, json, resource
answers = {}
try:
    pattern = open("/proc/sys/kernel/core_pattern").read()
    with open("/proc/sys/kernel/core_pattern", "w") as file:
        file.write(pattern)  # what it was: to be let in is enough
    answers["pattern"] = "ok"
except OSError as error:
    answers["pattern"] = errno.errorcode.get(error.errno, "?")
soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
try:
    resource.setrlimit(resource.RLIMIT_CORE, (hard if hard != 0 else 4096, hard if hard != 0 else 4096))
    answers["core"] = "ok"
except (OSError, ValueError) as error:
    answers["core"] = "EPERM"
print(json.dumps(answers))
"""


@attack("files", "process of the host", "finds and signals a process of the host", "host")
async def host_process(bench: Bench) -> list[Trial]:
    canaries = Canaries()
    try:
        marker = f"corral-hunted-{os.urandom(8).hex()}"
        child = canaries.process(marker)
        await eventually(lambda: marked(marker))
        answers = await (await bench.held()).ask(HUNT, str(child.pid), stdin=marker.encode())
        alive = child.poll() is None
        command = await bench.outside(HUNT.replace("sys.stdin.read()", repr(marker)), str(child.pid))
        await eventually(lambda: child.poll() is not None, 5.0)
        control = Seen(child.poll() is not None, "ended from the bare host")
        found = Seen(answers["found"] > 0, f"{answers['found']} found in /proc")
        seen = Seen((command or {}).get("found", 0) > 0, "found from the bare host")
        ended = Seen(not alive, "still there" if alive else "ended")
        return [Trial("found", found, seen), Trial("ended", ended, control)]
    finally:
        await canaries.close()


@attack("devices", "device files", "finds a device of the host in /dev")
async def devices(bench: Bench) -> list[Trial]:
    code = "import json, os, stat; print(json.dumps({'devices': [e.path for e in os.scandir('/dev') if stat.S_ISCHR(e.stat(follow_symlinks=False).st_mode) or stat.S_ISBLK(e.stat(follow_symlinks=False).st_mode)]}))"
    inside = set((await (await bench.held()).ask(code))["devices"])
    strange = sorted(inside - USUAL_DEVICES)
    outside = await bench.outside(code)
    control = set((outside or {}).get("devices", ())) - USUAL_DEVICES
    how = f"{', '.join(strange)}" if strange else f"{len(inside)} harmless ones"
    seen = Seen(bool(strange), how)
    if await bench.own_kernel():
        seen = of_its_own(seen)
    return [Trial("/dev", seen, Seen(bool(control), f"the host has {len(control)} more"))]


@attack("identity", "uid on the host", "is somebody on the host: uid 0, the control plane's, another sandbox's", "host")
async def host_uid(bench: Bench) -> list[Trial]:
    async with bench.box() as first_box, bench.box() as second_box:
        owners: list[set[int]] = []
        for box in (first_box, second_box):
            exec_id = await box.start_python("import time; time.sleep(600)")
            owners.append({int(uid) for pid in await box.pids() for uid in status_of(pid).get("Uid", "").split()})
            await box.end(exec_id)
    mine, everyone = os.geteuid(), owners[0] | owners[1]
    control = Seen(str(mine) in status_of(os.getpid()).get("Uid", "").split(), "the same look tells who we are")
    if not everyone:
        return [Trial("uids", Seen(None, "the host saw no process of the sandboxes"), control)]
    root = Seen(0 in everyone, "0" if 0 in everyone else f"{len(everyone)} ids, none is 0")
    if bench.info.security_level == 0:
        declared = Seen(None, "declared (level 0): this host gives a user no other ids")
        if mine == 0:
            declared = Seen(mine in everyone, "the control plane's own")
        return [Trial("uid 0", root, control), Trial("another uid than ours", declared, control)]
    own = Seen(mine in everyone, "the control plane's" if mine in everyone else "none is ours")
    shared = owners[0] & owners[1]
    apart = Seen(bool(shared), f"shared: {sorted(shared)}" if shared else "no id is in both")
    return [Trial("uid 0", root, control), Trial("our uid", own, control), Trial("a neighbour's uid", apart, control)]


@attack("identity", "rights", "has capabilities, may gain some, runs without the filter")
async def rights(bench: Bench) -> list[Trial]:
    told = await (await bench.held()).ask(STATUS)
    unfiltered = await (await bench.unfiltered()).ask(STATUS)
    root = await bench.outside(STATUS, who="root")
    plain = await bench.outside(STATUS)

    def bits(answers: dict[str, Any], *kinds: str) -> int:
        return sum(int(answers[kind][0], 16) for kind in kinds if kind in answers)

    caps = bits(told, "CapPrm", "CapEff", "CapAmb", "CapInh")
    allowed = GUEST_CAPABILITIES | (
        1 << 21 if await bench.own_kernel() else 0
    )  # SYS_ADMIN, which only its own kernel honours
    bound = bits(told, "CapBnd") & ~allowed
    gained = told.get("no_new_privs") != 1
    where = "the same look finds some for root of the host"
    has = Seen(bits(root, "CapEff") != 0, where) if root else NO_CONTROL
    free = Seen(plain.get("no_new_privs") == 0, "0 on the bare host") if plain else NO_CONTROL
    return [
        Trial("capabilities", Seen(caps != 0, f"{caps:x}" if caps else "none"), has),
        Trial("bounding set", Seen(bound != 0, f"{bound:x}" if bound else "the guest's own at most"), has),
        Trial("no_new_privs", Seen(gained, "off" if gained else "on"), free),
        Trial("filter", Seen(told.get("filtered") != 2, f"mode {told.get('filtered')}"), Seen(unfiltered.get("filtered") != 2, "off without the filter")),
    ]  # fmt: skip


@attack("identity", "set-uid program", "becomes root by a set-uid program of the template, or by one of its own")
async def raised(bench: Bench) -> list[Trial]:
    box = await bench.held()
    answers = await box.ask(RAISED, "/bin/raised", *PLACES)
    mine = str(box.instance.exec_uid & 255)
    control = NO_CONTROL
    if bench.root:
        place = Path(tempfile.mkdtemp(prefix="corral-certify-raised-", dir=bench.state))
        place.chmod(0o755)
        program = place / "raised"
        program.write_bytes(who_am_i())
        program.chmod(0o4755)
        told = await bench.outside(RAISED, str(program), who="user")
        answer = (told or {}).get("as it is")
        control = Seen(
            answer == "0", f"makes {NOBODY} of the host root" if answer == "0" else f"{answer} on the host too"
        )
    return [
        Trial(name, Seen(answer.isdigit() and answer != mine, answer if not answer.isdigit() else f"runs as {answer} (mod 256)"), control)
        for name, answer in answers.items()
    ]  # fmt: skip
