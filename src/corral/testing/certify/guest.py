"""An exec against its own guest and supervisor: memory, signals, the control channel, forged frames, old fences."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time

from corral.channel.client import GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.linux import sockets
from corral.testing.certify.bench import FENCE, Bench, Box, fresh, status_of
from corral.testing.certify.captured import CLAIMS_END
from corral.testing.certify.register import Try, attack, of_its_own, opened
from corral.testing.certify.verdict import Seen, Trial
from corral.testing.hostile.channel import CONNECT, DESCRIPTORS, FORGE, FORGERIES, SPEAK
from corral.testing.hostile.guest import guest
from corral.testing.hostile.memory import LOOK_AT_GUEST
from corral.testing.hostile.prelude import PRELUDE, TELL
from corral.testing.hostile.signals import AT_GUEST, AT_SUPERVISOR, SIGNAL, WAYS

WHERE = "with every defence of the guest off"


TOLD = frozenset(
    [
        "environ",
        "maps",
        "smaps",
        "auxv",
        "stack",
        "syscall",
        "pagemap",
        "io",
        "personality",
        "list fd",
        "list map_files",
        "follow fd",
        "exe",
        "namespace",
    ]
)
"""What /proc tells of a process: less than its memory, more than a program should know."""


RANK = frozenset({"affinity", "priority", "scheduler"})
"""What a kernel of its own only notes down: the host's scheduler is not asked."""


def _memory(told: bool) -> Try:
    async def run(bench: Bench) -> list[Trial]:
        async def ask() -> dict[str, tuple[dict[str, str], dict[str, str]]]:
            held, bare = await bench.held(), await bench.bare()
            found = {}
            for target in ("guest", "supervisor"):
                here, there = await asyncio.gather(held.ask(LOOK_AT_GUEST, target), bare.ask(LOOK_AT_GUEST, target))
                found[target] = (here, there)
            return found

        found: dict[str, tuple[dict[str, str], dict[str, str]]] = await bench.once("memory", ask)
        own = RANK if await bench.own_kernel() else frozenset()
        return [
            Trial(
                f"{name} of the {target}",
                of_its_own(opened(answer)) if name in own else opened(answer),
                opened(there.get(name), WHERE),
            )
            for target, (here, there) in found.items()
            for name, answer in here.items()
            if (name in TOLD) == told
        ]

    return run


attack("guest", "memory of guest and supervisor", "reads, traces, alters or starves PID 1 and the supervisor")(
    _memory(False)
)
attack("guest", "what /proc tells of them", "reads environment, maps and descriptors of PID 1 and the supervisor")(
    _memory(True)
)


@attack("guest", "kill of the supervisor", "ends or stops the supervisor of its exec, by every way to signal")
async def supervisor(bench: Bench) -> list[Trial]:
    trials = []
    for way in (*WAYS, "group"):
        held, bare = await bench.held(), await bench.bare()
        seen, control = await asyncio.gather(_at_supervisor(held, way), _at_supervisor(bare, way))
        trials.append(Trial(way, seen, Seen(control.broke, f"{WHERE}: {control.how}")))
    return trials


async def _at_supervisor(box: Box, way: str) -> Seen:
    ended = await box.python(AT_SUPERVISOR, way, "9")
    if ended.facts.guest_lost or ended.facts.sandbox_lost or ended.reason == "sandbox_lost":
        return Seen(True, "it died")
    try:
        told = ended.json()
    except (CorralError, ValueError):
        # A signal to the whole group reaches its sender as well: what counts is that the supervisor told of that.
        return Seen(False, "it lived and told of the end") if ended.facts.signal == 9 else Seen(None, ended.reason)
    lost = told["supervisor"] in ("gone", "T")
    return Seen(lost, "it died" if lost else "it lived" if told["told"] == "0" else told["told"])


@attack("guest", "signals at PID 1", "ends the guest by every signal", "host")
async def pid_1(bench: Bench) -> list[Trial]:
    async with bench.box() as box:
        before = await _first(box)
        with contextlib.suppress(CorralError):
            await box.ask(AT_GUEST)
        alive = await box.works() and await _first(box) == before
    plain = await bench.outside(PLAIN, *WAYS)
    died = plain is not None and set(plain.values()) == {9}
    return [
        Trial(
            "every signal",
            Seen(not alive, "it lives" if alive else "it ended"),
            Seen(died if plain is not None else None, "a plain process of the host dies of them"),
        )
    ]


PLAIN = (
    SIGNAL
    + r"""
for way in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(30)
        os._exit(0)
    while os.getsid(child) != child:
        time.sleep(0.001)
    send(way, child, 9)
    answers[way] = os.WTERMSIG(os.waitpid(child, 0)[1])
"""
    + TELL
)


async def _first(box: Box) -> int | None:
    """PID 1 of the sandbox as the host numbers it; where no process is seen, the first that is listed."""
    pids = await box.pids()
    for pid in pids:
        if status_of(pid).get("NSpid", "").split()[-1:] == ["1"]:
            return pid
    return pids[0] if pids else None


@attack(
    "guest",
    "descriptors and sockets",
    "finds the control channel: an open descriptor, a path, a name, another's descriptor",
)
async def channel(bench: Bench) -> list[Trial]:
    box = await bench.held()
    mine = (await box.ask(DESCRIPTORS))["mine"]
    more = (await box.ask("import os\nfor _ in range(3): os.open('/', os.O_RDONLY)\n" + DESCRIPTORS))["mine"]
    extra = sorted(set(mine) - {"0", "1", "2"})
    directory = box.instance.ref.directory
    own = [f"{directory}/s", "/run/corral/i/s", "/s", "/workspace/s"]
    answers = await box.ask(CONNECT, json.dumps(own))
    listed = answers.pop("listed")
    reached = sorted(name for name, answer in answers.items() if answer == "ok")
    spoken = await bench.outside(SPEAK, directory) if box.instance.control == "socket" else None
    control = Seen(None, "the guest of this runtime has no socket: nothing to connect to anywhere")
    if box.instance.control == "socket":
        control = opened((spoken or {}).get("speak"), "for the owner of the state directory")
    how = f"reached: {', '.join(reached)}" if reached else f"{len(answers)} ways refused, {len(listed)} sockets listed"
    return [
        Trial("descriptors", Seen(bool(extra), f"{len(mine)} open"), Seen(len(more) > len(mine), "the look finds what is open")),
        Trial("sockets", Seen(bool(reached), how), control),
    ]  # fmt: skip


@attack("guest", "forged frames", "writes frames of the guest's protocol to every descriptor that it has", "host")
async def forged(bench: Bench) -> list[Trial]:
    trials = []
    async with bench.box(guest=guest(CLAIMS_END)) as liar:
        believed = (await liar.python("raise SystemExit(3)", background="kill")).reason == "ok"
    control = Seen(believed, "said by PID 1 itself the same frame is believed")
    box = await bench.held()
    for name, frame in FORGERIES.items():
        ended = await box.python(FORGE, frame.hex(), stdin=b"", stdin_open=True)
        as_output = ended.stdout == frame and ended.facts.exit_code == 7 and not ended.facts.guest_lost
        trials.append(Trial(name, Seen(not as_output, "was output" if as_output else ended.reason), control))
    return trials


@attack(
    "guest", "old fences", "a worker whose lease is over starts programs, at the node and past it at the guest", "host"
)
async def fences(bench: Bench) -> list[Trial]:
    async with bench.box() as box:
        new = Fence(FENCE.incarnation, FENCE.token + 5)
        await bench.node.fence(box.instance_id, new, "adopt")
        node_old, node_new = await _start(box, FENCE), await _start(box, new)
        trials = [Trial("at the node", node_old, node_new)]
        if box.instance.control == "socket":
            guest_old, guest_new = await _past_the_node(box, FENCE), await _past_the_node(box, new)
            trials.append(Trial("at the guest", guest_old, guest_new))
    return trials


async def _start(box: Box, fence: Fence) -> Seen:
    try:
        await box.wait(await box.start_python("pass", fence=fence))
    except CorralError as error:
        return Seen(False if error.code == "lease_lost" else None, f"{error.code} with that fence")
    return Seen(True, "starts with the newest")


async def _past_the_node(box: Box, fence: Fence) -> Seen:
    """As a stale worker on this host would: by the guest's own socket, whose other user is thrown off by that."""
    client = await GuestClient.connect(sockets.connect(box.instance.ref.directory, "s", timeout_s=15))
    try:
        exec_id = fresh("exe")
        spec = {
            "exec_id": exec_id,
            "argv": [*box.bench.stage.python, "-c", "pass"],
            "cwd": "/",
            "env": {},
            "uid": box.instance.exec_uid,
            "gid": box.instance.exec_uid,
        }
        await client.start_exec(spec, fence=fence)
    except CorralError as error:
        return Seen(False if error.code == "lease_lost" else None, f"{error.code} with that fence")
    finally:
        await client.close()
    return Seen(True, "starts with the newest")


@attack(
    "guest",
    "what the control plane holds",
    "finds environment, arguments, descriptors or the directory of who made it",
    "host",
)
async def secrets_of_the_host(bench: Bench) -> list[Trial]:
    word = f"corral-secret-{os.urandom(12).hex()}"
    hidden = bench.state / word
    hidden.mkdir()
    (hidden / "file").write_text(word)
    before, leak = os.getcwd(), os.open(hidden / "file", os.O_RDONLY)
    os.set_inheritable(leak, True)
    os.environ["CORRAL_CERTIFY_SECRET"] = word
    try:
        os.chdir(hidden)
        box = await bench.create()
    finally:
        os.chdir(before)
        os.close(leak)
        del os.environ["CORRAL_CERTIFY_SECRET"]
    try:
        await box.start_python("import time; time.sleep(600)")
        began = time.monotonic()
        pids: list[int] = []
        while len(pids) < 2 and time.monotonic() - began < 5:
            pids = await box.pids()
            await asyncio.sleep(0.02)
        seen = sorted({place for pid in pids for place in _places_with(pid, word)})
        inside = (await box.ask(SEARCH, word[::-1]))["found"]
        control = (await box.ask("import os; os.environ['PLANTED'] = __import__('sys').argv[1][::-1]\n" + SEARCH, word[::-1]))["found"]  # fmt: skip
    finally:
        await box.destroy()
    looked = Seen(
        _places_with(os.getpid(), os.fsencode(os.environ.get("PATH", "/")).decode()) != [],
        "the same look finds our own",
    )
    return [
        Trial("seen by the host", Seen(bool(seen), ", ".join(seen) or f"nothing in {len(pids)} processes"), looked),
        Trial("seen inside", Seen(bool(inside), ", ".join(inside) or "nothing"), Seen(bool(control), "the same look finds what is planted")),
    ]  # fmt: skip


def _places_with(pid: int, word: str) -> list[str]:
    """Where /proc/PID of the host shows the word; what may not be looked at shows nothing."""
    found = []
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            if word.encode() in file.read():
                found.append(name)
    with contextlib.suppress(OSError):
        links = [f"/proc/{pid}/cwd", *(f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd"))]
        for link in links:
            with contextlib.suppress(OSError):
                if word in os.readlink(link):
                    found.append("cwd" if link.endswith("cwd") else "a descriptor")
    return found


SEARCH = (
    PRELUDE
    + r"""
word = sys.argv[1][::-1].encode()  # backwards, so that the look does not find itself
found = set()
if word in b"".join(f"{k}={v}".encode() for k, v in os.environ.items()):
    found.add("environment")
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    for name in ("environ", "cmdline"):
        try:
            if word in open(f"/proc/{pid}/{name}", "rb").read():
                found.add(name)
        except OSError:
            pass
    try:
        for name in ["cwd", "root", *("fd/" + n for n in os.listdir(f"/proc/{pid}/fd"))]:
            try:
                if word in os.fsencode(os.readlink(f"/proc/{pid}/{name}")):
                    found.add(name)
            except OSError:
                pass
    except OSError:
        pass
for place, names, files in os.walk("/", followlinks=False):
    if place == "/":
        names[:] = [n for n in names if n not in ("proc", "sys", "dev")]
    found.update("a name" for name in names + files if word in os.fsencode(name))
answers["found"] = sorted(found)
"""
    + TELL
)
