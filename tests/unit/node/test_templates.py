"""Templates: what a frozen base holds, and what never enters one."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from corral.adapters.runtimes import _bwrap
from corral.errors import CorralError
from corral.node.interpreter import PYTHON_ARGV, ensure_interpreter
from corral.node.templates import Templates, find_program

RECIPES = Path(__file__).resolve().parents[3] / "templates"


def small_recipe(directory: Path, **changes: str) -> Path:
    directory.mkdir()
    text = "name: small\nkind: frozen\nprograms: [sh env awk]\nlanguages: {bash: bash, python: python9}\n"
    (directory / "small.yaml").write_text(text + "".join(f"{k}: {v}\n" for k, v in changes.items()))
    return directory


@pytest.fixture(scope="session")
def bwrap(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program that the wheel brings, as the runtime unpacks it; else the system's."""
    found = _bwrap.install(str(tmp_path_factory.mktemp("bwrap"))) or shutil.which("bwrap")
    assert found, "neither the wheel nor the system has bubblewrap"
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path


def test_a_frozen_program_runs_with_nothing_but_the_base(state: Path, bwrap: str) -> None:
    template = asyncio.run(Templates(state, small_recipe(state / "recipes")).ensure("small"))
    awk = find_program(Path(template.path), "awk")
    assert awk == "/usr/bin/awk"
    done = subprocess.run(
        [bwrap, "--unshare-all", "--ro-bind", template.path, "/", "--clearenv", awk, "BEGIN { print 6 * 7 }"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_the_same_recipe_gives_the_same_digest_and_another_one_does_not(state: Path) -> None:
    first = asyncio.run(Templates(state / "a", small_recipe(state / "r1")).ensure("small"))
    again = asyncio.run(Templates(state / "b", state / "r1").ensure("small"))
    other = asyncio.run(
        Templates(state / "c", small_recipe(state / "r2", trees="[/etc/ssl/certs/ca-certificates.crt]")).ensure("small")
    )
    assert first.digest == again.digest
    assert first.digest != other.digest or not os.path.exists("/etc/ssl/certs/ca-certificates.crt")


def test_only_languages_whose_tool_is_there_are_offered(state: Path) -> None:
    template = asyncio.run(Templates(state, small_recipe(state / "recipes")).ensure("small"))
    assert "python" not in template.languages


def test_nothing_of_the_host_etc_but_a_generated_one_is_inside(state: Path) -> None:
    template = asyncio.run(Templates(state, small_recipe(state / "recipes")).ensure("small"))
    root = Path(template.path)
    assert "sandbox:x:1000" in (root / "etc/passwd").read_text()
    assert not (root / "etc/shadow").exists()
    assert (root / "etc/resolv.conf").read_text().startswith("nameserver 127.0.0.1\n")
    for directory in ("workspace", "home/sandbox", "tmp", "var/tmp", ".corral", "run/user/1000"):
        assert (root / directory).is_dir()


def test_set_id_bits_and_devices_never_enter_a_base(state: Path) -> None:
    bin_dir = state / "tool"
    bin_dir.mkdir()
    tool = bin_dir / "suid"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o6755)
    os.mkfifo(bin_dir / "pipe")
    template = asyncio.run(Templates(state, small_recipe(state / "recipes", trees=f"[{bin_dir}]")).ensure("small"))
    inside = Path(template.path + str(bin_dir))
    assert (inside / "suid").stat().st_mode & 0o7777 == 0o755
    assert not (inside / "pipe").exists()


@pytest.mark.parametrize(
    "secret",
    [
        "AKIA" + "ABCDEFGHIJKLMNOP", "ASIA" + "ABCDEFGHIJKLMNOP", *(f"gh{kind}_" + "a1B2" * 9 for kind in "pousr"),
        "xoxb-" + "1234567890-" * 3, "sk-ant-" + "a1_-" * 12, "sk-proj-" + "a1_-" * 12, "glpat-" + "a1B2" * 5,
        "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKCAQEA" * 8,
    ],
    ids=lambda secret: secret[:10],
)  # fmt: skip
def test_a_credential_in_a_base_fails_the_build_and_names_the_file(state: Path, secret: str) -> None:
    data = state / "data"
    data.mkdir()
    (data / "settings.ini").write_text(f"token = {secret}\n")
    templates = Templates(state, small_recipe(state / "recipes", trees=f"[{data}]"))
    with pytest.raises(CorralError, match=r"settings\.ini") as caught:
        asyncio.run(templates.ensure("small"))
    assert caught.value.code == "template_unavailable"
    assert templates.built("small") is None
    assert not list((state / "base").glob(".build-*"))


def test_what_only_begins_like_a_credential_is_taken(state: Path) -> None:
    data = state / "data"
    data.mkdir()
    (data / "notes").write_text("sk-learn AKIA ghp_short xox -----BEGIN PRIVATE KEY----- (none)\n")
    assert asyncio.run(Templates(state, small_recipe(state / "recipes", trees=f"[{data}]")).ensure("small")).digest


def test_an_unknown_template_is_named_with_the_known_ones(state: Path) -> None:
    for name in ("nope", "../host", ""):
        with pytest.raises(CorralError) as caught:
            asyncio.run(Templates(state, small_recipe(state / f"recipes-{len(name)}")).ensure(name))
        assert caught.value.code == "not_found"
        assert "small" in (caught.value.hint or "")


def test_many_builders_at_once_make_one_base(state: Path) -> None:
    recipes = small_recipe(state / "recipes")

    async def all_at_once() -> set[str]:
        made = await asyncio.gather(*(Templates(state, recipes).ensure("small") for _ in range(4)))
        return {template.path for template in made}

    assert len(asyncio.run(all_at_once())) == 1


@pytest.mark.slow
def test_the_host_template_runs_python_bash_node_and_c(state: Path, bwrap: str) -> None:
    template = asyncio.run(Templates(state, RECIPES).ensure("host"))
    script = r"""
      set -e
      python3 -c 'import ssl, sqlite3, json; print("你好", 6*7)'
      [ -z "$(command -v node)" ] || node -e 'console.log(6*7)'
      printf '#include <stdio.h>\n#include <math.h>\nint main(){printf("%%.0f\\n", sqrt(1764));return 0;}' > /tmp/a.c
      [ -z "$(command -v cc)" ] || { cc -o /tmp/a /tmp/a.c -lm; /tmp/a; }
    """
    done = subprocess.run(
        [
            bwrap,
            "--unshare-all",
            "--ro-bind",
            template.path,
            "/",
            "--tmpfs",
            "/tmp",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        + [
            "--clearenv",
            "--setenv",
            "PATH",
            "/usr/local/bin:/usr/bin:/bin",
            "--setenv",
            "LANG",
            "C.UTF-8",
            "bash",
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "你好 42"
    assert lines[1:] == ["42"] * (("javascript" in template.languages) + ("c" in template.languages))


@pytest.mark.index
@pytest.mark.slow
def test_the_busybox_template_has_one_static_program(state: Path, bwrap: str) -> None:
    template = asyncio.run(Templates(state, RECIPES).ensure("busybox"))
    done = subprocess.run(
        [
            bwrap,
            "--unshare-all",
            "--ro-bind",
            template.path,
            "/",
            "sh",
            "-c",
            "echo $((6*7)); ls /lib /usr/lib 2>/dev/null | wc -l",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[0] == "42", done.stderr
    assert not list(Path(template.path).rglob("libc.so*"))


def test_the_projected_interpreter_runs_in_an_empty_root(state: Path, bwrap: str) -> None:
    tree = ensure_interpreter(state)
    root = state / "empty"
    (root / ".corral").mkdir(parents=True)
    code = "import sys, tarfile, ctypes, json; print(sys.prefix, len([p for p in sys.path if not p.startswith('/.corral')]))"
    done = subprocess.run(
        [
            bwrap,
            "--unshare-all",
            "--ro-bind",
            str(root),
            "/",
            "--ro-bind",
            str(tree),
            "/.corral",
            *PYTHON_ARGV,
            "-c",
            code,
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "/.corral 0\n"), done.stderr


def test_the_interpreter_is_built_once_and_found_again(state: Path) -> None:
    first = ensure_interpreter(state)
    inode = (first / "bin/python3").stat().st_ino
    assert ensure_interpreter(state) == first
    assert (first / "bin/python3").stat().st_ino == inode


def test_the_profile_of_system_calls_is_the_recipes_and_changes_with_the_next_build(state: Path) -> None:
    plain = asyncio.run(Templates(state / "a", small_recipe(state / "r1")).ensure("small"))
    templates = Templates(state / "b", small_recipe(state / "r2", seccomp="debug"))
    debug = asyncio.run(templates.ensure("small"))
    assert (plain.seccomp, debug.seccomp) == ("default", "debug")
    assert plain.digest == debug.digest, "the tree is the same"
    recipe = state / "r2" / "small.yaml"
    recipe.write_text(recipe.read_text().replace("seccomp: debug", "seccomp: browser"))
    assert asyncio.run(templates.ensure("small")).seccomp == "debug"
    assert asyncio.run(templates.ensure("small", current=True)).seccomp == "browser"


def test_a_profile_that_there_is_not_is_refused(state: Path) -> None:
    with pytest.raises(CorralError, match="seccomp"):
        asyncio.run(Templates(state, small_recipe(state / "recipes", seccomp="open")).ensure("small"))
