"""What a try shows and what may be said of it: held only with a control that works, failed at the least crack."""

import asyncio
import dataclasses
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from corral import bootstrap, config
from corral.domain.facts import ExecFacts, Usage
from corral.domain.limits import MIB, LimitModes
from corral.errors import CorralError
from corral.ports.runtime import RuntimeInfo
from corral.testing import certify
from corral.testing.certify import kernel, limits, page, residue
from corral.testing.certify.bench import SMALL, Bench, Box, Canaries, Ended, create, unlisted
from corral.testing.certify.files import copied
from corral.testing.certify.register import GROUPS, Attack, first, of_its_own, opened
from corral.testing.certify.verdict import (
    AFTERWARDS,
    Report,
    RuntimeReport,
    Seen,
    Trial,
    broken,
    find,
    judge,
    limit_trial,
)

WORKS = Seen(True, "works elsewhere")
REFUSED = Seen(False, "refused too")
UNTRIED = Seen(None, "no means")


@pytest.mark.parametrize(
    ("attack", "control", "verdict"),
    [
        (False, WORKS, "held"),
        (False, REFUSED, "not_provable"),
        (False, UNTRIED, "not_provable"),
        (True, WORKS, "failed"),
        (True, REFUSED, "failed"),
        (True, UNTRIED, "failed"),
        (None, WORKS, "not_provable"),
        (None, REFUSED, "not_provable"),
    ],
)
def test_a_refusal_is_worth_what_its_control_is_and_a_break_is_one_always(
    attack: bool | None, control: Seen, verdict: str
) -> None:
    assert judge(Trial("way", Seen(attack, "x"), control)) == verdict


def of(*trials: Trial) -> certify.Finding:
    return find("guest", "name", "about", "host", trials)


def held(way: str) -> Trial:
    return Trial(way, Seen(False, "EPERM"), WORKS)


def test_one_way_that_breaks_fails_the_whole_attack_and_is_named() -> None:
    finding = of(held("a"), Trial("b", Seen(True, "ok"), REFUSED), held("c"))
    assert finding.verdict == "failed"
    assert (
        "1 of 3" in finding.evidence and "b (ok)" in finding.evidence and "a" not in finding.evidence.split("ways")[1]
    )


def test_what_shows_nothing_is_named_beside_what_holds_and_never_counted() -> None:
    finding = of(held("a"), held("b"), Trial("c", Seen(False, "ENOSYS"), REFUSED))
    assert finding.verdict == "held" and finding.evidence.startswith("2 of 3 ways refused: EPERM")
    assert "shows nothing here: c" in finding.evidence
    assert of(Trial("c", Seen(False, "ENOSYS"), REFUSED)).verdict == "not_provable"
    assert of().verdict == "not_provable", "nothing tried is nothing shown"


def test_a_trial_that_is_taken_away_counts_as_failed() -> None:
    assert broken("guest", "n", "a", "host", "sandbox_lost").verdict == "failed"


@pytest.mark.parametrize(
    ("declared", "seen", "verdict"),
    [
        ("enforced", "enforced", "held"),
        ("enforced", "watched", "failed"),
        ("enforced", "absent", "failed"),
        ("watched", "watched", "held"),
        ("watched", "enforced", "held"),
        ("watched", "absent", "failed"),
        ("absent", "absent", "not_provable"),
        ("absent", "enforced", "not_provable"),
        ("enforced", None, "not_provable"),
    ],
)
def test_a_limit_weaker_than_declared_is_a_failure(declared: str, seen: str | None, verdict: str) -> None:
    trial = limit_trial(declared, seen, "how", WORKS)  # type: ignore[arg-type]
    assert judge(trial) == verdict
    finding = of(trial)
    assert (finding.declared, finding.seen) == (declared, seen)
    assert finding.document()["declared"] == declared


def ended(stdout: str = "", **facts: object) -> Ended:
    return Ended(ExecFacts(True, **facts), stdout.encode(), b"")  # type: ignore[arg-type]


def told(got: int, errno: str | None) -> str:
    return json.dumps({"got": got, "errno": errno})


def test_the_mode_of_a_limit_is_read_off_the_end_of_the_program() -> None:
    disk, memory, pids = (limits.AMOUNTS[name] for name in ("disk", "memory", "pids"))
    assert limits.seen_mode(disk, ended(told(4 * disk.size, None), exit_code=0))[0] == "absent"
    assert limits.seen_mode(disk, ended(told(disk.size, "ENOSPC"), exit_code=0))[0] == "enforced"
    assert limits.seen_mode(disk, ended(told(2 * disk.size, "ENOSPC"), exit_code=0))[0] == "watched"
    assert limits.seen_mode(disk, ended(signal=9, ended_by="disk_watch"))[0] == "watched"
    assert limits.seen_mode(disk, ended(signal=9))[0] is None, "killed by something else shows nothing"
    assert limits.seen_mode(pids, ended(told(pids.size - 3, "EAGAIN"), exit_code=0))[0] == "enforced"
    kill = ended(signal=9, usage=Usage(peak_memory_bytes=memory.size, oom_kills=1))
    assert limits.seen_mode(memory, kill)[0] == "enforced"
    assert limits.seen_mode(memory, ended(exit_code=1))[0] is None, "it may have failed of anything"
    assert limits.seen_mode(memory, ended(exit_code=137, usage=Usage(oom_kills=1)))[0] == "enforced"
    over = ended(signal=9, usage=Usage(peak_memory_bytes=3 * memory.size))
    assert limits.seen_mode(memory, over)[0] == "watched"
    assert SMALL.memory_bytes == memory.size and memory.size % MIB == 0


def test_an_answer_that_comes_after_the_check_of_privilege_is_an_open_door() -> None:
    assert kernel.attack_of("mount tmpfs", "EINVAL").broke
    assert kernel.attack_of("mount tmpfs", "EPERM").broke is False
    assert kernel.attack_of("mount tmpfs", "EWHATEVER").broke is None
    assert kernel.attack_of("setuid 0", "EINVAL").broke is False, "there is no other id inside"
    assert kernel.attack_of("setuid 0", "ok").broke


def test_the_first_place_where_a_door_opens_is_the_control() -> None:
    places = [("a", {"bpf": "EPERM"}), ("b", None), ("c", {"bpf": "ok"}), ("d", {"bpf": "ok"})]
    seen = kernel.control_of("bpf", places)
    assert seen.broke and "c" in seen.how
    assert kernel.control_of("bpf", places[:2]).broke is False
    assert kernel.control_of("bpf", []).broke is None
    assert first().broke is None
    assert opened(None).broke is None and opened("ok").broke and opened("EPERM").broke is False
    assert of_its_own(Seen(True, "ok")).broke is None and of_its_own(Seen(False, "no")).broke is False


def report(*findings: certify.Finding, unusable: str | None = None, named: tuple[str, ...] = ()) -> Report:
    runtime = RuntimeReport("crun", "1.0", 1, unusable, findings)
    host = {"kernel": "6.1.0-secret-build", "machine": "x86_64", "cgroup": "v2", "memory_bytes": 1, "cpus": 2}
    return Report("2030-01-02T03:04:05Z", "root", host, {"corral": "0.1.0", "crun": "1.0"}, (runtime,), named)


def test_nothing_tried_is_no_success_and_one_failure_is_none_either() -> None:
    assert report(of(held("a"))).ok
    assert not report(of(held("a")), of(Trial("b", Seen(True, "ok"), WORKS))).ok
    assert not report(unusable="not installed").ok
    unproven = of(Trial("c", Seen(False, "x"), REFUSED))
    assert report(of(held("a")), unproven).ok, "not provable is no failure"
    assert not report(unproven).ok and not report().ok, "but alone it proves nothing"
    last = find(*AFTERWARDS, "about", "host", [held("a")])
    assert not report(unproven, last).ok, "nor does the row that every trial has"


def test_each_runtime_that_is_named_must_work_and_each_that_is_tried_must_prove_something() -> None:
    good = report(of(held("a")), named=("crun",))
    assert good.ok
    assert not dataclasses.replace(good, named=("crun", "runsc")).ok
    other = RuntimeReport("runsc", None, 2, "not installed")
    both = dataclasses.replace(good, runtimes=(*good.runtimes, other))
    assert both.ok, "one that is only configured may be missing"
    assert not dataclasses.replace(both, named=("crun", "runsc")).ok
    idle = dataclasses.replace(other, unusable=None)
    assert not dataclasses.replace(good, runtimes=(*good.runtimes, idle)).ok


def test_nobody_else_can_name_where_the_canary_lies_or_have_it_written_through_a_link(tmp_path: Path) -> None:
    async def go() -> None:
        canaries = Canaries()
        try:
            sockets = [target[1] for target in await canaries.listen() if target[0] == "path"]
            above = canaries.place.parent
            assert stat.S_IMODE(above.stat().st_mode) == 0o711 and stat.S_IMODE(canaries.place.stat().st_mode) == 0o777
            assert len(canaries.place.name) >= 32 and all(canaries.place.name not in path for path in sockets)
            assert stat.S_IMODE(canaries.file.stat().st_mode) == 0o666 and canaries.untouched()
            aim = tmp_path / "aim"
            aim.write_text(canaries.word)
            canaries.file.unlink()
            canaries.file.symlink_to(aim)
            assert not canaries.untouched(), "a link to the same words is another file"
            with pytest.raises(FileExistsError):
                create(canaries.file)
            assert aim.read_text() == canaries.word
        finally:
            await canaries.close()
        assert not above.exists()

    asyncio.run(go())


def test_arguments_that_are_unlisted_reach_the_program_and_not_its_command_line() -> None:
    code, words = unlisted("print(sys.argv[1:])", "/tmp/ä b", "word")
    done = subprocess.run([sys.executable, "-c", code], input=words, capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(["/tmp/ä b", "word"]) and "word" not in code


def test_a_copy_that_takes_nothing_at_all_and_a_tenant_elsewhere_show_nothing() -> None:
    assert copied(True, "taken", False).broke and copied(False, "taken", True).broke is False
    assert copied(False, "taken", False).broke is None
    assert judge(residue.met(held("files"), {"ids", "directory"}, set())) == "held"
    elsewhere = residue.met(held("files"), {"directory"}, {"ids"})
    assert judge(elsewhere) == "not_provable" and "never the same ids" in elsewhere.attack.how
    found = Trial("files", Seen(True, "found"), WORKS)
    assert judge(residue.met(found, set(), {"ids"})) == "failed", "what is found is found anywhere"


def test_the_last_row_tells_when_the_directory_of_the_trial_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (row,) = residue.after_all(str(tmp_path / "gone"), "cert-none", 1)
    assert row.verdict == "held" and not (tmp_path / "gone").exists()
    (tmp_path / "stays").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    (row,) = residue.after_all(str(tmp_path / "stays"), "cert-none", 1)
    assert row.verdict == "failed" and "the directory of the trial" in row.evidence


def test_whatever_an_attack_raises_is_a_row_and_what_is_no_object_is_no_answer() -> None:
    async def run(bench: Bench) -> list[Trial]:
        raise RecursionError("deep")

    attack = Attack("guest", "n", "a", "host", run)
    finding = asyncio.run(certify._try(attack, None))  # type: ignore[arg-type]
    assert finding.verdict == "failed" and "RecursionError" in finding.evidence

    class Told(Box):
        async def python(self, code: str, *arguments: str, **spec: object) -> Ended:
            return ended("[1]", exit_code=0)

    with pytest.raises(CorralError, match="no object"):
        asyncio.run(Told(None, "ins", None).ask(""))  # type: ignore[arg-type]


def test_the_page_tells_what_failed_escapes_bars_and_names_no_build_of_the_kernel() -> None:
    text = page.markdown([report(of(Trial("b", Seen(True, "a|b"), WORKS))).document()])
    assert "**failed**" in text and "a\\|b" in text and "6.1.0" in text and "secret" not in text
    assert "## crun as root" in text


def test_every_group_has_attacks_and_an_unknown_one_is_refused_by_name() -> None:
    assert {attack.group for attack in certify.ATTACKS} == set(GROUPS)
    names = [(attack.group, attack.name) for attack in certify.ATTACKS]
    assert len(names) == len(set(names))
    with pytest.raises(CorralError) as refused:
        certify.run_blocking(["bubblewrap"], only=["gest"])
    assert refused.value.code == "invalid_value" and "guest" in (refused.value.hint or "")


def test_an_adapter_that_cannot_be_opened_is_told_as_unusable_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unopened:
        def __init__(self, *_: object) -> None: ...

        async def open(self) -> None:
            raise RuntimeError("not today")

        async def close(self) -> None: ...

    monkeypatch.setattr(certify, "Bench", Unopened)
    settings = dataclasses.replace(config.load(), state_dir=str(tmp_path / "state"))
    told = certify.run_blocking(["crun", "runc"], settings=settings)
    assert [one.unusable for one in told.runtimes] == ["RuntimeError: not today"] * 2 and not told.ok
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_cannot_be_made_is_told_as_unusable_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmade(name: str, *_: object) -> object:
        raise ImportError(f"no module of {name}")

    monkeypatch.setattr(bootstrap, "_runtime", unmade)
    settings = dataclasses.replace(config.load(), state_dir=str(tmp_path / "state"))
    told = certify.run_blocking(["mine", "yours"], settings=settings)
    assert [one.unusable for one in told.runtimes] == [
        "ImportError: no module of mine",
        "ImportError: no module of yours",
    ]
    assert not told.ok and list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_runtime_is_refused(tmp_path: Path) -> None:
    settings = dataclasses.replace(config.load(), state_dir=str(tmp_path / "state"))
    with pytest.raises(CorralError, match="no runtime adapter 'nosuch'"):
        certify.run_blocking(["nosuch"], settings=settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["opening", "attack", "closing"])
async def test_an_interrupted_trial_is_closed_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    reached, going_on, closed = asyncio.Event(), asyncio.Event(), []

    class Interrupted:
        def __init__(self, *_: object) -> None: ...

        async def open(self) -> RuntimeInfo:
            if where == "opening":
                await stay(self)
            return RuntimeInfo("crun", True, None, 1, "1", {}, LimitModes())

        async def close(self) -> None:
            if where == "closing":
                reached.set()
                await going_on.wait()
            await asyncio.sleep(0)
            closed.append(self)

    async def nothing(bench: object) -> list[Trial]:
        return []

    async def stay(bench: object) -> list[Trial]:
        reached.set()
        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(certify, "Bench", Interrupted)
    monkeypatch.setattr(
        certify, "ATTACKS", [Attack("guest", "n", "a", "host", nothing if where == "closing" else stay)]
    )
    settings = dataclasses.replace(config.load(), state_dir=str(tmp_path / "state"))
    running = asyncio.create_task(certify.run(["crun"], settings=settings))
    await reached.wait()
    for _ in range(3):  # whoever is impatient does not shorten it
        running.cancel()
        await asyncio.sleep(0)
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(closed) == 1 and list(tmp_path.iterdir()) == []


def test_without_a_name_the_runtimes_of_the_configuration_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(config.load(), runtimes=())
    monkeypatch.setattr(bootstrap, "by_default", lambda given: ("crun", "mine") if given is settings else ())
    assert certify._configured(settings) == ["crun", "mine"]
    assert certify._configured(dataclasses.replace(settings, runtimes=("runc",))) == ["runc"]
