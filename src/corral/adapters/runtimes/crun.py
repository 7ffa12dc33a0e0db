"""crun, the fastest of the OCI family: takes a compiled filter and leaves control groups alone."""

from __future__ import annotations

from corral.adapters.runtimes._oci import OciRuntime, Program

PROGRAM = Program(
    command="crun",
    package="crun",
    options=("--cgroup-manager", "disabled"),
    filter="compiled",
    groups="without v2",
    modes_from_below=False,
)


class CrunRuntime(OciRuntime):
    """See `corral.adapters.runtimes._oci`."""

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        super().__init__("crun", PROGRAM, state_dir, installation_id=installation_id, subuid_range=subuid_range)
