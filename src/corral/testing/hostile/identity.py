"""Who a program is and what rights it has."""

from __future__ import annotations

from corral.testing.hostile.prelude import PRELUDE, TELL

STATUS = (
    PRELUDE
    + r"""
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Uid", "Gid", "Groups"):
        answers[name] = value.split()
answers["bits"] = libc.prctl(27, 0, 0, 0, 0)
answers["filtered"] = libc.prctl(21, 0, 0, 0, 0)
answers["no_new_privs"] = libc.prctl(39, 0, 0, 0, 0)
"""
    + TELL
)


GUEST_CAPABILITIES = (1 << 5) | (1 << 6) | (1 << 7)  # KILL, SETGID, SETUID
