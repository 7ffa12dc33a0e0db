"""Every spelling of an address is read as that address, and judged by where a connection would really go."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.domain.addresses import (
    carried,
    ends_in_a_number,
    host_of,
    is_local_name,
    judge,
    normal,
    parse_network,
    read_host,
    read_name,
)


def spellings(address: str) -> list[str]:
    """An IPv4 address as the parsers of this world take it."""
    a, b, c, d = (int(part) for part in address.split("."))
    number = int(IPv4Address(address))
    tails = {f"{b}.{(c << 8) + d}", f"{(b << 16) + (c << 8) + d}"}
    made = [
        address,
        f"{address}.",
        str(number),
        f"0{number:o}",
        f"000{number:o}",
        hex(number),
        hex(number).upper().replace("X", "x"),
        f"0X{number:X}",
        f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"0x{a:x}.{b}.0{c:o}.{d}",
        f"0x0000{a:x}.{b}.{c}.{d}",
        f"{a}.{b}.{(c << 8) + d}",
        *(f"{a}.{tail}" for tail in sorted(tails)),
        f"0x{a:x}.{(b << 16) + (c << 8) + d}",
        f"0{a:o}.0x{(b << 16) + (c << 8) + d:x}",
        # other digits and dots that IDNA maps to ours
        "".join(chr(ord(x) - 48 + 0xFF10) if x.isdigit() else x for x in address),
        address.replace(".", "\u3002"),
        address.replace(".", "\uff0e"),
        address.replace(".", "\uff61"),
    ]
    packed = f"{number >> 16:x}:{number & 0xFFFF:x}"
    for prefix in ("::ffff:", "0:0:0:0:0:ffff:", "0000:0000:0000:0000:0000:FFFF:"):
        made += [f"[{prefix}{packed}]", f"{prefix}{packed}", f"[{prefix}{address}]"]
    return made


NEVER = ["127.0.0.1", "127.255.255.254", "127.8.9.10", "169.254.169.254", "169.254.1.2", "0.0.0.0", "0.1.2.3", "224.0.0.1",
         "239.255.255.250", "255.255.255.255", "100.100.100.200", "168.63.129.16", "192.0.0.192"]  # fmt: skip
NAMED_ONLY = ["10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255", "192.0.2.7",
              "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.9", "240.0.0.1", "192.88.99.1", "192.0.0.8"]  # fmt: skip
OPEN = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.255.255", "172.32.0.1", "11.0.0.1", "9.255.255.255", "126.255.255.255",
        "128.0.0.1", "169.253.255.255", "169.255.0.1", "100.63.255.255", "100.128.0.1", "223.255.255.255", "192.167.1.1"]  # fmt: skip
EVERYTHING = (parse_network("0.0.0.0/0"), parse_network("::/0"))


@pytest.mark.parametrize("spelling, address", [(s, a) for a in NEVER for s in spellings(a)])
def test_an_address_that_is_never_reachable_is_not_in_any_spelling(spelling: str, address: str) -> None:
    host = read_host(spelling)
    assert not isinstance(host, str) and normal(host) == ip_address(address)
    refusal = judge(host, EVERYTHING)
    assert refusal is not None and refusal.final


@pytest.mark.parametrize("spelling, address", [(s, a) for a in NAMED_ONLY for s in spellings(a)])
def test_a_private_address_is_reachable_only_in_a_named_range(spelling: str, address: str) -> None:
    host = read_host(spelling)
    assert not isinstance(host, str) and normal(host) == ip_address(address)
    refusal = judge(host)
    assert refusal is not None and not refusal.final
    assert judge(host, (parse_network(f"{address}/32"),)) is None
    assert judge(host, (parse_network("1.2.3.0/24"),)) is not None


@pytest.mark.parametrize("spelling, address", [(s, a) for a in OPEN for s in spellings(a)])
def test_a_public_address_is_reachable_in_every_spelling(spelling: str, address: str) -> None:
    host = read_host(spelling)
    assert not isinstance(host, str) and normal(host) == ip_address(address)
    assert judge(host) is None


def tunnels(address: str) -> list[str]:
    """IPv6 addresses that a translator or tunnel turns into this one."""
    number = int(IPv4Address(address))
    high, low = number >> 16, number & 0xFFFF
    flipped = ~number & 0xFFFFFFFF
    return [
        f"64:ff9b::{high:x}:{low:x}",
        f"64:ff9b:1::{high:x}:{low:x}",
        f"64:ff9b:1:ffff::{high:x}:{low:x}",
        f"2002:{high:x}:{low:x}::",
        f"2002:{high:x}:{low:x}::1",
        f"2002:{high:x}:{low:x}:1234::5678",
        f"::ffff:0:{high:x}:{low:x}",
        f"2001:0:{high:x}:{low:x}::",
        f"2001:0:808:808::{flipped >> 16:x}:{flipped & 0xFFFF:x}",
        f"2606:4700::5efe:{high:x}:{low:x}",
        f"2606:4700::200:5efe:{high:x}:{low:x}",
    ]


@pytest.mark.parametrize("tunnel", [t for a in NEVER for t in tunnels(a)])
def test_no_tunnel_leads_to_an_address_that_is_never_reachable(tunnel: str) -> None:
    refusal = judge(ip_address(tunnel), EVERYTHING)
    assert refusal is not None and refusal.final, tunnel


@pytest.mark.parametrize("tunnel", [t for a in NAMED_ONLY for t in tunnels(a)])
def test_no_tunnel_leads_to_a_private_address(tunnel: str) -> None:
    assert judge(ip_address(tunnel)) is not None
    assert judge(ip_address(tunnel), (parse_network("0.0.0.0/0"),)) is not None, "named is not tunnelled"


@pytest.mark.parametrize(
    "address",
    [
        "::",
        "::1",
        "::2",
        "::127.0.0.1",
        "fe80::1",
        "febf::1",
        "ff02::1",
        "ff0e::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::a9fe:a9fe",
    ],
)
def test_ipv6_addresses_that_are_never_reachable(address: str) -> None:
    refusal = judge(ip_address(address), EVERYTHING)
    assert refusal is not None and refusal.final


@pytest.mark.parametrize(
    "address",
    ["fc00::1", "fdff::1", "fec0::1", "2001:db8::1", "2001:2::1", "3fff::1", "100::1", "5f00::1", "4000::1", "::8.8.8.8", "1::1", "e000::1",
     "2001:0:808:808::1", "64:ff9b:1::808:808"],
)  # fmt: skip
def test_ipv6_addresses_that_are_reachable_only_if_named(address: str) -> None:
    refusal = judge(ip_address(address))
    assert refusal is not None and (not refusal.final or address == "::8.8.8.8"), address


@pytest.mark.parametrize(
    "address", ["2606:4700::1111", "2a00:1450:4001::8a", "64:ff9b::808:808", "2400:cb00::1", "2002:808:808::1"]
)
def test_public_ipv6_addresses_are_reachable(address: str) -> None:
    assert judge(ip_address(address)) is None


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a..b", "-a.example", "a-.example", "a b", "a\tb", "a\0b", "a/b", "a@b", "a%2eb", "1.2.3.4.5", "256.1.1.1", "1.256.1", "08.1.1.1",
     "0x1g.1", "1.2.3.0x100", "4294967296", "0x100000000", "a.1", "example.0x7f", "[::1", "::1]", "[127.0.0.1]", "::g", ":::", "[fe80::1%1]",
     "fe80::1%eth0", "1:2", "x" * 64 + ".example", ".".join(["a" * 60] * 5), "a" * 2000, "é\u2028.example", "１.２.３.４.５", "a\u3002\u3002b", "xn--\u00e9",
     "a\u2024b\ufe00/"],
)  # fmt: skip
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_host(text)


@pytest.mark.parametrize(
    "text, name",
    [("Example.COM", "example.com"), ("example.com.", "example.com"), ("bücher.example", "xn--bcher-kva.example"), ("ｅxample.com", "example.com"),
     ("你好.example", "xn--6qq79v.example"), ("a_b.example", "a_b.example"), ("0x7f.com", "0x7f.com"), ("1.2.3.4a", "1.2.3.4a"),
     ("xn--bcher-kva.example", "xn--bcher-kva.example"), ("a。example", "a.example")],
)  # fmt: skip
def test_names_in_other_spellings(text: str, name: str) -> None:
    assert read_host(text) == name


def test_names_of_this_host() -> None:
    for text in ("localhost", "LOCALHOST.", "a.b.localhost", "ip6-localhost", "localhost.localdomain"):
        name = read_host(text)
        assert isinstance(name, str) and is_local_name(name)
    assert not is_local_name("localhost.example.com") and not is_local_name("mylocalhost")


@pytest.mark.parametrize(
    "authority, host, port",
    [("example.com", "example.com", None), ("example.com:8443", "example.com", 8443), ("[::1]:80", "::1", 80), ("[2606:4700::1]", "2606:4700::1", None),
     ("0x7f.1:443", "127.0.0.1", 443), ("例え.example:1", "xn--r8jz45g.example", 1)],
)  # fmt: skip
def test_authorities(authority: str, host: str, port: int | None) -> None:
    assert host_of(authority) == (host, port)


@pytest.mark.parametrize(
    "authority",
    ["", ":80", "a:", "a:b", "a:0", "a:65536", "a:-1", "a:+1", "a:１", "a:80:80", "u@a", "u:p@a", "a%40b", "%31", "[::1]x", "[::1]:", "[::1", "::1", "a b:1"],
)  # fmt: skip
def test_authorities_that_are_refused(authority: str) -> None:
    with pytest.raises(ValueError):
        host_of(authority)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1/8", "10.0.0.0/33", "a", "fe80::%1/64", "10.0.0.0/8/8", "10.0.0.0/-1", "::/129"]
)
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_network(text)


IPV4 = st.integers(0, 2**32 - 1).map(IPv4Address)
IPV6 = st.integers(0, 2**128 - 1).map(IPv6Address)


@given(IPV4)
def test_every_spelling_of_every_address_is_read_as_it(address: IPv4Address) -> None:
    verdict = judge(address)
    for spelling in spellings(str(address)):
        host = read_host(spelling)
        assert not isinstance(host, str) and normal(host) == address
        assert (judge(host) is None) == (verdict is None)


@given(IPV4)
def test_what_is_carried_is_never_better_than_what_carries_it(address: IPv4Address) -> None:
    for tunnel in tunnels(str(address)):
        carrier = ip_address(tunnel)
        assert address in carried(carrier)
        inner = judge(address, EVERYTHING)
        if inner is not None:
            assert judge(carrier, EVERYTHING) is not None
        if judge(address) is not None:
            assert judge(carrier) is not None


@given(st.one_of(IPV4, IPV6), st.integers(0, 32))
def test_naming_a_range_opens_nothing_that_is_final(address, bits: int) -> None:
    width = address.max_prefixlen
    network = parse_network(f"{type(address)(int(address) >> (width - bits) << (width - bits))}/{bits}")
    before, after = judge(address), judge(address, (network,))
    if before is None:
        assert after is None
    elif before.final:
        assert after is not None and after.final


@given(st.text(max_size=40))
def test_whatever_is_read_is_an_address_or_a_plain_name(text: str) -> None:
    try:
        host = read_host(text)
    except ValueError:
        return
    if isinstance(host, str):
        assert host.isascii() and host == host.lower() and not ends_in_a_number(host)
        assert read_host(host) == host == read_name(host)


@given(st.text(alphabet="0123456789abcdefx.:[]%１．。", max_size=24))
def test_nothing_made_of_digits_is_a_name(text: str) -> None:
    try:
        host = read_host(text)
    except ValueError:
        return
    if isinstance(host, str):
        assert not host.rpartition(".")[2].isdigit()
