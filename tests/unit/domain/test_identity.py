"""Keys, scopes and names: pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.domain import identity
from corral.domain.identity import (
    SCOPES,
    KeyRecord,
    check_grant,
    check_name,
    check_tenant_id,
    check_user_id,
    is_of,
    key_hash,
    key_text,
    parse_key,
    parse_scopes,
    user_id_of,
    with_included,
)
from corral.domain.ids import new_id
from corral.errors import CorralError


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10), st.binary(min_size=32, max_size=32))
def test_the_text_of_a_key_names_it_and_holds_its_secret(now: int, entropy: bytes, secret: bytes) -> None:
    key_id = new_id("key", now, entropy)
    text = key_text(key_id, secret)
    assert parse_key(text) == (key_id, secret) and text.isascii() and len(text) == 94
    key = KeyRecord(key_id, "acme", key_hash(secret), ["run"], 0, "me")
    assert is_of(key, secret) and not is_of(key, bytes(32 - len(secret[:31])) + secret[:31][::-1] + b"x")
    assert secret.hex() not in repr(key)


@given(st.text(max_size=120))
def test_other_text_is_no_key(text: str) -> None:
    assert parse_key(text) is None


def test_nearly_a_key_is_none() -> None:
    good = key_text(new_id("key", 1, b"\1" * 10), b"\2" * 32)
    for bad in (
        good[:-1],
        good + "0",
        good.upper(),
        good.replace("ck_", "cx_"),
        " " + good,
        good + "\n",
        good.replace("0", "o", 1),
    ):
        assert parse_key(bad) is None
    with pytest.raises(ValueError, match="32 bytes"):
        key_text("key_x", b"short")


def test_scopes_include_what_they_imply_and_nothing_else() -> None:
    assert with_included(["admin"]) == {"admin", "tenant"}
    assert with_included(["run"]) == {"run", "read"}
    assert with_included(["tenant"]) == {"tenant"}
    assert with_included(["read", "unheard-of"]) == {"read"}
    assert parse_scopes(["run", "admin", "run"]) == ("admin", "run")
    for bad in ([], None, "run", ["root"], [1], {}):
        with pytest.raises(CorralError) as error:
            parse_scopes(bad)
        assert error.value.field == "/scopes"


@given(
    held=st.sets(st.sampled_from(SCOPES)),
    wanted=st.sets(st.sampled_from(SCOPES), min_size=1),
    ends=st.none() | st.integers(0, 100),
    expires=st.none() | st.integers(0, 100),
)
def test_nobody_gives_what_he_has_not_nor_for_longer(
    held: set[str], wanted: set[str], ends: int | None, expires: int | None
) -> None:
    mine = with_included(held)
    try:
        check_grant(mine, ends, wanted, expires)
    except CorralError as error:
        assert error.code == "forbidden"
    else:
        assert "admin" in mine or with_included(wanted) <= mine
        assert ends is None or (expires is not None and expires <= ends)


def test_a_key_is_active_until_its_instant_and_revoked_for_good() -> None:
    key = KeyRecord("key_1", "acme", "h", ["run"], 0, "me", expires_at=10)
    assert [key.state(now) for now in (9, 10, 11)] == ["active", "expired", "expired"]
    assert KeyRecord("key_1", "acme", "h", ["run"], 0, "me", revoked_at=5).state(0) == "revoked"
    assert (key.lineage, KeyRecord("key_2", "a", "h", [], 0, "me", family="key_1").lineage) == ("key_1", "key_1")


@pytest.mark.parametrize("bad", ["", "Acme", "-a", "a/b", "a" * 64, "ä", None, 7, "a b", "a\n"])
def test_what_is_no_id_of_a_tenant(bad: object) -> None:
    with pytest.raises(CorralError, match="tenant"):
        check_tenant_id(bad)


@pytest.mark.parametrize("bad", ["", "a@b", "a/b", "a" * 65, "李", None, 7, "a\n"])
def test_what_is_no_id_of_a_user(bad: object) -> None:
    with pytest.raises(CorralError, match="user"):
        check_user_id(bad)


def test_names_are_for_people() -> None:
    assert check_name(None) is None and check_name("公司 Ltd.") == "公司 Ltd."
    for bad in ("", "  ", "a\nb", "x" * (identity.MAX_NAME + 1), 7, "\x1b[31m"):
        with pytest.raises(CorralError, match="name"):
            check_name(bad)


@given(st.text(min_size=1, max_size=300))
def test_whoever_an_issuer_names_has_one_id_that_an_address_may_hold(claim: str) -> None:
    assert check_user_id(user_id_of(claim)) == user_id_of(claim)
    assert user_id_of("li") == "li" and user_id_of("auth0|7") != user_id_of("auth0|8")
