"""The words of the command line: options shared by `run`, `exec` and `sandbox create`, and how they become a request.

The same words are the fields of the API; values go there as they were written and are judged there, so that a bad one is refused
alike everywhere. What only the command line can know (a local file, `K=V`) is judged here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from corral.cli import inputs, leaving
from corral.domain.quantities import parse_seconds, shown
from corral.errors import CorralError

Json = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

AGENT_VIEW_CHARS = 8000
_AGENT_VIEW_RANGE = range(200, 1_000_001)

RESOURCES = ("timeout", "memory", "cpu", "pids", "disk", "tmp", "output_limit", "output_kill")
_EXAMPLES = {"timeout": "60", "ttl": "3600", "idle_timeout": "600", "queue_timeout": "600", "cpu": "0.5", "pids": "128"}
_NUMBERS = tuple(_EXAMPLES)
_MAY_BE_NONE = ("ttl", "idle_timeout")
_TAKES_ANYTHING = ("-c", "--shell")
"""Options whose value may look like an option."""
PLACES = ("runtime", "template", "isolation", "network", "session")

_HELP = {
    "timeout": "Seconds that the program may run.",
    "memory": "Memory, such as 512M.",
    "cpu": "CPUs, such as 0.5.",
    "pids": "Processes and threads.",
    "disk": "Bytes under /workspace, such as 1G.",
    "tmp": "Bytes under /tmp.",
    "output_limit": "Output kept in the result, per stream, such as 10M.",
    "output_kill": "Output per stream that ends the program; else 10 times the limit.",
    "priority": "high, normal or low: the order of your own runs in the queue.",
    "queue_timeout": "Seconds that the run may wait in the queue.",
    "idle_timeout": "End it after so many seconds without activity; else as policy says, by default never.",
    "runtime": "bubblewrap, crun, runc or runsc.",
    "template": "host, busybox, polyglot or one of the operator's.",
    "isolation": "standard or strong.",
    "network": "Named network profile; this version has only none, the default.",
    "session": "Session whose sandbox and workspace are used (not in this version).",
}


def _option(name: str) -> Callable[[F], F]:
    return click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=_HELP[name])


def _apply(function: F, decorators: Sequence[Callable[[F], F]]) -> F:
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


class Ident(click.ParamType[str]):
    """An id as it was printed; what it names is for the service to say, but it names something."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value or any(char.isspace() or char in "/\0" for char in value):
            self.fail(f"{shown(value)} is no id.", param, ctx)
        return str(value)


IDENT = Ident()


def json_option(function: F) -> F:
    """`--json`: stdout is exactly one JSON document."""
    told = "Print exactly one JSON document."
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=_note_json, help=told)(function)


def tenant_option(text: str) -> Callable[[F], F]:
    """Whose things are meant, for an admin."""
    return click.option("--tenant", "tenant", metavar="ID", type=IDENT, help=text)


def lease_option(function: F) -> F:
    """The lease under which something is done to a sandbox."""
    told = "Under this lease, as corral lease acquire printed it."
    return click.option("--lease", "lease", metavar="FENCE", help=told)(function)


def check_lease(lease: str | None, ident: str) -> None:
    """Wrong usage for a run, whose sandbox is its own."""
    if lease is not None and not ident.startswith("exe_"):
        raise click.UsageError(f"--lease is for an exec; {ident} has a sandbox of its own.")


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    leaving.answer.wanted = value  # now it is certain; a --json of the program is none of ours
    return value


def sandbox_options(function: F) -> F:
    """What shapes a sandbox."""
    names = ("memory", "cpu", "pids", "disk", "tmp", *PLACES)
    more = (
        click.option(
            "--dep",
            "dep",
            multiple=True,
            metavar="NAME",
            help="Dependency, such as python:requests (not in this version).",
        ),
        click.option(
            "--file", "file", multiple=True, metavar="SRC[:DEST]", help="File or directory to put under /workspace."
        ),
        click.option(
            "--ttl", "ttl", metavar="SECONDS", help="How long the sandbox lives; none where policy allows it."
        ),
    )
    return _apply(function, (*(_option(name) for name in names), *more))


def idle_option(text: str = _HELP["idle_timeout"]) -> Callable[[F], F]:
    """When a kept sandbox that nobody uses ends."""
    return click.option("--idle-timeout", "idle_timeout", metavar="SECONDS", help=text)


def queue_options(function: F) -> F:
    """How a run waits for its turn, and who is told of its end."""
    names = ("priority", "queue_timeout")
    hook = click.option(
        "--webhook", "webhook", metavar="URL", help="Tell this URL of the end; signed with the tenant's secret."
    )
    return _apply(function, (*(_option(name) for name in names), hook))


def program_options(function: F) -> F:
    """What shapes one program and its result."""
    names = ("timeout", "output_limit", "output_kill")
    more = (
        click.option("-c", "code", metavar="CODE", help="Code to run."),
        click.option("--shell", "shell", metavar="STRING", help="Shell command to run."),
        click.option("--language", "language", metavar="NAME", help="Language of the code."),
        click.option("--stdin", "stdin", metavar="FILE|-", help="Standard input; none without it."),
        click.option("--env", "env", multiple=True, metavar="K=V", help="Environment variable."),
        click.option("--cwd", "cwd", metavar="PATH", help="Working directory inside."),
        click.option("--user", "user", metavar="NAME", help="User inside: sandbox (default) or root."),
        click.option(
            "--outputs", "outputs", multiple=True, metavar="GLOB", help="Files to keep; /workspace/out/** by default."
        ),
        click.option("--out", "out", metavar="DIR", help="Write the kept files there."),
        click.option(
            "--agent-view", "agent_view", metavar="[CHARS]", help="Print the output as a model should read it."
        ),
    )
    return _apply(function, (*(_option(name) for name in names), *more, json_option))


class PassThrough(click.Command):
    """A command whose options end where the program's words begin.

    `leading` words of our own (an id) come first, options may stand around them. In the context: `meta["separator"]` says whether
    `--` stood before the program's words. `--agent-view` takes the next word only if it is a number.
    """

    leading = 0
    separators: tuple[str, ...] = ("--",)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, words, separator, rest = self.split(ctx, list(args))
        ctx.meta["separator"] = separator
        return super().parse_args(ctx, [*options, "--", *words, *rest])

    def split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], bool, list[str]]:
        """(options with their values, leading words, was there `--`, the program's words)."""
        takes_value = {
            name: not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
        }
        options: list[str] = []
        words: list[str] = []
        while args:
            word = args.pop(0)
            if word in self.separators:
                return options, words, True, args
            if word == "--agent-view":
                number = args.pop(0) if args and args[0].isascii() and args[0].isdigit() else str(AGENT_VIEW_CHARS)
                options.append(f"{word}={number}")
            elif word.startswith("-") and word != "-":
                options.append(word)
                if takes_value.get(word, False):
                    if not args or (args[0] in takes_value and word not in _TAKES_ANYTHING):
                        found = f", not the option {args[0]!r}" if args else ""
                        raise click.BadOptionUsage(word, f"Option {word!r} requires an argument{found}.", ctx)
                    options.append(args.pop(0))
            elif len(words) < self.leading:
                words.append(word)
            else:
                return options, words, False, [word, *args]
        return options, words, False, []


class PassThroughAfterId(PassThrough):
    """`exec ID [OPTIONS] -- ARGV…`."""

    leading = 1


def program(ctx: click.Context, given: Json, words: Sequence[str], argv_field: str) -> Json:
    """The part of the request that says what to run; `argv_field` is what the API calls an argv there."""
    code, shell, language = given["code"], given["shell"], given["language"]
    if code is not None and shell is not None:
        raise click.UsageError("-c and --shell exclude each other.")
    if code is not None:
        return {"code": code, "language": language or "python", "args": list(words)}
    if shell is not None:
        if words:
            raise click.UsageError("--shell takes one string; quote it whole.")
        return {"shell": shell}
    if not words:
        raise click.UsageError(
            "Nothing to run: give FILE, -c CODE, --shell STRING or -- ARGV."
            if argv_field == "command"
            else "Nothing to run: give -- ARGV, -c CODE or --shell STRING."
        )
    if language is not None and (ctx.meta["separator"] or argv_field == "argv"):
        raise click.UsageError("--language is for FILE and -c; ARGV names its program itself.")
    if ctx.meta["separator"] or argv_field == "argv":
        return {argv_field: list(words)}
    name, *args = words
    document: Json = {"code": inputs.code_of(name), "code_path": os.path.basename(name), "args": args}
    return document | ({"language": language} if language else {})


def common(given: Json, code_path: str | None = None, code: str | None = None) -> Json:
    """The members that have the same word on both sides; what was not said is left out. `code_path` is what FILE has taken."""
    document: Json = {}
    for name in (*RESOURCES, *PLACES, "cwd", "user", "ttl", "idle_timeout", "priority", "queue_timeout", "webhook"):
        if given.get(name) is not None:
            document[name] = number(name, given[name]) if name in _NUMBERS else given[name]
    for name in ("outputs", "dep"):
        if given.get(name):
            document[name] = list(given[name])
    if given.get("keep"):
        document["keep"] = True
    if given.get("env"):
        document["env"] = _environment(given["env"])
    if given.get("stdin") is not None:
        document["stdin_base64"] = _base64(_read_stdin(given["stdin"]))
    if given.get("file"):
        document["files"] = inputs.files_of(given["file"], code_path, code)
    return document


def _environment(pairs: Sequence[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _is_name(name):
            raise CorralError(
                "usage", f"--env {pair!r} is not K=V", field="--env", hint="for example --env LANG=C.UTF-8"
            )
        env[name] = value
    return env


def _is_name(name: str) -> bool:
    """Programs take odd names, but none that would break a line."""
    return bool(name) and not any(
        char.isspace() or not (char.isprintable() or "\udc80" <= char <= "\udcff") for char in name
    )


def number(name: str, text: str) -> int | float | str:
    """What JSON has numbers for; the same refusal as by the API, in words of the command line."""
    if name in _MAY_BE_NONE and text == "none":
        return text
    try:
        if name != "pids":
            return parse_seconds(text)
        if text.isascii() and text.isdigit() and len(text) < 19:
            return int(text)
        raise ValueError(f"{shown(text)} is not a count; write an integer, such as 128")
    except ValueError as error:
        detail = str(error)
        if name == "cpu":
            detail = f"{shown(text)} is not a number of CPUs; write decimals, such as 2 or 0.5"
        hint = f"for example --{name.replace('_', '-')} {_EXAMPLES[name]}"
        raise CorralError("invalid_value", detail, hint=hint, field=f"/{name}") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read_stdin(source: str) -> bytes:
    try:
        if source == "-":
            with open(0, "rb", closefd=False) as file:
                data = file.read(inputs.MAX_BODY + 1)
        else:
            with open(source, "rb") as file:
                data = file.read(inputs.MAX_BODY + 1)
    except OSError as error:
        hint = "name a file that can be read, or - for the standard input"
        raise CorralError(
            "usage", f"cannot read {source!r}: {inputs.why(error)}", field="--stdin", hint=hint
        ) from error
    if len(data) > inputs.ROOM:
        raise CorralError(
            "too_large", "standard input is over 24 MiB", field="/stdin", hint="put it into a file with corral cp"
        )
    return data


def view(chars: str | None) -> Json:
    """Query parameters for the output: all of it, and with `chars` as a model should read it."""
    if chars is None:
        return {}
    if not (chars.isascii() and chars.isdigit() and len(chars) < 10 and int(chars) in _AGENT_VIEW_RANGE):
        detail = f"--agent-view {shown(chars)} is not a number of characters from 200 to 1000000"
        raise CorralError("usage", detail, field="--agent-view", hint=f"for example --agent-view {AGENT_VIEW_CHARS}")
    return {"view": "agent", "chars": int(chars)}
