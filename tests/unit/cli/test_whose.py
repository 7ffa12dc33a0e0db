"""Commands about people, and those that say whose thing is meant, or under which lease."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from .conftest import RUN, SANDBOX, Call, FakeTransport, ended, refusal

EXEC = "exe_" + "2" * 26
SBX = {"id": SANDBOX, "state": "terminated", "runtime": "crun", "template": "host", "expires_at": None}
LI = {"id": "li", "tenant": "acme", "name": "李", "state": "active", "created_at": "2026-12-01T10:00:00Z"}


# -- users -------------------------------------------------------------------------------------------------------------------------
def test_a_user_is_created_in_the_tenant_that_is_named(corral: Call, transport: FakeTransport) -> None:
    transport.document = LI
    assert corral("user", "create", "li", "--tenant", "acme", "--name", "李").out == b"li\n"
    assert transport.calls[0][:3] == ("POST", "/v1/users", {"id": "li", "name": "李", "tenant": "acme"})
    assert corral("user", "create", "li", "--json").json == LI
    assert transport.calls[1][2] == {"id": "li", "name": None, "tenant": None}, "one's own"


def test_users_are_listed_page_by_page(corral: Call, transport: FakeTransport) -> None:
    transport.document = {"items": [LI], "next": None}
    shown = corral("user", "ls", "--tenant", "acme").out.decode()
    assert "li" in shown and "李" in shown and "active" in shown
    assert transport.calls[0][1] == "/v1/users" and transport.calls[0][3]["tenant"] == "acme"
    assert corral("user", "ls", "--json").json == {"items": [LI], "next": None}
    assert "tenant" not in transport.calls[1][3]
    transport.document = {"items": [], "next": None}
    assert "no users" in corral("user", "ls").err


@pytest.mark.parametrize("word, disabled", [("disable", True), ("enable", False)])
def test_a_user_is_stopped_and_let_in_again(corral: Call, transport: FakeTransport, word: str, disabled: bool) -> None:
    transport.document = LI
    assert corral("user", word, "li", "--tenant", "acme").out == b"li\n"
    assert transport.calls == [("PATCH", "/v1/users/li", {"disabled": disabled}, {"tenant": "acme"})]


def test_a_user_is_removed(corral: Call, transport: FakeTransport) -> None:
    transport.document = {}
    assert corral("user", "rm", "li").out == b"li\n"
    assert corral("user", "rm", "li", "--tenant", "acme", "--json").json == {"id": "li"}
    assert [call[3] for call in transport.calls] == [{}, {"tenant": "acme"}]
    transport.document = refusal("not_found", "there is no user li")
    assert corral("user", "rm", "li").status == 125


@pytest.mark.parametrize("ident", ["", "a/b", "a b"])
def test_what_is_no_id_of_a_user_is_wrong_usage(corral: Call, transport: FakeTransport, ident: str) -> None:
    assert corral("user", "disable", ident).status == 2 and transport.calls == []


def test_help_of_users_names_the_words_and_cuts_none_off(corral: Call) -> None:
    told = corral("user", "--help").out.decode()
    assert all(f"\n  {word} " in told for word in ("create", "ls", "disable", "enable", "rm"))
    assert "..." not in told.split("Commands:")[1]


# -- another tenant's ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        ["sandbox", "ls"], ["sandbox", "inspect", SANDBOX], ["sandbox", "rm", SANDBOX],
        ["runs"], ["runs", "ls"], ["runs", RUN], ["runs", "show", RUN], ["cancel", RUN], ["cancel", EXEC], ["cancel", RUN, "--json"],
        ["lease", "ls"], ["queue"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_admin_names_the_tenant_whose_thing_is_meant(
    corral: Call, transport: FakeTransport, words: list[str]
) -> None:
    everything = {**ended(), "items": [], "next": None, "waiting": 0, **SBX, "state": "terminated"}
    transport.document = everything
    assert corral(*words, "--tenant", "acme").status == 0
    assert transport.calls and all(call[3]["tenant"] == "acme" for call in transport.calls)
    transport.calls.clear()
    assert corral(*words).status == 0
    assert transport.calls and not any("tenant" in call[3] for call in transport.calls)


def test_runs_take_the_tenant_before_the_id_too(corral: Call, transport: FakeTransport) -> None:
    assert corral("runs", "--tenant", "acme", RUN).status == 0
    assert transport.calls[0][1] == f"/v1/runs/{RUN}" and transport.calls[0][3] == {"tenant": "acme"}


# -- under a lease -------------------------------------------------------------------------------------------------------------------
def packed() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("x")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    return buffer.getvalue()


def test_copying_goes_out_under_the_lease(corral: Call, transport: FakeTransport, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    transport.blocks = [packed()]
    at = f"/v1/sandboxes/{SANDBOX}/files/archive"
    assert corral("cp", str(tmp_path / "a"), f"{SANDBOX}:/workspace/", "--lease", "1.7").status == 0
    assert transport.leased == [("PUT", at, "1.7")]
    assert corral("cp", f"{SANDBOX}:x", str(tmp_path / "x"), "--lease", "1.7").status == 0
    assert transport.leased[-1] == ("GET", at, "1.7")
    transport.leased.clear()
    assert corral("cp", str(tmp_path / "a"), f"{SANDBOX}:/workspace/").status == 0
    assert transport.leased == []


@pytest.mark.parametrize(
    "words, method, path",
    [
        (["exec", SANDBOX, "--lease", "1.7", "--json", "--", "true"], "POST", f"/v1/sandboxes/{SANDBOX}/execs"),
        (["sandbox", "rm", SANDBOX, "--lease", "1.7"], "DELETE", f"/v1/sandboxes/{SANDBOX}"),
        (["sandbox", "pause", SANDBOX, "--lease", "1.7"], "POST", f"/v1/sandboxes/{SANDBOX}/pause"),
        (["sandbox", "resume", SANDBOX, "--lease", "1.7"], "POST", f"/v1/sandboxes/{SANDBOX}/resume"),
        (["sandbox", "extend", SANDBOX, "--ttl", "9", "--lease", "1.7"], "PATCH", f"/v1/sandboxes/{SANDBOX}"),
        (["cancel", EXEC, "--lease", "1.7"], "POST", f"/v1/execs/{EXEC}/cancel"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_changes_a_sandbox_goes_out_under_the_lease(
    corral: Call, transport: FakeTransport, words: list[str], method: str, path: str
) -> None:
    transport.document = {**ended(), **SBX}
    assert corral(*words).status == 0
    assert transport.leased[0] == (method, path, "1.7")


@pytest.mark.parametrize(
    "words, told",
    [
        (["sandbox", "rm", SANDBOX, SANDBOX, "--lease", "1.7"], "one sandbox"),
        (["cancel", RUN, "--lease", "1.7"], "for an exec"),
        (["attach", RUN, "--lease", "1.7"], "for an exec"),
        (["shell", "--lease", "1.7"], "that is there"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_lease_where_there_can_be_none_is_wrong_usage(
    corral: Call, transport: FakeTransport, words: list[str], told: str
) -> None:
    said = corral(*words)
    assert said.status == 2 and told in said.err and transport.calls == []


def test_every_command_that_acts_on_a_sandbox_takes_a_lease(corral: Call) -> None:
    acts = (
        "exec", "cp", "shell", "attach", "cancel", "sandbox rm", "sandbox pause", "sandbox resume", "sandbox extend",
        "lease renew", "lease release",
    )  # fmt: skip
    for words in acts:
        assert "--lease" in corral(*words.split(), "--help").out.decode(), words
