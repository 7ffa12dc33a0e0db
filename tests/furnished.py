"""State directories that need not build their template first: it is built once per test run and linked into each.

What a first use does is shown by tests of templates, of the launcher and of the README; everything else only wants it done.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
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


def polyglot(state: Path, shared: Path) -> None:
    """Give a state directory the template polyglot, which takes minutes to build: once per machine, then linked once per test run.

    The base lies beside the state directories that use it, so that tests which only read it do not link 50,000 files each.
    """
    record = _polyglot(shared)
    (state / "base").mkdir(parents=True, exist_ok=True)
    (state / "base" / "polyglot.json").unlink(missing_ok=True)
    (state / "base" / "polyglot.json").write_text(record)
    (state / "base" / "polyglot.json").chmod(0o644)


def _polyglot(shared: Path) -> str:
    from corral.config import data_file
    from corral.node.templates import Templates
    from corral.node.templates_debian import host_suite

    recipes = Path(data_file("templates"))
    key = hashlib.sha256((recipes / "polyglot.yaml").read_bytes() + host_suite().encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = home / "corral" / "templates" / f"{key}-{os.geteuid()}"
    place = shared / "polyglot"

    def build() -> None:
        asyncio.run(Templates(cache, recipes).ensure("polyglot", lambda text, _part: print(text, flush=True)))
        for other in cache.parent.iterdir():
            old = time.time() - other.stat().st_mtime > 7 * 86400  # another checkout may have another recipe
            if old and other != cache and other.name.endswith(f"-{os.geteuid()}"):
                shutil.rmtree(other, ignore_errors=True)

    def link() -> None:
        once(cache, build)
        if subprocess.run(["cp", "-al", cache / "base", place / "base"], capture_output=True).returncode != 0:
            shutil.rmtree(place / "base", ignore_errors=True)  # another file system
            subprocess.run(["cp", "-a", cache / "base", place / "base"], check=True)

    once(place, link)
    record = json.loads((place / "base" / "polyglot.json").read_text())
    return json.dumps(record | {"path": str(place / "base" / Path(record["path"]).name)})
