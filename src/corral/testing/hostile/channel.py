"""The control channel: descriptors, sockets of the host, and frames said by who is not the guest."""

from __future__ import annotations

from corral.guest import protocol
from corral.testing.hostile.prelude import PRELUDE, TELL

DESCRIPTORS = (
    PRELUDE
    + r"""
answers["mine"] = {}
for fd in range(4096):
    try:
        os.fstat(fd)
        answers["mine"][fd] = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError:
        pass
"""
    + TELL
)


FORGERIES = {
    "ended well": protocol.control(protocol.EVENT, {"event": "ended", "attach": 1, "status": {"state": "ended", "exit_code": 0}}),
    "reply": protocol.control(protocol.REPLY, {"id": 1, "ok": {}}),
    "hello": protocol.control(protocol.HELLO, {"versions": [1, 1], "version": 1}),
    "output": protocol.data_frame(1, 0, 0, b"forged"),
    "resync": protocol.MAGIC + bytes(16),
    "request": protocol.control(protocol.REQUEST, {"id": 1, "op": "shutdown", "fence": [1, 9]}),
    "supervisor": b'{"event": "exited", "status": 0, "at": 1}',
}  # fmt: skip


FORGE = (
    PRELUDE
    + r"""
forged = bytes.fromhex(sys.argv[1])
for fd in (0, 1, 2):
    for path in (None, f"/proc/self/fd/{fd}", f"/dev/fd/{fd}"):
        try:
            place = fd if path is None else os.open(path, os.O_WRONLY)
            if path is None or fd == 0:
                os.write(place, forged)
        except OSError:
            pass
os._exit(7)
"""
)
"""Writes its argument to every descriptor that it has; the doors of /proc and /dev to its standard input are tried as well."""


CONNECT = (
    PRELUDE
    + r"""
def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2)
        sock.connect(path)
def send(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        sock.connect(path)
targets = json.loads(sys.argv[1])
for path in targets:
    path = "\0" + path[1:] if path.startswith("@") else path
    attempt("stream " + path, connect, path)
    attempt("datagram " + path, send, path)
for pid in [n for n in os.listdir("/proc") if n.isdigit()]:
    for fd in range(12):
        attempt(f"stream /proc/{pid}/fd/{fd}", connect, f"/proc/{pid}/fd/{fd}")
with open("/proc/net/unix") as table:
    answers["listed"] = [line.split()[7] for line in table.readlines()[1:] if len(line.split()) > 7]
"""
    + TELL
)


SPEAK = (
    PRELUDE
    + r"""
def speak():
    # Through the directory: a path of a socket may not be longer than 108 bytes.
    directory = os.open(sys.argv[1], os.O_PATH)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(f"/proc/self/fd/{directory}/s")
        body = b'{"versions": [1, 1], "role": "thief"}'
        sock.sendall(struct.pack(">IB", len(body), 1) + body)
        told = sock.recv(4096)
        return None if b'"instance"' in told else "no hello"
attempt("speak", speak)
"""
    + TELL
)
