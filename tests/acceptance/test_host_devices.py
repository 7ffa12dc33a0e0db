"""What a sandbox is made of never changes files of the host: the device files of /dev keep owner and mode."""

import os

from .conftest import Box

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx")


def owners() -> dict[str, tuple[int, int, int]]:
    return {d: (s.st_uid, s.st_gid, s.st_mode) for d in DEVICES if os.path.exists(d) for s in [os.stat(d)]}


def test_a_run_leaves_owner_and_mode_of_the_hosts_devices_alone(box: Box) -> None:
    before = owners()
    done = box("run", "--runtime", box.runtime, "--shell", "chmod 600 /dev/null; chown 1000 /dev/null; exit 0")
    assert done.returncode == 0, done.stderr
    assert owners() == before
