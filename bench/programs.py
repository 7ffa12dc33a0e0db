"""Real programs on the bare host and inside: the same tools, the same tests, and which of them fail only inside.

    python -m bench.programs [--on MODE]... [--only WORKLOAD]... [--template NAME] [--json FILE] [--markdown FILE]

Each workload of `tests/programs` prints TAP. `bare` runs it as an ordinary user in the template's root file system with the host's
own /dev, /proc and network; every other mode runs it in a sandbox of that template. Needs root for `bare` (a chroot).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = REPOSITORY / "tests" / "programs"
WORKLOADS = ("system", "cpython", "pytest", "node", "autotools", "java", "rust", "git")
MODES = ("bare", "bubblewrap", "crun", "runc", "runsc")
LIMITS = ("--memory", "2G", "--cpu", "2", "--pids", "512", "--disk", "3G", "--tmp", "512M")
LINE = re.compile(r"^\s*(ok|not ok)\b(?: \d+)?(?: - )?(.*?)\s*(# (?:SKIP|TODO).*)?$")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/sandbox", "USER": "sandbox",
    "LOGNAME": "sandbox", "SHELL": "/bin/sh", "LANG": "C.UTF-8", "TZ": "UTC", "TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def prepare(workload: str, target: Path) -> None:
    """The directory of a workload with what it needs from this machine."""
    shutil.copytree(PROGRAMS / workload, target, dirs_exist_ok=True)
    if workload == "cpython":
        with tempfile.TemporaryDirectory() as work:
            subprocess.run(["apt-get", "download", "-q", "libpython3.11-testsuite"], cwd=work, check=True, capture_output=True)  # fmt: skip
            subprocess.run(["dpkg-deb", "-x", *map(str, Path(work).glob("*.deb")), work], check=True)
            shutil.copytree(f"{work}/usr/lib/python3.11", target / "suite", dirs_exist_ok=True)
        shutil.copytree("/usr/lib/python3.11/test", target / "suite" / "test", dirs_exist_ok=True)
    if workload == "pytest":
        (target / "site").mkdir(exist_ok=True)
        shutil.copy(_origin("py"), target / "site")
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_origin(name).parent, target / "site" / name, ignore=ignore, dirs_exist_ok=True)


def _origin(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return Path(found.origin)


def parsed(text: str) -> dict[str, dict[str, str]]:
    """Test -> how it went, from TAP; comments that follow a failure are its reason."""
    found: dict[str, dict[str, str]] = {}
    last = ""
    for line in text.splitlines():
        if (match := LINE.match(line)) and match[2]:
            last = match[2]
            found[last] = {"result": "skip" if match[3] else match[1], "why": ""}
        elif line.lstrip().startswith("#") and last and found[last]["result"] == "not ok" and not found[last]["why"]:
            found[last]["why"] = line.lstrip("# ").strip()[:300]
    return found


def on_bare(root: str, work: Path, workload: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """In the template's tree by chroot, as uid 1000 of the host, in mount and pid namespaces that go with the program."""
    binds = {"workspace": "workspace", "home": "home/sandbox", "tmp": "tmp", "var_tmp": "var/tmp"}
    for name in (*binds, "root"):
        (work / name).mkdir(exist_ok=True)
        (work / name).chmod(0o1777)
    script = [f"mount --bind {root} {work}/root", f"mount --rbind /dev {work}/root/dev", f"mount -t proc proc {work}/root/proc"]  # fmt: skip
    script += [f"mount --bind {work}/{name} {work}/root/{inside}" for name, inside in binds.items()]
    words = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    inner = f"cd /workspace && exec sh /workspace/{workload}/run.sh"
    script.append(f"exec env -i {words} {shutil.which('chroot')} --userspec=1000:1000 {work}/root sh -c '{inner}'")
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-ec", "\n".join(script)]  # fmt: skip
    shutil.copytree(work / workload, work / "workspace" / workload, dirs_exist_ok=True)
    subprocess.run(["chown", "-R", "1000:1000", work / "workspace", work / "home"], check=True)
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout)  # fmt: skip


def inside(
    corral: list[str],
    runtime: str,
    template: str,
    work: Path,
    workload: str,
    timeout: float,
    env: dict[str, str] | None = None,
) -> Any:
    """In a sandbox of its own."""
    options = ["--runtime", runtime, "--template", template, *LIMITS, "--ttl", str(int(timeout) + 600)]
    made = subprocess.run([*corral, "sandbox", "create", *options], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(made.stderr)
    sandbox = made.stdout.strip()
    try:
        subprocess.run([*corral, "cp", str(work / workload), f"{sandbox}:/workspace/{workload}"], check=True)
        values = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        program = ["sh", f"/workspace/{workload}/run.sh"]
        command = [*corral, "exec", sandbox, "--timeout", str(timeout), *values, "--", *program]
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    finally:
        subprocess.run([*corral, "sandbox", "rm", sandbox], capture_output=True)


def markdown(report: dict[str, Any]) -> str:
    """The table, and what fails only inside."""
    modes = report["modes"]
    lines = ["| workload | " + " | ".join(modes) + " |", "|---|" + "---|" * len(modes)]
    for workload, by_mode in report["results"].items():
        cells = []
        for mode in modes:
            if (one := by_mode.get(mode)) is None:
                cells.append("not run")
                continue
            counts = [sum(t["result"] == kind for t in one["tests"].values()) for kind in ("ok", "not ok", "skip")]
            skipped = f", {counts[2]} skipped" if counts[2] else ""
            cells.append(f"{counts[0]} ok, {counts[1]} failed{skipped}, {one['seconds']} s")
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    lines += ["", "Failed inside and not on the bare host:", ""]
    only = [
        f"- {workload}, {mode}: {name}: {test['why']}"
        for workload, by_mode in report["results"].items()
        for mode, one in by_mode.items()
        if mode != "bare"
        for name, test in one["tests"].items()
        if test["result"] == "not ok"
        and by_mode.get("bare", {"tests": {}})["tests"].get(name, {}).get("result") != "not ok"
    ]
    return "\n".join([*lines, *(only or ["- nothing"])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--on", action="append", choices=MODES)
    parser.add_argument("--only", action="append", choices=WORKLOADS)
    parser.add_argument("--template", default="polyglot")
    parser.add_argument("--timeout", type=float, default=3000)
    parser.add_argument("--json", type=Path, help="adds to what is there")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    corral = [str(REPOSITORY / "corral")]
    modes = options.on or list(MODES)
    report: dict[str, Any] = {"results": {}}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report |= {"date": datetime.date.today().isoformat(), "kernel": platform.release(), "limits": " ".join(LIMITS)}
    told = subprocess.run([*corral, "run", "--json", "--template", options.template, "--", "true"], capture_output=True)
    digest = json.loads(told.stdout)["decisions"]["placement"]["template_digest"]
    report |= {"template": f"{options.template} {digest}"}
    from corral import config

    record = json.loads((Path(config.load().state_dir) / "base" / f"{options.template}.json").read_text())
    for workload in options.only or WORKLOADS:
        for mode in modes:
            with tempfile.TemporaryDirectory(prefix="corral-programs-") as place:
                work = Path(place)
                work.chmod(0o755)
                prepare(workload, work / workload)
                began = time.monotonic()
                if mode == "bare":
                    done = on_bare(record["path"], work, workload, options.timeout)
                else:
                    done = inside(corral, mode, options.template, work, workload, options.timeout)
                seconds = round(time.monotonic() - began)
            tests = parsed(done.stdout)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or [""])[-1][:300]
                tests.setdefault("the whole", {"result": "not ok", "why": f"ended with {done.returncode}: {why}"})
            report["results"].setdefault(workload, {})[mode] = {"seconds": seconds, "tests": tests}
            report["modes"] = [m for m in MODES if any(m in r for r in report["results"].values())]
            failed = {name: test["why"] for name, test in tests.items() if test["result"] == "not ok"}
            print(f"{workload} on {mode}: {len(tests)} tests, {len(failed)} failed, {seconds} s", flush=True)
            for name, why in failed.items():
                print(f"    {name}: {why}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    if options.markdown:
        options.markdown.write_text(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
