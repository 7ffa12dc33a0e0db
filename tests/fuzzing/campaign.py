"""A run of many cases: inputs that reach lines not reached before are kept and changed further; what fails is made small and saved."""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import corral

from . import channel, node, tape, trees
from .clock import Broken
from .tape import Case

TARGETS: dict[str, Callable[[Case], Any]] = {
    "channel": channel.run,
    "bytes": channel.replay,
    "node": node.run,
    "trees": trees.run,
    "archives": trees.unpack,
}
SOURCE = Path(corral.__file__).parent
WATCHED = tuple(
    str(SOURCE / part)
    for part in (
        "channel/",
        "node/",
        "linux/guesttree/",
        "linux/manifest.py",
        "client/trees.py",
        "guest/protocol.py",
        "domain/result.py",
    )
)
CASE_S = 120
"""Real seconds after which a case is one that hangs."""
GROWTH = 256 << 20
"""What a process may hold more than after its first hundred cases."""


def fails(case: Case) -> str | None:
    """What the case shows to be wrong, in one line; None when nothing is."""
    try:
        TARGETS[case.target](case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return signature(error)
    return None


def signature(error: BaseException) -> str:
    """The same for the same defect: without numbers, names of scratch directories and times."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, Broken):
        last = traceback.extract_tb(error.__traceback__)[-1]
        text += f" ({Path(last.filename).name}, {last.name})"
    return re.sub(r"\d+", "N", re.sub(r"corral-fuzz-\w+", "PLACE", text))[:400]


class Lines:
    """Which lines of the watched files ran. The tracing of Python costs about half of the speed and finds three times as much."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, int]] = set()
        self.fresh = False
        self._known: dict[Any, bool] = {}

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        watched = self._known.get(code)
        if watched is None:
            watched = self._known[code] = code.co_filename.startswith(WATCHED)
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        key = (frame.f_code, frame.f_lineno if event == "line" else -1 if event == "exception" else 0)
        if key not in self.seen:
            self.seen.add(key)
            self.fresh = True
        return self._line

    def __enter__(self) -> Lines:
        self.fresh = False
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *why: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


class Campaign:
    """One process of it. What it keeps lies in `directory` and is used by the next one, or by others beside."""

    def __init__(self, directory: Path, seed: int, targets: Iterable[str] = tuple(TARGETS)) -> None:
        self.directory = directory
        self.seed = seed
        self.rng = random.Random(seed)
        self.targets = tuple(targets)
        self.counts = dict.fromkeys(self.targets, 0)
        self.crashes: dict[str, int] = {}
        self.kept: dict[str, list[Case]] = {target: [] for target in self.targets}
        self._files: set[str] = set()
        self._lines = Lines()
        self._base = 0
        # Of this run alone: another with the same seed goes on in the same directory and counts beside it.
        self._counted = directory / f"counts-{seed}-{time.time_ns()}.json"
        for name in ("corpus", "crashes"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def run(self, until: float, tell: Callable[[str], None] = print) -> None:
        """Until this time of the monotonic clock."""
        signal.signal(signal.SIGALRM, _hangs)
        told = time.monotonic()
        try:
            while time.monotonic() < until:
                if sum(self.counts.values()) % 200 == 0:
                    self._take()
                self._one()
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    tell(self.line())
                    self._count()
        finally:
            self._count()

    def line(self) -> str:
        counts = " ".join(f"{target} {count}" for target, count in self.counts.items())
        return f"seed {self.seed}: {counts}; {len(self._lines.seen)} lines, {sum(map(len, self.kept.values()))} kept, {len(self.crashes)} kinds of failure"

    def _one(self) -> None:
        target = self.rng.choice(self.targets)
        kept = self.kept[target]
        if kept and self.rng.random() < 0.8:
            case = tape.changed(self.rng.choice(kept), self.rng.choice(kept), self.rng)
        else:
            case = tape.fresh(target, self.rng)
        self.counts[target] += 1
        signal.alarm(CASE_S)
        with self._lines:
            wrong = fails(case)
        signal.alarm(0)
        if wrong is None:
            wrong = self._grown()
        if wrong is not None:
            self._crash(case, wrong)
        elif self._lines.fresh:
            self._keep(case)

    def _grown(self) -> str | None:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if sum(self.counts.values()) <= 100:
            self._base = size
        elif size > self._base + GROWTH:
            self._base = size
            return f"Broken: the process has grown to {size >> 20} MiB"
        return None

    def _keep(self, case: Case) -> None:
        name = hashlib.sha256(case.dump().encode()).hexdigest()[:16]
        self._files.add(name)
        self.kept[case.target].append(case)
        (self.directory / "corpus" / f"{name}.json").write_text(case.dump())

    def _take(self) -> None:
        """What others beside us, or before us, have found."""
        for path in (self.directory / "corpus").glob("*.json"):
            if path.stem not in self._files:
                self._files.add(path.stem)
                try:
                    case = Case.load(path.read_text())
                except (ValueError, KeyError):
                    continue  # another is writing it just now
                if case.target in self.kept:
                    self.kept[case.target].append(case)

    def _crash(self, case: Case, wrong: str) -> None:
        self.crashes[wrong] = self.crashes.get(wrong, 0) + 1
        path = self.directory / "crashes" / f"{case.target}-{hashlib.sha256(wrong.encode()).hexdigest()[:12]}.json"
        if path.exists():
            return
        path.write_text(case.dump(wrong=wrong, seed=self.seed, smallest=False))
        signal.alarm(10 * CASE_S)
        small = tape.smallest(case, lambda other: fails(other) == wrong)
        signal.alarm(0)
        path.write_text(small.dump(wrong=wrong, seed=self.seed, smallest=True))

    def _count(self) -> None:
        aside = self._counted.with_suffix(".new")
        aside.write_text(json.dumps({"cases": self.counts, "failures": self.crashes, "lines": len(self._lines.seen)}))
        aside.replace(self._counted)


def _hangs(number: int, frame: Any) -> None:
    raise Broken(f"a case takes more than {CASE_S} real seconds")


def some(target: str, seed: int, count: int, seconds: float) -> int:
    """At most so many cases in so many seconds, for tests: Broken with the smallest input that fails. -> how many ran."""
    rng = random.Random(f"{target}:{seed}")
    until = time.monotonic() + seconds
    done = 0
    while done < count and (time.monotonic() < until or done == 0):
        case = tape.fresh(target, rng)
        done += 1
        if (wrong := fails(case)) is not None:
            small = tape.smallest(case, lambda other: fails(other) == wrong, tries=150)
            raise Broken(f"{wrong}\nseed {seed}, case {done}; smallest input:\n{small.dump()}")
    return done
