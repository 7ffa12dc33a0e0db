#!/usr/bin/python3
"""Stands in for `ls` where the kernel refuses what coreutils asks it: as much as scripts of configure use (-d -i -t -L -1)."""

import os
import sys

words = sys.argv[1:]
options = "".join(word[1:] for word in words if word.startswith("-"))
names = [word for word in words if not word.startswith("-")] or ["."]
status = 0
shown = []
for name in names:
    try:
        found = os.stat(name) if "L" in options else os.lstat(name)
    except OSError as error:
        print(f"ls: {name}: {error.strerror}", file=sys.stderr)
        status = 2
        continue
    if os.path.isdir(name) and "d" not in options:
        for inner in sorted(os.listdir(name)):
            if not inner.startswith("."):
                shown.append((os.lstat(f"{name}/{inner}"), inner))
    else:
        shown.append((found, name))
if "t" in options:
    shown.sort(key=lambda one: -one[0].st_mtime_ns)
for found, name in shown:
    print(f"{found.st_ino} {name}" if "i" in options else name)
sys.exit(status)
