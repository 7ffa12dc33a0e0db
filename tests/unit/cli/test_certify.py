"""`corral certify` and `corral doctor --security`: tables and documents of what they are told, exit statuses."""

import json
from pathlib import Path

import pytest

from corral.testing import certify
from corral.testing.certify.verdict import Report, RuntimeReport, Seen, Trial, find

from .conftest import Call, FakeTransport


def report(broke: bool) -> Report:
    trial = Trial("mount tmpfs", Seen(broke, "ok" if broke else "EPERM"), Seen(True, "opens: without the filter"))
    runtime = RuntimeReport("crun", "1.8", 1, None, (find("mounts", "mount calls", "mounts", "inside", [trial]),), 1.0)
    host = {"kernel": "6.1.0-x", "machine": "x86_64", "cgroup": "v2", "memory_bytes": 1, "cpus": 2}
    return Report("2030-01-02T03:04:05Z", "root", host, {"corral": "0.1.0"}, (runtime,))


@pytest.mark.parametrize(("broke", "status", "word"), [(False, 0, "held"), (True, 1, "failed")])
def test_certify_fails_when_something_failed_and_tells_what(
    corral: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broke: bool, status: int, word: str
) -> None:
    asked: list[object] = []

    def run(runtimes: object, **options: object) -> Report:
        asked.append((runtimes, options["only"]))
        return report(broke)

    monkeypatch.setattr(certify, "run_blocking", run)
    said = corral("certify", "--runtime", "crun", "--only", "mounts")
    assert said.status == status and asked == [(("crun",), ("mounts",))]
    row = next(line for line in said.out.decode().splitlines() if line.startswith("mounts"))
    assert row.split()[:4] == ["mounts", "mount", "calls", word]
    told = corral("certify", "--json", "--markdown", str(tmp_path / "page.md"))
    assert told.status == status and told.json["runtimes"][0]["attacks"][0]["verdict"] == word
    assert told.json["ok"] is not broke
    (tmp_path / "before.json").write_text(json.dumps(told.json))
    joined = corral("certify", "--markdown", str(tmp_path / "two.md"), "--join", str(tmp_path / "before.json"))
    assert joined.status == status
    assert (tmp_path / "two.md").read_text().count("## crun as root") == 2
    assert corral("certify", "--join", "x").status == 2


def test_doctor_security_prints_grades_with_reason_and_hint(corral: Call, transport: FakeTransport) -> None:
    check = {"name": "swap", "kind": "may", "ok": False, "seen": "1 in use", "hint": "swapoff"}
    graded = {"grade": "B", "reason": "swap: 1 in use", "hint": "swapoff"}
    security = {"host": graded, "runtimes": [{"name": "crun", **graded}], "checks": [check]}
    transport.document = {"runtimes": [], "default": "crun", "security": security}
    said = corral("doctor", "--security")
    lines = [line.split() for line in said.out.decode().splitlines()]
    assert said.status == 0 and ["host", "B", "swap:", "1", "in", "use", "swapoff"] in lines
    assert ["swap", "may", "missing", "1", "in", "use", "swapoff"] in lines
    assert transport.calls[0][3] == {"security": True}
