"""The shape of the code base: who may import whom, what every package is called, what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "corral"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
MODULES = sorted(SOURCE.rglob("*.py"))


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    return [REPOSITORY / name for name in listing.decode().split("\0") if name and (REPOSITORY / name).is_file()]


def texts(paths: list[Path]) -> list[tuple[str, str]]:
    found = []
    for path in paths:
        try:
            found.append((str(path.relative_to(REPOSITORY)), path.read_text()))
        except UnicodeDecodeError:
            continue
    return found


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_client_loads_no_server_library() -> None:
    loaded = loaded_after("import corral.client")
    assert "corral.client" in loaded
    assert not loaded & {"fastapi", "starlette", "sqlalchemy", "pydantic", "uvicorn"}


def test_testing_package_loads_no_pytest() -> None:
    assert "pytest" not in loaded_after("import corral.testing")


def test_runtime_entry_points_equal_the_adapter_modules() -> None:
    named = {point.name: point.value for point in entry_points(group="corral.runtimes")}
    declared = PROJECT["project"]["entry-points"]["corral.runtimes"]
    assert named == declared
    modules = {target.partition(":")[0].rpartition(".")[2] for target in declared.values()}
    sharing = {"oci"}  # what OCI runtimes have in common; no runtime of its own
    files = {path.stem for path in (SOURCE / "adapters" / "runtimes").glob("*.py")} - {"__init__"} - sharing
    private = {name for name in files if name.startswith("_")}
    assert files - private == modules


def test_architecture_page_names_every_package_and_top_module() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text()
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    tops = {package.partition("/")[0] + "/" for package in packages}
    single = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    missing = sorted(name for name in tops | single if f"`{name}`" not in page)
    assert not missing


@pytest.mark.parametrize("word", ["utils", "util", "helpers", "helper", "common", "managers", "manager", "misc"])
def test_no_module_is_named_after_nothing(word: str) -> None:
    assert not [path for path in MODULES if path.stem == word or path.parent.name == word]


NUMBER_SIGNALS = {"kill", "killpg"}
MAY_SIGNAL = ("linux/process.py", "guest/")


def number_signals(source: str) -> list[int]:
    """Lines that name `os.kill` or `os.killpg`, however `os` or the function was imported."""
    lines = []
    names = {"os", "posix"}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name in ("os", "posix") and alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NUMBER_SIGNALS and isinstance(node.value, ast.Name):
            lines.extend([node.lineno] if node.value.id in names else [])
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            lines.extend(node.lineno for alias in node.names if alias.name in NUMBER_SIGNALS)
    return lines


def test_number_signals_are_seen_in_every_spelling() -> None:
    spellings = [
        "import os\nos.kill(1, 9)",
        "import os as o\no.killpg(1, 9)",
        "from os import kill as k",
        "import posix\nposix.kill",
    ]
    assert all(number_signals(spelling) for spelling in spellings)
    assert not number_signals("import os\nprocess.kill()\nos.close(0)")


def test_nothing_signals_a_number_but_the_two_places_that_may() -> None:
    found = []
    for path in MODULES:
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(MAY_SIGNAL):
            found += [f"{name}:{line}" for line in number_signals(path.read_text())]
    assert not found


def test_no_file_holds_a_path_of_a_development_machine() -> None:
    here = re.escape(f"{REPOSITORY}/")  # wherever that is for whoever runs this
    pattern = re.compile(rf"(?<![\w.])/(?:home|Users)/[a-z]\w+/|(?<![\w.]){here}|/root/\.(?!cache)")
    allowed = re.compile(r"/home/(?:sandbox|user|linuxbrew)/")
    hits = [
        f"{name}: {match.group()}"
        for name, text in texts(tracked())
        if name != "tests/unit/test_architecture.py"
        for match in pattern.finditer(text)
        if not allowed.match(match.group())
    ]
    assert not hits


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_locks_name_no_host_and_hash_every_package(lock: str) -> None:
    text = (REPOSITORY / lock).read_text()
    assert not re.search(r"https?://|--(?:extra-)?index-url|--find-links", text)
    requirements = re.split(r"\n(?=\S)", text.strip())
    assert len(requirements) > 20
    assert [r.split()[0] for r in requirements if "--hash=sha256:" not in r or "==" not in r] == []


def test_locks_hold_every_declared_dependency_and_agree() -> None:
    def pinned(lock: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / lock).read_text(), re.MULTILINE))

    plain, dev = pinned("requirements.lock"), pinned("requirements-dev.lock")
    name = re.compile(r"[A-Za-z0-9.-]+")
    wanted = {name.match(d).group().lower() for d in PROJECT["project"]["dependencies"]}  # type: ignore[union-attr]
    wanted_dev = {
        name.match(d).group().lower()  # type: ignore[union-attr]
        for d in PROJECT["project"]["optional-dependencies"]["dev"]
    }
    assert wanted <= plain.keys()
    assert wanted | wanted_dev <= dev.keys()
    assert {package: dev.get(package) for package in plain} == plain
    for extra in ("inspect-ai", "pydantic-ai"):
        lock = pinned(f"tests/ecosystem/{extra}.lock")
        [framework] = PROJECT["project"]["optional-dependencies"][extra]
        assert re.match(r"[\w-]+", framework).group().replace("_", "-") in lock  # type: ignore[union-attr]
        assert {package: lock.get(package) for package in plain} == plain


def test_dependencies_page_gives_a_reason_for_each() -> None:
    page = (REPOSITORY / "docs" / "explanation" / "dependencies.md").read_text()
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    declared = [requirement for group in groups for requirement in group]
    names = [re.match(r"[\w.-]+", d).group() for d in declared]  # type: ignore[union-attr]
    assert [n for n in names if f"`{n}`" not in page] == []


def test_version_imports_only_what_a_quick_start_allows() -> None:
    loaded = loaded_after("import corral.cli.main, corral.cli.run, corral.cli.exec, corral.cli.doctor")
    heavy = {
        "rich",
        "fastapi",
        "starlette",
        "sqlalchemy",
        "uvicorn",
        "asyncio",
        "yaml",
        "pydantic",
        "httpx2",
        "alembic",
    }
    assert not loaded & heavy
