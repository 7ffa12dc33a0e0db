"""schemathesis over the committed OpenAPI document, against a running server with real sandboxes: no answer is a failure of ours.

It runs in an environment of its own. The seed is fixed, so that a failure can be repeated; streams and archives are left out, as it
can neither follow the one nor make the other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from furnished import once

VERSION = "4.32.5"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "openapi.json"
RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat]\nlanguages: {bash: sh}\n"
KEY = "a-key-for-schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)
pytestmark = [pytest.mark.index, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def schemathesis(shared: Path) -> Path:
    """The program, installed once per test run."""
    place = shared / "schemathesis"

    def make() -> None:
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        pip = [
            place / "venv" / "bin" / "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            f"schemathesis=={VERSION}",
        ]
        subprocess.run(pip, check=True, capture_output=True)

    once(place, make)
    return place / "venv" / "bin" / "schemathesis"


@pytest.fixture
def url() -> Iterator[str]:
    """A server on a new state directory, emptied at the end."""
    above = Path(tempfile.mkdtemp(prefix="corral-schemathesis-"))
    above.chmod(0o711)
    recipes = above / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(RECIPE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    environment = {
        **clean,
        "CORRAL_STATE_DIR": str(above / "state"),
        "CORRAL_TEMPLATES": str(recipes),
        "CORRAL_RUNTIMES": "bubblewrap",
    }
    corral = [sys.executable, "-c", "from corral.cli.main import main; main()"]
    # It tries wrong keys with every call, and expects the same refusal each time.
    patient = "from corral.api import auth; auth.WRONG = 10**9; from corral.cli.main import main; main()"
    serve = subprocess.Popen(
        [sys.executable, "-c", patient, "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "CORRAL_ADMIN_KEY": KEY},
    )
    try:
        assert serve.stdout is not None
        yield serve.stdout.readline().split()[-1]
    finally:
        serve.terminate()
        serve.wait(60)
        made = subprocess.run([*corral, "sandbox", "ls", "--json"], env=environment, capture_output=True, text=True)
        if found := re.findall(r"sbx_[0-9a-z]{26}", made.stdout):
            subprocess.run([*corral, "sandbox", "rm", *dict.fromkeys(found)], env=environment, check=True)
        subprocess.run([*corral, "gc"], env=environment, check=True, capture_output=True)
        shutil.rmtree(above)


def test_no_answer_is_a_failure_and_each_is_as_the_document_says(schemathesis: Path, url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [schemathesis, "run", DOCUMENT, "--url", url, "-H", f"Authorization: Bearer {KEY}"]
        + ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
        + ["--exclude-path-regex", "/(stream|watch|ws|archive|gc)$", "--request-timeout", "90", "--no-color"]
        + ["--generation-database", "none", "--continue-on-failure"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None and int(cases[1]) == int(cases[2]) > 500, done.stdout[-3000:]
