"""`corral certify`: attack the runtimes of this host and say what held."""

from __future__ import annotations

import json
import os

import click

from corral.cli import terminal, words
from corral.errors import CorralError

STYLES = {"held": "green", "failed": "bold red", "not_provable": "yellow"}


@click.command()
@click.option(
    "--runtime", "runtimes", multiple=True, metavar="NAME", help="Runtime to try; all that are configured by default."
)
@click.option(
    "--only", "only", multiple=True, metavar="GROUP", help="Group of attacks to try, or GROUP/ATTACK; all by default."
)
@click.option("--markdown", "markdown", metavar="FILE", help="Write the report as a page.")
@click.option(
    "--join", "join", multiple=True, metavar="FILE", help="Put a report that --json printed before on the page too."
)
@click.option("-v", "--verbose", is_flag=True, help="Show each way of each attack, with its control.")
@words.json_option
@click.pass_context
def command(
    ctx: click.Context,
    runtimes: tuple[str, ...],
    only: tuple[str, ...],
    markdown: str | None,
    join: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> None:
    """Run the hostile suite against the runtimes of this host: held, failed, or not provable here.

    Sandboxes that run are neither seen nor touched; the trial has a state directory of its own and leaves nothing.
    Exit status 1 if something failed, if nothing held on a runtime that was tried, or if one that is named does not work here.
    """
    if join and markdown is None:
        raise click.BadOptionUsage("--join", "--join needs --markdown.", ctx)
    earlier = [_read(path) for path in join]
    from corral.testing import certify
    from corral.testing.certify import page

    with terminal.progress() as progress:
        report = certify.run_blocking(runtimes, only=only, progress=progress)
    document = report.document()
    if markdown is not None:
        _write(markdown, page.markdown([*earlier, document]))
    if as_json:
        terminal.put_json(document)
    else:
        _print(document, verbose)
    ctx.exit(0 if report.ok else 1)


def _print(document: words.Json, verbose: bool) -> None:
    from corral.testing.certify import page

    for name, text in page.facts_of(document):
        terminal.put(f"{name}: {terminal.plain(text)}\n")
    for runtime in document["runtimes"]:
        head = f"{runtime['name']} {runtime['version'] or ''}".strip()
        if not runtime["usable"]:
            terminal.put(f"\n{head}: not usable here: {terminal.plain(runtime['reason'] or '')}\n")
            continue
        off = f", switched off: {', '.join(runtime['unsafe'])}" if runtime["unsafe"] else ""
        terminal.put(f"\n{head}, level {runtime['security_level']}{off}\n")
        _table(runtime["attacks"], verbose)
        counts = (f"{runtime[one]} {word}" for one, word in (("held", "held"), ("failed", "failed"), ("not_provable", "not provable here")))  # fmt: skip
        terminal.put(f"{', '.join(counts)}; {runtime['took_s']} s\n")


def _table(attacks: list[words.Json], verbose: bool) -> None:
    from corral.testing.certify import page

    rows = []
    for attack in attacks:
        told = {"group": attack["group"], "attack": attack["name"], "verdict": page.words_of(attack)}
        rows.append(
            {**told, "style": STYLES[attack["verdict"]], "seen": attack["evidence"], "control": attack["control"]}
        )
        if verbose and len(attack["ways"]) > 1:
            for way in attack["ways"]:
                word = page.WORDS[way["verdict"]]
                rows.append({"attack": f"  {way['way']}", "verdict": word, "style": STYLES[way["verdict"]], "seen": way["attack"], "control": way["control"]})  # fmt: skip
    columns = ("group", "attack", "verdict", "seen", *(("control",) if verbose else ()))
    terminal.table(rows, columns, empty="nothing was tried", style="style")


def _read(path: str) -> words.Json:
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if not isinstance(document, dict) or not isinstance(document.get("runtimes"), list):
            raise ValueError("it is no report of corral certify --json")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CorralError("invalid_value", f"cannot read {path}: {why}", field="--join") from error
    return document


def _write(path: str, text: str) -> None:
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise CorralError("invalid_value", f"cannot write {path}: {error.strerror}", field="--markdown") from error
