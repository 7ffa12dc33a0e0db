"""Runs modules of CPython's test suite, each in a process of its own, and prints TAP: one line per test.

A test that is silent for STALL_S seconds ends its module's process: it is reported, and the module begins again without it, up to HANGS
times. So it does without a class of tests in which the suite itself ends before it wrote its results.
"""

import concurrent.futures
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as tree

HERE = os.path.dirname(os.path.abspath(__file__))
USES = "all,-network,-gui,-largefile,-urlfetch,-audio,-tzdata,-cpu"
STALL_S = float(os.environ.get("STALL_S", "120"))
MODULE_S = float(os.environ.get("MODULE_S", "900"))
ATTEMPTS = 12
HANGS = 3
BEGUN = re.compile(rb"^(test\w*) \((?:test\.)?([\w.]+)\)", re.MULTILINE)
ENDED = re.compile(rb"^(test\w*) \((?:test\.)?([\w.]+)\) \.\.\. (ok|FAIL|ERROR|skipped)\b", re.MULTILINE)
KINDS = {b"ok": ("ok", ""), b"FAIL": ("not ok", ""), b"ERROR": ("not ok", ""), b"skipped": ("ok", " # SKIP")}
LAST_ERROR = re.compile(rb"^(?:\w+\.)*\w+(?:Error|Exception)\b.*$|uncaught exception", re.MULTILINE)


def watched(module: str, without: list[str]) -> tuple[str, bytes]:
    """Run a module -> (why it was ended or "", what it printed)."""
    words = [sys.executable, "-m", "test", "-v", "-u", USES, "--junit-xml", f"{module}.xml"]
    words += [word for name in without for word in ("-i", name)]
    process = subprocess.Popen([*words, module], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    began = heard = time.monotonic()
    said = bytearray()
    why = ""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while process.poll() is None and not why:
            if ready.select(1):
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    break
                said += part
                heard = time.monotonic()
            if time.monotonic() - heard > STALL_S:
                why = f"no word for {STALL_S:.0f} seconds"
            elif time.monotonic() - began > MODULE_S:
                why = f"module not done after {MODULE_S:.0f} seconds"
    try:
        process.wait(None if why == "" and process.poll() is not None else 30)
    except subprocess.TimeoutExpired:
        why = why or "its end did not come"
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if not why and process.returncode < 0:
        why = f"ended by {signal.Signals(-process.returncode).name}"
    process.stdout.close()
    with open(f"{module}.log", "ab") as log:
        log.write(said)
    return why, bytes(said)


def lines(module: str) -> list[str]:
    """What there is to say of a module."""
    told: list[str] = []
    without: list[str] = []
    hangs = 0
    for _ in range(ATTEMPTS):
        why, said = watched(module, without)
        crashed = (
            "" if why or b"uncaught exception" not in said else LAST_ERROR.findall(said)[-1].decode(errors="replace")
        )
        if not why and not crashed:
            break
        begun = [match[2].decode() + ("" if match[2].endswith(match[1]) else f".{match[1].decode()}") for match in BEGUN.finditer(said)]  # fmt: skip
        last = begun[-1] if begun else ""
        told += [f"not ok - {'test.' + last if last else module + ' (as a whole)'}", f"# {why or crashed}"]
        hangs += bool(why)
        if not last or hangs == HANGS or why.startswith("module"):
            break
        without.append(f"*{last}" if why else f"*{last.rpartition('.')[0]}.*")
    if os.path.exists(f"{module}.xml"):
        told += cases(f"{module}.xml")
    elif told:  # what it said before it was ended
        results = {match[2].decode(): match[3] for match in ENDED.finditer(said)}
        told += [f"{KINDS[kind][0]} - test.{name}{KINDS[kind][1]}" for name, kind in results.items()]
    if not told:
        reason = re.findall(rb"^.*(?:skipped|Error|error).*$", said, re.MULTILINE)
        skipped = b"skipped" in said and b"Error" not in said
        told = [f"{'ok' if skipped else 'not ok'} - {module} (as a whole){' # SKIP' if skipped else ''}"]
        told += [f"# {reason[-1].decode(errors='replace')}"] if reason and not skipped else []
    return told


def cases(path: str) -> list[str]:
    told = []
    for case in tree.parse(path).iter("testcase"):
        name = case.get("name", "")
        why = next((e for e in (case.find("failure"), case.find("error")) if e is not None), None)
        skipped = case.find("skipped") is not None
        told.append(f"{'ok' if why is None else 'not ok'} - {name}{' # SKIP' if skipped else ''}")
        if why is not None:
            last = [line for line in (why.text or why.get("message") or "").strip().splitlines() if line.strip()]
            told.append(f"# {last[-1][:300] if last else ''}")
    return told


def main() -> None:
    with open(os.path.join(HERE, "modules.txt")) as file:
        modules = os.environ.get("MODULES", "").split() or file.read().split()
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        for done in concurrent.futures.as_completed([pool.submit(lines, module) for module in modules]):
            print(*done.result(), sep="\n", flush=True)


main()
