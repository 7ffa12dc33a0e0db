"""The look at a sandbox's descriptors can fail: what a kernel of its own holds is told from what leaked into it, file by file."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from corral.ports.runtime import HostTree, Instance, InstanceRef, InstanceSpec
from corral.testing.runtime.descriptors import strange

HOLD = (
    "import os, sys\nfor path in sys.argv[1:]: print(os.open(path, os.O_RDONLY))\nsys.stdout.flush()\nsys.stdin.read()"
)


def test_a_file_that_is_not_shown_inside_is_strange_by_whatever_name(tmp_path: Path) -> None:
    rootfs, directory, interpreter = tmp_path / "base", tmp_path / "i", tmp_path / "py"
    disk = directory / "m" / "disk"
    (disk / "workspace").mkdir(parents=True)
    (rootfs / "etc").mkdir(parents=True)
    interpreter.mkdir()
    of_the_base, own, leaked = rootfs / "etc" / "passwd", disk / "workspace" / "file", tmp_path / "etc-shadow"
    beside, pipe = directory / "m" / "config.json", directory / "guest.in"
    for path in (of_the_base, own, leaked, beside):
        path.touch()
    os.mkfifo(pipe)
    spec = InstanceSpec("ins_1", "sbx_1", 1, "inst", str(directory), str(rootfs), str(interpreter), ())
    instance = Instance(InstanceRef("x", "ins_1", str(directory), {}), HostTree(str(disk), 1, 1, "image"))
    held = [str(path) for path in (of_the_base, own, leaked, beside, "/dev/zero", "/dev/null", "/proc")]
    with subprocess.Popen([sys.executable, "-c", HOLD, *held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        numbers = [int(child.stdout.readline()) for _ in held]
        found = strange(child.pid, "no-such-secret", spec, instance, ours=False)
        # As the host names them they are no paths of the inside: what counts is what they are.
        by_name = {path: number in found for path, number in zip(held, numbers, strict=True)}
        assert by_name[str(leaked)] and by_name["/dev/zero"] and by_name["/proc"]
        assert not by_name[str(beside)] and not by_name["/dev/null"] and not by_name[str(own)]
        assert by_name[str(of_the_base)], "a name of the host is not one of the inside"
        shown = strange(child.pid, "no-such-secret", replace(spec, rootfs=""), instance, ours=False)
        assert numbers[0] not in shown and "/dev/zero" in shown.values()
        told = strange(child.pid, "passwd", replace(spec, rootfs=""), instance, ours=False)
        assert told[numbers[0]] == str(of_the_base), "the word that must not be there is looked for in every name"
        child.stdin.close()
        child.wait(60)
