"""A report as a page of Markdown: what held on a host, with its evidence, and no name or path of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
WORDS = {"held": "held", "failed": "failed", "not_provable": "not provable here"}


def words_of(attack: Json) -> str:
    """The verdict for people; of a limit also what is declared and what was seen."""
    told = WORDS[attack["verdict"]]
    return f"{told} ({attack['declared']}, seen {attack['seen'] or 'nothing'})" if "declared" in attack else told


def facts_of(document: Json) -> list[tuple[str, str]]:
    """Host, kernel, date and versions of a report, for people."""
    host = document["host"]
    return [
        ("date", str(document["date"])),
        ("kernel", f"{host['kernel']} {host['machine']}"),
        ("control groups", str(host["cgroup"])),
        ("versions", ", ".join(f"{name} {version or '?'}" for name, version in document["versions"].items())),
    ]


def markdown(documents: Sequence[Json]) -> str:
    """The committed page of one or more reports of the same host (as root, as an ordinary user)."""
    lines = [
        "# What `corral certify` found",
        "",
        "Made by `corral certify --markdown FILE`; how to read it, and how to make it on your own host, is in",
        "[the how-to](../howto/certify.md). An attack *held* only where its control (the same attack with the defence",
        "switched off, or where nothing defends) succeeds; else it is *not provable here*.",
        "",
        "| | " + " | ".join(_title(document, runtime) for document, runtime in _all(documents)) + " |",
        "|---|" + "---|" * len(list(_all(documents))),
    ]
    for word in ("held", "failed", "not_provable"):
        counts = (str(runtime[word]) if runtime["usable"] else "-" for _, runtime in _all(documents))
        lines.append(f"| {WORDS[word]} | " + " | ".join(counts) + " |")
    if all("load" in document["host"] for document in documents):  # a time without that says nothing
        times = (f"{runtime['took_s']:.0f} at load {document['host']['load']}" for document, runtime in _all(documents))
        lines.append("| seconds | " + " | ".join(times) + " |")
    lines += [""]
    versions: dict[str, Any] = {}
    for document in documents:
        versions.update(document["versions"])
    host = dict(documents[0]["host"])
    host["kernel"] = host["kernel"].partition("-")[0]  # what follows names a build of somebody's
    facts = facts_of({**documents[0], "host": host, "versions": versions})
    lines += [f"- {name}: {_cell(text)}" for name, text in facts]
    for document, runtime in _all(documents):
        lines += ["", f"## {_title(document, runtime)}", ""]
        if not runtime["usable"]:
            lines.append(f"Not usable here: {_cell(runtime['reason'] or '')}.")
            continue
        lines += [f"Version {runtime['version']}, security level {runtime['security_level']}.", ""]
        if runtime["unsafe"]:
            lines += [f"Defences switched off: {', '.join(runtime['unsafe'])}.", ""]
        lines += ["| group | attack | verdict | seen | control |", "|---|---|---|---|---|"]
        for attack in runtime["attacks"]:
            word = f"**{words_of(attack)}**" if attack["verdict"] == "failed" else words_of(attack)
            cells = (attack["group"], attack["name"], word, attack["evidence"], attack["control"])
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _all(documents: Sequence[Json]) -> list[tuple[Json, Json]]:
    return [(document, runtime) for document in documents for runtime in document["runtimes"]]


def _title(document: Json, runtime: Json) -> str:
    return f"{runtime['name']} as {'root' if document['user'] == 'root' else 'an ordinary user'}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
