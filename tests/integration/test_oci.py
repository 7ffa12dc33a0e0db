"""What the programs of the OCI family have in common, and what the smaller ways of one must not change for another."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.adapters.runtimes import _oci, crun, runc
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.linux import cgroups
from corral.node.interpreter import GUEST_ARGV, PYTHON_ARGV, ensure_interpreter
from corral.testing import attacks
from corral.testing.runtime import Bench, Config
from corral.testing.runtime.host import host_uid

pytestmark = [pytest.mark.root]
BOTH = ["crun", "runc"]
LEAST = Limits(memory_bytes=16 * MIB, pids=8, disk_bytes=8 * MIB, inodes=200, tmp_bytes=MIB)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="corral-oci-"))
    base = path / "base"
    for name in (".corral", "bin", "dev", "etc", "home/sandbox", "proc", "run", "sys", "tmp", "var/tmp", "workspace"):
        (base / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed: there is no program to run inside")
    shutil.copy(busybox, base / "bin/busybox")
    for closed in ("tmp", "var/tmp"):
        (base / closed).chmod(0o700)
    yield path
    shutil.rmtree(path)


def bench_of(name: str, state: Path) -> Bench:
    factory = f"corral.adapters.runtimes.{name}:{name.capitalize()}Runtime"
    return Bench(
        Config(factory, str(state), str(state / "base"), str(ensure_interpreter(state)), GUEST_ARGV, PYTHON_ARGV)
    )


@pytest.mark.parametrize("name", BOTH)
def test_an_installed_program_is_usable(name: str, state: Path) -> None:
    need(name)
    info = asyncio.run(bench_of(name, state).runtime.probe())
    assert info.usable, info.reason
    assert set(info.limits.as_dict().values()) == {"enforced"} and info.capabilities["pause"]


@pytest.mark.parametrize("name", BOTH)
def test_the_least_limits_hold_whatever_the_program_itself_needs(name: str, state: Path) -> None:
    need(name)

    async def work() -> None:
        bench = bench_of(name, state)
        before = Path("/proc/self/mountinfo").read_text()
        async with bench.box(LEAST) as box:
            group = cgroups.host().open(f"{bench.config.installation_id}/{box.spec.instance_id}")
            at_rest = await bench.runtime.stats(box.ref)
            assert at_rest.peak_pids is None, "the program's own threads are nobody's use"
            assert at_rest.memory_bytes is not None and at_rest.memory_bytes <= LEAST.memory_bytes
            answer = (await box.python(attacks.FORK % 64)).json()
            assert answer["errno"] == "EAGAIN" and answer["children"] < LEAST.pids, answer
            for _ in range(100):  # the guest makes ready for the next exec meanwhile
                seen = [set(group.procs()), set(await bench.runtime.processes(box.ref)), set(group.procs())]
                if seen[0] == seen[2]:
                    break
                await asyncio.sleep(0.05)
            assert seen[0] == seen[1] == seen[2]
            hog = await box.python(f"x = bytearray(b'x') * {4 * LEAST.memory_bytes}\nprint(len(x))")
            assert hog.status["signal"] == 9 and hog.stdout == b""
            assert await box.alive()
            shown = await box.run(["/bin/busybox", "stat", "-c", "%a", "/tmp", "/var/tmp"])
            assert shown.stdout.split() == [b"1777", b"1777"], "whatever modes the base has"
        after = Path("/proc/self/mountinfo").read_text()
        for line in before.splitlines():
            if " - cgroup" in line:
                assert line in after, "what a program sees read-only stays writable for the host"

    asyncio.run(work())


def test_a_peak_above_what_the_program_needed_is_the_instances(state: Path) -> None:
    need("runc")

    async def work() -> None:
        bench = bench_of("runc", state)
        async with bench.box() as box:
            answer = (await box.python(attacks.FORK % 40)).json()
            assert answer["children"] == 40
            peak = (await bench.runtime.stats(box.ref)).peak_pids
            assert peak is not None and 40 < peak < 64, peak

    asyncio.run(work())


def test_a_program_with_another_name_is_a_runtime_of_its_own(state: Path) -> None:
    need("runc")
    named = state / "named"
    named.symlink_to(shutil.which("runc") or "")
    config = bench_of("runc", state).config
    program = _oci.Program(
        **{**vars(runc.PROGRAM), "command": str(named), "security_level": 2, "user_namespace": False}
    )
    runtime = _oci.OciRuntime("special", program, str(state), installation_id=config.installation_id)

    async def work() -> None:
        info = await runtime.probe()
        assert info.usable, info.reason
        assert (info.name, info.security_level) == ("special", 2)
        assert not info.capabilities["two_uids"], "no user namespace, so one id inside"
        bench = Bench(config)
        bench.runtime = runtime
        async with bench.box() as box:
            assert box.ref.runtime == "special" and box.instance.same_uid
            assert {host_uid(ref.pid) for ref in await box.refs()} == {1000}
            assert os.listdir(state / "node" / "special") == [box.spec.instance_id]
            hostile = (await box.python(attacks.HOSTILE)).json()
            assert "done" not in hostile.values(), hostile

    asyncio.run(work())


@pytest.mark.parametrize("member", ["maskedPaths", "readonlyPaths"])
@pytest.mark.parametrize("name", BOTH)
def test_an_instance_whose_proc_was_left_open_is_not_made(name: str, member: str, state: Path) -> None:
    need(name)
    bench = bench_of(name, state)
    forgetful = state / f"forgetful-{name}-{member}"
    forgetful.write_text(
        "#!/bin/sh\nset -e\nprevious=\n"
        f'for word; do [ "$previous" != --bundle ] || sed -i s/{member}/forgotten/ "$word/config.json"; previous=$word; done\n'
        f'exec {shutil.which(name)} "$@"\n'
    )
    forgetful.chmod(0o755)
    module = {"crun": crun, "runc": runc}[name]
    program = _oci.Program(**{**vars(module.PROGRAM), "command": str(forgetful)})

    async def work() -> None:
        async with bench.box() as box:
            assert await box.alive(), "with the program itself it is"
        bench.runtime = _oci.OciRuntime(name, program, str(state), installation_id=bench.config.installation_id)
        spec = bench.spec()
        with pytest.raises(CorralError) as caught:
            await bench.create(spec)
        await bench.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
        shutil.rmtree(spec.directory, ignore_errors=True)
        what = "/proc/keys" if member == "maskedPaths" else "/proc/sys"
        assert "left open" in caught.value.detail and what in caught.value.detail

    asyncio.run(work())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#!/bin/sh\nexit 3\n", "ended with status 3"),
        ('#!/bin/sh\ncase "$*" in *--version*) echo fake version 9.9;; esac\n', "no process of the guest"),
        ("not a program", "status 127"),
    ],
)
def test_a_program_that_starts_nothing_is_told_apart_by_trying(state: Path, text: str, why: str) -> None:
    fake = Path(tempfile.mkdtemp(dir=state)) / "fake-oci"
    fake.write_text(text)
    fake.chmod(0o755)
    installation = f"ocif{os.getpid()}"
    program = _oci.Program(str(fake), "", security_level=3)
    runtime = _oci.OciRuntime("strong", program, str(state), installation_id=installation)
    info = asyncio.run(runtime.probe())
    assert not info.usable and info.reason is not None and why in info.reason, info.reason
    assert info.security_level == 3
    assert os.listdir(state / "i") == []
    assert cgroups.host().find_ours(installation) == []


def test_a_program_that_is_missing_names_what_to_install() -> None:
    info = asyncio.run(
        _oci.OciRuntime("kata", _oci.Program("/no/kata", "kata"), "/no/state", installation_id="o").probe()
    )
    assert not info.usable and info.reason is not None and "not installed" in info.reason


def test_only_crun_is_given_a_compiled_filter() -> None:
    assert (crun.PROGRAM.filter, runc.PROGRAM.filter) == ("compiled", "rules")
