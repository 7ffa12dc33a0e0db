"""A chaos run: an installation of its own, clients and nemesis by a plan, then quiet, a look at what is left, and the verdict."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.errors import CorralError
from corral.testing.history import quiet
from corral.testing.history.checker import Verdict, check
from corral.testing.history.client import Spec
from corral.testing.history.events import Event, Recorder, read
from corral.testing.history.installation import Installation
from corral.testing.history.nemesis import Nemesis, jump_of, write_clock
from corral.testing.history.plan import Plan
from corral.testing.history.proxy import Proxy
from corral.testing.history.receiver import Receiver, own_address

Progress = Callable[[str], None]
LEAVE_S = 90.0
"""How long a client may take to finish what it is doing."""


@dataclass(frozen=True)
class Report:
    """`told`: answers by call and outcome; `faults`: how often each was done; `directory`: kept when a promise was broken."""

    plan: Plan
    verdict: Verdict
    events: int
    took_s: float
    told: dict[str, dict[str, int]]
    faults: dict[str, int]
    straight: dict[str, int] = field(default_factory=dict)
    directory: str | None = None

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def document(self) -> dict[str, Any]:
        return {
            "seed": self.plan.seed,
            "kind": self.plan.kind,
            "seconds": self.plan.seconds,
            "ok": self.ok,
            "events": self.events,
            "took_s": round(self.took_s, 1),
            "calls": self.told,
            "faults": self.faults,
            "old_fences": self.straight,
            "examined": self.verdict.examined,
            "violations": [
                {"rule": one.rule, "what": one.what, "events": [str(event) for event in one.events]}
                for one in self.verdict.violations
            ],
            "directory": self.directory,
        }


class Clients:
    """Processes by name; one that died is replaced by one that goes on with the next act."""

    def __init__(
        self,
        plan: Plan,
        installation: Installation,
        directory: Path,
        urls: list[tuple[str, ...]],
        receiver: str | None = None,
    ) -> None:
        self._plan = plan
        self._receiver = receiver
        self._it = installation
        self._directory = directory
        self._urls = urls
        self._leases = installation.has_leases()
        self._clock = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), None)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._watch: threading.Thread | None = None
        self.crashes = 0

    def start(self) -> None:
        for client in range(self._plan.clients):
            self._begin(client, 0)
        self._watch = threading.Thread(target=self._replace, name="clients")
        self._watch.start()

    def history(self, client: int) -> Path:
        return self._directory / f"client{client}.jsonl"

    def _begin(self, client: int, first: int) -> None:
        spec = Spec(
            self._plan,
            client,
            first,
            self._urls[client],
            self._it.keys[self._plan.tenant(client)],
            str(self.history(client)),
            runtime="bubblewrap",
            token=self._it.token,
            leases=self._leases,
            receiver=self._receiver,
            others=tuple(
                str(self.history(other))
                for other in range(self._plan.clients)
                if self._plan.tenant(other) != self._plan.tenant(client)
            ),
        )
        path = self._directory / f"client{client}.json"
        path.write_text(json.dumps(spec.document()))
        path.chmod(0o600)
        env = dict(os.environ)
        if self._clock is not None and self._jumps(client):
            clock = self._directory / f"clock{client}"
            if not clock.exists():
                write_clock(clock, "+0")
            # Its monotonic clock stays true: it stamps the history.
            env |= {"LD_PRELOAD": self._clock, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
            env |= {"DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        with open(self._directory / f"client{client}.log", "ab") as log:
            self._processes[client] = subprocess.Popen(
                [sys.executable, "-m", "corral.testing.history.client", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd="/",
                start_new_session=True,
            )

    @staticmethod
    def _jumps(client: int) -> bool:
        return client % 2 == 1

    def _replace(self) -> None:
        while not self._over.wait(0.1):
            with self._guard:
                for client, one in list(self._processes.items()):
                    if one.poll() is not None and not self._over.is_set():
                        self.crashes += 1
                        self._begin(client, self._done(client) + 1)

    def _done(self, client: int) -> int:
        with contextlib.suppress(FileNotFoundError), open(self.history(client), encoding="utf-8") as file:
            return max((int(event["index"]) for event in read(file) if event.kind == "act"), default=-1)
        return -1

    def kill(self, dice: float) -> str:
        with self._guard:
            client = sorted(self._processes)[int(dice * len(self._processes))]
            self._processes[client].kill()
            return f"client {client}"

    def jump(self, dice: float) -> str | None:
        fit = [client for client in range(self._plan.clients) if self._jumps(client)]
        if self._clock is None or not fit:
            return None
        client = fit[int(dice * len(fit))]
        write_clock(self._directory / f"clock{client}", jump_of(dice * 7 % 1))
        return f"client {client}"

    def finish(self) -> None:
        """Each finishes its act."""
        self._over.set()
        if self._watch is not None:
            self._watch.join()
        for one in self._processes.values():
            one.terminate()
        end = time.monotonic() + LEAVE_S
        for one in self._processes.values():
            try:
                one.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    def said(self) -> str:
        """What went wrong in the clients themselves, which is no finding."""
        found = []
        for client in range(self._plan.clients):
            text = (self._directory / f"client{client}.log").read_text(errors="replace")
            if "Traceback" in text:
                found.append(f"client {client}: {text[-1500:]}")
        return "\n".join(found)


def run(
    plan: Plan,
    *,
    replicas: int = 2,
    door: quiet.Door | None = None,
    prepare: Callable[[Path], None] | None = None,
    progress: Progress = lambda text: None,
    keep: bool = False,
    spoil: str = "",
) -> Report:
    """Do it. `door` opens the node's socket, for old fences; `prepare` may furnish the state directory before the first start. A failure of the harness itself is an exception."""
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="corral-chaos-"))
    directory.chmod(0o755)
    installation = Installation(directory, replicas if plan.kind == "postgres" else 0, spoil)
    proxies: list[Proxy] = []
    report: Report | None = None
    address = own_address()
    notes = Recorder(directory / "receiver.jsonl", "receiver")
    receiver = None if address is None else Receiver(address, plan.seed, notes)
    installation.write_policy(None if receiver is None else (receiver.address, receiver.port))
    try:
        if prepare is not None:
            prepare(installation.state)
        progress("starting the installation" if receiver is not None else "no address of this host for webhooks: none")
        installation.start()
        installation.wait_ready()
        proxies = [Proxy(installation.port, plan.seed * 10 + number) for number in range(2)]
        direct = f"http://127.0.0.1:{installation.port}"
        ways = [f"http://127.0.0.1:{proxy.port}" for proxy in proxies]
        # Every third client goes straight; the others through a proxy, with the other one as their second way.
        urls: list[tuple[str, ...]] = [
            (direct,) if n % 3 == 2 else (ways[n % 2], ways[1 - n % 2]) for n in range(plan.clients)
        ]
        quiet.warm(installation, progress)
        for number, secret in enumerate(installation.make_tenants(plan.tenants)):
            if receiver is not None:
                receiver.secrets[str(number)] = secret
        clients = Clients(plan, installation, directory, urls, None if receiver is None else receiver.url)
        report = _chaos(plan, installation, directory, proxies, clients, progress, began, door)
        return report
    finally:
        for proxy in proxies:
            proxy.close()
        if report is None:
            quiet.abandon(installation)
        installation.close()
        if receiver is not None:
            receiver.close()
        if report is not None and report.ok and not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _chaos(
    plan: Plan,
    installation: Installation,
    directory: Path,
    proxies: list[Proxy],
    clients: Clients,
    progress: Progress,
    began: float,
    door: quiet.Door | None,
) -> Report:
    nemesis = Nemesis(installation, proxies, clients, Recorder(directory / "nemesis.jsonl", "nemesis"), progress)
    beginning = time.monotonic()
    try:
        clients.start()
        nemesis.start(plan.faults(), beginning)
        while (left := beginning + plan.seconds - time.monotonic()) > 0:
            time.sleep(min(left, 5.0))
            progress(f"{plan.seconds - max(0.0, left):.0f} of {plan.seconds:.0f} s")
    finally:
        nemesis.finish()
        clients.finish()
    if nemesis.failed is not None:
        raise CorralError("infra_error", f"the nemesis itself failed: {nemesis.failed}", retryable=False)
    if said := clients.said():
        raise CorralError("infra_error", f"a client itself failed: {said}", retryable=False)
    progress("waiting for quiet")
    installation.wait_ready()
    known = history(directory)
    final = Recorder(directory / "final.jsonl", "final")
    straight = quiet.collect(installation, plan, known, final, progress, door)
    events = history(directory)
    verdict = check(events)
    told = _told(events)
    place = None if verdict.ok else str(directory)
    return Report(plan, verdict, len(events), time.monotonic() - began, told, nemesis.done, straight, place)


def history(directory: Path) -> list[Event]:
    """All files of a run's directory."""
    found: list[Event] = []
    for path in sorted(directory.glob("*.jsonl")):
        with open(path, encoding="utf-8") as file:
            found += read(file)
    return found


def _told(events: list[Event]) -> dict[str, dict[str, int]]:
    """Answers by call and outcome: what makes a verdict worth something."""
    calls = {(event.by, event["op"]): str(event["call"]) for event in events if event.kind == "invoke"}
    counts: dict[str, Counter[str]] = {}
    for event in events:
        if event.kind in ("return", "unknown") and (name := calls.get((event.by, event["op"]))) is not None:
            how = "unknown" if event.kind == "unknown" else event.get("reason") or event.get("code") or "done"
            counts.setdefault(name, Counter())[str(how)] += 1
    return {name: dict(counter.most_common()) for name, counter in sorted(counts.items())}


def fresh_seed() -> int:
    """One that nobody has chosen; it is printed, and gives the same plan again."""
    return secrets.randbelow(1_000_000)
