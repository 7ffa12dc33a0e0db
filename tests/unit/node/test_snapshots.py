"""The manifest of a memory snapshot: an instance goes on only with what it was born with."""

import json
from pathlib import Path

import pytest

from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node import snapshots
from corral.node.snapshots import Snapshot

DEBUG = Snapshot("ins_1", "runsc", "1", "sha256:1", "py", Limits(), "debug", ("unsafe_no_landlock",))


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    snapshots.write(str(tmp_path), DEBUG)
    assert snapshots.read(str(tmp_path)) == DEBUG


@pytest.mark.parametrize("missing", ["seccomp", "unsafe"])
def test_a_manifest_that_does_not_tell_its_defences_is_no_snapshot(tmp_path: Path, missing: str) -> None:
    snapshots.write(str(tmp_path), DEBUG)
    manifest = tmp_path / snapshots.MANIFEST
    document = json.loads(manifest.read_text())
    del document[missing]
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorralError) as refused:
        snapshots.read(str(tmp_path))
    assert refused.value.code == "not_found"


def test_other_defences_than_those_it_was_born_with_are_a_conflict() -> None:
    def check(seccomp: str, unsafe: frozenset[str]) -> None:
        DEBUG.check("runsc", "1", "sha256:1", Limits(), seccomp=seccomp, unsafe=unsafe)

    same = frozenset({"unsafe_no_landlock"})
    check("debug", same)
    for seccomp, unsafe, word in (("default", same, "debug"), ("debug", frozenset[str](), "defences")):
        with pytest.raises(CorralError) as refused:
            check(seccomp, unsafe)
        assert refused.value.code == "conflict" and word in refused.value.detail
