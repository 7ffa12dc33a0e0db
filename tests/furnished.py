"""State directories that need not build their template first: it is built once per test run and linked into each.

What a first use does is shown by tests of templates, of the launcher and of the README; everything else only wants it done.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path


def once(directory: Path, make: Callable[[], None]) -> None:
    """Call `make` for the first of all workers that come here; the others wait for its end."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / ".made").exists():
            make()
            (directory / ".made").touch()


def furnish(state: Path, shared: Path, uid: int | None = None) -> None:
    """Give a new state directory of `uid` the template host and the interpreter, as if it had built them."""
    owner = os.geteuid() if uid is None else uid
    built = _built(shared, owner)
    state.mkdir(parents=True, exist_ok=True)
    for name in ("base", "interpreter"):
        subprocess.run(["cp", "-al", built / name, state / name], check=True)
    record = json.loads((built / "base" / "host.json").read_text())
    record["path"] = str(state / "base" / Path(record["path"]).name)
    (state / "base" / "host.json").unlink()
    (state / "base" / "host.json").write_text(json.dumps(record))
    for place in (state, state / "base", state / "interpreter", state / "base" / "host.json"):
        os.chown(place, owner, owner if uid is not None else -1)


def _built(shared: Path, owner: int) -> Path:
    place = shared / f"built-{owner}"

    def make() -> None:
        if owner == os.geteuid():
            _build(place)
        else:  # as that user would have built it: every file its own
            mine = _built(shared, os.geteuid())
            subprocess.run(["cp", "-a", mine / "base", mine / "interpreter", place], check=True)
            subprocess.run(["chown", "-Rh", f"{owner}:{owner}", place], check=True)

    once(place, make)
    return place


def _build(place: Path) -> None:
    from corral.config import data_file
    from corral.node.interpreter import ensure_interpreter
    from corral.node.templates import Templates

    asyncio.run(Templates(place, data_file("templates")).ensure("host"))
    ensure_interpreter(place)
