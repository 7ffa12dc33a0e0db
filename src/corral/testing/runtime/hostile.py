"""Programs that attack what serves them, with controls that show that the attacks can succeed."""

from __future__ import annotations

from corral.testing import attacks
from corral.testing.runtime.bench import Bench, NotApplicable, check

TOLD_BY_OWN_KERNEL = ("priority", "nice")
"""Niceness, which gVisor only notes down: the host's scheduler is not asked."""


@check
async def hostile_exec_is_refused(bench: Bench) -> None:
    """Reading, tracing, stopping or killing the guest and the supervisor, and every door to more rights."""
    async with bench.box() as box:
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        if not await bench.host_pids():
            opened = {name: answer for name, answer in opened.items() if not name.startswith(TOLD_BY_OWN_KERNEL)}
        assert not opened, opened
        assert await box.alive()


@check
async def hostile_exec_is_refused_with_one_uid(bench: Bench) -> None:
    """Guest and execs share a uid: the guest's own measures must hold."""
    if not (await bench.info()).capabilities.get("one_uid", False):
        raise NotApplicable("guest and execs never share a uid")
    async with bench.box(unsafe=frozenset({"unsafe_one_uid"})) as box:
        if not box.instance.same_uid:
            raise NotApplicable("the runtime has no way with one uid")
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        assert not opened, opened
        assert await box.alive()


@check
async def profile_debug_lets_an_exec_trace_its_own_and_nobody_else(bench: Bench) -> None:
    async with bench.box(seccomp="debug") as box:
        traced = (await box.python(attacks.TRACE)).json()
        wanted = {"attach": 0, "peek": 0, "word": "inside", "read": 6, "detach": 0, "fixed addresses": 0, "status": 9}
        if not await bench.host_pids():  # gVisor has neither
            wanted |= {"read": "ENOSYS", "fixed addresses": "EINVAL"}
        assert traced == wanted, traced
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        if not await bench.host_pids():
            opened = {name: answer for name, answer in opened.items() if not name.startswith(TOLD_BY_OWN_KERNEL)}
        assert not opened, opened
        assert await box.alive()
    async with bench.box() as box:  # the control
        refused = (await box.python(attacks.TRACE)).json()
        assert refused == {"attach": "EPERM", "fixed addresses": "EPERM", "status": 9}, refused


@check
async def profile_browser_lets_a_program_shut_itself_in_and_opens_nothing_around_it(bench: Bench) -> None:
    async with bench.box(seccomp="browser") as box:
        code = f"GUEST_IS_ANOTHER = {not box.instance.same_uid}\n{attacks.BROWSE}"
        answers = (await box.python(code)).json()
        opened = {name for name, answer in answers.items() if answer == "done"}
        if box.instance.guest_uid != 0:
            opened.discard("shadow")  # with one id whatever is in the base is the exec's
        wanted = {"namespaces of a child", "root of its own", "chroot"}
        if not await bench.host_pids():
            wanted -= {"root of its own"}  # gVisor refuses it in a namespace below
        assert opened == wanted, answers
        traced = (await box.python(attacks.TRACE)).json()
        assert traced["attach"] == "EPERM", traced
        assert await box.alive()


@check
async def hostile_exec_cannot_kill_guest_or_supervisor(bench: Bench) -> None:
    async with bench.box() as box:
        for code in (
            "import os; print(os.kill(1, 9))",
            "import os; print(os.kill(1, 19))",
            "import os; print(os.kill(os.getppid(), 9))",
            "import os; print(os.kill(os.getppid(), 19))",
            "import os; print(os.kill(-1, 9))",
            attacks.OWNER_SIGNAL,
        ):
            outcome = await box.python(code)
            ended = outcome.status
            assert ended["state"] == "ended" and ended["started"] and ended["ended_by"] is None, (code, ended)
            if "kill(-1" not in code and not (box.instance.same_uid and "kill(1," in code):
                # Of one's own uid, PID 1 may be told; it has no handler, so the kernel drops the signal.
                assert not outcome.ok, (code, "was not refused")
            assert await box.alive(), code


@check
async def control_without_seccomp_a_user_namespace_opens(bench: Bench) -> None:
    """The hostile checks can fail: with the filter off, what it refuses works."""
    async with bench.box(unsafe=frozenset({"unsafe_no_seccomp"})) as box:
        code = "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').unshare(0x10000000))"
        assert (await box.python(code)).stdout == b"0\n"
        if box.instance.same_uid:
            code = "import resource; print(len(resource.prlimit(1, resource.RLIMIT_NOFILE)))"
            assert (await box.python(code)).stdout == b"2\n"
    async with bench.box() as box:
        code = "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').unshare(0x10000000))"
        assert (await box.python(code)).stdout == b"-1\n"


@check
async def control_with_one_uid_the_supervisor_dies(bench: Bench) -> None:
    """The kill checks can fail: with one uid and no signal scope, an exec ends its supervisor; the guest survives that."""
    async with bench.box(unsafe=frozenset({"unsafe_one_uid", "unsafe_no_landlock"})) as box:
        if not box.instance.same_uid:
            raise NotApplicable("the runtime has no way with one uid")
        outcome = await box.python("import os, time; os.kill(os.getppid(), 9); time.sleep(30)")
        assert outcome.status["state"] == "lost", outcome.status
        assert await box.alive()
