"""What reaches the inside, and what may be done there: environment, descriptors, ids, privileges, places to write."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from pathlib import Path

from corral.testing import attacks
from corral.testing.runtime.bench import Bench, NotApplicable, check
from corral.testing.runtime.descriptors import strange
from corral.testing.runtime.host import host_uid

GUEST_CAPABILITIES = (1 << 5) | (1 << 6) | (1 << 7)  # KILL, SETGID, SETUID


@check
async def nothing_of_the_host_reaches_the_inside(bench: Bench) -> None:
    """Environment, working directory and descriptors of the creating process stay outside."""
    secret = f"corral-secret-{secrets.token_hex(8)}"
    hidden = f"{bench.config.state_dir}/{secret}"
    await bench.info()
    if bench.config.scripted:
        raise NotApplicable("nothing real runs inside")
    os.mkdir(hidden)
    Path(f"{hidden}/file").write_text(secret)
    before, leaked = os.getcwd(), os.open(f"{hidden}/file", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    os.environ["CORRAL_TEST_SECRET"] = secret
    try:
        os.chdir(hidden)
        async with bench.box() as box:
            os.chdir(before)
            assert await box.alive()
            for ref in await box.refs():
                # What may not be looked at (an ordinary user, a process that is not dumpable) is looked at as root; what has ended
                # since it was listed holds nothing any more.
                with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
                    assert secret.encode() not in Path(f"/proc/{ref.pid}/environ").read_bytes()
                    assert secret not in os.readlink(f"/proc/{ref.pid}/cwd")
                    # What came from outside stays; what the guest itself reads just now, as its own /proc, it closes.
                    ours = await bench.host_pids()
                    stays = set(strange(ref.pid, secret, box.spec, box.instance, ours).items())
                    for _ in range(10):
                        if not stays:
                            break
                        await asyncio.sleep(0.05)
                        stays &= set(strange(ref.pid, secret, box.spec, box.instance, ours).items())
                    assert not stays, stays
            shown = await box.run(["/bin/busybox", "env"], env={"PATH": "/bin", "A": "b"})
            assert set(shown.stdout.split()) <= {b"PATH=/bin", b"A=b", b"PWD=/workspace", b"SHLVL=0", b"SHLVL=1"}, (
                shown.stdout
            )
            looked = await box.python(attacks.LOOK)
            answers = looked.json()
            assert answers["fds"] == [0, 1, 2], answers
            assert answers["hostname"] == box.spec.hostname
            assert answers["interfaces"] == ["lo"], answers
            if box.instance.guest_uid == 0:
                assert answers["shadow"] != "read", "an exec reads what only root of the base may"
            assert not (await box.run(["/bin/busybox", "ls", hidden])).ok
    finally:
        os.chdir(before)
        os.close(leaked)
        del os.environ["CORRAL_TEST_SECRET"]
        shutil.rmtree(hidden)


@check
async def ids_on_the_host_are_the_instances_own(bench: Bench) -> None:
    info = await bench.info()
    async with bench.box() as box:
        exec_id = await box.start(["/bin/busybox", "sleep", "1000"])
        (pid1, *_), everyone = await box.refs(), await box.refs()
        sleepers = [ref for ref in everyone if b"sleep" in Path(f"/proc/{ref.pid}/cmdline").read_bytes()]
        assert len(sleepers) == int(await bench.host_pids()), (exec_id, everyone)
        uids = {host_uid(ref.pid) for ref in everyone}
        if info.security_level >= 1:
            assert not uids & {0, os.getuid()}, uids
        elif os.getuid() != 0:
            assert uids == {os.getuid()}
        assert 0 not in uids
        assert os.stat("/dev/null").st_uid == 0, "the host's device was given away"
        assert info.capabilities["two_uids"] == (not box.instance.same_uid)
        if not await bench.host_pids():
            # The host sees neither of the two: the kernel inside tells them apart, by whom it lets be signalled.
            code = "import os\ndef may(pid):\n try: os.kill(pid, 0)\n except PermissionError: return 0\n return 1\n"
            asked = await box.python(code + "print(may(os.getpid()), may(os.getppid()))")
            assert asked.stdout == (b"1 0\n" if info.capabilities["two_uids"] else b"1 1\n"), asked
        for sleeper in sleepers:
            assert info.capabilities["two_uids"] == (host_uid(pid1.pid) != host_uid(sleeper.pid))
        told = await box.run(["/bin/busybox", "id"])
        assert told.stdout.startswith(f"uid={box.instance.exec_uid}".encode()), told.stdout
        made = await box.run(["/bin/busybox", "touch", "/workspace/mine"])
        assert made.ok, made.stderr
        seen = os.stat(f"{box.instance.tree.path}/workspace/mine")
        assert (seen.st_uid, seen.st_gid) == (box.instance.tree.uid, box.instance.tree.gid)


@check
async def execs_have_no_privilege(bench: Bench) -> None:
    async with bench.box() as box:
        shown = await box.run(["/bin/busybox", "cat", "/proc/self/status"])
        fields = dict(line.split(":\t", 1) for line in shown.stdout.decode().splitlines() if ":\t" in line)
        if await bench.host_pids():
            assert int(fields["CapAmb"], 16) == 0 and fields["NoNewPrivs"] == "1", fields
        else:  # not every kernel tells these two
            asked = await box.python(
                "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').prctl(39, 0, 0, 0, 0))"
            )
            assert int(fields.get("CapAmb", "0"), 16) == 0 and asked.stdout == b"1\n", (fields, asked)
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0, fields
        # Where PID 1 makes a pid namespace per exec, that takes one capability more, which no kernel of the host has given.
        bound = GUEST_CAPABILITIES if await bench.host_pids() else GUEST_CAPABILITIES | 1 << 21
        assert int(fields["CapBnd"], 16) & ~bound == 0, fields["CapBnd"]
        assert fields["Seccomp"] == "2", fields
        groups = fields["Groups"].split()
        assert set(groups) <= {"1000", "65534"}, groups


@check
async def only_the_named_places_are_writable(bench: Bench) -> None:
    async with bench.box() as box:
        answers = (await box.python(attacks.WRITE)).json()
        for path in ("/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/run/user/1000"):  # noqa: S108
            assert answers[path] == "ok", (path, answers)
            del answers[path]
        assert "ok" not in answers.values(), [path for path, answer in answers.items() if answer == "ok"]
        assert answers["write /etc/passwd"] != "ok"
    assert not list(Path(bench.config.rootfs).glob("**/.probe"))
