"""Reference pages that are made from the code say what the code says. To renew them: `python tests/unit/test_reference_pages.py`."""

import re
from pathlib import Path

import pytest

from corral.domain.sandbox import render_diagram, render_table
from corral.errors import CODES

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"


def lifecycle_page() -> str:
    return (
        "# Lifecycle of a sandbox\n\nMade from `corral.domain.sandbox`, the one transition table. A pair that is not listed is "
        "illegal and raises\n`illegal_transition` with the sandbox's history.\n\n"
        f"```mermaid\n{render_diagram().strip()}\n```\n\n{render_table().strip()}\n"
    )


def errors_page() -> str:
    rows = "\n".join(
        f"| `{name}` | {code.status} | {code.exit} | {'yes' if code.retryable else 'no'} | {code.title} |"
        for name, code in sorted(CODES.items())
    )
    return (
        "# Error codes\n\nMade from `corral.errors`. An error means that the platform refused or failed; how a program ended is a "
        "result, never an\nerror. Each problem document (RFC 9457) has `code`, `retryable`, `hint`, and `field` where one value is "
        "to blame.\n\n| code | HTTP | exit status | retry helps | meaning |\n|---|---|---|---|---|\n" + rows + "\n"
    )


MADE = {"lifecycle.md": lifecycle_page, "errors.md": errors_page}


def test_no_page_gives_an_option_behind_the_file_to_run_where_it_would_be_the_programs() -> None:
    root = PAGES.parents[1]
    pages = [root / "README.md", *root.glob("docs/**/*.md")]
    behind = re.compile(r"\brun (?:--?[a-z][a-z-]*(?: (?!-)\S+)?+ )*+[^\s`-][^\s`]*\.[a-z]+ [^`\n]*--[a-z].*")
    assert behind.search("corral run --memory 1G app/main.go --file app:.")
    assert not behind.search("corral run --file app:. app/main.go") and not behind.search("run -- sh x.sh --foo")
    found = [(page.name, hit[0]) for page in pages for hit in behind.finditer(page.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("name", MADE)
def test_the_page_says_what_the_code_says(name: str) -> None:
    assert (PAGES / name).read_text(encoding="utf-8") == MADE[name]()


if __name__ == "__main__":
    for page, make in MADE.items():
        (PAGES / page).write_text(make(), encoding="utf-8")
