"""Every language on the template that has them all: several files, input, arguments, Unicode, faults of the build and of the program.

One runtime has everything, the others have one language here; `tests/acceptance/test_languages.py` has sandboxes that stay.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from corral.client.sdk import Corral, Result
from corral.domain.runner import LANGUAGES
from furnished import furnish, polyglot

pytestmark = [
    pytest.mark.timeout(1200),  # the first test builds a base of two gigabytes
    pytest.mark.root,
    pytest.mark.index,
    pytest.mark.skipif(
        shutil.which("mmdebstrap") is None, reason="polyglot is built with mmdebstrap, which is not installed"
    ),
]

RUNTIME = "crun" if shutil.which("crun") else "bubblewrap"
ARGS = ["a b", "参数", "$HOME'\"*"]
LINE = "输入 line\n"


@dataclass
class Case:
    """A program that prints `42`, its arguments in brackets and its input, and exits 3; how it can be wrong."""

    code: str
    files: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    """Code that the build (or, without one, the program) stumbles over."""
    says: str = ""
    """What is said about it."""
    failing: str = ""
    """Code that is built and then fails."""
    fails: tuple[str, int, str] = ("nonzero_exit", 1, "")
    """The reason of that, the exit code and a word on stderr."""


CASES = {
    "python": Case(
        "import sys\nfrom 包.深 import value\nprint(value)\nfor a in sys.argv[1:]: print(f'[{a}]')\nprint(input())\nsys.exit(3)",
        {"包/__init__.py": "", "包/深.py": "value = 42"},
        "print(",
        "SyntaxError",
    ),
    "bash": Case(
        'source ./lib.sh\nvalue\nprintf "[%s]\\n" "$@"\ncat\nexit 3',
        {"lib.sh": "value() { echo 42; }"},
        "if",
        "syntax error",
    ),
    "javascript": Case(
        "const {value} = require('./lib/x');\nconsole.log(value);\nfor (const a of process.argv.slice(2)) console.log(`[${a}]`);\n"
        "console.log(require('fs').readFileSync(0, 'utf8').trim());\nprocess.exit(3);",
        {"lib/x.js": "exports.value = 42;"},
        "let x = ;",
        "SyntaxError",
    ),
    "typescript": Case(
        "import { value } from './lib/x';\nimport * as fs from 'fs';\nconst numbers: number[] = [value];\nconsole.log(numbers[0]);\nconsole.error(new Error('坏').stack);\n"
        "for (const a of process.argv.slice(2)) console.log(`[${a}]`);\n"
        "console.log(fs.readFileSync(0, 'utf8').trim());\nprocess.exit(fs.existsSync(__dirname + '/lib/x.ts') ? 3 : 4);",
        {"lib/x.ts": "export const value: number = 42;"},
        "const x: number = '你好';\nconsole.log(x);",
        "main.ts(1,7): error TS2322",
    ),
    "c": Case(
        '#include <stdio.h>\n#include "x.h"\nint main(int n, char **v) {\n  char line[99];\n  printf("%d\\n", value());\n'
        '  for (int i = 1; i < n; i++) printf("[%s]\\n", v[i]);\n  if (fgets(line, 99, stdin)) printf("%s", line);\n  return 3;\n}',
        {
            "x.h": "int value(void);",
            "lib/x.c": '#include "x.h"\nint value(void) { return 42; }',
            "other.c": "int main(void) { return 1; }",
        },
        "int main(void) { return 你; }",
        "error:",
        '#include <stdlib.h>\nint main(void) { abort(); }',
        ("signal", 134, ""),
    ),
    "cpp": Case(
        '#include <iostream>\n#include <string>\n#include "x.hpp"\nint main(int n, char **v) {\n  std::string line;\n'
        '  std::cout << value<int>() << "\\n";\n  for (int i = 1; i < n; i++) std::cout << "[" << v[i] << "]\\n";\n'
        '  std::getline(std::cin, line);\n  std::cout << line << "\\n";\n  return 3;\n}',
        {
            "include/x.hpp": 'extern "C" int forty(); int two();\ntemplate <class T> T value() { return forty() + two(); }',
            "src/two.cc": "int two() { return 2; }",
            "src/forty.c": "int forty(void) { int class = 40; return class; }",
        },
        "int main() { std::string s; }",
        "error:",
        '#include <stdexcept>\nint main() { throw std::runtime_error("坏"); }',
        ("signal", 134, "坏"),
    ),
    "go": Case(
        'package main\n\nimport (\n\t"bufio"\n\t"fmt"\n\t"os"\n\n\t"example.com/app/inner"\n)\n\nfunc main() {\n'
        '\tfmt.Println(inner.Value + two())\n\tfor _, a := range os.Args[1:] {\n\t\tfmt.Printf("[%s]\\n", a)\n\t}\n'
        '\tline, _ := bufio.NewReader(os.Stdin).ReadString(10)\n\tfmt.Print(line)\n\tos.Exit(3)\n}',
        {
            "go.mod": "module example.com/app\n\ngo 1.18\n",
            "inner/x.go": "package inner\n\nconst Value = 40\n",
            "two.go": "package main\n\nfunc two() int { return 2 }\n",
            "two_test.go": "package main\n\nnonsense",
        },
        'package main\n\nfunc main() { var x int = "你" }',
        "cannot use",
        'package main\n\nfunc main() { panic("坏") }',
        ("nonzero_exit", 2, "坏"),
    ),
    "java": Case(
        "import java.util.*;\nimport org.example.Value;\n// class Wrong\npublic class Program {\n  public static void main(String[] args) {\n"
        "    System.out.println(Value.of());\n    for (String a : args) System.out.println(\"[\" + a + \"]\");\n"
        "    System.out.println(new Scanner(System.in).nextLine());\n    System.exit(3);\n  }\n}",
        {
            "org/example/Value.java": "package org.example;\npublic class Value { public static int of() { return Two.TWO + 40; } }",
            "lib/Two.java": "package org.example;\nclass Two { static final int TWO = 2; }",
        },
        'public class Wrong { int x = "你"; }',
        "Wrong.java:1: error:",
        'record P(int x) {}\nenum E { A }\nclass Q { public static void main(String[] a) { throw new IllegalStateException("坏"); } }',
        ("nonzero_exit", 1, "坏"),
    ),
    "rust": Case(
        "mod inner;\nuse std::io::BufRead;\nfn main() {\n    println!(\"{}\", inner::deep::VALUE);\n"
        "    for a in std::env::args().skip(1) { println!(\"[{}]\", a); }\n"
        "    println!(\"{}\", std::io::stdin().lock().lines().next().unwrap().unwrap());\n    std::process::exit(3);\n}",
        {"inner/mod.rs": "pub mod deep;", "inner/deep.rs": "pub const VALUE: i32 = 42;"},
        'fn main() { let _x: i32 = "你"; }',
        "error[E0308]",
        'fn main() { panic!("坏"); }',
        ("nonzero_exit", 101, "坏"),
    ),
    "sql": Case(
        ".read lib/x.sql\n.import -csv /dev/stdin lines\nselect value from x;\nselect * from lines;\nselect missing from x;\nselect 7;",
        {"lib/x.sql": "create table x(value); insert into x values (42);"},
        "select 1;\nselect from;",
        "syntax error",
    ),
    "r": Case(
        "source('lib/x.R')\ncat(value, '\\n', sep='')\nfor (a in commandArgs(TRUE)) cat('[', a, ']\\n', sep='')\n"
        "cat(readLines(file('stdin'), n=1), '\\n', sep='')\nquit(status=3)",
        {"lib/x.R": "value <- 42"},
        "x <- (",
        "Error",
    ),
}  # fmt: skip
FAILING = [name for name, case in CASES.items() if case.failing]
BUILT = [*FAILING, "typescript"]


@pytest.fixture(scope="module")
def corral(shared: Path) -> Iterator[Corral]:
    above = Path(tempfile.mkdtemp(prefix="corral-runners-"))
    above.chmod(0o711)
    furnish(above / "s", shared)
    polyglot(above / "s", shared)
    with Corral(state_dir=above / "s") as made:
        yield made
        made.request("POST", "/v1/gc")
        assert made.request("GET", "/v1/doctor")["leftovers"] == []
    shutil.rmtree(above, ignore_errors=True)


def run(corral: Corral, language: str, code: str, files: dict[str, str] | None = None, **more: Any) -> Result:
    sent = [{"path": path, "content": content} for path, content in (files or {}).items()]
    place = {"runtime": RUNTIME, "template": "polyglot"}
    result = corral.run(code=code, language=language, files=sent, **{**place, **more}).result
    assert result is not None
    return result


def test_every_language_has_a_case() -> None:
    assert set(CASES) == set(LANGUAGES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_program_of_several_files_with_arguments_and_input(corral: Corral, language: str) -> None:
    case = CASES[language]
    args = ["数 据.db"] if language == "sql" else ARGS
    result = run(
        corral, language, case.code, case.files, args=args, stdin="line\n" + LINE if language == "sql" else LINE
    )
    told = (result.stdout.text, result.stderr.text, result.hint)
    assert result.phase == "run", told
    if language == "sql":
        assert result.stdout.text == 'value\n42\nline\n"输入 line"\n', told
        assert (result.reason, result.exit_code) == (
            "nonzero_exit",
            1,
        ) and "no such column: missing" in result.stderr.text
    else:
        assert result.stdout.text == "42\n" + "".join(f"[{a}]\n" for a in ARGS) + LINE, told
        assert (result.reason, result.exit_code) == ("nonzero_exit", 3), told
    # What a build makes is no file of the caller's code; a database is.
    assert [f["path"] for f in result.files] == (["/workspace/数 据.db"] if language == "sql" else [])
    assert (result.build is not None) == (language in BUILT)
    if language == "typescript":
        assert "Error: 坏\n" in result.stderr.text and "(/workspace/main.ts:5:" in result.stderr.text, told
    assert not result.limits["pids"]["hit"] and not result.limits["memory"]["hit"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_fault_in_the_code_is_told_with_its_phase(corral: Corral, language: str) -> None:
    case = CASES[language]
    result = run(corral, language, case.fault)
    told = (result.stdout.text, result.stderr.text, result.hint)
    assert result.reason == "nonzero_exit" and result.exit_code in (1, 2) and case.says in result.stderr.text, told
    if language in BUILT:
        assert result.phase == "build" and result.hint is not None and result.hint.startswith("the build failed"), told
    else:
        assert result.phase == "run", told


@pytest.mark.parametrize("files", [{}, {"go.mod": "module example.com/p\n\ngo 1.18\n"}], ids=["files", "module"])
def test_a_package_of_go_that_is_no_program_is_a_fault_in_the_code(corral: Corral, files: dict[str, str]) -> None:
    result = run(corral, "go", "package library\n\nfunc F() int { return 1 }\n", files)
    told = (result.stdout.text, result.stderr.text, result.hint)
    assert (result.reason, result.exit_code, result.phase) == ("nonzero_exit", 1, "build"), told
    assert "package main" in result.stderr.text, told


@pytest.mark.parametrize("language", FAILING)
def test_a_program_that_fails_is_no_failed_build(corral: Corral, language: str) -> None:
    case = CASES[language]
    reason, code, word = case.fails
    result = run(corral, language, case.failing)
    told = (result.stdout.text, result.stderr.text, result.hint)
    assert (result.phase, result.reason, result.exit_code) == ("run", reason, code), told
    assert word in result.stderr.text, told
    assert result.build is not None and result.build["reason"] == "ok" and result.build["exit_code"] == 0


GREEDY = """#define T(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
int a[] = {T(T(T(T(T(T(1))))))};
int main(void) { return 0; }
"""
LARGE = "char a[200000000] = {1};\nint main(void) { return a[5]; }"


def test_limits_that_a_build_meets_are_told_as_such(corral: Corral) -> None:
    result = run(corral, "c", GREEDY, memory="40M")
    assert (result.reason, result.phase) == ("oom", "build"), (result.stderr.text, result.hint)
    assert result.hint is not None and "in the build of the c code" in result.hint and "40 MiB" in result.hint
    result = run(corral, "c", LARGE, disk="64M")
    assert result.exit_code and result.phase == "build", (result.stderr.text, result.hint)
    assert result.hint is not None and "64 MiB" in result.hint and "ask for more disk" in result.hint


def test_a_project_of_cargo_is_built_whole(corral: Corral) -> None:
    files = {
        "Cargo.toml": '[package]\nname = "p"\nversion = "0.1.0"\nedition = "2021"\n',
        "src/lib.rs": "pub fn value() -> i32 { 42 }",
    }
    code = 'fn main() { println!("{} {}", p::value(), std::env::args().nth(1).unwrap()); }'
    result = run(corral, "rust", code, files, code_path="src/main.rs", args=["a b"])
    assert (result.reason, result.stdout.text) == ("ok", "42 a b\n"), result.stderr.text
    assert [f["path"] for f in result.files] == ["/workspace/Cargo.lock"]


@pytest.mark.parametrize("runtime", [name for name in ("bubblewrap", "runc", "runsc") if name != RUNTIME])
def test_a_virtual_machine_of_a_language_runs_on_the_other_runtimes(corral: Corral, runtime: str) -> None:
    if runtime != "bubblewrap" and shutil.which(runtime) is None:
        pytest.skip(f"{runtime} is not installed")
    case = CASES["java"]
    result = run(corral, "java", case.code, case.files, args=ARGS, stdin=LINE, runtime=runtime)
    told = (result.stdout.text, result.stderr.text, result.hint)
    assert (result.reason, result.exit_code, result.phase) == ("nonzero_exit", 3, "run"), told
    assert result.stdout.text == "42\n" + "".join(f"[{a}]\n" for a in ARGS) + LINE, told
