"""What a claim and an exec cost over HTTP, alone and with many clients at once: on SQLite, on PostgreSQL, with one and two replicas.

    .venv/bin/python -m bench.claims [--clients 50] [--rounds 20] [--stores sqlite,postgres-1,postgres-2] [--json FILE]

Per store an installation of its own is started, with as many sandboxes as clients. `create` makes a sandbox (and deletes it behind the
clock), `attach` acquires an idle one as another owner (store, node and guest take the fence), `exec` runs `/bin/true` in one's own,
`fork` is fork+exec of the same program on the host. Everything is timed by one client alone and by all at once, in turns with `fork` within each round;
ratios are to the median of `fork` in the same way. The clients share the machine with the servers. Memory is that of all processes of
the installation together, PostgreSQL and Redis not counted.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.run import TRUE, arguments, leftovers, spawn
from corral.testing.history.installation import Installation

STORES = {"sqlite": 0, "postgres-1": 1, "postgres-2": 2}
"""Replicas of each; 0 = one process with its own SQLite file."""
PER_CLIENT = 4
"""Calls of each client in a round with all at once."""
IDLE_S = 30.0


@dataclass
class Series:
    """Times of one kind of call, in milliseconds: by one client alone, and by all at once with what they did per second."""

    alone: list[float] = field(default_factory=list)
    crowd: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Caller:
    """One client: a connection that is kept, a sandbox of its own, a name."""

    def __init__(self, installation: Installation, number: int) -> None:
        self._it = installation
        self._number = number
        self._turn = 0
        self._connection: http.client.HTTPConnection | None = None
        self.sandboxes: list[str] = []
        """Its own first."""
        self._fence: str | None = None

    def call(self, method: str, path: str, document: Any = None, **headers: str) -> Any:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._it.port, timeout=120)
        body = None if document is None else json.dumps(document)
        fields = {"Authorization": f"Bearer {self._it.key}", **headers}
        for last in (False, True):
            try:
                self._connection.request(method, path, body, fields)
                answer = self._connection.getresponse()
                told = json.loads(answer.read())
                break
            except (http.client.RemoteDisconnected, ConnectionError):  # an idle connection was ended meanwhile
                self._connection.close()
                if last:
                    raise
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {told}")
        return told

    def made(self) -> None:
        document = {"runtime": "bubblewrap", "memory": "64M", "disk": "16M"}
        self.sandboxes.append(self.call("POST", "/v1/sandboxes", document)["id"])

    def deleted(self) -> None:
        self.call("DELETE", f"/v1/sandboxes/{self.sandboxes.pop()}?wait=60")

    def leased(self) -> None:
        """As somebody new."""
        self._turn += 1
        path = f"/v1/sandboxes/{self.sandboxes[0]}/attach"
        self._fence = self.call("POST", path, {"owner": f"bench/{self._number}-{self._turn}", "ttl_s": 3600})["lease"]

    def held(self) -> None:
        if self._fence is None:
            self.leased()

    def idle(self) -> None:
        """Given back, and settled."""
        path = f"/v1/sandboxes/{self.sandboxes[0]}"
        if self._fence is not None:
            self.call("POST", f"{path}/release", {}, **{"Corral-Lease": self._fence})
            self._fence = None
        end = time.monotonic() + IDLE_S
        while self.call("GET", path)["state"] == "recycling":
            if time.monotonic() > end:
                raise RuntimeError(f"{path} does not become idle")
            time.sleep(0.01)

    def worked(self) -> None:
        assert self._fence is not None
        path = f"/v1/sandboxes/{self.sandboxes[0]}/execs?wait=60"
        told = self.call("POST", path, {"argv": [TRUE]}, **{"Corral-Lease": self._fence})
        if told["result"]["reason"] != "ok":
            raise RuntimeError(told["result"])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def timed(once: Callable[[], Any]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    once()
    return (time.perf_counter() - began) * 1000


@dataclass(frozen=True)
class Kind:
    """What is timed, `times` times by each client in a round; what must be so before, and is undone behind it, is not timed."""

    once: Callable[[Caller], None]
    before: Callable[[Caller], None] = lambda _: None
    behind: Callable[[Caller], None] = lambda _: None
    times: int = 1


KINDS = {
    "fork": Kind(lambda _: spawn([TRUE]), times=PER_CLIENT),
    "exec": Kind(Caller.worked, before=Caller.held, times=PER_CLIENT),
    "attach": Kind(Caller.leased, before=Caller.idle),
    "create": Kind(Caller.made, behind=Caller.deleted),
}


def together(callers: list[Caller], kind: Kind) -> tuple[list[float], float]:
    """All at once; -> (every time, calls per second)."""
    found: list[float] = []
    spans: list[tuple[float, float]] = []
    failed: list[BaseException] = []
    ready = threading.Barrier(len(callers))

    def live(caller: Caller) -> None:
        try:
            kind.before(caller)
            ready.wait()
            began = time.perf_counter()
            mine = [timed(lambda: kind.once(caller)) for _ in range(kind.times)]
            spans.append((began, time.perf_counter()))
            ready.wait()
            kind.behind(caller)
        except BaseException as error:
            failed.append(error)
            ready.abort()
        else:
            found.extend(mine)

    threads = [threading.Thread(target=live, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
    return found, len(found) / (max(end for _, end in spans) - min(began for began, _ in spans))


def alone(caller: Caller, kind: Kind) -> float:
    """By one client while the others do nothing."""
    kind.before(caller)
    took = timed(lambda: kind.once(caller))
    kind.behind(caller)
    return took


def resident(installation: Installation) -> int:
    """Bytes of all processes of the installation: the server and what it started, sandboxes not counted."""
    assert installation.server is not None
    pids = [installation.server.pid]
    pids += [ref.pid for word in ("replica", "node") for ref in installation.children(word)]
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return total


def furnished(state: Path, built: Path) -> None:
    """Templates and interpreter of an installation that was built before."""
    state.mkdir(parents=True)
    for name in ("base", "interpreter"):
        subprocess.run(["cp", "-al", str(built / name), str(state / name)], check=True)
    record = json.loads((built / "base" / "host.json").read_text())
    record["path"] = str(state / "base" / Path(record["path"]).name)
    (state / "base" / "host.json").unlink()
    (state / "base" / "host.json").write_text(json.dumps(record))


def measure(scratch: Path, store: str, options: Any) -> dict[str, Any]:
    """One installation from its start to its end."""
    place = scratch / store
    place.mkdir(mode=0o755)
    installation = Installation(place, STORES[store])
    if (built := scratch / "built").exists():
        furnished(installation.state, built)
    callers: list[Caller] = []
    try:
        installation.start()
        installation.wait_ready()
        fresh = resident(installation)
        callers = [Caller(installation, number) for number in range(options.clients)]
        for caller in callers:
            caller.made()
        if not built.exists():
            built.mkdir()
            for name in ("base", "interpreter"):
                subprocess.run(["cp", "-al", str(installation.state / name), str(built / name)], check=True)
        series = {name: Series() for name in KINDS}
        for kind in KINDS.values():  # one uncounted round: caches, lazy imports
            together(callers[:2], kind)
        for number in range(options.rounds):
            for name, kind in KINDS.items():
                series[name].alone.append(alone(callers[number % len(callers)], kind))
            for name, kind in KINDS.items():
                times, rate = together(callers, kind)
                series[name].crowd += times
                series[name].rates.append(rate)
            if sys.stderr.isatty():
                print(f"\r{store} round {number + 1}/{options.rounds}", end="", file=sys.stderr, flush=True)
        loaded = resident(installation)
        for caller in callers:
            caller.deleted()
        rows = [row_of(name, series[name], series["fork"]) for name in KINDS]
        return {"store": store, "rows": rows, "rss_fresh": fresh, "rss_loaded": loaded}
    finally:
        for caller in callers:
            caller.close()
        installation.close()


def row_of(name: str, one: Series, base: Series) -> dict[str, Any]:
    """Medians, 99th percentiles, and ratios to fork+exec in the same way."""
    found: dict[str, Any] = {"kind": name, "per_second": statistics.median(one.rates)}
    for way in ("alone", "crowd"):
        times, against = getattr(one, way), getattr(base, way)
        middle = statistics.median(times)
        found[way] = {
            "p50_ms": middle,
            "p99_ms": percentile(times, 0.99),
            "ratio": middle / statistics.median(against),
        }
    return found


def percentile(times: list[float], share: float) -> float:
    """The smallest that is not below this share of them."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--stores", default=",".join(STORES), help="names, with commas between")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="cb-"))
    scratch.chmod(0o755)
    load = os.getloadavg()[0]
    try:
        found = [measure(scratch, store, options) for store in options.stores.split(",")]
        left = leftovers(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    head = f"{options.clients} clients, {options.rounds} rounds, {os.cpu_count()} CPUs, kernel {platform.release()}"
    print(f"{head}, load {load:.2f} -> {os.getloadavg()[0]:.2f}")
    print(
        f"{'store':<12}{'call':<8}{'alone p50':>10}{'p99':>9}{'x fork':>8}{'all p50':>10}{'p99':>9}{'x fork':>8}{'per s':>9}"
    )
    for one in found:
        for row in one["rows"]:
            times = "".join(
                f"{row[name]['p50_ms']:>10.2f}{row[name]['p99_ms']:>9.2f}{row[name]['ratio']:>8.1f}"
                for name in ("alone", "crowd")
            )
            print(f"{one['store']:<12}{row['kind']:<8}{times}{row['per_second']:>9.1f}")
        print(
            f"{one['store']:<12}RSS {one['rss_fresh'] / 1e6:.0f} MB fresh, {one['rss_loaded'] / 1e6:.0f} MB after all"
        )
    if left:
        print("LEFT BEHIND:", *left, sep="\n  ")
    if options.json:
        options.json.write_text(
            json.dumps({"clients": options.clients, "rounds": options.rounds, "stores": found}, indent=1)
        )
    return 1 if left else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
