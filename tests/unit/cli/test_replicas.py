"""The parent of `corral serve --replicas` over children that do nothing but say that they are ready."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from corral.cli import replicas

CHILD = """
import json, os, signal, sys
os.write(json.loads(sys.argv[-1])["status"], b'{"state": "ready"}\\n')
signal.pause()
"""


class Host:
    """Starts processes, except when it has none to spare."""

    def __init__(self, then: Any) -> None:
        self.refusals = 0
        self.begun: list[subprocess.Popen[bytes]] = []
        self.then = then

    def __call__(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.begun.append(started := POPEN(words, **options))
        self.then()
        return started


POPEN = subprocess.Popen


@pytest.mark.parametrize("how", ["a replica died", "a restart was asked for"])
def test_a_host_that_cannot_start_a_process_just_now_ends_none_that_is_there(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    said: list[str] = []
    lock = os.open(os.devnull, os.O_RDONLY)

    def up() -> None:
        host.refusals = 3
        if how == "a replica died":
            host.begun[-1].kill()
        else:
            server._signals.append(signal.SIGHUP)

    def begun() -> None:
        if len(host.begun) == 4:
            server._signals.append(signal.SIGTERM)

    def heard(line: str) -> None:
        said.append(line)
        if line == "the old ones stay":  # and the next restart is tried when somebody asks for it
            assert all(one.poll() is None for one in host.begun)
            host.refusals = 0
            server._signals.append(signal.SIGHUP)

    host = Host(begun)
    monkeypatch.setattr(replicas.subprocess, "Popen", host)
    monkeypatch.setattr(replicas, "_ourselves", lambda: [sys.executable, "-c", CHILD])
    monkeypatch.setattr(replicas, "log", heard)
    server = replicas.Replicas(2, {}, lock, None, os.environ, up)
    try:
        server.run()
    finally:
        os.close(lock)
        for one in host.begun:
            one.kill()
            one.wait()
    assert len(host.begun) == 4, "a node, two replicas, and the one that came when it could"
    why = f"cannot be started: {os.strerror(errno.EAGAIN)}"
    assert sum(why in line for line in said) == (3 if how == "a replica died" else 1)
    assert host.begun[0].returncode == -signal.SIGTERM, "the node lived until the stop"
