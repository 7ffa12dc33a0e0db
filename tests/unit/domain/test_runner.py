from pathlib import Path

import pytest
import yaml

from corral.domain.runner import EXTENSIONS, LANGUAGES, SHEBANGS, Runner, commands, compile_hint

FOLDER = Path(__file__).parents[3] / "runners"
DOCUMENTS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
RUNNERS = {name: Runner.from_dict(doc) for name, doc in DOCUMENTS.items()}


def test_the_runners_of_this_version():
    assert set(RUNNERS) == {"python", "bash", "javascript", "c"} <= set(LANGUAGES)
    assert all(name == runner.language for name, runner in RUNNERS.items())
    assert RUNNERS["python"].env == {"PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_a_runner_agrees_with_the_table_of_languages(runner):
    assert set(runner.extensions) == {ext for ext, language in EXTENSIONS.items() if language == runner.language}
    assert set(runner.shebangs) == {name for name, language in SHEBANGS.items() if language == runner.language}
    assert EXTENSIONS["." + runner.file_name.rpartition(".")[2]] == runner.language


def test_commands_of_an_interpreter():
    assert commands(RUNNERS["python"], "/workspace/a b.py", ["x", "{out}"]) == (
        None,
        ("python3", "/workspace/a b.py", "x", "{out}"),
    )


def test_compiling_is_a_command_of_its_own():
    compiler, program = commands(RUNNERS["c"], "/workspace/{out}", ["x"], out="/tmp/p")
    assert compiler == ("cc", "-O1", "-o", "/tmp/p", "-x", "c", "/workspace/{out}", "-x", "none", "-lm")
    assert program == ("/tmp/p", "x")
    assert "did not compile" in compile_hint(RUNNERS["c"], None) and "never started" in compile_hint(RUNNERS["c"], "x")


@pytest.mark.parametrize(
    "change",
    [{"language": "cobol"}, {"language": None}, {"run": []}, {"run": "python3"}, {"run": [1]}, {"file_name": "../x"}, {"file_name": ""},
     {"env": {"A": 1}}, {"tools": "x"}, {"compiler": ["x"]}],
)  # fmt: skip
def test_a_broken_runner_is_refused(change):
    with pytest.raises(ValueError, match="runner"):
        Runner.from_dict({**DOCUMENTS["python"], **change})
