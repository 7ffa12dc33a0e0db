"""What all adapters share: whoever asked is told why it failed, also where what was begun cannot be cleared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corral.adapters.runtimes import _adapter, _instance
from corral.errors import CorralError
from corral.ports.runtime import Evidence, Instance, InstanceRef, InstanceSpec, RuntimeInfo


class Failing(_adapter.Adapter):
    """Cannot make anything, and cannot clear it either."""

    name = "failing"

    def __init__(self, state: Path, cause: BaseException | None, trouble: Exception | None) -> None:
        super().__init__(str(state), installation_id="test")
        self.cause, self.trouble = cause, trouble

    def make(self, spec: InstanceSpec) -> Instance:
        assert self.cause is not None
        raise self.cause

    def create(self, spec: InstanceSpec) -> Instance:
        return asyncio.run(self._begin(spec, lambda: self.make(spec)))

    def _clear(self, ref: InstanceRef, notes: list[str]) -> list[str]:
        if self.trouble is not None:
            raise self.trouble
        return ["mount /there"]

    def _destroy(self, ref: InstanceRef) -> Evidence:
        return Evidence(clean=False, left=tuple(self._clear(ref, [])))

    def _answer(self, ref: InstanceRef) -> Instance:
        raise NotImplementedError

    def _program(self) -> str:
        raise NotImplementedError

    def _usable(self, version: str | None) -> RuntimeInfo:
        raise NotImplementedError


BUSY = OSError(16, "Device or resource busy")
LEFT = [(BUSY, "not cleared: [Errno 16] Device or resource busy"), (None, "mount /there")]


def spec_in(directory: Path) -> InstanceSpec:
    return InstanceSpec("ins_test", "sbx_test", 1, "test", str(directory), "/", "/", ("/guest",))


@pytest.mark.parametrize(("trouble", "left"), LEFT)
@pytest.mark.parametrize(
    "cause", [CorralError("infra_error", "no runtime today"), OSError(5, "no runtime today"), ValueError("no runtime today")]
)  # fmt: skip
def test_a_create_that_fails_tells_why_and_what_is_left(
    tmp_path: Path, cause: Exception, trouble: Exception | None, left: str
) -> None:
    with pytest.raises(CorralError, match="no runtime today") as caught:
        Failing(tmp_path, cause, trouble).create(spec_in(tmp_path))
    assert (caught.value.code, caught.value.facts["left"]) == ("infra_error", [left])


def test_what_ends_a_create_from_outside_stays_what_it_is(tmp_path: Path) -> None:
    tried, spec = Failing(tmp_path, SystemExit(3), BUSY), spec_in(tmp_path)
    with pytest.raises(SystemExit):
        tried._create(spec, lambda: tried.make(spec))


@pytest.mark.parametrize(("trouble", "left"), LEFT)
def test_an_earlier_attempt_that_cannot_be_removed_is_told(
    tmp_path: Path, trouble: Exception | None, left: str
) -> None:
    Path(_instance.place_of(str(tmp_path))).mkdir(parents=True)
    with pytest.raises(CorralError) as caught:
        Failing(tmp_path, None, trouble).create(spec_in(tmp_path))
    assert caught.value.detail == f"an earlier attempt could not be removed: {left}"


@pytest.mark.parametrize(("trouble", "left"), LEFT)
def test_a_trial_that_fails_tells_why_and_what_is_left(tmp_path: Path, trouble: Exception | None, left: str) -> None:
    tried = Failing(tmp_path, CorralError("runtime_unavailable", "no runtime today"), trouble)
    with pytest.raises(CorralError, match="no runtime today") as caught, tried._trial(tried.make):
        raise AssertionError("it was made")
    assert caught.value.facts["left"] == [left]
