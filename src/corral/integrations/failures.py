"""What refusals and results of Corral mean in the words of Python, which other people's interfaces are written in."""

from __future__ import annotations

import errno

from corral.client.values import Result
from corral.errors import CorralError

_GONE = ("sandbox_deleted", "sandbox_lost", "lease_lost")
_ERRNO = {
    "not_found": errno.ENOENT,
    "permission_denied": errno.EACCES,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "already_exists": errno.EEXIST,
    "not_empty": errno.ENOTEMPTY,
    "disk_full": errno.ENOSPC,
    "not_a_file": errno.EINVAL,
    "invalid_value": errno.EINVAL,  # what the kernel says of a path, as a circle of links or a name that is too long
}


def os_error(error: CorralError) -> OSError | None:
    """The built-in error of a refusal that is about a path (`FileNotFoundError`, `IsADirectoryError` …), None for all others."""
    if error.code == "cwd_not_found":
        return FileNotFoundError(errno.ENOENT, error.detail)
    entry = error.facts.get("entry")
    number = _ERRNO.get(error.code)
    if entry is None or number is None:
        return None
    return OSError(number, error.detail, str(entry))


def is_gone(error: CorralError) -> bool:
    """Does it say that the sandbox is no more, so that no repetition helps?"""
    return error.code in (*_GONE, "guest_lost") or (error.code == "not_found" and "entry" not in error.facts)


def ended_with_sandbox(result: Result) -> bool:
    """Did the program end because its sandbox did?"""
    return result.reason in _GONE or (result.reason == "oom" and result.exit_code is None)


def not_executable(result: Result) -> bool:
    """Was the program found, but the user may not start it?"""
    return result.started is False and result.exit_code == 126 and "not executable" in (result.hint or "")


def exit_of(result: Result) -> int:
    """The exit status. `CorralError` with the reason where there is none: nobody knows how the program ended."""
    if result.exit_code is None:
        raise CorralError(result.reason, result.hint or "the outcome of the program is not known")
    return result.exit_code


def complaint_of(result: Result) -> str:
    """Standard error; of a program that never ran, what a shell would have said instead."""
    text = result.stderr.text
    return text if text or result.started or not result.hint else result.hint + "\n"
