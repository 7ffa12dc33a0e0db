"""What is asked of a program before it is tried: it may be anything, and what it starts ends with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from corral.adapters.runtimes import _instance, _probe
from corral.errors import CorralError
from corral.linux import process


def program(directory: Path, text: str) -> str:
    path = directory / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def living(mark: str) -> Iterator[bytes]:
    """Command lines that name it."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if mark.encode() in line:
                yield line


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("crun version 1.8.1\ncommit: 0000000", "1.8.1"),
        ("runc version 1.1.5+ds1\ncommit: 1.1.5", "1.1.5+ds1"),
        ("runsc version 0.0~20221219.0\nspec: 1.0.2-dev", "0.0~20221219.0"),
        ("runsc version release-20240101.0", "release-20240101.0"),
        ("bubblewrap 0.11.0", "0.11.0"),
        ("kata-runtime  : 3.2.0\n   commit   : x", "3.2.0"),
        ("usage: program [OPTIONS]", None),
        ("program version \033[31m9", None),
        ("version " + "9" * 100, None),
        ("", None),
    ],
)
def test_the_version_is_what_the_program_says_or_nothing(tmp_path: Path, said: str, version: str | None) -> None:
    (tmp_path / "said").write_text(said)
    assert _probe.version(program(tmp_path, f"#!/bin/sh\ncat {tmp_path}/said\n")) == version


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/sh\necho program version 1.0; exit 1\n",
        "#!/no/such/interpreter\n",
        "\x7fELF not a program",
        "#!/bin/sh\nhead -c 3000000 /dev/urandom\n",
        "#!/bin/sh\nkill -9 $$\n",
    ],
)
def test_a_program_that_fails_has_none(tmp_path: Path, text: str) -> None:
    assert _probe.version(program(tmp_path, text)) is None


def test_what_is_no_program_has_none(tmp_path: Path) -> None:
    closed = Path(program(tmp_path, "#!/bin/sh\n"))
    closed.chmod(0o644)
    assert [_probe.version(str(path)) for path in (closed, tmp_path, tmp_path / "none")] == [None] * 3


@pytest.mark.parametrize("text", ["sleep {0} & sleep {0}", "trap '' TERM HUP PIPE; sleep {0} & exec >&-; while :; do sleep {0}; done"])  # fmt: skip
def test_a_program_that_does_not_end_is_no_use_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(_probe, "_VERSION_S", 1.0)
    mark = f"600.0{secrets.randbelow(10**9)}"
    began = time.monotonic()
    with pytest.raises(CorralError, match="did not end in 1 s") as caught:
        _probe.version(program(tmp_path, f"#!/bin/sh\n{text.format(mark)}\n"))
    assert caught.value.code == "runtime_unavailable" and time.monotonic() - began < 30
    assert not list(living(mark))


def test_what_may_not_be_ended_at_once_hides_neither_the_fault_nor_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[process.ProcessRef] = []

    def kill(ref: process.ProcessRef) -> bool:
        if len(refused) < 2:
            refused.append(ref)
            raise PermissionError(1, "another's")
        return process.kill(ref)

    monkeypatch.setattr(_probe, "_VERSION_S", 1.0)
    monkeypatch.setattr(_probe, "process", SimpleNamespace(**{**vars(process), "kill": kill}))
    mark = f"600.0{secrets.randbelow(10**9)}"
    with pytest.raises(CorralError, match="did not end in 1 s"):
        _probe.version(program(tmp_path, f"#!/bin/sh\nsleep {mark} & sleep {mark}\n"))
    for ref in refused:
        assert process.wait_gone_blocking(ref, 60)
        with pytest.raises(ChildProcessError):  # reaped
            os.waitpid(ref.pid, os.WNOHANG)
    assert not list(living(mark))


def test_what_a_program_said_is_told_as_words_of_one_line(tmp_path: Path) -> None:
    (tmp_path / _instance.LOCK).write_bytes(b"\xff\x1b]0;title\x07 two\r\n\n three\0" + b"four\n")
    said = _instance.said(str(tmp_path))
    assert said.isprintable() and said.endswith("]0;title two three four")
