"""Where the state directory may lie, and what config.toml may name."""

from __future__ import annotations

import asyncio
import datetime
import os
import sqlite3
from pathlib import Path

import pytest

from corral import bootstrap, config
from corral.errors import CorralError


def state_of(length: int, below: Path) -> Path:
    path = os.fspath(below)
    while length - len(path) > 120:
        path += "/" + "d" * 100
    return Path(path + "/" + "d" * (length - len(path) - 1))


def test_a_path_that_is_too_long_is_refused_with_the_limit() -> None:
    long = state_of(config.MAX_STATE_DIR + 1, Path("/tmp"))
    with pytest.raises(CorralError) as caught:
        config.load(environ={"CORRAL_STATE_DIR": str(long)})
    error = caught.value
    assert (error.code, error.field) == ("invalid_value", "CORRAL_STATE_DIR")
    assert str(config.MAX_STATE_DIR) in error.detail and error.hint


def test_bytes_count_not_characters() -> None:
    with pytest.raises(CorralError):
        config.load("/tmp/" + "/".join(["目" * 50] * 4))


def test_the_longest_path_has_room_for_every_database(tmp_path: Path) -> None:
    state = state_of(config.MAX_STATE_DIR, tmp_path)
    assert config.load(str(state)).state_dir == str(state) and len(os.fsencode(state)) == config.MAX_STATE_DIR
    (state / "node").mkdir(parents=True)
    for name in ("corral.db", "node/journal.db"):
        with sqlite3.connect(state / name) as database:
            database.execute("pragma journal_mode=wal")
            database.execute("create table t (x)")
        database.close()


OCI = """
[oci.kata]
program = "/opt/kata/bin/kata-runtime"
options = ["--config", "/etc/kata.toml"]
security_level = 3
user_namespace = false

[oci.youki]
program = "/usr/bin/youki"
groups = "as they are"
"""


def test_programs_of_the_oci_family_are_runtimes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(OCI)
    settings = config.load(str(tmp_path), environ={})
    kata, youki = settings.oci
    assert kata == config.OciProgram(
        "kata", "/opt/kata/bin/kata-runtime", ("--config", "/etc/kata.toml"), 3, user_namespace=False
    )
    assert (youki.name, youki.security_level, youki.user_namespace, youki.groups) == ("youki", 1, True, "as they are")
    assert bootstrap.by_default(settings)[-2:] == ("kata", "youki")
    made = bootstrap._runtime("kata", settings, "test")
    assert made.name == "kata"
    info = asyncio.run(made.probe())
    assert not info.usable and info.security_level == 3 and "not installed" in (info.reason or "")


def test_names_of_runtimes_that_there_are_cannot_be_taken() -> None:
    assert set(bootstrap.RUNTIMES) == config.BUILT_IN


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[oci.runc]\nprogram = '/x'", "oci.runc"),
        ("[oci.Kata]\nprogram = '/x'", "oci.Kata"),
        ("[oci.kata]", "oci.kata.program"),
        ("[oci.kata]\nprogram = 'kata'", "oci.kata.program"),
        ("[oci.kata]\nprogram = '/x'\nsecurity_level = 4", "oci.kata.security_level"),
        ("[oci.kata]\nprogram = '/x'\nsecurity_level = true", "oci.kata.security_level"),
        ("[oci.kata]\nprogram = '/x'\noptions = 'a'", "oci.kata.options"),
        ("[oci.kata]\nprogram = '/x'\ngroups = 'mine'", "oci.kata.groups"),
        ("[oci.kata]\nprogram = '/x'\nuser_namespace = false", "oci.kata.user_namespace"),
        ("[oci.kata]\nprogram = '/x'\nimage = 'y'", "oci.kata.image"),
        ("oci = 3", "oci."),
        ("[oci]\nkata = 3", "oci.kata"),
    ],
)
def test_a_wrong_program_of_the_oci_family_is_refused_by_name(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(CorralError) as caught:
        config.load(str(tmp_path), environ={})
    assert caught.value.code == "invalid_value" and word in caught.value.detail and caught.value.hint


OIDC = "[oidc]\nissuer = 'https://id.example'\naudience = 'corral'\n"


def test_an_issuer_of_tokens_is_configured_by_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        OIDC + "tenant_claim = 'org'\nalgorithms = ['ES256']\nleeway_s = 5\n[oidc.scopes]\n'sandboxes:use' = ['run']\n"
    )
    given = config.load(str(tmp_path), {}).oidc
    assert given is not None
    assert (given.issuer, given.audience, given.tenant_claim) == ("https://id.example", ("corral",), "org")
    assert (given.algorithms, given.scopes, given.user_claim) == (("ES256",), {"sandboxes:use": ("run",)}, "sub")
    (tmp_path / "config.toml").write_text("")
    assert config.load(str(tmp_path), {}).oidc is None


@pytest.mark.parametrize(
    "text, named",
    [
        (OIDC + "tenant = 'acme'\n", "oidc.scopes"),
        (OIDC + "default_scopes = ['run']\n", "oidc.tenant"),
        (OIDC + "tenant = 'a'\ntenant_claim = 'b'\ndefault_scopes = ['run']\n", "oidc.tenant"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['root']\n", "oidc.default_scopes"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['run']\nalgorithms = ['HS256']\n", "oidc.algorithms"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['run']\nalgorithms = ['none']\n", "oidc.algorithms"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['run']\nalgorithms = []\n", "oidc.algorithms"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['run']\nleeway_s = 3600\n", "oidc.leeway_s"),
        (OIDC + "tenant = 'a'\ndefault_scopes = ['run']\nsecret = 'x'\n", "oidc.secret"),
        (OIDC + "tenant = 'a'\n[oidc.scopes]\nx = ['root']\n", "oidc.scopes"),
        (OIDC.replace("https", "http") + "tenant = 'a'\ndefault_scopes = ['run']\n", "oidc.issuer"),
        (OIDC.replace("https://", "ftp://") + "tenant = 'a'\ndefault_scopes = ['run']\n", "oidc.issuer"),
        ("[oidc]\naudience = 'corral'\ntenant = 'a'\ndefault_scopes = ['run']\n", "oidc.issuer"),
        ("[oidc]\nissuer = 'https://x'\ntenant = 'a'\ndefault_scopes = ['run']\n", "oidc.audience"),
        ("oidc = 'https://x'\n", "oidc"),
    ],
)
def test_an_issuer_that_could_not_be_trusted_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(CorralError) as refused:
        config.load(str(tmp_path), {})
    assert refused.value.code == "invalid_value" and f"config.toml: {named}" in refused.value.detail


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("a: [1, x, null, true]\n", {"a": [1, "x", None, True]}),
        ("1: one\n2: yes\n", {1: "one", 2: True}),
        ("day: 2026-01-02\n", {"day": datetime.date(2026, 1, 2)}),
    ],
)
def test_a_document_from_the_cache_is_the_one_that_was_parsed(tmp_path: Path, text: str, document: object) -> None:
    assert config.parsed_yaml(text.encode(), str(tmp_path / "cache")) == document
    assert config.parsed_yaml(text.encode(), str(tmp_path / "cache")) == document


def test_a_document_that_holds_itself_is_parsed_and_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        document = config.parsed_yaml(b"a: &here [*here]\n", str(tmp_path / "cache"))
        assert document["a"][0] is document["a"]
    assert not (tmp_path / "cache").exists()
