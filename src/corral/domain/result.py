"""What happened, as one document: the facts of the host become one reason, an exit code, a hint and the fields of the contract.

`judge` is total: every combination of facts has exactly one verdict, the first reason of `ORDER` that applies. A counter that rose
in a program which exited 0 is no reason but a hint. Nothing here trusts what the guest says about limits: the facts are the host's.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.domain.facts import ExecFacts, StartFailure, StreamFacts
from corral.domain.limits import LIMIT_NAMES, LimitModes, Limits
from corral.domain.quantities import format_bytes, format_seconds, shown
from corral.errors import CorralError

ORDER = (
    "cancelled",
    "sandbox_deleted",
    "lease_lost",
    "timeout",
    "circuit_breaker",
    "oom",
    "output_limit",
    "disk_full",
    "inodes",
    "pids_limit",
    "seccomp",
    "signal",
    "nonzero_exit",
    "ok",
)
"""The reasons of a program that was started, first that applies."""

NO_OUTCOME = (
    "refused",
    "missing_tool",
    "not_found",
    "cwd_not_found",
    "user_refused",
    "queue_timeout",
    "dependency_failed",
    "sandbox_lost",
    "sandbox_deleted",
    "lease_lost",
    "infra_error",
    "policy_denied",
)
"""Reasons under which the program has no outcome of its own: exit status 125."""

MAX_TIMELINE = 10_000
MAX_FILES = 10_000
PHASES = ("build", "run")
"""What a result tells of: the build of code in a compiled language that did not succeed, or the program."""
TIMINGS = ("queued_ms", "planning_ms", "acquiring_ms", "preparing_ms", "running_ms", "collecting_ms", "total_ms")

_KILLED = {"timeout": 124, "oom": 137, "output_limit": 137, "circuit_breaker": 137, "cancelled": 137}

_SIGNALS = dict(
    enumerate(
        [
            "HUP",
            "INT",
            "QUIT",
            "ILL",
            "TRAP",
            "ABRT",
            "BUS",
            "FPE",
            "KILL",
            "USR1",
            "SEGV",
            "USR2",
            "PIPE",
            "ALRM",
            "TERM",
            "STKFLT",
            "CHLD",
            "CONT",
            "STOP",
            "TSTP",
            "TTIN",
            "TTOU",
            "URG",
            "XCPU",
            "XFSZ",
            "VTALRM",
            "PROF",
            "WINCH",
            "IO",
            "PWR",
            "SYS",
        ],
        start=1,
    )
)
_SIGSYS = 31


@dataclass(frozen=True)
class Verdict:
    """One reason with what goes beside it. `exit_code` is 128+n after signal n; None = never started or unknown."""

    reason: str
    exit_code: int | None
    signal_name: str | None
    hint: str | None
    started: bool | None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals count from `SIGRTMIN`."""
    if number in _SIGNALS:
        return f"SIG{_SIGNALS[number]}"
    return f"SIGRTMIN+{number - 34}" if 34 <= number <= 64 else f"SIG{number}"


REFUSALS = {
    "cwd_not_found": ("/cwd", "create it first, or leave cwd out"),
    "user_refused": ("/user", "use the user sandbox"),
}
"""Reasons for which the caller's own words are to blame: reason -> (their field, what to do about it)."""


def refusal(reason: str, hint: str | None) -> CorralError | None:
    """The error to raise for a verdict that refuses what the caller asked for (cwd, user); None when there is a result to show."""
    if reason not in REFUSALS:
        return None
    field, advice = REFUSALS[reason]
    detail = (hint or reason).partition(f"; {advice}")[0]
    return CorralError(reason, detail, hint=advice, field=field)


def _cwd(failure: StartFailure, cwd: str | None) -> str:
    name = f" {shown(cwd, 200)}" if cwd is not None else ""
    return f"the working directory{name} cannot be entered: {failure.message or 'it does not exist inside'}"


def judge(facts: ExecFacts, limits: Limits, modes: LimitModes, cwd: str | None = None) -> Verdict:
    """The one verdict over an exec; `cwd` is the directory that its caller named, for the hint that blames it."""
    reason, hint = _reason(facts, limits, modes, cwd)
    code, name = facts.exit_code, None
    if facts.signal is not None:
        code, name = min(128 + facts.signal, 255), signal_name(facts.signal)
    started = facts.started
    failure = facts.start_failure
    if failure is not None and not started:
        started = False
        code = _start_code(failure.errno) if failure.what == "argv" and reason == "nonzero_exit" else None
        name = None
    elif code is not None and started is None:
        started = True  # whoever has an exit code has run
    if reason in ("infra_error", "sandbox_lost"):
        code, name = None, None
    sentences = [hint] if hint else []
    if not facts.killed_all:
        sentences.append("some of its processes outlived the kill, so the sandbox is destroyed")
    if reason in ("ok", "nonzero_exit", "signal"):
        sentences += _notes(facts, limits, modes)
    return Verdict(reason, code, name, "; ".join(sentences) or None, started)


def _reason(facts: ExecFacts, limits: Limits, modes: LimitModes, cwd: str | None) -> tuple[str, str | None]:
    if facts.infra is not None:
        return (
            "infra_error",
            f"the platform failed: {facts.infra}; this is not the program's fault, trying again may help",
        )
    ended = _ended_by_us(facts, limits)
    if ended is not None:
        return ended
    if facts.start_failure is not None and not facts.started:
        full = facts.start_failure.errno == "EAGAIN" and _pids_hit(facts, limits, modes)
        if full and facts.start_failure.what == "platform":
            return "pids_limit", (
                f"could not be started: limit {limits.pids} pids, taken by other programs of the sandbox, or by what they left running; have those end, "
                f"or ask for more pids{_watched(modes, 'pids')}"
            )
        return _not_started(facts.start_failure, cwd)
    usage = facts.usage
    known = facts.exit_code is not None or facts.signal is not None
    failed = facts.exit_code != 0
    oom_kills = usage.oom_kills or 0
    if failed and (facts.ended_by in ("memory_watch", "memory_unseen") or oom_kills > 0):
        return "oom", _oom_hint(facts, limits, modes)
    if (facts.sandbox_lost or facts.guest_lost) and not known and facts.ended_by is None:
        return (
            "sandbox_lost",
            "the sandbox ended under the program, its outcome is unknown; run it again in a new sandbox",
        )
    if facts.ended_by == "output_limit":
        kill = format_bytes(limits.output_kill_bytes)
        return (
            "output_limit",
            f"killed: wrote more than {kill} of output; write less, write to a file, or raise output_kill",
        )
    if failed and facts.tmp_full:
        return "disk_full", f"/tmp is full ({format_bytes(limits.tmp_bytes)}); write to /workspace, or ask for more tmp"  # noqa: S108
    if failed and facts.ended_by == "disk_unseen":
        return "disk_full", _unseen(format_bytes(limits.disk_bytes), "disk", modes)
    if failed and (facts.disk_full or facts.ended_by == "disk_watch"):
        size = format_bytes(limits.disk_bytes)
        verb = "killed: exceeded" if facts.ended_by == "disk_watch" else "the disk is full: limit"
        return (
            "disk_full",
            f"{verb} {size} of disk; write less, delete files, or ask for more disk{_watched(modes, 'disk')}",
        )
    if failed and (facts.inodes_full or facts.ended_by == "inodes_watch"):
        verb = "killed: made" if facts.ended_by == "inodes_watch" else "no more files can be made: limit"
        return (
            "inodes",
            f"{verb} {limits.inodes} inodes; make fewer files, or ask for more disk{_watched(modes, 'inodes')}",
        )
    if failed and _pids_hit(facts, limits, modes):
        return "pids_limit", (
            f"could not start a process: limit {limits.pids} pids; start fewer processes or threads at once, "
            f"or ask for more pids{_watched(modes, 'pids')}"
        )
    if failed and (facts.signal == _SIGSYS or (facts.seccomp_hits or 0) > 0):
        return "seccomp", "killed: made a system call that sandboxes do not allow; do without it"
    if facts.signal is not None:
        return "signal", _signal_hint(facts.signal)
    if facts.exit_code is None:
        return "infra_error", "the program's outcome is unknown; trying again may help"
    return ("ok", None) if facts.exit_code == 0 else ("nonzero_exit", _exit_hint(facts.exit_code))


def _ended_by_us(facts: ExecFacts, limits: Limits) -> tuple[str, str] | None:
    """The reasons that stand before every limit: we ended it, whatever it did about that."""
    before = " before it was started" if facts.started is False else ""
    match facts.ended_by:
        case "cancelled":
            return "cancelled", f"cancelled by request{before}; output up to then is kept"
        case "sandbox_deleted":
            return "sandbox_deleted", f"the sandbox was deleted{before or ' while the program ran'}; make a new one"
        case "lease_lost":
            return "lease_lost", f"the lease on the sandbox ended{before or ' while the program ran'}; acquire it again"
        case "timeout":
            wall = format_seconds(limits.wall_s)
            slowed = f", held back by its limit of {limits.cpu:g} cpu" if facts.cpu_throttled else ""
            return (
                "timeout",
                f"killed: ran longer than {wall}{slowed}; make it faster, do less at once, or ask for a longer timeout",
            )
        case "circuit_breaker":
            return (
                "circuit_breaker",
                "killed: its use of the machine crossed a threshold of the operator; do less at once",
            )
    return None


def _not_started(failure: StartFailure, cwd: str | None) -> tuple[str, str]:
    if failure.what == "cwd":
        return "cwd_not_found", f"{_cwd(failure, cwd)}; {REFUSALS['cwd_not_found'][1]}"
    if failure.what == "user":
        advice = REFUSALS["user_refused"][1]
        return "user_refused", f"the user is not available here: {failure.message}; {advice}"
    if failure.what == "platform":
        return "infra_error", f"the platform could not start the program: {failure.message or failure.errno}"
    if failure.errno == "ENOENT":
        return (
            "nonzero_exit",
            f"not found: {failure.message or 'the program'}; check the name and PATH, or use another template",
        )
    why = {
        "EACCES": "it is not executable (chmod +x) or its directory cannot be entered",
        "ENOEXEC": "it is neither a program of this machine nor a script with a #! line",
        "E2BIG": "arguments and environment are too long; pass data by stdin or a file",
    }.get(failure.errno, failure.errno)
    return "nonzero_exit", f"could not be started: {failure.message or 'the program'}: {why}"


def _start_code(errno: str) -> int:
    """What a shell answers: 127 not found, 126 found but not startable."""
    return 127 if errno == "ENOENT" else 126


def _pids_hit(facts: ExecFacts, limits: Limits, modes: LimitModes) -> bool:
    if facts.ended_by == "pids_watch" or (facts.usage.pids_limit_hits or 0) > 0:
        return True
    # A watched limit has no counter: between two looks of the host, a coarser limit of the kernel refuses the next fork. What
    # shows it is that more processes lived at once than the limit allows: seen by the host, or left behind and ended with main.
    return modes.pids == "watched" and max(facts.usage.peak_pids or 0, facts.killed_children + 1) > limits.pids


def _watched(modes: LimitModes, name: str) -> str:
    if getattr(modes, name) != "watched":
        return ""
    more = modes.overshoot.get(name)
    return f" (this limit is watched, not enforced{': ' + more if more else ''})"


def _unseen(size: str, what: str, modes: LimitModes) -> str:
    return (
        f"killed: more files are open in the sandbox than can be looked at, so its {what} cannot be seen to stay within {size}; "
        f"open fewer files, in fewer processes{_watched(modes, what)}"
    )


def _oom_hint(facts: ExecFacts, limits: Limits, modes: LimitModes) -> str:
    size = format_bytes(limits.memory_bytes)
    if facts.ended_by == "memory_unseen":
        return _unseen(size, "memory", modes)
    advice = f"reduce memory or ask for a larger class{_watched(modes, 'memory')}"
    if (facts.sandbox_lost or facts.guest_lost) and facts.exit_code is None and facts.signal is None:
        return f"killed: exceeded {size}, and the whole sandbox ended with it; {advice}"
    if facts.ended_by != "memory_watch" and facts.signal != 9:
        return f"a process of it was killed: exceeded {size}; {advice}"
    return f"killed: exceeded {size}; {advice}"


def _signal_hint(number: int) -> str:
    cause = {
        6: "it aborted itself (assertion or runtime error); see stderr",
        7: "invalid memory access",
        4: "an instruction that this machine does not have",
        8: "an arithmetic error such as a division by zero",
        11: "invalid memory access (segmentation fault)",
        13: "it wrote to a pipe that nobody read any more",
        9: "no limit of the sandbox was hit, so a process of the sandbox did it",
        24: "it used up its CPU time",
    }.get(number, "no limit of the sandbox was hit")
    return f"ended by {signal_name(number)}: {cause}"


def _exit_hint(code: int) -> str:
    if code == 127:
        return "exit status 127: most often a shell that did not find a command; see stderr"
    if code == 126:
        return "exit status 126: most often a shell that could not start a file (not executable?); see stderr"
    if 128 < code <= 128 + 64:
        return f"exit status {code} = 128+{code - 128}: a shell says so when its command was ended by {signal_name(code - 128)}"
    return f"the program itself exited with status {code}; see its output"


def _notes(facts: ExecFacts, limits: Limits, modes: LimitModes) -> list[str]:
    """What happened besides, for a program that ended by itself."""
    notes: list[str] = []
    usage = facts.usage
    if facts.exit_code == 0:
        if kills := usage.oom_kills:
            who = "1 child process was" if kills == 1 else f"{kills} child processes were"
            notes.append(f"{who} killed for memory: exceeded {format_bytes(limits.memory_bytes)}")
        if hits := usage.pids_limit_hits:
            notes.append(f"the limit of {limits.pids} pids was hit {_times(hits)}")
        elif _pids_hit(facts, limits, modes):
            notes.append(f"the limit of {limits.pids} pids was passed{_watched(modes, 'pids')}")
        if facts.tmp_full:
            notes.append(f"/tmp was full ({format_bytes(limits.tmp_bytes)})")  # noqa: S108
        if facts.disk_full:
            notes.append(f"the disk was full ({format_bytes(limits.disk_bytes)})")
        if facts.inodes_full:
            notes.append(f"the limit of {limits.inodes} inodes was hit")
        if facts.seccomp_hits:
            notes.append("system calls that sandboxes do not allow were refused")
    if ended := facts.killed_children:
        who = "1 background process was" if ended == 1 else f"{ended} background processes were"
        notes.append(f"{who} ended when the main program exited")
    for name, stream in (("stdout", facts.stdout), ("stderr", facts.stderr)):
        if stream.truncated:
            notes.append(f"{name} had {format_bytes(stream.produced)}, of which {format_bytes(stream.kept)} are kept")
    return notes


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# -- documents -----------------------------------------------------------------------------------------------------------------


def stream_document(facts: StreamFacts, head: bytes, tail: bytes) -> dict[str, Any]:
    """One output stream of a result. What was handed over counts, should it be less than `facts` promise."""
    kept = len(head) + len(tail)
    produced = max(facts.produced, kept)
    truncated = kept < produced
    if truncated:
        marker = omission(produced - kept, after_line=not head or head.endswith(b"\n"))
        text = head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")
        exact = False
    else:
        text = (head + tail).decode("utf-8", "replace")
        exact = text.encode("utf-8") == head + tail
    return {
        "bytes": produced,
        "kept_bytes": kept,
        "truncated": truncated,
        "text": text,
        "base64": None if exact else base64.b64encode(head + tail).decode("ascii"),
        "head_bytes": len(head) if truncated else None,
    }


def omission(size: int, *, after_line: bool) -> str:
    """The line that stands where bytes were left out."""
    return f"{'' if after_line else chr(10)}[… {size} bytes omitted …]\n"


def limit_hits(facts: ExecFacts, limits: Limits, modes: LimitModes) -> dict[str, bool]:
    """Which limits were reached, whatever the reason says."""
    usage = facts.usage
    return {
        "memory": facts.ended_by == "memory_watch" or (usage.oom_kills or 0) > 0,
        "cpu": (facts.cpu_throttled or 0) > 0,
        "pids": _pids_hit(facts, limits, modes),
        "disk": facts.ended_by == "disk_watch" or facts.disk_full,
        "inodes": facts.ended_by == "inodes_watch" or facts.inodes_full,
        "tmp": facts.tmp_full,
        "output": facts.ended_by == "output_limit" or facts.stdout.truncated or facts.stderr.truncated,
        "wall": facts.ended_by == "timeout",
    }


def limits_document(limits: Limits, modes: LimitModes, hits: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """`limits` of a result: value, mode and hit of each."""
    values = limits.as_dict()
    document: dict[str, Any] = {
        name: {"value": values[name], "mode": getattr(modes, name), "hit": bool((hits or {}).get(name))}
        for name in LIMIT_NAMES
    }
    document["output"]["kill"] = limits.output_kill_bytes
    return document


def result_document(
    verdict: Verdict,
    facts: ExecFacts,
    *,
    stdout: Mapping[str, Any] | None = None,
    stderr: Mapping[str, Any] | None = None,
    timeline: Sequence[Mapping[str, Any]] = (),
    files: Sequence[Mapping[str, Any]] = (),
    files_truncated: bool = False,
    artifacts: Sequence[Mapping[str, Any]] = (),
    limits: Limits,
    modes: LimitModes,
    timings: Mapping[str, float | None] | None = None,
    phase: str | None = "run",
    build: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A result with every field of the contract. `stdout` and `stderr` are `stream_document`s; without one, nothing was kept.

    `phase` is one of `PHASES`, None where neither began; `build` is the `build_document` of a build that came before the program.
    """
    nothing = StreamFacts()
    known = dict(timings or {})
    if known.get("running_ms") is None:
        known["running_ms"] = facts.running_ms
    return {
        "exit_code": verdict.exit_code,
        "signal": verdict.signal_name,
        "reason": verdict.reason,
        "hint": verdict.hint,
        "phase": phase,
        "started": verdict.started,
        "build": dict(build) if build is not None else None,
        "stdout": dict(stdout) if stdout is not None else stream_document(nothing, b"", b""),
        "stderr": dict(stderr) if stderr is not None else stream_document(nothing, b"", b""),
        "timeline": merge_timeline(timeline),
        "files": [dict(item) for item in files[:MAX_FILES]],
        "files_truncated": files_truncated or len(files) > MAX_FILES,
        "artifacts": [dict(item) for item in artifacts],
        "usage": dict(vars(facts.usage)),
        "limits": limits_document(limits, modes, limit_hits(facts, limits, modes)),
        "timings": {name: _milliseconds(known.get(name)) for name in TIMINGS},
    }


def outcomeless_document(
    reason: str,
    hint: str,
    *,
    limits: Limits | None = None,
    modes: LimitModes | None = None,
    timings: Mapping[str, float | None] | None = None,
    started: bool | None = False,
    stdout: Mapping[str, Any] | None = None,
    stderr: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a run that never had a program to report on: `policy_denied`, `missing_tool`, `infra_error`, ..."""
    return result_document(
        Verdict(reason, None, None, hint, started),
        ExecFacts(started=started),
        stdout=stdout,
        stderr=stderr,
        limits=limits or Limits(),
        modes=modes or LimitModes(),
        timings=timings,
        phase=None,
    )


def build_document(exec_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """`build` of a result, from the stored result of the build: how it went, and whose logs have what the compiler said."""
    return {
        "exec_id": exec_id,
        "exit_code": result["exit_code"],
        "reason": result["reason"],
        "running_ms": result["timings"]["running_ms"],
        "stdout_bytes": result["stdout"]["produced"],
        "stderr_bytes": result["stderr"]["produced"],
    }


def _milliseconds(value: float | None) -> int | None:
    return None if value is None else max(0, round(value))


def exit_status(reason: str | Mapping[str, Any], exit_code: int | None = None, *, interrupted: bool = False) -> int:
    """Exit status of the command line for a result (or its reason and exit code). `interrupted`: Ctrl-C of this very caller."""
    if not isinstance(reason, str):
        exit_code, reason = reason.get("exit_code"), str(reason.get("reason"))
    if interrupted and reason == "cancelled":
        return 130
    if reason in _KILLED:
        return _KILLED[reason]
    if reason in NO_OUTCOME or exit_code is None:
        return 125
    return exit_code


def merge_timeline(entries: Iterable[Mapping[str, Any]], cap: int = MAX_TIMELINE) -> list[dict[str, Any]]:
    """At most `cap` entries, neighbours merged.

    Entries of one stream that follow each other within the same millisecond are always one. While there are too many, the window
    is doubled and each stream has one entry per window: times get coarser, offsets and bytes stay whole.
    """
    merged: list[dict[str, Any]] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["stream"] == entry["stream"]
            and last["t_ms"] == entry["t_ms"]
            and last["offset"] + last["bytes"] == entry["offset"]
        ):
            last["bytes"] += entry["bytes"]
        else:
            merged.append({name: entry[name] for name in ("t_ms", "stream", "offset", "bytes")})
    window = 1
    while len(merged) > max(cap, 2):
        window *= 2
        merged = _coarser(merged, window)
    return merged


def _coarser(entries: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    open_entries: dict[str, dict[str, Any]] = {}
    start: int | None = None
    for entry in entries:
        if start is None or entry["t_ms"] - start >= window:
            start, open_entries = entry["t_ms"], {}
        first = open_entries.get(entry["stream"])
        if first is None:
            open_entries[entry["stream"]] = entry
            kept.append(entry)
        else:
            # The end counts, not the sum: bytes that were dropped in between belong to the entry that covers them.
            first["bytes"] = max(first["offset"] + first["bytes"], entry["offset"] + entry["bytes"]) - first["offset"]
    return kept
