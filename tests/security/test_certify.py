"""`corral certify` can fail: each defence switched off is found by the attack that it is against, which holds with it on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import corral

from .conftest import ROOT
from .probes import AS_USER, USER, user_python

PROGRAM = """
import json, sys
from corral import config
from corral.testing import certify
report = certify.run_blocking([sys.argv[1]], only=sys.argv[2:], settings=config.load())
print(json.dumps(report.document()))
"""
SUPERVISOR, TOLD, NAMESPACES = "guest/kill of the supervisor", "guest/what /proc tells of them", "namespaces/namespaces"


def place_of(place: Path) -> Path:
    """A directory that everybody can pass through."""
    place.chmod(0o711)
    for above in list(place.parents)[:3]:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    state = place / "s"
    state.mkdir()
    return state


def environment(state: Path, unsafe: str = "") -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(Path(corral.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(state),
        "CORRAL_STATE_DIR": str(state / "state"),
        "CORRAL_UNSAFE": unsafe,
    }


def certified(place: Path, unsafe: str, *only: str, user: bool = False) -> dict[str, str]:
    """Verdicts by `group/name`, by a process of root or of an ordinary user."""
    state = place_of(place)
    become, python = {}, sys.executable
    if user and ROOT:
        os.chown(state, USER, USER)
        become, python = AS_USER, user_python()
    done = subprocess.run(
        [python, "-c", PROGRAM, "bubblewrap", *only],
        cwd="/",
        env=environment(state, unsafe),
        capture_output=True,
        timeout=300,
        **become,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (runtime,) = json.loads(done.stdout)["runtimes"]
    if not runtime["usable"]:
        pytest.skip(f"bubblewrap is not usable here: {runtime['reason']}")
    assert list(state.iterdir()) == [], "the trial left something beside the state directory"
    return {f"{attack['group']}/{attack['name']}": attack["verdict"] for attack in runtime["attacks"]}


@pytest.mark.root
def test_without_the_filter_namespaces_fail_and_with_all_nothing_does(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = certified(tmp_path / "a", "unsafe_no_seccomp", NAMESPACES)
    assert found[NAMESPACES] == "failed" and found["residue/the host, afterwards"] == "held", found
    found = certified(tmp_path / "b", "", NAMESPACES, SUPERVISOR, TOLD)
    assert set(found.values()) == {"held"} and len(found) == 4, found


@pytest.mark.root
def test_with_one_uid_and_no_landlock_the_supervisor_is_killed(tmp_path: Path) -> None:
    assert certified(tmp_path, "unsafe_one_uid,unsafe_no_landlock", SUPERVISOR)[SUPERVISOR] == "failed"


def test_a_dumpable_guest_of_an_ordinary_user_is_found(tmp_path: Path) -> None:
    assert certified(tmp_path, "unsafe_dumpable_guest", TOLD, user=True)[TOLD] == "failed"


def traces(state: Path) -> list[str]:
    """What on the host still speaks of a trial beside this state directory."""
    found = [f"file {path}" for path in state.iterdir()]
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{state}/" in line]
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                if os.fsencode(f"{state}/") in (place / "cmdline").read_bytes():
                    found.append(f"process {place.name}")
    return found


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGINT, "corral-certify-*"), (signal.SIGTERM, "corral-certify-*/i/*")]
)
def test_a_trial_that_is_stopped_leaves_nothing_wherever_it_was(
    tmp_path: Path, number: signal.Signals, at: str
) -> None:
    """While it probes, and while sandboxes live."""
    state = place_of(tmp_path)
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom corral.cli.main import main; main()"
    command = [sys.executable, "-c", program, "certify", "--runtime", "bubblewrap", "--json"]
    with subprocess.Popen(command, cwd="/", env=environment(state), stdout=subprocess.PIPE) as trial:
        end = time.monotonic() + 120
        while not list(state.glob(at)):
            assert trial.poll() is None and time.monotonic() < end, "the trial did not come so far"
            time.sleep(0.01)
        trial.send_signal(number)
        out, _ = trial.communicate(timeout=120)
    assert trial.returncode == 128 + number
    assert json.loads(out)["error"]["code"] == "cancelled"
    end = time.monotonic() + 30  # what was killed is seen for a moment
    while (left := traces(state)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def test_what_a_killed_trial_left_goes_with_the_next_one_and_a_living_one_stays(tmp_path: Path) -> None:
    state = place_of(tmp_path)
    program = "from corral.cli.main import main; main()"
    command = [sys.executable, "-c", program, "certify", "--runtime", "bubblewrap", "--json"]
    alive = state / "corral-certify-alive"
    alive.mkdir()
    with (
        open(alive / "trial.json", "w") as mark,
        subprocess.Popen(command, cwd="/", env=environment(state), stdout=subprocess.PIPE) as trial,
    ):
        fcntl.flock(mark, fcntl.LOCK_EX)
        end = time.monotonic() + 120
        while not list(state.glob("corral-certify-*/i/*")):
            assert trial.poll() is None and time.monotonic() < end, "the trial did not come so far"
            time.sleep(0.01)
        trial.kill()
        trial.communicate(timeout=120)
        left = [path for path in state.glob("corral-certify-*") if path != alive]
        assert len(left) == 1, "control: it leaves something"
        done = subprocess.run(
            [*command, "--only", TOLD], cwd="/", env=environment(state), capture_output=True, timeout=300
        )
        assert done.returncode in (0, 1), done.stderr[-2000:]
        assert [path.name for path in state.glob("corral-certify-*")] == [alive.name]
    alive.joinpath("trial.json").unlink()
    alive.rmdir()
    end = time.monotonic() + 30
    while (told := traces(state)) and time.monotonic() < end:
        time.sleep(0.1)
    assert told == []
