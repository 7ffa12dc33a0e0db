"""The table of the languages page says what the runners say. To renew it: `python tests/unit/test_languages_page.py`."""

from pathlib import Path

import yaml

from corral.domain.runner import LANGUAGES, Runner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "languages.md"
BEGIN, END = "<!-- made from runners/*.yaml: python tests/unit/test_languages_page.py -->\n", "<!-- end -->"


def table() -> str:
    rows = [
        "| language | FILE | tools | how it is run | several files | without a network |",
        "|---|---|---|---|---|---|",
    ]
    for language in LANGUAGES:
        doc = yaml.safe_load((ROOT / "runners" / f"{language}.yaml").read_text("utf-8"))
        runner = Runner.from_dict(doc)
        known = [f"`{each}`" for each in runner.extensions] + [f"`#!` {each}" for each in runner.shebangs]
        tools = ", ".join(f"`{each}`" for each in runner.tools)
        cells = [f"`{language}`", f"{', '.join(known)}; `{runner.file_name}`", tools]
        rows.append("| " + " | ".join([*cells, *(runner.about[word] for word in ("how", "files", "offline"))]) + " |")
    return "\n".join(rows) + "\n"


def parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    made, _, after = rest.partition(END)
    return before + BEGIN, made, END + after


def test_the_table_says_what_the_runners_say() -> None:
    assert parts()[1] == table()


if __name__ == "__main__":
    head, _, tail = parts()
    PAGE.write_text(head + table() + tail, "utf-8")
