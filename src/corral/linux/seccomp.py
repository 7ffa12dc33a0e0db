"""System call filters: one data file, compiled to BPF here (no libseccomp) and emitted as OCI `linux.seccomp`.

`seccomp_data.json` holds number tables per architecture and named filters: rules that refuse, everything else is allowed.
A *profile* (`PROFILES`) is a pair of them: the one of its name is what a runtime installs around guest and execs, `exec_filter` is
stricter and installed inside by the exec's supervisor. Every profile but `default` opens something:

* `debug`: tracing (what the kernel lets one process do to another, so never guest or supervisor), and address spaces that are not
  randomised.
* `browser`: what Chromium's own sandbox is built of: user, pid and network namespaces inside, and `chroot`. Whoever makes such a
  namespace is root in it; what that opens beyond is closed again as far as calls can tell it (netlink families; the socket options of packet filter tables, of
  multicast routing and of the virtual server).

A rule refuses its calls with `errno`, always or only when `all` its conditions on arguments hold. Conditions look at the low
32 bits, as the kernel does for these arguments (garbage in the upper half is a known way around filters), but `set` looks at
all 64. Calls of a foreign architecture or ABI (i386, x32) answer ENOSYS.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from functools import cache
from typing import Any

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_NR_AT, _ARCH_AT = 0, 4
_X32_BIT = 0x40000000
_ALL_ONES = 0xFFFFFFFF

PROFILES = ("default", "debug", "browser")

_NEXT, _FAIL = -1, -2
_Op = tuple[
    int, int, int, int
]  # code, jump if true, jump if false, constant; jumps may be _NEXT or _FAIL until resolved


@cache
def _data() -> dict[str, Any]:
    path = os.path.join(os.path.dirname(__file__), "seccomp_data.json")  # importlib.resources costs 5 modules
    with open(path, encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def machine() -> str:
    """This machine's architecture as the data file names it."""
    return os.uname().machine


@cache
def version() -> str:
    """Changes whenever what `compile` answers here may change: to know whether a compiled filter is still good, without the rules."""
    seen = hashlib.sha256(machine().encode())
    for path in (__file__, os.path.join(os.path.dirname(__file__), "seccomp_data.json")):
        with open(path, "rb") as file:
            seen.update(file.read())
    return seen.hexdigest()[:16]


def exec_filter(profile: str) -> str:
    """The name of a profile's filter for execs."""
    return "exec" if profile == "default" else f"{profile}-exec"


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of a filter, those that it extends first. KeyError for an unknown one."""
    described = _data()["profiles"][name]
    inherited = rules(described["extends"]) if "extends" in described else []
    lifted = set(described.get("without", ()))
    kept = [{**rule, "names": [call for call in rule["names"] if call not in lifted]} for rule in inherited]
    added = _data()["profiles"][described["with"]]["rules"] if "with" in described else []
    return [*(rule for rule in kept if rule["names"]), *added, *described["rules"]]


def compile(profile: str = "default", arch: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, for `--seccomp FD` or `prctl`. KeyError for an unknown name."""
    table = _data()["arches"][arch or machine()]
    numbers: dict[str, int] = table["numbers"]
    enosys = _RET_ERRNO | errno.ENOSYS
    program: list[_Op] = [
        (_LD, 0, 0, _ARCH_AT),
        (_JEQ, 1, 0, table["audit"]),
        (_RET, 0, 0, enosys),
        (_LD, 0, 0, _NR_AT),
    ]
    if table["x32"]:
        program += [(_JGE, 0, 1, _X32_BIT), (_RET, 0, 0, enosys)]
    for rule in rules(profile):
        calls = sorted(numbers[name] for name in rule["names"] if name in numbers)
        refusal = (_RET, 0, 0, _RET_ERRNO | getattr(errno, rule["errno"]))
        if "all" not in rule:
            for start in range(0, len(calls), 200):  # a jump spans at most 255 instructions
                chunk = calls[start : start + 200]
                last = len(chunk) - 1
                program += [(_JEQ, last - i, 1 if i == last else 0, number) for i, number in enumerate(chunk)]
                program.append(refusal)
            continue
        body = [op for condition in rule["all"] for op in _condition(condition)]
        # Whoever leaves the block has the call's number loaded again, so that the next rule can look at it.
        tail: list[_Op] = [refusal, (_LD, 0, 0, _NR_AT)]
        for number in calls:
            block: list[_Op] = [(_JEQ, _NEXT, _FAIL, number), *body, *tail]
            program += _resolve(block, len(block) - 1)
    program.append((_RET, 0, 0, _RET_ALLOW))
    return b"".join(struct.pack("=HBBI", *op) for op in program)


def _condition(condition: dict[str, Any]) -> list[_Op]:
    """Instructions that fall through when the condition holds and jump to _FAIL when not."""
    low = 16 + 8 * int(condition["arg"])  # both architectures are little-endian
    load: _Op = (_LD, 0, 0, low)
    match condition["op"]:
        case "any_bit":
            return [load, (_JSET, _NEXT, _FAIL, condition["value"])]
        case "in":
            values = condition["values"]
            last = len(values) - 1
            return [load, *((_JEQ, last - i, _FAIL if i == last else _NEXT, v) for i, v in enumerate(values))]
        case "masked":
            return [load, (_AND, 0, 0, condition["mask"]), (_JEQ, _NEXT, _FAIL, condition["value"])]
        case "outside":
            # Bits beyond the mask; all ones is the question "what is it now" and passes.
            beyond = _ALL_ONES & ~int(condition["mask"])
            return [load, (_JEQ, _FAIL, _NEXT, _ALL_ONES), (_AND, 0, 0, beyond), (_JEQ, _FAIL, _NEXT, 0)]
        case "ne":
            return [load, (_JEQ, _FAIL, _NEXT, condition["value"])]
        case "set":
            return [(_LD, 0, 0, low + 4), (_JEQ, _NEXT, 2, 0), load, (_JEQ, _FAIL, _NEXT, 0)]
    raise ValueError(f"unknown condition {condition['op']!r}")


def _resolve(block: list[_Op], fail_at: int) -> list[_Op]:
    done = []
    for at, (code, yes, no, constant) in enumerate(block):
        jumps = [0 if jump == _NEXT else fail_at - at - 1 if jump == _FAIL else jump for jump in (yes, no)]
        if max(jumps) > 255:
            raise ValueError("a rule has too many conditions")
        done.append((code, *jumps, constant))
    return done  # type: ignore[return-value]


def to_oci(profile: str = "default", arch: str | None = None) -> dict[str, Any]:
    """The same profile as the value of `linux.seccomp` in an OCI spec; conditions become alternatives of one comparison each."""
    table = _data()["arches"][arch or machine()]
    calls: list[dict[str, Any]] = []
    for rule in rules(profile):
        names = [name for name in rule["names"] if name in table["numbers"]]
        if not names:
            continue
        base = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": getattr(errno, rule["errno"])}
        alternatives: list[list[dict[str, Any]]] = [[]]
        for condition in rule.get("all", []):
            alternatives = [[*known, test] for known in alternatives for test in _oci_tests(condition)]
        calls += [{**base, "args": tests} if tests else base for tests in alternatives]
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [table["oci"]], "syscalls": calls}


def _oci_tests(condition: dict[str, Any]) -> list[dict[str, Any]]:
    index = int(condition["arg"])

    def masked(mask: int, value: int) -> dict[str, Any]:
        return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

    match condition["op"]:
        case "any_bit":
            bits = [1 << n for n in range(32) if condition["value"] >> n & 1]
            return [masked(bit, bit) for bit in bits]
        case "in":
            return [masked(_ALL_ONES, value) for value in condition["values"]]
        case "masked":
            return [masked(condition["mask"], condition["value"])]
        case "outside":
            # Top bit clear and a forbidden bit set, or top bit set and not all ones.
            top = 1 << 31
            forbidden = [1 << n for n in range(31) if not condition["mask"] >> n & 1]
            return [
                *(masked(top | bit, bit) for bit in forbidden),
                *(masked(top | 1 << n, top) for n in range(31)),
            ]
        case "ne":
            return [{"index": index, "value": condition["value"], "op": "SCMP_CMP_NE"}]
        case "set":
            return [{"index": index, "value": 0, "op": "SCMP_CMP_NE"}]
    raise ValueError(f"unknown condition {condition['op']!r}")
