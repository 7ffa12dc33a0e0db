"""Where the service may connect to on behalf of a caller: hosts in any spelling, and the verdict on each address.

`read_host` turns whatever stands for a host into an address or a name, as the most lenient of the usual parsers would read it
(`0x7f.1`, `017700000001`, `[::ffff:7f00:1]`, full-width digits), so that nothing is a name here and an address elsewhere. `judge` says
whether an address may be connected to. Names are judged by what they resolve to: resolve once, judge every address, connect to one of
those; a second look-up may answer something else.

Loopback, link-local, metadata, multicast and unspecified addresses are refused always. Private, carrier and reserved ranges are refused
unless the operator has named a range that holds the address. An address that carries another one (IPv4-mapped, NAT64, 6to4) is refused
if that one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
MAX_NAME = 253
MAX_LABEL = 63
MAX_INPUT = 1024
"""Of characters that are looked at: mapping and encoding a name costs more than its length."""
HTTP_PORTS = (1, 65535)

_DOTS = dict.fromkeys(map(ord, "\u3002\uff0e\uff61"), ".")
_LDH = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


@dataclass(frozen=True)
class Refusal:
    """Why an address is refused. `final`: no range that an operator names changes it."""

    address: Address
    kind: str
    final: bool

    def __str__(self) -> str:
        return f"{self.address} is {_WORDS[self.kind]}"


_WORDS = {
    "loopback": "this host itself",
    "link_local": "link-local",
    "metadata": "a metadata service of a cloud",
    "multicast": "multicast",
    "unspecified": "no host's address",
    "private": "in a private range",
    "carrier": "in a carrier's range",
    "reserved": "in a reserved range",
}

_ALWAYS: tuple[tuple[str, str], ...] = (
    ("metadata", "169.254.169.254/32"),  # most clouds
    ("metadata", "169.254.170.2/32"),  # credentials of containers
    ("metadata", "169.254.170.23/32"),
    ("metadata", "100.100.100.200/32"),  # in a carrier's range
    ("metadata", "192.0.0.192/32"),
    ("metadata", "168.63.129.16/32"),  # public by its number
    ("metadata", "fd00:ec2::254/128"),
    ("metadata", "fd00:ec2::23/128"),
    ("metadata", "fd20:ce::254/128"),
    ("metadata", "fe80::a9fe:a9fe/128"),
    ("unspecified", "0.0.0.0/8"),  # reaches this host on Linux
    ("loopback", "127.0.0.0/8"),
    ("link_local", "169.254.0.0/16"),
    ("multicast", "224.0.0.0/4"),
    ("multicast", "255.255.255.255/32"),
    ("unspecified", "::/128"),
    ("loopback", "::1/128"),
    ("link_local", "fe80::/10"),
    ("multicast", "ff00::/8"),
)
_UNLESS_NAMED: tuple[tuple[str, str], ...] = (
    ("private", "10.0.0.0/8"),
    ("private", "172.16.0.0/12"),
    ("private", "192.168.0.0/16"),
    ("carrier", "100.64.0.0/10"),
    ("reserved", "192.0.0.0/24"),
    ("reserved", "192.0.2.0/24"),
    ("reserved", "192.31.196.0/24"),
    ("reserved", "192.52.193.0/24"),
    ("reserved", "192.88.99.0/24"),
    ("reserved", "192.175.48.0/24"),
    ("reserved", "198.18.0.0/15"),
    ("reserved", "198.51.100.0/24"),
    ("reserved", "203.0.113.0/24"),
    ("reserved", "240.0.0.0/4"),
    ("private", "fc00::/7"),
    ("private", "fec0::/10"),
    ("reserved", "2001::/23"),  # Teredo and other protocols
    ("reserved", "2001:db8::/32"),
    ("reserved", "3fff::/20"),
)
_GLOBAL_6 = IPv6Network("2000::/3")
"""All other IPv6 space is reserved, whatever it will be used for."""
_NAT64 = IPv6Network("64:ff9b::/96")
_MAPPED = IPv6Network("::ffff:0:0/96")
_6TO4 = IPv6Network("2002::/16")
_CARRIES_LAST_4 = (
    IPv6Network("::/96"),  # IPv4-compatible, given up long ago
    _MAPPED,
    IPv6Network("::ffff:0:0:0/96"),  # IPv4-translated
    _NAT64,
    IPv6Network("64:ff9b:1::/48"),  # NAT64 of a site
)


def _table(rows: Iterable[tuple[str, str]]) -> tuple[tuple[str, Network], ...]:
    return tuple((kind, ip_network(text)) for kind, text in rows)


_ALWAYS_IN, _UNLESS_NAMED_IN = _table(_ALWAYS), _table(_UNLESS_NAMED)


def parse_network(text: str) -> Network:
    """A range as an operator names it, `10.0.0.0/8` or one address; ValueError for one with bits below its prefix, or anything else."""
    if "%" in text:
        raise ValueError(f"{text[:60]!r} has a zone")
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text[:60]!r} is no range of addresses: {error}") from error


def normal(address: Address) -> Address:
    """The address that a connection to this one really goes to: an IPv4-mapped one is its IPv4 address."""
    if isinstance(address, IPv6Address) and address in _MAPPED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def carried(address: Address) -> list[Address]:
    """The addresses that this one stands for somewhere: what a translator or tunnel on the way would connect to."""
    if isinstance(address, IPv4Address):
        return []
    number = int(address)
    found: list[int] = []
    if any(address in network for network in _CARRIES_LAST_4) and number > 1:
        found.append(number & 0xFFFFFFFF)
    if address in _6TO4:
        found.append(number >> 80 & 0xFFFFFFFF)
    if number >> 96 == 0x20010000:  # Teredo: its server, and the client, inverted
        found += [number >> 64 & 0xFFFFFFFF, ~number & 0xFFFFFFFF]
    if number >> 32 & 0xFCFFFFFF == 0x00005EFE:  # ISATAP
        found.append(number & 0xFFFFFFFF)
    return [IPv4Address(each) for each in found]


def judge(address: Address, named: Sequence[Network] = ()) -> Refusal | None:
    """None if it may be connected to. `named`: private ranges that the operator has named."""
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return Refusal(address, "link_local", True)
    address = normal(address)
    # A range that is named is meant as it is written, not as it might be reached through somebody's tunnel.
    inner = [refusal for each in carried(address) if (refusal := judge(each)) is not None]
    for refusal in inner:
        if refusal.final:
            return Refusal(address, refusal.kind, True)
    for kind, network in _ALWAYS_IN:
        if address in network:
            return Refusal(address, kind, True)
    if any(address in network for network in named):
        return None
    if inner:
        return Refusal(address, inner[0].kind, False)
    for kind, network in _UNLESS_NAMED_IN:
        if address in network:
            return Refusal(address, kind, False)
    if isinstance(address, IPv6Address) and address not in _GLOBAL_6 and address not in _NAT64:
        return Refusal(address, "reserved", False)
    return None


# -- spellings ---------------------------------------------------------------------------------------------------------------------


def _number(text: str) -> int | None:
    """One part of an IPv4 address as inet_aton reads it: 0x… hexadecimal, 0… octal, else decimal. None = no number."""
    if text[:2] in ("0x", "0X"):
        digits = text[2:]
        if all(c in "0123456789abcdefABCDEF" for c in digits):
            return int(digits, 16) if digits else 0
        return None
    if not text or not (text.isascii() and text.isdigit()):
        return None
    if len(text) > 1 and text[0] == "0":
        return int(text, 8) if all(c in "01234567" for c in text) else -1
    return int(text) if len(text) < 20 else -1


def ends_in_a_number(name: str) -> bool:
    """A host whose last part is a number is an IPv4 address or nothing; it is never looked up."""
    return _number(name.rpartition(".")[2]) is not None


def read_ipv4(text: str) -> IPv4Address:
    """One to four numbers, in any base, the last one filling what is left; ValueError for anything else."""
    parts = text.split(".")
    numbers = [_number(part) for part in parts]
    if len(parts) > 4 or any(number is None or number < 0 for number in numbers):
        raise ValueError(f"{text[:60]!r} ends in a number but is no IPv4 address")
    *first, last = [number or 0 for number in numbers]
    if any(number > 255 for number in first) or last >= 256 ** (4 - len(first)):
        raise ValueError(f"{text[:60]!r} is no IPv4 address: a number is too large")
    total = last
    for place, number in enumerate(first):
        total += number << 8 * (3 - place)
    return IPv4Address(total)


def read_ipv6(text: str) -> IPv6Address:
    """An IPv6 address without brackets; a zone is refused: no address with one is reachable for a caller."""
    if "%" in text:
        raise ValueError(f"{text[:60]!r} has a zone")
    try:
        return IPv6Address(text)
    except ValueError as error:
        raise ValueError(f"{text[:60]!r} is no IPv6 address") from error


def read_name(text: str) -> str:
    """A DNS name, lower-case ASCII without the last dot; ValueError otherwise. Other alphabets are encoded (IDNA)."""
    if len(text) > MAX_INPUT:
        raise ValueError("the name of a host is too long")
    name = text
    if not name.isascii():
        import unicodedata  # a megabyte, and most names are plain

        name = unicodedata.normalize("NFKC", name.translate(_DOTS)).translate(_DOTS)
        if any(ord(c) < 128 and c.lower() not in _LDH and c != "." for c in name):
            raise ValueError(f"{text[:60]!r} is no name of a host")
        try:
            name = name.encode("idna").decode("ascii")
        except UnicodeError as error:
            raise ValueError(f"{text[:60]!r} is no name of a host") from error
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > MAX_NAME or any(not _label(label) for label in labels):
        raise ValueError(f"{text[:60]!r} is no name of a host")
    return name


def _label(label: str) -> bool:
    return 0 < len(label) <= MAX_LABEL and not set(label) - _LDH and label[0] != "-" and label[-1] != "-"


def read_host(text: str) -> Address | str:
    """What a host's text stands for: an address, however it is spelt, or a name. ValueError for what is neither."""
    if len(text) > MAX_INPUT:
        raise ValueError("the name of a host is too long")
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"{text[:60]!r} has a bracket that is not closed")
        return read_ipv6(text[1:-1])
    if ":" in text:
        return read_ipv6(text)
    name = read_name(text)
    return read_ipv4(name) if ends_in_a_number(name) else name


def is_local_name(name: str) -> bool:
    """Names that mean this host whatever a resolver says."""
    return name.rpartition(".")[2] == "localhost" or name in ("localhost.localdomain", "ip6-localhost", "ip6-loopback")


def host_of(authority: str) -> tuple[str, int | None]:
    """`host[:port]` of a URL -> (host in its plain spelling, port); ValueError for anything else, percent signs and users included."""
    if "%" in authority or "@" in authority:
        raise ValueError("a host has no percent signs and no user")
    host, port = authority, ""
    if authority.startswith("["):
        inner, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("the brackets of the address are not closed")
        host, port = f"[{inner}]", rest[1:]
        if rest == ":":
            raise ValueError("a port is missing after the colon")
    elif ":" in authority:
        host, _, port = authority.partition(":")
        if not port:
            raise ValueError("a port is missing after the colon")
    if not host:
        raise ValueError("the host is missing")
    read = read_host(host)
    if not port:
        return str(read), None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and HTTP_PORTS[0] <= int(port) <= HTTP_PORTS[1]):
        raise ValueError(f"{port[:20]!r} is no port")
    return str(read), int(port)
