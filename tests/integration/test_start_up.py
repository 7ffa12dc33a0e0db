"""What a command loads before it does its work: what is loaded is paid for by every call, so what is not needed must not come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh true]\nlanguages: {bash: sh}\n"
SERVES = {"fastapi", "starlette", "uvicorn", "h11", "pydantic", "httpx2", "anyio"}
DATABASES = {"sqlalchemy", "alembic", "psycopg", "psycopg_pool", "redis"}
OF_SERVERS = {"jwt", "cryptography", "msgpack"}
SLOW = {"yaml", "email", "importlib.resources", "importlib.metadata", "http.client", "urllib.request", "unicodedata"}
SERVICE = {
    "asyncio",
    "ssl",
    "sqlite3",
    "ctypes",
    "corral.bootstrap",
    "corral.services",
    "corral.node",
    "corral.adapters",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    recipes = tmp_path / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(RECIPE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    state = str(tmp_path / "state")
    return {**clean, "CORRAL_STATE_DIR": state, "CORRAL_TEMPLATES": str(recipes), "CORRAL_RUNTIMES": "fake"}


def loaded(environment: dict[str, str], *words: str, before: str = "") -> set[str]:
    """The modules that a command line has loaded when it has ended well; `before` runs ahead of it."""
    code = f"""
    import sys
    {before}
    from corral.cli.main import main
    sys.argv = ["corral", *{list(words)!r}]
    try:
        main()
    except SystemExit as end:
        status = end.code
    import json
    print(json.dumps([status, sorted(sys.modules)]), file=sys.stderr)
    """
    command = [sys.executable, "-I", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status in (0, 127), done.stderr  # the runtime that runs nothing has no bash
    return set(modules)


def test_the_version_loads_nothing_of_the_service(environment: dict[str, str]) -> None:
    modules = loaded(environment, "--version")
    assert not modules & (
        SERVES | DATABASES | OF_SERVERS | SERVICE | SLOW - {"email", "importlib.metadata", "importlib.resources"}
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--runtime", "fake", "--", "true"),
        ("run", "--runtime", "fake", "--language", "bash", "-c", "true"),
        ("sandbox", "ls"),
        ("runs", "ls", "--json"),
    ],
)
def test_a_command_on_a_warm_state_directory_loads_nothing_that_it_does_not_need(
    environment: dict[str, str], words: tuple[str, ...]
) -> None:
    loaded(environment, *words)
    modules = loaded(environment, *words)
    assert "corral.adapters.store.sqlite" in modules
    assert not modules & (SERVES | DATABASES | OF_SERVERS | SLOW)


def test_the_parent_of_replicas_loads_nothing_that_serves(environment: dict[str, str]) -> None:
    urls = ("--database-url", "postgresql:///nowhere", "--redis-url", "redis://localhost")
    before = "import corral.cli.replicas as r; r.Replicas.run = lambda self: print('ran', file=sys.stderr)"
    modules = loaded(environment, "serve", "--port", "0", "--replicas", "2", *urls, before=before)
    assert "corral.cli.replicas" in modules
    assert modules & (SERVES | DATABASES | OF_SERVERS | SLOW | SERVICE) <= {"unicodedata"}  # of looking up the host
