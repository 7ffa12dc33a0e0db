"""A captured guest, as text: PID 1 keeps to the protocol as far as its mood wants, and lies about the rest."""

from __future__ import annotations

_PROGRAM = r'''
import os, signal, socket, sys, time
sys.path.insert(0, "/.corral/site")
from corral.guest import protocol
words = sys.argv[1:]
instance = words[words.index("--instance") + 1]
class Pipes:
    """Standard input and output as a connection, where no socket is passed inside; a resync makes it a new one."""
    def setblocking(self, flag):
        for fd in (0, 1):
            os.set_blocking(fd, flag)
    def accept(self):
        return self, None
    def recv(self, size):
        return os.read(0, size)
    def sendall(self, data):
        while data:
            data = data[os.write(1, data):]
    def close(self):
        pass
fifo = "--control-fifo" in words
listener = Pipes() if fifo else socket.socket(fileno=int(words[words.index("--control-fd") + 1]))
listener.setblocking(True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
SPARE = ["/bin/sleep", "1000"]
execs = {}
def hello():
    return {"versions": [1, 1], "version": 1, "guest": "0.1.0", "instance": instance, "installation": "", "identified": False,
        "capabilities": {"subreaper": 1, "pidfd": 1, "change_uid": 1, "landlock": 7, "same_uid": 0, "pid1": 1}, "sandbox": "", "floor": [0, 0]}
def status(exec_id, **more):
    return {"exec_id": exec_id, "state": "running", "started": True, "exit_code": None, "signal": None, "failure": None, "started_ms": 1,
        "ended_ms": None, "utime_ms": 0, "stime_ms": 0, "maxrss_kib": 0, "ended_by": None, "killed": 0, "killed_all": True, "background": 0,
        "offsets": {"stdout": 0, "stderr": 0}, "stdin": None, "already": False, **more}
def ended(exec_id, **more):
    return status(exec_id, **{"state": "ended", "exit_code": 0, "ended_ms": 2, **more})
def send(data):
    connection.sendall(data)
def ok(request, **answer):
    send(protocol.control(protocol.REPLY, {"id": request["id"], "ok": answer}))
def event(**body):
    send(protocol.control(protocol.EVENT, body))
def end(request, **more):
    event(event="ended", attach=request["attach"], status=ended(request["exec_id"], **more))
def begin(argv):
    """Really run something that nobody ends."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        listener.close()
        connection.close()
        for fd in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDWR), fd)
        if os.getuid() == 0:
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        os.execv(argv[0], argv)
    return pid
def on_start(request):
    spec = request["spec"]
    execs[spec["exec_id"]] = begin(spec["argv"])
    ok(request, **status(spec["exec_id"]))
def on_attach(request):
    ok(request, **status(request["exec_id"]))
def on_kill(request):
    ok(request, killed_all=True, killed=1)
def on_status(request):
    ok(request, **status(request["exec_id"]))
def serve(request):
    op = request["op"]
    if op == "ping":
        ok(request, now_ms=int(time.monotonic() * 1000))
    elif op == "identify":
        ok(request, floor=request["fence"])
    elif op == "exec.start":
        on_start(request)
    elif op == "exec.attach":
        on_attach(request)
    elif op == "exec.status":
        on_status(request)
    elif op in ("exec.kill", "kill_all", "fence"):
        on_kill(request)
    else:
        ok(request)
def greet():
    send(protocol.control(protocol.HELLO, hello()))
def accept():
    return listener.accept()[0]
#MOOD
while True:
    try:
        connection = accept()
        decoder = protocol.Decoder({protocol.HELLO: 65536, protocol.REQUEST: 1 << 22, protocol.INPUT: 1 << 20, protocol.ACK: 64}, resync=fifo)
        while data := connection.recv(65536):
            for kind, payload in decoder.feed(data):
                if kind == protocol.SYNC:
                    send(protocol.MAGIC + payload)
                elif kind == protocol.HELLO:
                    greet()
                elif kind == protocol.REQUEST:
                    serve(protocol.loads(payload))
    except OSError:
        pass
'''


WITHOUT_CAPABILITY = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
libc.prctl(47, 4, 0, 0, 0)
libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Before the real guest: one that does not keep the capability that its execs lack. One of the five measures, switched off."""


def guest(mood: str) -> str:
    """The program with definitions that replace its own."""
    return _PROGRAM.replace("#MOOD", mood)
