"""`corral db`: check, upgrade, downgrade, backup. On the state directory's file, or on PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import click

from corral import config
from corral.cli import terminal, words
from corral.errors import CorralError
from corral.ports.database import Database

url_option = click.option(
    "--database-url", metavar="URL", help="A PostgreSQL database. [CORRAL_DATABASE_URL, which hides it from others]"
)


@click.group(name="db")
def command() -> None:
    """Look after the database: corral.db of the state directory, or PostgreSQL."""


@contextlib.contextmanager
def _database(url: str | None, *, changed: bool = False) -> Iterator[Database]:
    """The database; with the state directory's lock if it is to be changed and nobody else may be at work on it."""
    from corral import bootstrap

    settings = config.load()
    if url is not None:
        settings = dataclasses.replace(settings, database_url=url)
    database = bootstrap.make_database(settings)
    if not (changed and database.alone):
        yield database
        return
    from corral.cli.serve import own

    lock = own(settings.state_dir)
    try:
        yield database
    finally:
        os.close(lock)


@command.command()
@url_option
@words.json_option
@click.pass_context
def check(ctx: click.Context, database_url: str | None, as_json: bool) -> None:
    """Say its version, how much is in it and what is wrong with it. Status 0 if it is good for this Corral, else 1."""
    with _database(database_url) as database:
        health = database.check()
    if as_json:
        terminal.put_json(
            {
                "database": health.where,
                "version": health.version,
                "needed": health.needed,
                "good": health.good,
                "rows": dict(health.rows),
                "problems": list(health.problems),
            }
        )
    else:
        state = "empty" if health.version is None else f"version {health.version}"
        needed = "" if health.version == health.needed else f", this Corral needs {health.needed}"
        terminal.put(f"{health.where}: {state}{needed}\n")
        terminal.table(
            [{"table": name, "rows": count} for name, count in health.rows.items()], ("table", "rows"), empty="no rows"
        )
        for problem in health.problems:
            terminal.put(f"wrong: {problem}\n")
    if not health.good:
        ctx.exit(1)


@command.command()
@url_option
@words.json_option
def upgrade(database_url: str | None, as_json: bool) -> None:
    """Bring it to the version of this Corral, in one transaction. An empty one gets its tables. Again: nothing."""
    with _database(database_url, changed=True) as database:
        before, now = database.upgrade()
    _changed(before, now, as_json)


@command.command()
@click.option("--to", "revision", required=True, metavar="VERSION", help="The older version.")
@click.option("--lose-data", is_flag=True, help="Needed: what only newer versions keep is lost.")
@url_option
@words.json_option
def downgrade(revision: str, lose_data: bool, database_url: str | None, as_json: bool) -> None:
    """Bring it back to an older version, for the older Corral. Make a backup before."""
    if not lose_data:
        hint = "corral db backup FILE first, then again with --lose-data"
        raise CorralError("usage", "what only newer versions keep would be lost", hint=hint, field="--lose-data")
    with _database(database_url, changed=True) as database:
        before, now = database.downgrade(revision)
    _changed(before, now, as_json)


def _changed(before: str | None, now: str, as_json: bool) -> None:
    if as_json:
        terminal.put_json({"before": before, "version": now})
    elif before == now:
        terminal.put(f"it is of version {now} already\n")
    else:
        terminal.put(f"{'made' if before is None else f'from {before}'}: version {now}\n")


@command.command(short_help="Write a consistent copy to a new FILE.")
@click.argument("file", type=click.Path(), metavar="FILE")
@url_option
@words.json_option
def backup(file: str, database_url: str | None, as_json: bool) -> None:
    """Write a copy to the new FILE while servers go on: of SQLite a database file, of PostgreSQL an archive for pg_restore."""
    with _database(database_url) as database:
        size = database.backup(file)
    if as_json:
        terminal.put_json({"file": file, "bytes": size})
    else:
        terminal.put(f"{file}: {size} bytes\n")
