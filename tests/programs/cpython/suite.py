"""Runs modules of CPython's test suite, each in a process of its own, and prints TAP: one line per test."""

import os
import subprocess
import sys
import xml.etree.ElementTree as tree

HERE = os.path.dirname(os.path.abspath(__file__))
USES = "all,-network,-gui,-largefile,-urlfetch,-audio,-tzdata,-cpu"


def main() -> None:
    with open(os.path.join(HERE, "modules.txt")) as file:
        modules = sys.argv[1:] or file.read().split()
    workers = os.environ.get("WORKERS", "2")
    timeout = os.environ.get("MODULE_TIMEOUT", "900")
    command = [sys.executable, "-m", "test", f"-j{workers}", "-u", USES, "--timeout", timeout]
    done = subprocess.run([*command, "--junit-xml", "results.xml", *modules], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")  # fmt: skip
    with open("log.txt", "w") as log:
        log.write(done.stdout + done.stderr)
    bad = set()
    if os.path.exists("results.xml"):
        for case in tree.parse("results.xml").iter("testcase"):
            name = case.get("name", "")
            why = next((e for e in (case.find("failure"), case.find("error")) if e is not None), None)
            skipped = case.find("skipped") is not None
            print("ok" if why is None else "not ok", "-", name, "# SKIP" if skipped else "")
            if why is not None:
                bad.add(name.split(".")[1] if name.startswith("test.") else name)
                last = [line for line in (why.text or why.get("message") or "").strip().splitlines() if line.strip()]
                print("#", last[-1][:300] if last else "")
    # A module that crashed or ran out of time has no results of its own.
    part = done.stdout.rpartition("tests failed:")[2] if "tests failed:" in done.stdout else ""
    part = part or (done.stdout.rpartition("test failed:")[2] if "test failed:" in done.stdout else "")
    for module in part.partition("\n\n")[0].split():
        if module in modules and module not in bad:
            print("not ok -", module, "(as a whole)")


main()
