"""Where a trial happens: a directory of its own, locked as long as the trial lives, and what trials that were killed left in theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral import config
from corral.errors import CorralError
from corral.testing.certify import residue

PREFIX = "corral-certify-"
MARK = "trial.json"


@dataclass(frozen=True)
class Place:
    """A directory of a trial: of which runtime, under which installation's name."""

    path: Path
    runtime: str
    installation: str


@contextlib.contextmanager
def make(state_dir: str, runtime: str, installation: str) -> Iterator[Place]:
    """A directory beside the state directory, so on the same file system with the same mount options; else a temporary one.

    Who comes later sees by its lock that the trial lives. Nothing is removed here.
    """
    made = _directory(state_dir)
    # Locked before it has its name: no one may ever find it free.
    lock = os.open(made / f"{MARK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, json.dumps({"runtime": runtime, "installation": installation}).encode())
        os.rename(made / f"{MARK}.new", made / MARK)
        yield Place(made, runtime, installation)
    finally:
        os.close(lock)


async def clear_dead(settings: config.Config) -> list[str]:
    """Remove what trials of this user left that ended with their process; -> directories that stay all the same."""
    from corral import bootstrap

    left = []
    for parent in dict.fromkeys((_beside(settings.state_dir), tempfile.gettempdir())):
        for path in sorted(Path(parent).glob(f"{PREFIX}*")):
            with _dead(path) as place:
                if place is None:
                    continue
                with contextlib.suppress(Exception):  # an adapter of anybody's; what it leaves is told
                    trial = dataclasses.replace(settings, state_dir=str(path), runtimes=(place.runtime,))
                    node = bootstrap.trial_node(
                        trial, place.installation, place.runtime, str(path / "trial"), lambda runtime: runtime
                    )
                    await node.open()
                    try:
                        for instance_id in await node.instances():
                            with contextlib.suppress(CorralError):  # `gc` tries once more
                                await node.destroy(instance_id, "certify")
                        await node.gc()
                    finally:
                        await node.close()
                if not residue.remove(str(path)):
                    left.append(str(path))
    return left


@contextlib.contextmanager
def _dead(path: Path) -> Iterator[Place | None]:
    """The place of a trial whose process is gone, kept from others meanwhile; None for any other directory."""
    lock, place = -1, None
    try:
        lock = os.open(path / MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        info = os.fstat(lock)
        if not stat.S_ISREG(info.st_mode) or {info.st_uid, os.lstat(path).st_uid} != {os.geteuid()}:
            raise ValueError("somebody else's")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        told = json.loads(os.read(lock, 4096))
        place = Place(path, str(told["runtime"]), str(told["installation"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        yield place
    finally:
        if lock >= 0:
            os.close(lock)


def _beside(state_dir: str) -> str:
    return os.path.dirname(os.path.abspath(state_dir))


def _directory(state_dir: str) -> Path:
    for parent in (_beside(state_dir), None):
        try:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError:
            continue
        made.chmod(0o711)
        return made
    raise CorralError(
        "infra_error", "there is no directory for the trial", hint="set CORRAL_STATE_DIR", retryable=False
    )
