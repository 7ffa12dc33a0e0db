"""The network: what can be reached, and how fast a refusal comes. First argument: JSON list of `[kind, where, port]`."""

from __future__ import annotations

from corral.testing.hostile.prelude import PRELUDE, TELL

REACH = (
    PRELUDE
    + r"""
def tcp(host, port):
    with socket.create_connection((host, port), 3) as sock:
        return None if sock.recv(1) == b"!" else "connected, another"
def udp(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(3)
        sock.connect((host, port))
        sock.send(b"?")
        return None if sock.recv(1) == b"!" else "answered, another"
def abstract(name):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3)
        sock.connect("\0" + name)
def path(name):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3)
        sock.connect(name)
def resolve(name):
    try:
        socket.getaddrinfo(name, 80)
    except socket.gaierror as error:
        raise OSError(errno.ENOENT, "no name")
for kind, *where in json.loads(sys.argv[1]):
    began = time.monotonic()
    attempt(" ".join(map(str, [kind, *where])), {"tcp": tcp, "udp": udp, "abstract": abstract, "path": path, "resolve": resolve}[kind], *where)
    answers["slowest"] = max(answers.get("slowest", 0), time.monotonic() - began)
answers["interfaces"] = [name for _, name in socket.if_nameindex()]
for name in ("route", "ipv6_route", "arp", "dev"):
    try:
        answers[name] = open("/proc/net/" + name).read().splitlines()
    except OSError as error:
        answers[name] = name_of(error.errno)
"""
    + TELL
)


OUTSIDE = [
    ["tcp", "169.254.169.254", 80],
    ["tcp", "fd00:ec2::254", 80],
    ["tcp", "100.100.100.200", 80],
    ["udp", "169.254.169.254", 53],
    ["tcp", "192.0.2.1", 80],
    ["udp", "192.0.2.1", 53],
    ["tcp", "10.0.0.1", 22],
    ["tcp", "2001:db8::1", 80],
    ["tcp", "0.0.0.0", 80],  # noqa: S104
    ["udp", "255.255.255.255", 67],
    ["udp", "224.0.0.251", 5353],
    ["resolve", "metadata.google.internal"],
    ["resolve", "example.com"],
]


AT_ONCE = {"ENETUNREACH", "ECONNREFUSED", "EADDRNOTAVAIL", "EACCES", "ENOENT", "EAFNOSUPPORT"}
