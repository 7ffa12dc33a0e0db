"""Real programs on the bare host and inside: the same tools, the same tests, and which of them fail only inside.

    python -m bench.programs [--on MODE]... [--only WORKLOAD]... [--template NAME] [--json FILE] [--markdown FILE]

Each workload of `tests/programs` prints TAP. `bare` runs it as an ordinary user in the template's root file system with the host's
own /dev, /proc and network; every other mode runs it in a sandbox of that template, `bubblewrap-user` as an ordinary user with a state
directory of its own. Needs root. What is not in the repository comes from the package index that the host's apt is configured for.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = REPOSITORY / "tests" / "programs"
WORKLOADS = ("system", "pytest", "node", "autotools", "libuv", "java", "rust", "git", "cpython")
MODES = ("bare", "bubblewrap", "bubblewrap-user", "crun", "runc", "runsc")
ORDINARY_UID = 54321
LIMITS = ("--memory", "4G", "--cpu", "2", "--pids", "512", "--disk", "3G", "--tmp", "512M")
LINE = re.compile(r"^\s*(ok|not ok)\b(?: \d+)?(?: - )?(.*?)\s*(# (?:SKIP|TODO).*)?$")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/sandbox", "USER": "sandbox",
    "LOGNAME": "sandbox", "SHELL": "/bin/sh", "LANG": "C.UTF-8", "TZ": "UTC", "TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


def prepare(workload: str, target: Path, base: str = "/") -> None:
    """The directory of a workload with what it needs from this machine, and from the index in the version that `base` has."""
    shutil.copytree(PROGRAMS / workload, target, dirs_exist_ok=True)
    if workload == "cpython":
        shown = ["dpkg-query", f"--admindir={base}/var/lib/dpkg", "--show", "--showformat=${Version}"]
        version = subprocess.run([*shown, "libpython3.11-stdlib"], check=True, capture_output=True, text=True).stdout
        with tempfile.TemporaryDirectory() as work:
            _fetch(Path(work), "download", f"libpython3.11-testsuite={version}", f"libpython3.11-stdlib={version}")
            for package in Path(work).glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", package, f"{work}/{package.name.partition('_')[0]}"], check=True)
            inside = "usr/lib/python3.11"
            shutil.copytree(f"{work}/libpython3.11-testsuite/{inside}", target / "suite", symlinks=True)
            rest = f"{work}/libpython3.11-stdlib/{inside}/test"  # what the interpreter's own package has of it
            shutil.copytree(rest, target / "suite" / "test", symlinks=True, dirs_exist_ok=True)
    if workload == "libuv":
        with tempfile.TemporaryDirectory() as work:
            _fetch(Path(work), "source", "--download-only", "--tar-only", "libuv1")
            shutil.copy(next(Path(work).glob("*.orig.tar.*")), target / "source.tar")
        shutil.copy(PROGRAMS / "autotools" / "ls.py", target)
    if workload == "pytest":
        (target / "site").mkdir(exist_ok=True)
        shutil.copy(_origin("py"), target / "site")
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_origin(name).parent, target / "site" / name, ignore=ignore, dirs_exist_ok=True)
    subprocess.run(["chmod", "-R", "a+rX", target], check=True)  # other users' sandboxes take it as well


def _fetch(work: Path, *words: str) -> None:
    """Call apt-get in `work` with newly read lists of its own, those of the distribution's sources as well; the host's stay as they are."""
    line = "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    wanted = ["apt-get", "indextargets", "--format", line, "Created-By: Packages", "Origin: Debian"]
    told = subprocess.run(wanted, check=True, capture_output=True, text=True).stdout
    binary = sorted(set(told.splitlines()))
    source = [f"deb-src{line.removeprefix('deb')}" for line in binary if "-security" not in line]
    place = work / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (place / name).mkdir(parents=True)
    (place / "sources.list").write_text("\n".join([*binary, *source]) + "\n")
    where = {"State::Lists": "lists", "Cache": "cache", "Etc::SourceList": "sources.list"}
    options = [word for key, name in where.items() for word in ("-o", f"Dir::{key}={place / name}")]
    options += ["-o", "Dir::Etc::SourceParts=-", "-o", "APT::Sandbox::User=root", "-q"]
    for command in (["update"], words):
        done = subprocess.run(["apt-get", *options, *command], cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"apt-get {' '.join(command)}: {done.stderr.strip()[-500:]}")


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
        elif line.lstrip().startswith("#") and last and found[last]["result"] == "not ok":
            found[last]["why"] = f"{found[last]['why']} {line.lstrip('# ').strip()}".strip()[:300]
    return found


def on_bare(
    root: str, work: Path, workload: str, timeout: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """In the template's tree by chroot, as uid 1000 of the host, in mount, pid and host name namespaces that go with the program."""
    binds = {"workspace": "workspace", "home": "home/sandbox", "tmp": "tmp", "var_tmp": "var/tmp"}
    for name in (*binds, "root"):
        (work / name).mkdir(exist_ok=True)
        (work / name).chmod(0o1777)
    script = [f"mount --bind {root} {work}/root", f"mount --rbind /dev {work}/root/dev", f"mount -t proc proc {work}/root/proc"]  # fmt: skip
    script += [f"mount --bind {work}/{name} {work}/root/{inside}" for name, inside in binds.items()]
    script.append(f"hostname $(cat {work}/root/etc/hostname)")  # the one that the tree's own /etc/hosts knows
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in (ENVIRONMENT | env).items())
    inner = f"cd /workspace && exec sh /workspace/{workload}/run.sh"
    script.append(f"env -i {words} {shutil.which('chroot')} --userspec=1000:1000 {work}/root sh -c '{inner}'")
    script.append("exit $?")  # so that this shell stays as PID 1, which collects orphans
    command = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "private", "sh", "-ec", "\n".join(script)]  # fmt: skip
    shutil.copytree(work / workload, work / "workspace" / workload, dirs_exist_ok=True, symlinks=True)
    subprocess.run(["chown", "-R", "1000:1000", work / "workspace", work / "home"], check=True)

    def own_streams() -> None:
        for fd in (1, 2):
            os.fchown(fd, 1000, 1000)

    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout, preexec_fn=own_streams)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, (late.stdout or b"").decode(errors="replace"), "out of time")


def as_ordinary_user(place: Path, record: dict[str, Any], template: str) -> list[str]:
    """The words before a command of `corral` of a user who is not root, with a checkout, a home and a state directory in `place`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (place / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, place / "checkout" / name)
    (place / "state" / "base").mkdir(parents=True, exist_ok=True)
    (place / "state" / "base" / f"{template}.json").write_text(json.dumps(record))
    (place / "home").mkdir(exist_ok=True)
    subprocess.run(["chown", "-R", f"{ORDINARY_UID}:{ORDINARY_UID}", place / "state", place / "home"], check=True)
    become = ["setpriv", "--reuid", str(ORDINARY_UID), "--regid", str(ORDINARY_UID), "--clear-groups"]
    return [*become, "env", f"CORRAL_STATE_DIR={place / 'state'}", f"HOME={place / 'home'}", str(place / "checkout" / "corral")]  # fmt: skip


def inside(
    corral: list[str],
    runtime: str,
    template: str,
    work: Path,
    workload: str,
    timeout: float,
    env: dict[str, str],
) -> Any:
    """In a sandbox of its own."""
    options = ["--runtime", runtime, "--template", template, *LIMITS, "--ttl", str(int(timeout) + 600)]
    made = subprocess.run([*corral, "sandbox", "create", *options], capture_output=True, text=True)
    if made.returncode:
        return made
    sandbox = made.stdout.strip()
    try:
        subprocess.run([*corral, "cp", str(work / workload), f"{sandbox}:/workspace/{workload}"], check=True)
        values = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
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
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        help="K=V for the workload: FILES, COMMITS, MODULES, WORKERS, STALL_S, MODULE_S",
    )
    parser.add_argument("--json", type=Path, help="adds to what is there")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    corral = [str(REPOSITORY / "corral")]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # else what a shell starts in the background passes it on as ignored
    modes = options.on or list(MODES)
    env = dict(word.split("=", 1) for word in options.env)
    report: dict[str, Any] = {"results": {}}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report |= {"date": datetime.date.today().isoformat(), "kernel": platform.release(), "limits": " ".join(LIMITS)}
    told = subprocess.run([*corral, "run", "--json", "--template", options.template, "--", "true"], capture_output=True)
    digest = json.loads(told.stdout)["decisions"]["placement"]["template_digest"]
    report |= {"template": f"{options.template} {digest}"}
    from corral import config

    record = json.loads((Path(config.load().state_dir) / "base" / f"{options.template}.json").read_text())
    with tempfile.TemporaryDirectory(prefix="corral-programs-") as given, contextlib.ExitStack() as ends:
        place = Path(given)
        place.chmod(0o711)
        prefixes = {mode: corral for mode in modes}
        if "bubblewrap-user" in modes:
            prefixes["bubblewrap-user"] = as_ordinary_user(place / "user", record, options.template)
            ends.callback(subprocess.run, [*prefixes["bubblewrap-user"], "gc"], capture_output=True)
        for workload in options.only or WORKLOADS:
            made = place / "made" / workload
            made.parent.mkdir(exist_ok=True)
            prepare(workload, made, record["path"])
            for mode in modes:
                work = place / f"{workload}-{mode}"
                shutil.copytree(made, work / workload, symlinks=True)
                began = time.monotonic()
                if mode == "bare":
                    done = on_bare(record["path"], work, workload, options.timeout, env)
                else:
                    runtime = mode.partition("-")[0]
                    done = inside(prefixes[mode], runtime, options.template, work, workload, options.timeout, env)
                seconds = round(time.monotonic() - began)
                _account(report, options, workload, mode, done, seconds)
                shutil.rmtree(work)
    if options.markdown:
        options.markdown.write_text(markdown(report))
    return 0


def _account(
    report: dict[str, Any],
    options: argparse.Namespace,
    workload: str,
    mode: str,
    done: subprocess.CompletedProcess[str],
    seconds: int,
) -> None:
    """Add how a workload went, and print it."""
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


if __name__ == "__main__":
    sys.exit(main())
