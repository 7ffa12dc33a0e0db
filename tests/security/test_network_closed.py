"""Threat: an exec reaches the network, the host's own services, a metadata service, or another sandbox.

The sandbox has a network namespace of its own with nothing but `lo`: nothing that could be switched off one by one. The control is a plain
child of the host that reaches the same listeners with the same code.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from corral.testing.hostile.network import AT_ONCE, OUTSIDE, REACH
from corral.testing.hostile.prelude import PRELUDE, TELL

from .conftest import Box, Lab
from .probes import on_the_host


@pytest.fixture
def listeners() -> Iterator[list[list[object]]]:
    """Services of the host: TCP and UDP on loopback of both families and on its own address, and an abstract socket."""
    made: list[socket.socket] = []
    targets: list[list[object]] = []
    addresses = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            addresses.append((socket.AF_INET, probe.getsockname()[0]))
        except OSError:
            pass  # the host itself has no network: loopback is all there is
    stop = threading.Event()

    def answer_tcp(listener: socket.socket) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
                connection.send(b"!")
                connection.close()
            except OSError:
                continue

    def answer_udp(sock: socket.socket) -> None:
        while not stop.is_set():
            try:
                _, peer = sock.recvfrom(10)
                sock.sendto(b"!", peer)
            except OSError:
                continue

    threads = []
    for family, address in addresses:
        for kind, serve, name in ((socket.SOCK_STREAM, answer_tcp, "tcp"), (socket.SOCK_DGRAM, answer_udp, "udp")):
            try:
                sock = socket.socket(family, kind)
                sock.bind((address, 0))
            except OSError:
                continue  # no IPv6 here
            sock.settimeout(0.2)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            made.append(sock)
            targets.append([name, address, sock.getsockname()[1]])
            threads.append(threading.Thread(target=serve, args=(sock,)))
    name = f"corral-test-{os.urandom(6).hex()}"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name)
    unix.listen()
    made.append(unix)
    targets.append(["abstract", name])
    for thread in threads:
        thread.start()
    yield targets
    stop.set()
    for thread in threads:
        thread.join()
    for sock in made:
        sock.close()


def test_nothing_is_reached_and_every_refusal_comes_at_once(box: Box, listeners: list[list[object]]) -> None:
    targets = [*listeners, *OUTSIDE]
    answers = box.ask(REACH, json.dumps(targets))
    told = {" ".join(map(str, target)): answers[" ".join(map(str, target))] for target in targets}
    assert set(told.values()) <= AT_ONCE, told
    assert answers["slowest"] < 2.5, "a refusal is no time-out"
    outside = on_the_host(REACH, json.dumps(listeners))
    reached = {" ".join(map(str, target)): outside[" ".join(map(str, target))] for target in listeners}
    assert set(reached.values()) == {"ok"}, "control: a plain child of the host reaches them all"


def test_there_is_one_interface_and_no_route(box: Box) -> None:
    answers = box.ask(REACH, "[]")
    assert answers["interfaces"] == ["lo"]
    assert len(answers["route"]) == 1, answers["route"]
    assert all(line.split()[-1] == "lo" for line in answers["ipv6_route"]), answers["ipv6_route"]
    assert [line.split(":")[0].strip() for line in answers["dev"][2:]] == ["lo"]


def test_loopback_is_the_sandboxs_own(lab: Lab) -> None:
    serve = (
        PRELUDE
        + r"""
listener = socket.create_server(("127.0.0.1", 18080))
print("up", flush=True)
while True:
    peer, _ = listener.accept()
    peer.send(b"!")
    peer.close()
"""
    )
    targets = json.dumps([["tcp", "127.0.0.1", 18080]])
    waiting = (
        PRELUDE
        + "\nend = time.monotonic() + 10\nwhile time.monotonic() < end:\n try:\n  socket.create_connection(('127.0.0.1', 18080), 1).close()\n  break\n except OSError:\n  time.sleep(0.02)\n"
    )
    with lab.box() as first, lab.box() as second:
        server = first.start_python(serve)
        first.python(waiting)
        assert first.ask(REACH, targets)["tcp 127.0.0.1 18080"] == "ok", "it works inside"
        assert second.ask(REACH, targets)["tcp 127.0.0.1 18080"] == "ECONNREFUSED"
        assert on_the_host(REACH, targets)["tcp 127.0.0.1 18080"] != "ok"
        lab.call("end", exec_id=server, why="cancelled")


def test_an_interface_cannot_be_made(box: Box) -> None:
    code = (
        PRELUDE
        + r"""
def up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x0))  # SIOCSIFFLAGS: lo down
def address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("192.0.2.9"))
        fcntl.ioctl(sock, 0x8916, request)  # SIOCSIFADDR
def link():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH", 8, 3) + b"dum\0" + struct.pack("=HHHH", 12, 18, 8, 1) + b"dumm"
        sock.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
        error = struct.unpack_from("=i", sock.recv(4096), 16)[0]
        if error:
            raise OSError(-error, "netlink")
def tun():
    os.close(os.open("/dev/net/tun", os.O_RDWR))
for action in (up, address, link, tun):
    attempt(action.__name__, action)
"""
        + TELL
    )
    answers = box.ask(code)
    assert set(answers.values()) <= {"EPERM", "EACCES", "ENOENT"}, answers
    with box.lab.box("unsafe_no_seccomp") as open_box:
        # Control: with the filter off a user namespace gives the right to do it, in a network of one's own.
        inside = code.replace(
            "for action in", 'uid = os.getuid()\ncall("unshare", 0x50000000)\nopen("/proc/self/uid_map", "w").write(f"0 {uid} 1")\nfor action in', 1
        )  # fmt: skip
        assert open_box.ask(inside)["up"] == "ok"
