"""Network namespaces kept by a mount: what listens in one, nobody outside can reach, and it goes with the mount."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.linux import mounts, netns

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

LISTEN = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + sys.argv[1])
server.listen()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "net")
    netns.keep_new(path)
    try:
        yield path
    finally:
        mounts.umount_below(path)


def listen(name: str, inside: str | None) -> subprocess.Popen[bytes]:
    enter = [] if inside is None else ["nsenter", f"--net={inside}", "--"]
    server = subprocess.Popen(
        [*enter, sys.executable, "-c", LISTEN, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None and server.stdout.readline() == b"up\n"
    return server


def connects(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(f"\0{name}")
        except ConnectionRefusedError:
            return False
        return True


def test_an_abstract_socket_inside_is_not_to_be_reached_from_the_host(kept: str) -> None:
    name = f"corral-test-{os.urandom(8).hex()}"
    with listen(name, kept) as server:
        assert not connects(name)
        assert server.stdin is not None
        server.stdin.close()
    with listen(name, None) as server:  # the same without it: the look can fail
        assert connects(name)
        assert server.stdin is not None
        server.stdin.close()


def test_it_has_no_interface_that_is_up_and_is_not_the_hosts(kept: str) -> None:
    assert os.stat(kept).st_ino != os.stat("/proc/self/ns/net").st_ino
    shown = subprocess.run(
        ["nsenter", f"--net={kept}", "--", "cat", "/proc/self/net/dev"], capture_output=True, check=True
    )
    assert [line.split(b":")[0].strip() for line in shown.stdout.splitlines()[2:]] == [b"lo"]


def test_this_process_stays_where_it_was_and_the_mount_goes(tmp_path: Path) -> None:
    before = os.stat("/proc/self/ns/net").st_ino
    path = str(tmp_path / "net")
    netns.keep_new(path)
    assert os.stat("/proc/self/ns/net").st_ino == before
    assert mounts.umount_below(path) == []
    assert os.stat(path).st_size == 0 and os.stat(path).st_ino != before


def test_a_name_that_is_taken_is_an_error(kept: str) -> None:
    with pytest.raises(FileExistsError):
        netns.keep_new(kept)
