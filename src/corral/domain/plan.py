"""Planning by rules: what a task needs, told from the request alone, at once and without a model.

This version sizes by policy's default class and says what kind of work it saw; a wish of the caller is not the planner's to change.
"""

from __future__ import annotations

from corral.domain.intent import ResourceIntent
from corral.domain.request import ExecRequest, RunRequest, SandboxRequest
from corral.domain.runner import NO_NAMES, Names

PLANNER_VERSION = "rules/1"
DEFAULT_CLASS = "default"

_BUILD_TOOLS = frozenset(
    [
        "make",
        "cmake",
        "ninja",
        "gcc",
        "g++",
        "cc",
        "c++",
        "clang",
        "rustc",
        "cargo",
        "go",
        "javac",
        "mvn",
        "gradle",
        "npm",
        "pnpm",
        "yarn",
        "tsc",
    ]
)
_COMPILED = frozenset(("c", "cpp", "go", "java", "rust", "typescript"))


def plan_by_rules(request: RunRequest | SandboxRequest | ExecRequest, names: Names = NO_NAMES) -> ResourceIntent:
    """The intent for a request, with the planner's version and its reason. `names` tell interpreters."""
    workload, why = _workload(request, names)
    placement = None if isinstance(request, ExecRequest) else request.placement
    ttl = None if isinstance(request, ExecRequest) else request.ttl_s
    return ResourceIntent(
        workload=workload,
        resource_class=DEFAULT_CLASS,
        runtime=placement.runtime if placement else None,
        isolation=placement.isolation if placement else None,
        template=placement.template if placement else None,
        network_profile=None,
        ttl_seconds=ttl,
        confidence=0.5,
        reason=f"{why}; rules give every task the class {DEFAULT_CLASS}",
        planner=PLANNER_VERSION,
    )


def _workload(request: RunRequest | SandboxRequest | ExecRequest, names: Names) -> tuple[str, str]:
    if isinstance(request, SandboxRequest):
        return "session", "a sandbox without a task yet"
    if request.language is not None:
        kind = "build" if request.language in _COMPILED else request.language
        return kind, f"code in {request.language}"
    argv = request.command if isinstance(request, RunRequest) else request.argv
    if argv is None:
        return "shell", "a shell command"
    program = argv[0].rpartition("/")[2]
    if program in _BUILD_TOOLS:
        return "build", "a build tool"
    language = names.of_program(program)
    return (language, f"an interpreter of {language}") if language else ("command", "a program")
