"""Marks for the next tenant, and the look for them. Arguments: the word, then the places."""

from __future__ import annotations

from corral.testing.hostile.prelude import PRELUDE, TELL

PLACES = ("/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/run/user/1000")  # noqa: S108


LEAVE = (
    PRELUDE
    + r"""
word, places = sys.argv[1], sys.argv[2:]
for place in places:
    os.mkdir(f"{place}/{word}")
    for name in (f"{place}/{word}/file", f"{place}/.{word}"):
        open(name, "w").write(word)
open("/home/sandbox/.bashrc", "a").write(f"echo {word}\n")
os.makedirs("/home/sandbox/.local/lib/python3/site-packages", exist_ok=True)
open("/home/sandbox/.local/lib/python3/site-packages/" + word, "w").write(word)
identifier = libc.shmget(0x5EC0DE, 4096, 0o1666)
libc.shmat.restype = ctypes.c_void_p
ctypes.memmove(libc.shmat(identifier, None, 0), word.encode(), len(word))
libc.msgget(0x5EC0DE, 0o1666)
libc.semget(0x5EC0DE, 1, 0o1666)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        tcp = socket.create_server(("127.0.0.1", 18081))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("\0" + "corral-residue")
        unix.listen()
        unlinked = open(f"/workspace/unlinked-{word}", "w")
        unlinked.write(word * 1000)
        os.unlink(unlinked.name)
        libc.prctl(15, b"residue", 0, 0, 0)
        os.write(write, b"up")
        os.close(1), os.close(2), os.close(write)
        while True:
            time.sleep(1000)
    os._exit(0)
os.close(write)
assert os.read(read, 2) == b"up"
"""
    + TELL
)


LOOK_FOR_MARKS = (
    PRELUDE
    + r"""
word = sys.argv[1].encode()
found = []
for place in sys.argv[2:]:
    for folder, names, files in os.walk(place):
        for name in names + files:
            path = os.path.join(folder, name)
            held = word in os.fsencode(name)
            if not held and name in files and not os.path.islink(path):
                held = word in open(path, "rb").read()
            if held:
                found.append(path)
answers["files"] = len(found)
answers["shm"] = libc.shmget(0x5EC0DE, 0, 0) >= 0
answers["msg"] = libc.msgget(0x5EC0DE, 0) >= 0
answers["sem"] = libc.semget(0x5EC0DE, 0, 0) >= 0
def tcp():
    socket.create_connection(("127.0.0.1", 18081), 2).close()
def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0corral-residue")
attempt("tcp", tcp)
attempt("abstract", abstract)
answers["processes"] = 0
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            answers["processes"] += open(f"/proc/{name}/comm").read() == "residue\n"
        except OSError:
            pass
answers["hostname"] = socket.gethostname()
answers["used"] = {place: os.statvfs(place).f_files - os.statvfs(place).f_ffree for place in sys.argv[2:]}
"""
    + TELL
)


CLEAN = {"files": 0, "shm": False, "msg": False, "sem": False, "tcp": "ECONNREFUSED", "abstract": "ECONNREFUSED", "processes": 0}  # fmt: skip
