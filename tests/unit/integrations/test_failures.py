"""Refusals and results in the words of Python, over what the service really says."""

from __future__ import annotations

from typing import Any

import pytest

from corral.client.values import Result
from corral.domain.facts import ExecFacts, StartFailure, Usage
from corral.domain.limits import LimitModes, Limits
from corral.domain.result import judge
from corral.errors import CorralError
from corral.integrations.failures import complaint_of, ended_with_sandbox, exit_of, is_gone, not_executable, os_error

LIMITS = Limits()
MODES = LimitModes(**{name: "enforced" for name in ("memory", "cpu", "pids", "disk", "inodes", "tmp")})  # type: ignore[arg-type]


def result(stderr: str = "", **facts: Any) -> Result:
    """A result as the service makes it of what the host saw."""
    made = judge(ExecFacts(**facts), LIMITS, MODES)
    stream = {"bytes": len(stderr), "kept_bytes": len(stderr), "truncated": False, "text": stderr, "base64": None}
    empty = {name: [] for name in ("files", "artifacts")} | {name: {} for name in ("usage", "limits", "timings")}
    told = {"exit_code": made.exit_code, "signal": made.signal_name, "reason": made.reason, "hint": made.hint}
    return Result({**told, "started": made.started, "stdout": stream, "stderr": stream, **empty})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", FileNotFoundError),
        ("permission_denied", PermissionError),
        ("is_a_directory", IsADirectoryError),
        ("not_a_directory", NotADirectoryError),
        ("already_exists", FileExistsError),
        ("disk_full", OSError),
        ("not_a_file", OSError),
    ],
)
def test_a_refusal_that_names_a_path_is_the_error_of_the_language(code: str, kind: type[OSError]) -> None:
    made = os_error(CorralError(code, "'/workspace/a' is odd", entry="/workspace/a"))
    assert type(made) is kind and made.filename == "/workspace/a" and "is odd" in str(made)


def test_a_refusal_without_a_path_is_passed_on() -> None:
    assert os_error(CorralError("not_found", "no sandbox sbx_1")) is None
    assert os_error(CorralError("overloaded", "busy", entry="/workspace/a")) is None


def test_a_missing_directory_to_start_in_is_a_missing_file() -> None:
    assert isinstance(os_error(CorralError("cwd_not_found", "/nowhere does not exist")), FileNotFoundError)


def test_a_missing_file_is_not_a_missing_sandbox() -> None:
    assert is_gone(CorralError("not_found", "no sandbox sbx_1")) and is_gone(CorralError("sandbox_deleted", "deleted"))
    assert not is_gone(CorralError("not_found", "'a' is not there", entry="a")) and not is_gone(
        CorralError("overloaded", "busy")
    )


@pytest.mark.parametrize(
    ("number", "refused"), [("EACCES", True), ("ENOEXEC", False), ("E2BIG", False), ("ENOENT", False)]
)
def test_only_a_program_that_may_not_be_started_is_not_executable(number: str, refused: bool) -> None:
    made = result(started=False, start_failure=StartFailure("argv", number, "./a"))
    assert not_executable(made) is refused
    assert exit_of(made) == (127 if number == "ENOENT" else 126)
    assert "./a" in complaint_of(made), "nobody wrote anything: the hint is what a shell would have said"


def test_a_program_that_ran_keeps_its_own_words_and_status() -> None:
    made = result("mine\n", started=True, exit_code=126)
    assert (exit_of(made), complaint_of(made), not_executable(made)) == (126, "mine\n", False)
    assert complaint_of(result(started=True, exit_code=3)) == ""


@pytest.mark.parametrize("facts", [{"sandbox_lost": True}, {"sandbox_lost": True, "usage": Usage(oom_kills=1)}])
def test_a_program_without_a_sandbox_has_no_status(facts: dict[str, Any]) -> None:
    made = result(started=True, **facts)
    assert ended_with_sandbox(made)
    with pytest.raises(CorralError, match=made.reason):
        exit_of(made)
