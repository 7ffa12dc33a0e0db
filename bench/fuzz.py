"""Fuzzing of the host side for hours: a captured guest, recorded conversations with broken bytes, hostile trees and archives.

    .venv/bin/python -m bench.fuzz --hours 8 [--seed 1] [--jobs 2] [--dir fuzz-state] [--targets channel,node]
    .venv/bin/python -m bench.fuzz --replay fuzz-state/crashes/node-….json

The directory keeps the inputs that reached something new, so a later run goes on from there, and one file for each kind of failure:
its smallest input, what was wrong, and the seed. Exit status 1 when there was any. Ctrl-C ends it early, with the same report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzzing import campaign
from fuzzing.tape import Case


def replay(path: Path) -> int:
    """Run one saved case, with its traceback."""
    case = Case.load(path.read_text())
    campaign.TARGETS[case.target](case)
    print("nothing wrong")
    return 0


def conduct(options: argparse.Namespace) -> int:
    """As many processes as asked for; -> exit status."""
    options.dir.mkdir(parents=True, exist_ok=True)
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.fuzz", *_words(options), "--seed", str(options.seed + job)],
            start_new_session=True,  # what a terminal sends reaches them once, through this process
        )
        for job in range(1, options.jobs)
    ]
    if options.jobs and not options.child:
        print(
            f"seeds {options.seed} to {options.seed + max(0, options.jobs - 1)}, {options.hours} hours, in {options.dir}",
            flush=True,
        )
    one = campaign.Campaign(options.dir, options.seed, options.targets)
    try:
        one.run(time.monotonic() + options.hours * 3600, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        for child in children:
            child.send_signal(signal.SIGINT)
    finally:
        for child in children:
            child.wait()
    if options.child:
        return 0
    return _report(options.dir)


def _words(options: argparse.Namespace) -> list[str]:
    return [
        "--child",
        "--hours",
        str(options.hours),
        "--jobs",
        "1",
        "--dir",
        str(options.dir),
        "--targets",
        ",".join(options.targets),
    ]


def _report(directory: Path) -> int:
    total: dict[str, int] = {}
    for path in directory.glob("counts-*.json"):
        for target, count in json.loads(path.read_text())["cases"].items():
            total[target] = total.get(target, 0) + count
    print(
        "cases:", ", ".join(f"{target} {count}" for target, count in sorted(total.items())), f"({sum(total.values())})"
    )
    crashes = sorted((directory / "crashes").glob("*.json"))
    for path in crashes:
        told = json.loads(path.read_text())
        print(f"{path}: {told['wrong']} (seed {told['seed']})")
        print(f"    .venv/bin/python -m bench.fuzz --replay {path}")
    return 1 if crashes else 0


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(campaign.TARGETS):
        raise argparse.ArgumentTypeError(f"no target {sorted(unknown)}; there are {sorted(campaign.TARGETS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("fuzz-state"))
    parser.add_argument("--targets", type=_targets, default=tuple(campaign.TARGETS))
    parser.add_argument("--replay", type=Path, help="run one saved case")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Whoever ends us by TERM, or starts us in the background where Ctrl-C is ignored, gets the report too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    return replay(options.replay) if options.replay else conduct(options)


if __name__ == "__main__":
    sys.exit(main())
