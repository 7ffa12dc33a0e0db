"""Threat: PID 1 itself is in the hands of the sandboxed code (notes N6) and says to the host whatever it likes.

What can be claimed honestly: exit code and output of an exec are the guest's word, as they are the program's word anyway. Everything else
is seen or done on the host: that a kill happened, that the clock ran out, that what is called over is over where nothing may live on, what
was used, that the deadline holds. So a captured guest can make a program look as if it had ended well only where the program could have
ended well by itself, never one that the host sees alive; and it harms neither the node nor a neighbour.

The control is the same program with an honest guest (or the hostile one telling no lie): the lie is what is found out.
"""

from __future__ import annotations

import base64
import io
import tarfile
import time
import uuid
from collections.abc import Iterator

import pytest

from corral.domain.facts import ExecFacts
from corral.domain.limits import MIB, LimitModes, Limits
from corral.domain.result import judge
from corral.testing.certify.bench import marked
from corral.testing.certify.captured import CLAIMS_END, FLOOD, GARBAGE
from corral.testing.hostile.guest import guest

from .conftest import MODES, Box, Lab, Refused, eventually

IMPATIENT = {"request_s": 2.0, "connect_s": 2.0, "keepalive_s": 2.0}


@pytest.fixture(scope="session", params=MODES)
def impatient(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A node that waits two seconds for a guest where it usually waits fifteen."""
    lab = Lab(request.param, channel=IMPATIENT)
    yield lab
    lab.close()


@pytest.fixture
def mark() -> str:
    return f"mark{uuid.uuid4().hex}"


def reason(facts: ExecFacts) -> str:
    return judge(facts, Limits(), LimitModes()).reason


def sleep(mark: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f"trap '' TERM; while :; do sleep 1; done # {mark}")


def start_marked(box: Box, mark: str, **spec: object) -> str:
    """An exec of which the host sees that it runs."""
    exec_id = box.start(*sleep(mark), **spec)
    eventually(lambda: marked(mark), "the program runs")
    return exec_id


def test_an_end_that_is_a_lie_is_no_result_where_nothing_may_live_on(impatient: Lab, mark: str) -> None:
    """One-shot: the guest says exit 0 and all gone while the host sees the program run."""
    with impatient.box(guest=guest(CLAIMS_END)) as box:
        facts = box.wait(start_marked(box, mark, background="kill")).facts
        assert reason(facts) == "sandbox_lost" and facts.exit_code is None and facts.guest_lost, facts
        assert facts.killed_all and not marked(mark)
        assert box.pids() == [], "whose guest lies has no sandbox any more"


def test_control_the_same_words_are_believed_when_the_host_sees_nothing_against_them(impatient: Lab) -> None:
    with impatient.box(guest=guest(CLAIMS_END)) as box:
        facts = box.run("/bin/true", background="kill").facts
        assert reason(facts) == "ok", facts
    with impatient.box() as box:
        facts = box.sh("sleep 0.1 & exit 0", background="kill").facts
        assert reason(facts) == "ok" and facts.killed_all, facts
        assert box.works()


def test_a_start_denied_while_the_program_runs_is_not_believed(impatient: Lab, mark: str) -> None:
    failed = "state='failed', started=False, failure={'what': 'argv', 'errno': 'ENOENT', 'message': 'no'}"
    mood = f"def on_start(request):\n spec = request['spec']\n begin(spec['argv'])\n time.sleep(0.5)\n ok(request, **status(spec['exec_id'], {failed}))\n"
    with impatient.box(guest=guest(mood)) as box:
        facts = box.wait(box.start(*sleep(mark))).facts
        assert facts.started is None and reason(facts) == "sandbox_lost", facts
        assert not marked(mark)


@pytest.mark.parametrize(
    ("lie", "mood"),
    [
        ("says that it killed", ""),
        ("does not answer", "def on_kill(request):\n pass\n"),
        ("says no", "def on_kill(request):\n ok(request, killed_all=False, killed=0)\n"),
        ("says that there is no such exec", "def on_kill(request):\n send(protocol.control(protocol.REPLY, {'id': request['id'], "
         "'error': {'code': 'not_found', 'detail': 'no such exec', 'field': None}}))\n"),
        ("kills nothing and goes on talking", "def on_kill(request):\n ok(request, killed_all=True, killed=0)\n end({'attach': seen, 'exec_id': request['exec_id']})\n"
         "def on_attach(request):\n global seen\n seen = request['attach']\n ok(request, **status(request['exec_id']))\n"),
    ],
)  # fmt: skip
def test_a_kill_happens_whatever_the_guest_says_of_it(impatient: Lab, mark: str, lie: str, mood: str) -> None:
    """The clock is the host's, and so is the witness."""
    with impatient.box(guest=guest(mood)) as box:
        began = time.monotonic()
        exec_id = start_marked(box, mark, limits={"wall_s": 1.0}, grace_s=0.2)
        facts = box.wait(exec_id).facts
        assert time.monotonic() - began < 8
        # An exit code may be the guest's word, as it may be that of a program that bears TERM well; the reason is not.
        assert reason(facts) == "timeout" and facts.killed_all and facts.exit_code in (None, 0), facts
        assert not marked(mark)


def test_control_an_honest_guest_keeps_the_sandbox_over_a_timeout(impatient: Lab, mark: str) -> None:
    with impatient.box() as box:
        facts = box.wait(start_marked(box, mark, limits={"wall_s": 1.0}, grace_s=0.2)).facts
        assert reason(facts) == "timeout" and facts.killed_all, facts
        assert not marked(mark) and box.works()


def test_control_what_is_at_work_beside_or_before_is_not_taken_for_a_lie(impatient: Lab, mark: str) -> None:
    """A file transfer and kept background processes run on while another exec is killed, or ends by itself."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    with impatient.box() as box:
        assert box.sh("sleep 1000 & sleep 0.01").facts.exit_code == 0
        tar = base64.b64encode(packed.getvalue()).decode()
        transfer = impatient.send("put_tar", instance=box.instance, tar=tar, dest="/workspace", pause_s=3.0)
        facts = box.wait(start_marked(box, mark, limits={"wall_s": 0.5}, grace_s=0.1)).facts
        assert reason(facts) == "timeout" and facts.killed_all and not marked(mark), facts
        assert reason(box.run("/bin/true", background="kill").facts) == "ok"
        impatient.answer(transfer)
        assert reason(box.run("/bin/ls", "/workspace/empty", background="kill").facts) == "ok"
        assert box.works()


SILENT = "def on_start(request):\n begin(request['spec']['argv'])\n"


def test_silence_after_a_start_ends_in_time_and_ends_the_program(impatient: Lab, mark: str) -> None:
    with impatient.box(guest=guest(SILENT + "def on_status(request):\n pass\n")) as box:
        began = time.monotonic()
        try:
            facts = box.wait(box.start(*sleep(mark))).facts
        except Refused as error:
            assert error.code in ("guest_lost", "sandbox_lost", "infra_error"), error
        else:
            assert reason(facts) in ("sandbox_lost", "infra_error") and facts.started is None, facts
        assert time.monotonic() - began < 15
        eventually(lambda: not marked(mark), "the program of a silent guest is ended")


def test_silence_while_a_program_runs_ends_with_the_clock_of_the_host(impatient: Lab, mark: str) -> None:
    mood = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n time.sleep(1000)\n"
    with impatient.box(guest=guest(mood)) as box:
        began = time.monotonic()
        facts = box.wait(start_marked(box, mark, limits={"wall_s": 1.0}, grace_s=0.2)).facts
        assert time.monotonic() - began < 12
        assert reason(facts) in ("timeout", "sandbox_lost") and facts.exit_code is None, facts
        eventually(lambda: not marked(mark), "the program of a silent guest is ended")


TINY = """
def on_attach(request):
    ok(request, **status(request["exec_id"]))
    at = 0
    while True:
        send(b"".join(protocol.data_frame(request["streams"]["stdout"], at + n, 0, b"x") for n in range(500)))
        at += 500
"""
PINGS = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n while True: ok({'id': 1})\n"
OTHERS = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n event(event='ended', attach=77, status=ended('exe_other'))\n"
OFFSETS = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n end(request, offsets={'stdout': 2**50, 'stderr': 0})\n"
LATE = "def on_attach(request):\n ok(request, **status(request['exec_id'], offsets={'stdout': 2**60, 'stderr': 0}))\n end(request, offsets={'stdout': 2**60, 'stderr': 0})\n"
WRONG = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n event(event='ended', attach=request['attach'], status=ended('exe_other'))\n"
CODES = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n end(request, exit_code=-1)\n"


@pytest.mark.parametrize(
    "mood",
    [FLOOD, TINY, PINGS, GARBAGE, OTHERS, OFFSETS, LATE, WRONG, CODES],
    ids=["flood", "tiny-frames", "replies", "garbage", "others-end", "offsets", "far-offsets", "other-exec", "codes"],
)
def test_floods_and_broken_frames_are_no_result_cost_no_memory_and_hurt_no_neighbour(
    impatient: Lab, mark: str, mood: str
) -> None:
    with impatient.box() as neighbour, impatient.box(guest=guest(mood)) as box:
        assert neighbour.works()
        before = impatient.resident_bytes()
        limits = {"wall_s": 2.5, "output_kill_bytes": 20 * MIB}
        waiting = impatient.send("wait", exec_id=box.start(*sleep(mark), limits=limits, grace_s=0.1))
        worst = 0.0
        for _ in range(5):
            began = time.monotonic()
            assert neighbour.works()
            worst = max(worst, time.monotonic() - began)
        facts = ExecFacts(**{k: v for k, v in impatient.answer(waiting).items() if k in ("started", "exit_code", "signal", "ended_by", "guest_lost", "sandbox_lost", "killed_all")})  # fmt: skip
        assert reason(facts) in ("sandbox_lost", "output_limit", "timeout"), facts
        assert facts.exit_code is None and facts.signal is None, facts
        assert impatient.resident_bytes() - before < 64 * MIB
        assert worst < 3.0, worst
        assert neighbour.works()
        eventually(lambda: not marked(mark), "the program of a guest that is given up ends")


@pytest.mark.parametrize(
    "mood",
    [
        "def greet():\n pass\n",
        "def accept():\n time.sleep(1000)\n",
        "def greet():\n send(b'HTTP/1.1 200 OK\\r\\n\\r\\n' * 1000)\n",
        "instance = 'ins_someone_else'\n",
        "raise SystemExit(0)\n",
        "def serve(request):\n send(protocol.control(protocol.REPLY, {'id': request['id'], 'ok': 'no'}))\n",
    ],
    ids=["no-hello", "no-accept", "other-protocol", "other-instance", "ends", "bad-identify"],
)
def test_a_guest_that_is_wrong_from_the_start_is_no_sandbox_and_leaves_nothing(impatient: Lab, mood: str) -> None:
    before = impatient.call("instances")
    began = time.monotonic()
    with pytest.raises(Refused) as refused:
        impatient.call("create", guest=guest(mood))
    assert refused.value.code in ("infra_error", "guest_lost", "sandbox_lost"), refused.value
    assert time.monotonic() - began < 15
    assert impatient.call("instances") == before
    for path in ("/proc/self/mountinfo",):
        with open(path) as file:
            assert str(impatient.state) + "/i/" not in file.read()


def test_the_deadline_holds_against_a_guest_that_has_none(impatient: Lab, mark: str) -> None:
    with impatient.box(guest=guest(""), deadline_s=2.0) as box:
        exec_id = start_marked(box, mark)
        facts = box.wait(exec_id).facts
        assert reason(facts) == "sandbox_lost", facts
        eventually(lambda: not box.pids() and not marked(mark), "the host ends it at its deadline")


def test_what_the_guest_says_of_use_and_of_others_is_not_in_the_facts(impatient: Lab) -> None:
    lie = "utime_ms=10**9, maxrss_kib=10**9, killed=10**6"
    mood = f"def on_attach(request):\n ok(request, **status(request['exec_id']))\n end(request, {lie})\n"
    with impatient.box(guest=guest(mood)) as box:
        facts = box.run("/bin/true").facts
        assert facts.usage.cpu_seconds is None or facts.usage.cpu_seconds < 60, facts.usage
        assert facts.usage.peak_memory_bytes is None or facts.usage.peak_memory_bytes < 512 * MIB, facts.usage


def test_the_guest_s_words_in_a_file_transfer_write_and_read_nothing_of_the_host(
    impatient: Lab, host_canary: object
) -> None:
    """A captured guest answers a download with what it likes: the node hands it on as bytes, an error or not, and does nothing with it."""
    mood = """
def on_attach(request):
    ok(request, **status(request["exec_id"]))
    said = b'{"code": "internal", "detail": "' + b"d" * 100000 + b'", "entry": 1}\\n'
    send(protocol.data_frame(request["streams"]["stderr"], 0, 0, said[:60000]))
    end(request, exit_code=3, offsets={"stdout": 0, "stderr": 60000})
"""
    with impatient.box(guest=guest(mood)) as box:
        with pytest.raises(Refused) as refused:
            impatient.call("get_tar", instance=box.instance, path="/workspace")
        assert refused.value.code == "infra_error" and len(refused.value.detail) < 3000, refused.value
