"""`corral`: one module per command, loaded when it is called. Errors and exit statuses are settled here, once.

With `--json` stdout is exactly one JSON document in every case: a refusal without a run is `{"error": PROBLEM}`.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence

import click

from corral.cli import leaving, terminal
from corral.cli.following import Interrupted, Interrupts, die_of
from corral.cli.terminal import OutputGone
from corral.errors import CorralError

COMMANDS = {
    "run": ("corral.cli.run", "Run code or a command in a fresh sandbox."),
    "exec": ("corral.cli.exec", "Run a command in a sandbox that is there."),
    "shell": ("corral.cli.shell", "Open a terminal in a sandbox."),
    "attach": ("corral.cli.attach", "Follow what is running, with its terminal."),
    "cp": ("corral.cli.cp", "Copy files into or out of a sandbox."),
    "sandbox": ("corral.cli.sandbox", "Create, list, inspect and remove sandboxes."),
    "lease": ("corral.cli.lease", "Acquire, renew, release and list leases."),
    "logs": ("corral.cli.logs", "Print the output of a run or exec."),
    "runs": ("corral.cli.runs", "List runs, show one."),
    "queue": ("corral.cli.queue", "List the runs that wait for room."),
    "cancel": ("corral.cli.cancel", "End a run or exec."),
    "template": ("corral.cli.template", "Build, list, show and remove templates."),
    "tenant": ("corral.cli.tenant", "Create, list, disable and remove tenants."),
    "user": ("corral.cli.user", "Create, list, disable and remove users."),
    "key": ("corral.cli.key", "Create, list, revoke and rotate keys of the API."),
    "serve": ("corral.cli.serve", "Serve the API on a TCP port."),
    "db": ("corral.cli.db", "Check, upgrade and back up the database."),
    "mcp": ("corral.cli.mcp", "Serve the sandbox to a model over MCP."),
    "gc": ("corral.cli.gc", "Remove what no sandbox owns any more."),
    "doctor": ("corral.cli.doctor", "Say what this host can do."),
    "certify": ("corral.cli.certify", "Attack the runtimes of this host, say what held."),
    "bench": ("corral.cli.bench", "Put this build under strain on this host."),
}
INTERNAL = {"node": "corral.cli.node", "replica": "corral.cli.replica"}
"""What `corral serve` starts; no part of help."""


class Commands(click.Group):
    """The register above as a group: help needs no command's module, a call needs one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name not in INTERNAL:
            return None
        module = INTERNAL.get(cmd_name) or COMMANDS[cmd_name][0]
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and args[0] not in INTERNAL and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f" Did you mean {near[0]}?" if near else f" Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        terminal.put(f"corral {version('corral')}\n")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.pass_context
def corral(ctx: click.Context) -> None:
    """Run untrusted code in hardened sandboxes and get an explained result."""
    ctx.obj = ctx.with_resource(Interrupts().installed())


def _usage(error: click.UsageError, arguments: Sequence[str]) -> CorralError:
    path = error.ctx.command_path if error.ctx else _path_of(arguments)
    param = error.param if isinstance(error, click.BadParameter) else None
    field = None
    if param is not None:
        field = param.human_readable_name if isinstance(param, click.Argument) else param.opts[0]
    return CorralError("usage", error.format_message(), hint=f"see {path} --help", field=field)


def _path_of(arguments: Sequence[str]) -> str:
    """The command that the words name, as far as they name one; for what the parser raises without saying where."""
    path = ["corral"]
    command: click.Group = corral
    for word in arguments:
        found = command.get_command(click.Context(command), word)
        if found is None:
            break
        path.append(word)
        if not isinstance(found, click.Group):
            break
        command = found
    return " ".join(path)


def _refuse(error: CorralError) -> int:
    if leaving.answer.wanted and not leaving.answer.given:
        terminal.put_json({"error": error.to_problem()})
    else:
        terminal.complain(error)
    return error.exit_status


def call(arguments: Sequence[str]) -> int:
    """Run one command line, return its exit status."""
    leaving.answer.expect(list(arguments))
    try:
        try:
            with corral.make_context("corral", list(arguments)) as ctx:
                corral.invoke(ctx)
            return 0
        except click.exceptions.Exit as end:
            return end.exit_code
        except click.exceptions.NoArgsIsHelpError as error:
            told = CorralError("usage", "no command given", hint="the commands follow")
            terminal.complain(told)
            terminal.write(2, f"{error.format_message()}\n".encode())
            return told.exit_status
        except click.UsageError as error:
            return _refuse(_usage(error, arguments))
        except click.ClickException as error:
            return _refuse(CorralError("usage", error.format_message(), hint="see corral --help"))
        except KeyboardInterrupt as stopped:
            number = stopped.number if isinstance(stopped, Interrupted) else signal.SIGINT
            if leaving.answer.wanted and not leaving.answer.given:
                _refuse(CorralError("cancelled", leaving.detail(number), hint=leaving.HINT))
            return 128 + number
        except CorralError as error:
            return _refuse(error)
        except OutputGone:
            raise
        except Exception as error:  # a defect of ours: say so in the form that was asked for
            if os.environ.get("CORRAL_DEBUG"):
                import traceback

                traceback.print_exc()
            detail = f"unexpected {type(error).__name__}: {error}"
            hint = "set CORRAL_DEBUG=1 for the traceback"
            return _refuse(CorralError("infra_error", detail, hint=hint, retryable=False))
    except OutputGone as gone:
        try:
            die_of(gone)
        except CorralError as error:
            terminal.complain(error)
            return error.exit_status
