import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from corral.domain.limits import Limits
from corral.domain.runner import (
    ABOUT,
    LANGUAGES,
    Names,
    Runner,
    build_hint,
    commands,
)
from corral.services.languages import chained

FOLDER = Path(__file__).parents[3] / "runners"
DOCUMENTS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
RUNNERS = {name: Runner.from_dict(doc) for name, doc in DOCUMENTS.items()}
NAMES = Names.of(RUNNERS.values())
LIMITS = Limits(memory_bytes=1000, cpu=1.5)
each_runner = pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)


def test_every_language_of_the_contract_has_a_runner():
    assert set(RUNNERS) == set(LANGUAGES)
    assert all(name == runner.language for name, runner in RUNNERS.items())
    assert RUNNERS["python"].env["PYTHONUNBUFFERED"] == "1"


@each_runner
def test_a_language_is_told_by_what_its_runner_says(runner):
    assert all(NAMES.of_file(f"a{extension}") == runner.language for extension in runner.extensions)
    assert all(NAMES.of_program(f"/usr/bin/{program}") == runner.language for program in runner.shebangs)
    assert NAMES.of_file(runner.file_name) == runner.language


@each_runner
def test_a_runner_says_which_tools_it_needs_and_what_it_does(runner):
    assert runner.tools and set(runner.about) == set(ABOUT)
    said = " ".join((*runner.run, *(runner.build or ())))
    assert all(tool in said for tool in runner.tools)


def test_no_extension_and_no_program_of_a_first_line_belongs_to_two_languages():
    for words in ({"extensions": (".rs",)}, {"shebangs": ("node",)}):
        other = Runner("sql", "main.sql", ("sqlite3",), **words)
        with pytest.raises(ValueError, match="already"):
            Names.of([*RUNNERS.values(), other])
    assert Names.of([*RUNNERS.values(), RUNNERS["rust"]]) == NAMES, "the same once more claims nothing new"
    assert all(
        NAMES.of_first_line(f"#!/usr/bin/env {s}\n".encode()) == r.language
        for r in RUNNERS.values()
        for s in r.shebangs
    )


@each_runner
def test_the_scripts_of_a_runner_are_posix_shell(runner):
    for words in (runner.run, runner.build or ()):
        if words[:1] == ("sh",):
            assert words[1] == "-euc"  # a step that fails is never passed over
            for shell in ("sh", "bash"):
                if shutil.which(shell):
                    subprocess.run([shell, "-n"], input=words[2], text=True, check=True)


@each_runner
def test_a_path_and_arguments_are_passed_as_they_are(runner):
    path = "/workspace/{out} $(touch x) '你 好'"
    made = commands(runner, path, ["a b", "{file}", "$HOME"], LIMITS, out="/o")
    assert made.run[-3:] == ("a b", "{file}", "$HOME")
    assert path in (*made.run, *(made.build or ()))
    scripts = [words[2] for words in (made.run, made.build or ()) if words[:1] == ("sh",)]
    assert not any(path in script for script in scripts)


def test_commands_of_an_interpreter():
    made = commands(RUNNERS["python"], "/workspace/a b.py", ["x", "{out}"], LIMITS, out="/o")
    assert made.build is None and made.run == ("python3", "/workspace/a b.py", "x", "{out}")
    assert made.env == {"PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": "/o/pycache"}


def test_the_build_is_a_command_of_its_own():
    made = commands(RUNNERS["c"], "/workspace/main.c", ["x"], LIMITS, out="/o")
    assert made.build is not None and made.build[-4:] == ("build", "/workspace/main.c", "/workspace", "/o")
    assert made.run == ("/o/program", "x")


def test_numbers_of_the_limits_are_filled_in():
    doc = {"language": "go", "file_name": "main.go", "run": ["x{memory:85%}y", "{cpus}"], "env": {"M": "{memory}"}}
    made = commands(Runner.from_dict(doc), "/f", (), LIMITS)
    assert made.run == ("x850y", "2") and made.env == {"M": "1000"}


def test_a_failed_build_reads_differently_from_a_failed_program():
    plain = build_hint("go", "nonzero_exit", 1, "the program itself exited with status 1")
    assert plain.startswith("the build failed:") and "never started" in plain and "itself" not in plain
    assert "(exit status 127" in build_hint("go", "nonzero_exit", 127, "exit status 127: not found")
    assert "(ended by SIGSEGV)" in build_hint("c", "signal", 139, "ended by SIGSEGV")
    assert build_hint("c", "timeout", None, "killed").endswith("before the program was started: killed")


@pytest.mark.parametrize(
    "change",
    [{"language": "cobol"}, {"language": None}, {"run": []}, {"run": "python3"}, {"run": [1]}, {"file_name": "../x"}, {"file_name": ""}, {"extensions": [".R"]}, {"extensions": ["r"]},
     {"env": {"A": 1}}, {"tools": "x"}, {"compile": ["x"]}, {"run": ["sh", "-c", "cat {file}"]}, {"build": ["cd {root}"]},
     {"env": {"A": "{cpus:10%}"}}, {"about": {"how": "x"}}],
)  # fmt: skip
def test_a_broken_runner_is_refused(change):
    with pytest.raises(ValueError, match="runner"):
        Runner.from_dict({**DOCUMENTS["python"], **change})


def test_build_and_program_in_one_command_line_leave_a_mark_between_them(tmp_path):
    built = tmp_path / "it's built"
    script = 'cat; printf "built %s\\n" "$1"; exit "$2"'
    program = ("sh", "-c", 'cat; printf "[%s]" "$@"; exit 3', "program", "a b", "你'好")

    def run(status: str) -> subprocess.CompletedProcess[str]:
        argv = chained(("sh", "-c", script, "build", "it's $HOME", status), program, str(built))
        return subprocess.run(argv, input="input", capture_output=True, text=True, check=False)

    failed = run("2")
    assert failed.returncode == 2 and failed.stdout == "built it's $HOME\n" and not built.exists()
    done = run("0")
    assert done.returncode == 3 and done.stdout == "built it's $HOME\ninput[a b][你'好]" and built.exists()
