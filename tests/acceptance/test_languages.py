"""Code in a sandbox that stays, as root and as an ordinary user; `tests/integration/test_runners.py` has runs of every language."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from furnished import polyglot

from .conftest import Box

PROGRAMS = {
    "bash": 'cat /dev/stdin; echo "[$1]"; echo told | tee /dev/stderr >/dev/null',
    "c": '#include <stdio.h>\nint main(int n, char **v) { char l[99]; printf("%s[%s]\\n", fgets(l, 99, stdin), v[1]); fputs("told\\n", stderr); }',
    "go": 'package main\n\nimport (\n\t"bufio"\n\t"fmt"\n\t"os"\n)\n\nfunc main() {\n\tl, _ := bufio.NewReader(os.Stdin).ReadString(10)\n'
    '\tfmt.Printf("%s[%s]\\n", l, os.Args[1])\n\tfmt.Fprintln(os.Stderr, "told")\n}',
    "java": "import java.util.*;\npublic class Hello {\n  public static void main(String[] a) {\n"
    '    System.out.println(new Scanner(System.in).nextLine() + "\\n[" + a[0] + "]");\n    System.err.println("told");\n  }\n}',
}  # fmt: skip
LINE = "输入\n"


@pytest.mark.root
@pytest.mark.index
@pytest.mark.skipif(
    shutil.which("mmdebstrap") is None, reason="polyglot is built with mmdebstrap, which is not installed"
)
def test_code_of_every_kind_runs_in_a_sandbox_of_polyglot(box: Box, shared: Path) -> None:
    polyglot(box.state, shared)
    sandbox = box.sandbox("--template", "polyglot")
    try:
        for language, code in PROGRAMS.items():
            words = ("exec", sandbox, "--json", "--language", language, "--stdin", "-", "-c", code, "参 数")
            status, ended = box.document(*words, input=LINE.encode(), timeout=300)
            result = ended.get("result") or ended
            assert status == 0 and (result["reason"], result["phase"]) == ("ok", "run"), (language, result)
            assert result["stdout"]["text"] == f"{LINE}[参 数]\n", (language, result["stderr"])
            assert result["stderr"]["text"] == "told\n", language
            assert not result["limits"]["pids"]["hit"], language
        status, ended = box.document("exec", sandbox, "--json", "--language", "c", "-c", "int main( {", timeout=300)
        assert (status, ended["result"]["reason"], ended["result"]["phase"]) == (1, "nonzero_exit", "build")
        assert "error:" in ended["result"]["stderr"]["text"] and ended["result"]["hint"].startswith("the build failed")
        status, ended = box.document(
            "exec", sandbox, "--json", "--language", "c", "-c", "int main() { return 1; }", timeout=300
        )
        assert (status, ended["result"]["reason"], ended["result"]["phase"]) == (1, "nonzero_exit", "run")
    finally:
        box("sandbox", "rm", sandbox)


def test_a_template_without_the_language_names_those_that_have_it(box: Box) -> None:
    status, run = box.document("run", "--json", "--runtime", box.runtime, "--language", "rust", "-c", "fn main() {}")
    result = run["result"]
    assert (status, result["reason"], result["started"], result["phase"]) == (125, "missing_tool", False, None)
    assert "the template host has no rust: it lacks rustc" in result["hint"] and "polyglot" in result["hint"]
