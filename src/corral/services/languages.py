"""The languages of this installation: which runner, which commands, which template has the tools. Used by runs and by execs.

A run makes two execs of code that is compiled, the build and the program. An exec of a kept sandbox has one id and one stream of
output, so there both are one command line, and a file that the build leaves behind tells afterwards how far it came.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corral.domain.limits import Limits
from corral.domain.quantities import format_bytes
from corral.domain.request import ExecRequest, RunRequest
from corral.domain.result import Verdict
from corral.domain.runner import BUILD_S, OUT, ROOT, Commands, Runner, build_hint, commands
from corral.errors import CorralError
from corral.services.control import Core

Json = dict[str, Any]


CODE = ".corral-exec"
"""Below the workspace: where the code of execs lies, each in a directory of its own, for as long as the exec."""
_FULL = (b"No space left on device", b"File size limit exceeded")
"""What the kernel's words for a full disk are, whoever prints them."""


def build_limits(limits: Limits) -> Limits:
    """A build has a clock of its own (A6); the rest holds for it as for the program."""
    return replace(limits, wall_s=max(limits.wall_s, BUILD_S))


class Languages:
    """Answers for `core.runners`; every method refuses a language without a runner with `not_supported_yet`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def runner(self, language: str | None) -> Runner | None:
        """The runner of a language; None for none."""
        if language is None:
            return None
        runner = self._core.runners.get(language)
        if runner is None:
            raise CorralError(
                "not_supported_yet",
                f"this installation has no runner for {language}",
                hint=f"use one of {', '.join(sorted(self._core.runners))}, or a command",
                field="/language",
            )
        return runner

    async def check_tools(self, language: str | None, template: str) -> None:
        """`missing_tool` if the template lacks the language: known before anything is started."""
        runner = self.runner(language)
        if runner is None:
            return
        known = {str(each["name"]): each for each in await self._core.node.templates()}
        here = known.get(template)
        if here is None or language in here["languages"]:
            return
        having = sorted(name for name, each in known.items() if language in each["languages"])
        usable = [name for name in having if known[name]["available"]]
        if usable:
            hint = f"use a template that has it: {', '.join(usable)}"
        elif having:
            hint = "; ".join(f"{name} would have it, but: {known[name].get('reason')}" for name in having)
        else:
            hint = "no template of this installation has it"
        raise CorralError(
            "missing_tool",
            f"the template {template} has no {language}: it lacks {_listed(runner.tools)}",
            hint=hint,
            field="/template",
        )

    async def build_hint(self, exec_id: str, language: str | None, verdict: Verdict, limits: Limits) -> str:
        """The hint of a build that did not succeed. A compiler that meets a full disk removes its file, so that nobody can see it
        afterwards: then its own words count for the hint, though never for the reason."""
        hint = build_hint(str(language), verdict.reason, verdict.exit_code, verdict.hint)
        if verdict.reason != "nonzero_exit":
            return hint
        full, before = False, b""
        try:
            async for piece in self._core.node.kept_output(exec_id, "stderr"):
                said = before + piece
                full = full or any(words in said for words in _FULL)
                before = said[-len(max(_FULL, key=len)) :]
        except CorralError:
            return hint
        if full:
            hint += f"; they speak of a full disk: the limit is {format_bytes(limits.disk_bytes)}, ask for more disk"
        return hint

    # -- a run -----------------------------------------------------------------------------------------------------------------
    def builds(self, request: RunRequest) -> bool:
        """Whether a build comes before the program."""
        runner = self.runner(request.language)
        return runner is not None and runner.build is not None

    def code_path(self, request: RunRequest) -> str:
        """Where the code of a run lies, relative to the workspace."""
        if request.code_path is not None:
            return request.code_path
        runner = self.runner(request.language)
        assert runner is not None
        return runner.file_name

    def steps(self, request: RunRequest, limits: Limits) -> Commands:
        """What a run starts: code, argv or shell. All files of the workspace belong to the program."""
        if request.command is not None:
            return Commands(None, request.command, {})
        if request.shell is not None:
            return Commands(None, ("/bin/sh", "-c", request.shell), {})
        runner = self.runner(request.language)
        assert runner is not None
        return commands(runner, f"{ROOT}/{self.code_path(request)}", request.args, limits)

    # -- an exec of a kept sandbox ---------------------------------------------------------------------------------------------
    def exec_code_path(self, language: str | None, exec_id: str) -> str:
        """Where the code of an exec lies: never over a file of the caller's."""
        runner = self.runner(language)
        assert runner is not None
        return f"{CODE}/{exec_id}/{runner.file_name}"

    def exec_command(
        self, request: ExecRequest, exec_id: str, limits: Limits
    ) -> tuple[tuple[str, ...], dict[str, str], str | None]:
        """(argv, environment of the runner, the file that is there once the build has succeeded). The code is alone in its directory.

        That file is the sandbox's: a program may remove it, and code that runs in a build may make it.
        """
        if request.argv is not None:
            return request.argv, {}, None
        if request.shell is not None:
            return ("/bin/sh", "-c", request.shell), {}, None
        runner = self.runner(request.language)
        assert runner is not None
        path = f"{ROOT}/{self.exec_code_path(request.language, exec_id)}"
        out = f"{OUT}/{exec_id}"
        made = commands(runner, path, request.args, limits, root=path.rpartition("/")[0], out=out)
        if made.build is None:
            return made.run, made.env, None
        built = f"{out}/built"
        return chained(made.build, made.run, built), made.env, built


def exec_directories(exec_id: str) -> tuple[str, ...]:
    """What an exec of code leaves inside that is not its program's."""
    return (f"{ROOT}/{CODE}/{exec_id}", f"{OUT}/{exec_id}")


def is_code(path: str) -> bool:
    """Whether a changed path of the workspace lies where Corral puts the code of execs."""
    return f"{path.removeprefix(f'{ROOT}/')}/".startswith(f"{CODE}/")


def chained(build: Sequence[str], run: Sequence[str], built: str) -> tuple[str, ...]:
    """One command line: the build without input; if that succeeds the file `built` is made and the program takes its place."""
    script = f'{shlex.join(build)} </dev/null && : >{shlex.quote(built)} && exec "$@"'
    return ("/bin/sh", "-c", script, "run", *run)


def _listed(tools: Sequence[str]) -> str:
    return " and ".join(tools) if tools else "its tools"
