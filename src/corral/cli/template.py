"""`corral template`: what sandboxes are made from. Recipes are added on the host; what is remote names them only."""

from __future__ import annotations

import datetime
import os
from typing import Any

import click

from corral.cli import terminal, words
from corral.cli.connection import opened
from corral.client import Transport, where
from corral.client.transport import quote
from corral.errors import CorralError

Json = dict[str, Any]
LOOK_S = 1.0


@click.group(name="template")
def command() -> None:
    """Build, list, show and remove templates."""


@command.command()
@words.json_option
def ls(as_json: bool) -> None:
    """List templates and whether they can be had here."""
    with opened() as transport:
        answer = transport.request("GET", "/v1/templates")
    if as_json:
        terminal.put_json(answer)
    else:
        rows = [item | {"languages": " ".join(item.get("languages") or [])} for item in answer["items"]]
        terminal.table(rows, ("name", "kind", "available", "digest", "languages", "reason"), empty="no templates")


@command.command(short_help="Say what a template is made of.")
@click.argument("name", type=words.IDENT)
@words.json_option
def show(name: str, as_json: bool) -> None:
    """Say what a template is: digest, size, languages, packages, who uses it."""
    with opened() as transport:
        document = transport.request("GET", f"/v1/templates/{quote(name)}")
    if as_json:
        terminal.put_json(document)
    else:
        _print(document)


@command.command(short_help="Build one from a recipe, an archive or an image.")
@click.argument("what", metavar="NAME|FILE", required=False)
@click.option(
    "--from-archive", metavar="TAR", help="A root file system: tar, or tar compressed by gzip, bzip2, xz or zstd."
)
@click.option("--from-oci", metavar="PATH", help="An OCI image layout: a directory, or its tar.")
@click.option("--name", metavar="NAME", help="Name of the template, for what has none of its own.")
@click.option("--reference", metavar="REF", help="Which image of the layout.")
@click.option("--platform", metavar="OS/ARCH", help="Which platform of the image; this host's by default.")
@click.option("--refresh", is_flag=True, help="Build anew even if it is there. Sandboxes keep the base they have.")
@words.json_option
def build(
    what: str | None,
    from_archive: str | None,
    from_oci: str | None,
    name: str | None,
    reference: str | None,
    platform: str | None,
    refresh: bool,
    as_json: bool,
) -> None:
    """Build a template by its NAME, from a recipe in a FILE (*.yaml), from an archive or from an image."""
    sources = [source for source in (what, from_archive, from_oci) if source is not None]
    if len(sources) != 1:
        raise click.UsageError("Give one of NAME, FILE, --from-archive TAR and --from-oci PATH.")
    if (from_archive or from_oci) and name is None:
        raise click.UsageError("--from-archive and --from-oci need --name NAME.")
    if from_oci is None and (reference or platform):
        raise click.UsageError("--reference and --platform are for --from-oci.")
    if what is not None and not ("/" in what or what.endswith((".yaml", ".yml"))):
        if name is not None:
            raise click.UsageError("--name is for FILE, --from-archive and --from-oci.")
        wanted = what
    else:
        kind = "recipe" if what is not None else "archive" if from_archive is not None else "oci"
        wanted = _add(kind, sources[0], name, {"reference": reference, "platform": platform})
    with opened() as transport:
        document = _build(transport, wanted, refresh)
    if as_json:
        terminal.put_json(document)
    else:
        terminal.put(f"{document['name']} {document['digest']}\n")
        if not document["allowed"]:
            terminal.say(
                f"corral: the policy does not allow the template {document['name']} yet (its member templates)"
            )


@command.command(short_help="Remove a template's base and its recipe.")
@click.argument("name", type=words.IDENT)
@words.json_option
def rm(name: str, as_json: bool) -> None:
    """Remove a template's base, and its recipe unless it is shipped. Refused while a sandbox uses it."""
    with opened() as transport:
        answer = transport.request("DELETE", f"/v1/templates/{quote(name)}")
    if as_json:
        terminal.put_json(answer)
    else:
        freed = answer["freed_bytes"]
        terminal.put(
            f"{answer['name']}: {'nothing was built' if answer['digest'] is None else f'{terminal.size(freed)} freed'}\n"
        )


def _add(kind: str, path: str, name: str | None, more: Json) -> str:
    """Recipes lie in the state directory; who may write there is the operator of this host."""
    if where(None, None, None)[0] is not None:
        raise CorralError(
            "usage",
            "a server takes no recipes and no paths of this host",
            hint="run this on the server's host without CORRAL_URL, then build it by name from anywhere",
        )
    from corral import bootstrap, config

    field = "FILE" if kind == "recipe" else f"--from-{kind}"
    if not os.path.exists(path):
        raise CorralError("usage", f"{path!r} is not there", field=field)
    if kind != "oci" and os.path.isdir(path):
        hint = "an image layout is taken by --from-oci; pack a root file system with tar first"
        raise CorralError("usage", f"{path!r} is a directory", field=field, hint=hint)
    return bootstrap.add_template(config.load(), kind, path, name, more)


def _build(transport: Transport, name: str, refresh: bool) -> Json:
    """Begin it and look until it is over: the build is the service's, and so goes on if this program is stopped."""
    document = transport.request("POST", "/v1/templates", {"name": name, "refresh": refresh}, {"wait": 0})
    with terminal.progress() as progress:
        while (state := document["build"]) is not None and state["state"] == "building":
            progress(state["text"] or f"template {name}", state["part"])
            document = transport.request("GET", f"/v1/templates/{quote(name)}", params={"wait": LOOK_S})
    if state is not None:
        raise CorralError.from_problem(state["error"])
    if document["digest"] is None:
        raise CorralError("infra_error", f"the build of {name} was interrupted", hint="run it again")
    return document


def _print(document: Json) -> None:
    rows = [(word, document[word]) for word in ("name", "kind", "description", "digest", "path", "reason")]
    rows.append(("size", None if document["size_bytes"] is None else terminal.size(document["size_bytes"])))
    rows += [(word, document.get(word)) for word in ("files", "build_s")]
    if (built_at := document["built_at"]) is not None:
        moment = datetime.datetime.fromtimestamp(built_at, datetime.UTC)
        rows.append(("built at", moment.isoformat(timespec="seconds")))
    rows += [(word, " ".join(document[word])) for word in ("languages", "skills", "sandboxes")]
    image = document["image"] or {}
    rows += [(f"image {word}", value) for word, value in image.items() if word != "left_out"]
    rows += [(word, document.get(word)) for word in ("start", "ready", "health", "stop_signal")]
    left_out = image.get("left_out") or (document.get("archive") or {}).get("left_out") or {}
    rows.append(("left out", [f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in left_out.items()]))
    for word, value in rows:
        text = " ".join(value) if isinstance(value, list) else value
        if text not in (None, ""):
            terminal.put(f"{word}: {terminal.plain(str(text))}\n")
    packages = document["packages"] or {}
    if packages:
        terminal.put("\n")
        terminal.table([{"package": k, "version": v} for k, v in packages.items()], ("package", "version"), empty="")
