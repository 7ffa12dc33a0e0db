"""runc, the reference of the OCI family.

It differs from crun in four ways. It reads the filter as rules and compiles them with libseccomp. It would make groups in every
hierarchy that it can write to: it sees them read-only and is told (`--rootless`) that this is no error. It gives a tmpfs the mode of
the directory that it covers (before 1.2), so one with the right mode is put there first. And it is a Go program: for the moment of
the start it needs a dozen threads (on two cores) and memory of its own, whatever the instance may have.
"""

from __future__ import annotations

from corral.adapters.runtimes._oci import OciRuntime, Program
from corral.domain.limits import MIB

PROGRAM = Program(
    command="runc",
    package="runc",
    options=("--rootless", "true"),
    groups="read-only",
    joins_user_namespace=False,  # before 1.2 it is not root there: https://github.com/opencontainers/runc/pull/4473
    launch_memory=32 * MIB,
    launch_pids=64,
)


class RuncRuntime(OciRuntime):
    """See `corral.adapters.runtimes._oci`."""

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        super().__init__("runc", PROGRAM, state_dir, installation_id=installation_id, subuid_range=subuid_range)
