"""Both faces are one surface, and importing them brings nothing of the server."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.client import async_sdk, sdk
from corral.client.async_leases import AsyncLease
from corral.client.effects import Blocking, drive, iterate
from corral.client.leases import Lease
from corral.client.values import FileInfo, Output, Result, encoded

TWINS = [name for name, value in vars(sdk).items() if inspect.isclass(value) and value.__module__ == sdk.__name__]
ENTERS = {"__aenter__": "__enter__", "__aexit__": "__exit__"}


def members(kind: type) -> dict[str, Any]:
    return {
        ENTERS.get(name, name): value
        for name, value in vars(kind).items()
        if callable(value) or isinstance(value, property)
    }


@pytest.mark.parametrize("name", TWINS)
def test_every_member_has_its_twin_with_the_same_parameters(name: str) -> None:
    here, there = members(getattr(sdk, name)), members(getattr(async_sdk, f"Async{name}"))
    assert set(here) == set(there)
    for member, value in here.items():
        twin = there[member]
        assert type(value) is type(twin), member
        if isinstance(value, property):
            continue
        mine = [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
        theirs = [(p.name, p.kind, p.default) for p in inspect.signature(twin).parameters.values()]
        assert mine == theirs, member
        if not member.startswith("_"):
            assert value.__doc__ and twin.__doc__, member


@pytest.mark.parametrize("name", TWINS)
def test_what_waits_here_is_awaited_there(name: str) -> None:
    for member, value in members(getattr(sdk, name)).items():
        twin = members(getattr(async_sdk, f"Async{name}"))[member]
        if isinstance(value, property) or member in ("__init__", "__repr__", "as_user", "lease", "_like"):
            continue
        said = inspect.signature(twin).return_annotation
        assert inspect.iscoroutinefunction(twin) or str(said).startswith("AsyncGenerator"), member


def test_a_lease_is_the_same_on_both_faces() -> None:
    here, there = members(Lease), members(AsyncLease)
    assert set(here) == set(there)
    for member, value in here.items():
        assert inspect.iscoroutinefunction(there[member]), member
        assert list(inspect.signature(value).parameters) == list(inspect.signature(there[member]).parameters), member


def loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


SERVER = ("fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy", "alembic", "yaml", "httpx2", "h11", "anyio")
OURS = (
    "corral.services",
    "corral.node",
    "corral.adapters",
    "corral.api",
    "corral.bootstrap",
    "corral.domain",
    "corral.ports",
)


@pytest.mark.parametrize("name", ["Corral", "AsyncCorral", "connect"])
def test_importing_a_face_brings_nothing_of_the_server(name: str) -> None:
    modules = loaded(f"from corral.client import {name}")
    assert not [m for m in modules if m.partition(".")[0] in SERVER or m.startswith(OURS)]
    assert name == "AsyncCorral" or "asyncio" not in modules


def test_a_remote_client_brings_nothing_of_the_server_either() -> None:
    modules = loaded("from corral.client import Corral; Corral(url='http://127.0.0.1:1')")
    assert not [m for m in modules if m.partition(".")[0] in (*SERVER, "asyncio", "ssl") or m.startswith(OURS)]


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(corral.__file__).parent / "py.typed").exists()
    assert typing.get_type_hints(sdk.Files.read)["return"] is bytes


def test_names_come_from_the_package_itself() -> None:
    assert corral.Corral is sdk.Corral and corral.AsyncCorral is async_sdk.AsyncCorral
    assert corral.CorralError("usage", "x").code == "usage"
    with pytest.raises(AttributeError):
        corral.Nothing


# -- coroutines without a loop ---------------------------------------------------------------------------------------------------
def test_a_driven_coroutine_returns_raises_and_may_not_suspend() -> None:
    import asyncio

    async def good() -> int:
        await Blocking().sleep(0)
        return 3

    async def bad() -> None:
        raise KeyError("x")

    assert drive(good()) == 3
    with pytest.raises(KeyError):
        drive(bad())
    with pytest.raises(RuntimeError):
        drive(asyncio.sleep(1))


def test_closing_the_generator_closes_its_source() -> None:
    closed = []

    async def source() -> typing.AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    items = iterate(source())
    assert next(items) == 1
    items.close()
    assert closed == [True] and list(iterate(source())) == [1, 2]


# -- values ----------------------------------------------------------------------------------------------------------------------
def test_output_is_the_exact_bytes() -> None:
    plain = Output.of({"text": "你", "base64": None, "bytes": 3, "truncated": False, "head_bytes": None})
    assert plain.data == "你".encode()
    cut = Output.of({"text": "a\n[…]\nb", "base64": "YWI=", "bytes": 99, "truncated": True, "head_bytes": 1})
    assert (cut.data, cut.truncated, cut.head_bytes, cut.bytes) == (b"ab", True, 1, 99)


def test_requests_take_bytes_and_mappings() -> None:
    document = encoded(
        {"argv": ("a", "b"), "stdin": b"\xff", "files": {"x": b"\0", "y": "t"}, "cwd": None, "pty": (1, 2)}
    )
    assert document == {
        "argv": ["a", "b"],
        "stdin_base64": "/w==",
        "files": [{"path": "x", "base64": "AA=="}, {"path": "y", "content": "t"}],
        "pty": [1, 2],
    }


def test_a_file_info_has_the_exact_path() -> None:
    entry = {"path": "/workspace/\udcff", "path_base64": "L3dvcmtzcGFjZS//", "name": "\udcff", "type": "file", "size": 1,
             "mode": "0640", "uid": 1000, "gid": 1000, "mtime": "2026-01-01T00:00:00.000000001Z"}  # fmt: skip
    info = FileInfo.of(entry)
    assert info.path_bytes == b"/workspace/\xff" and info.mode == 0o640 and info.name == "\udcff"
    assert info.is_file and not info.is_dir and not info.is_link


def test_a_result_has_what_the_document_has() -> None:
    stream = {"text": "", "base64": None, "bytes": 0, "truncated": False}
    document = {
        "exit_code": 137, "signal": "KILL", "reason": "oom", "hint": "more memory", "started": True, "stdout": stream,
        "stderr": stream, "timeline": [], "files": [], "artifacts": [], "usage": {}, "limits": {}, "timings": {},
    }  # fmt: skip
    result = Result(document)
    assert not result.ok and "oom" in repr(result) and result.document is document
