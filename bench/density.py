"""Density: many idle sandboxes alive at once, what each holds of the host, and what the others notice of them.

    .venv/bin/python -m bench.density [--count 200] [--runtimes bubblewrap,crun] [--in-flight 8] [--json FILE]

Per runtime, one embedded service on a scratch directory: sandboxes are made with so many calls in flight (beside `crun run`, or `bwrap`,
as many in flight in the same minutes, before and after); then PSS, descriptors and mounts per idle sandbox, the time of a warm exec
with all of them alive against one alone, each as a ratio to fork+exec of its own rounds, and the control plane's own memory. At the end
all are deleted, and what is left of processes, mounts, loop devices and control groups is looked for on the host. Exit status 1 when
anything failed, was left, or is over its budget of memory. As an ordinary user: run it as one (crun is then unavailable).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.run import TRUE, Bench, Unavailable, leftovers, spawn

MIB = 1 << 20
BUDGET_PSS = 6e6
BUDGET_RATE = 60
RAW = 100
EXECS = 40


class Host:
    """What the kernel tells of the sandboxes of one state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def instances(self) -> set[str]:
        try:
            return {f"ins_{name}" for name in os.listdir(self.state / "i") if len(name) == 26}
        except FileNotFoundError:
            return set()

    def processes(self) -> dict[str, list[int]]:
        """Instance -> its processes on the host, launchers and supervisors included: all carry its id in their command line."""
        ours = self.instances()
        found: dict[str, list[int]] = {name: [] for name in ours}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                for word in words:
                    if word.startswith(b"ins_") and word.decode("ascii", "replace") in found:
                        found[word.decode()].append(int(pid))
                        break
        return found

    def mounts(self) -> int:
        return sum(str(self.state) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())

    def loops(self) -> int:
        count = 0
        for path in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                count += str(self.state) in path.read_text()
        return count


def pss(pids: list[int]) -> int:
    """Bytes of all of them, what is shared by many counted in parts."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def own() -> dict[str, int]:
    """Resident memory and descriptors of this process, which is the control plane and the node."""
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return {"rss": rss, "fds": len(os.listdir("/proc/self/fd"))}


def in_flight(count: int, at_once: int, work: Callable[[int], Any]) -> tuple[list[Any], float]:
    """-> (answers, seconds in all)."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(work, range(count)))
    return answers, time.perf_counter() - began


def _quarters(count: int) -> list[int]:
    """Four parts, none of them empty where there is enough."""
    part = count // 4
    return [size for size in (part, part, part, count - 3 * part) if size]


def _processor() -> float:
    """Seconds of this process and the launchers that it has waited for: a figure that load moves little."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def paced(rounds: int, work: Callable[[], None]) -> tuple[float, float]:
    """-> (median milliseconds, median ratio to fork+exec of the same round)."""
    times, ratios = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        spawn([TRUE])
        between = time.perf_counter()
        work()
        ended = time.perf_counter()
        times.append((ended - between) * 1000)
        ratios.append((ended - between) / (between - began))
    return statistics.median(times), statistics.median(ratios)


class Density:
    """One runtime's turn."""

    def __init__(self, scratch: Path, runtime: str, options: argparse.Namespace) -> None:
        self.scratch = scratch
        self.runtime = runtime
        self.options = options
        self.bench = Bench(scratch)
        self.bench.state = scratch / f"state-{runtime}"
        self.host = Host(self.bench.state)
        self.rng = random.Random(options.seed)
        self.seen: set[str] = set()

    def run(self) -> dict[str, Any]:
        """The report of this runtime; Unavailable where it cannot run."""
        try:
            return self._run()
        finally:
            self.bench.undo.close()

    def _run(self) -> dict[str, Any]:
        options, report = self.options, {"runtime": self.runtime, "count": self.options.count}
        self.bench.transport()
        self.bench._usable(self.runtime)
        raw = self.bench.crun().once if self.runtime == "crun" else self.bench.bwrap().once
        first = self._create(0)
        self._check(first)
        report["before"] = own()
        report["alone"] = paced(EXECS, lambda: self._true(first))
        raw_before = RAW / in_flight(RAW, options.in_flight, lambda _: raw())[1]
        made, took, cpu = [], 0.0, []
        for batch in _quarters(options.count - 1):
            before = _processor()
            more, seconds = in_flight(batch, options.in_flight, self._create)
            made, took = made + more, took + seconds
            cpu.append((_processor() - before) / batch * 1000)
        report["cpu_ms_per_create"] = cpu
        raw_after = RAW / in_flight(RAW, options.in_flight, lambda _: raw())[1]
        report["creates_per_s"] = (options.count - 1) / took
        report["raw_per_s"] = statistics.mean((raw_before, raw_after))
        boxes = [first, *made]
        time.sleep(2)  # supervisors that stand by are there
        report |= self._look()
        report["with_all"] = paced(EXECS, lambda: self._true(self.rng.choice(boxes)))
        report["first_execs_ms"] = statistics.median(
            self._timed(box) for box in self.rng.sample(boxes, min(20, len(boxes)))
        )
        report["after"] = own()
        for box in boxes:
            self._check(box)
        _, took = in_flight(len(boxes), options.in_flight, lambda n: self._delete(boxes[n]))
        report["deletes_per_s"] = len(boxes) / took
        report["left"] = self._left()
        report["end"] = own()
        return report

    def _create(self, number: int) -> str:
        body = {"runtime": self.runtime, "disk": "64M"}
        return self.bench.transport().request("POST", "/v1/sandboxes", json=body)["id"]

    def _true(self, box: str) -> None:
        self.bench._exec(box, ["/bin/true"])

    def _timed(self, box: str) -> float:
        began = time.perf_counter()
        self._true(box)
        return (time.perf_counter() - began) * 1000

    def _check(self, box: str) -> None:
        """It lives, and sees nobody's mark but its own."""
        doc = self.bench._exec(box, ["sh", "-c", f"cat marker 2>/dev/null; echo {box} > marker"])
        if doc["result"]["stdout"]["text"].strip() not in ("", box):
            raise RuntimeError("a sandbox sees the files of another one")

    def _delete(self, box: str) -> None:
        self.bench.transport().request("DELETE", f"/v1/sandboxes/{box}")

    def _look(self) -> dict[str, Any]:
        processes = self.host.processes()
        self.seen = set(processes)
        sizes = [pss(pids) for pids in processes.values()]
        return {
            "alive": sum(bool(pids) for pids in processes.values()),
            "pss": {"median": statistics.median(sizes), "max": max(sizes), "mean": statistics.mean(sizes)},
            "processes": statistics.mean(len(pids) for pids in processes.values()),
            "mounts": self.host.mounts() / len(sizes),
            "loops": self.host.loops(),
        }

    def _left(self) -> list[str]:
        until = time.monotonic() + 60  # an answer to a delete may come before its last file is gone
        left: list[str] = []
        while time.monotonic() < until:
            left = list(self._names_left())
            if not left:
                return []
            time.sleep(0.5)
        return left

    def _names_left(self) -> Iterator[str]:
        yield from sorted(self.host.instances())
        if count := self.host.mounts():
            yield f"{count} mounts"
        if count := self.host.loops():
            yield f"{count} loop devices"
        for pids in self.host.processes().values():
            yield from (f"process {pid}" for pid in pids)
        groups = (Path(top) / name for top, names, _ in os.walk("/sys/fs/cgroup") for name in names)
        yield from (f"control group {group}" for group in groups if group.name in self.seen)


def show(report: dict[str, Any]) -> bool:
    """Print one runtime's figures; -> whether all is as it has to be."""
    alone, all_ = report["alone"], report["with_all"]
    size = report["pss"]
    good = report["alive"] == report["count"] and not report["left"] and size["median"] <= BUDGET_PSS
    print(f"{report['runtime']}: {report['alive']} of {report['count']} alive")
    print(
        f"  PSS per idle sandbox     median {size['median'] / 1e6:.2f} MB, max {size['max'] / 1e6:.2f} (budget {BUDGET_PSS / 1e6:.0f})"
    )
    print(
        f"  processes, mounts        {report['processes']:.1f}, {report['mounts']:.2f} per sandbox; {report['loops']} loop devices in all"
    )
    print(
        f"  warm exec                alone {alone[0]:.1f} ms ({alone[1]:.1f} x fork), with all {all_[0]:.1f} ms ({all_[1]:.1f} x fork): {all_[1] / alone[1]:.2f} x"
    )
    raw, rate = report["raw_per_s"], report["creates_per_s"]
    print(
        f"  creates per second       {rate:.1f} (raw {raw:.1f}, {rate / raw:.2f} of it; budget {BUDGET_RATE} on crun, quiet); deletes {report['deletes_per_s']:.1f}"
    )
    print(
        f"  processor per create     {', '.join(f'{one:.0f}' for one in report['cpu_ms_per_create'])} ms in the four quarters of the way up"
    )
    grown = report["after"]["rss"] - report["before"]["rss"]
    print(
        f"  control plane            {report['after']['rss'] / 1e6:.0f} MB resident, {grown / report['count'] / 1e3:.0f} kB per sandbox"
    )
    fds = report["after"]["fds"] - report["before"]["fds"]
    print(
        f"  descriptors of ours      {report['before']['fds']} -> {report['after']['fds']} ({fds / report['count']:.2f} per sandbox) -> {report['end']['fds']}"
    )
    print(f"  left at the end          {', '.join(report['left']) or 'nothing'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--runtimes", default="bubblewrap,crun")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    user = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    print(
        f"{options.count} sandboxes, {options.in_flight} in flight, {user}, kernel {platform.release()}, load {os.getloadavg()[0]:.2f}",
        flush=True,
    )
    reports, good = [], True
    for runtime in options.runtimes.split(","):
        scratch = Path(tempfile.mkdtemp(prefix="cb-"))
        scratch.chmod(0o755)
        try:
            report = Density(scratch, runtime, options).run()
        except Unavailable as why:
            print(f"{runtime}: unavailable: {why}")
            continue
        finally:
            left = leftovers(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
        report["left"] += left
        good &= show(report)
        reports.append(report)
    print(f"load {os.getloadavg()[0]:.2f} at the end")
    if options.json:
        options.json.write_text(json.dumps({"user": user, "seed": options.seed, "runtimes": reports}, indent=1))
    return 0 if good and reports else 1


if __name__ == "__main__":
    sys.exit(main())
