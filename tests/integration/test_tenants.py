"""Tenants over HTTP as programs meet them: keys, scopes, what a foreign id looks like, and what a key that ends takes with it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from corral.api.calls import ANY_KEY, ANYBODY
from corral.api.routes import ROUTES
from corral.client.sdk import Corral
from corral.domain.ids import new_id
from corral.errors import CorralError
from oidc_issuer import Issuer

from .test_serve import PATIENCE_S, Server, _empty, _state

NEVER_SEEN = 1_700_000_000_000
"""Ids of then are nobody's."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with real sandboxes and with the tenants `acme` and `bolt`."""
    with pytest.MonkeyPatch.context() as patch:
        place = Path(tempfile.mkdtemp(prefix="corral-tenants-"))
        place.chmod(0o711)
        policy = place / "policy.yaml"
        shipped = (Path(__file__).parents[2] / "policy" / "default.yaml").read_text()
        policy.write_text(shipped.replace("  # require_enforced: []", "  require_enforced: [] #"))
        made = Server(_state("bubblewrap", place, patch), CORRAL_POLICY=str(policy))
        try:
            made.started(first=True)
            for name in ("acme", "bolt"):
                assert made.json("POST", "/v1/tenants", {"id": name})[0] == 201
            yield made
        finally:
            for key in (new_key(made, "acme"), new_key(made, "bolt")):
                for item in called(made, key, "GET", "/v1/sandboxes")[1]["items"]:
                    called(made, key, "DELETE", f"/v1/sandboxes/{item['id']}")
            made.ended()
            _empty(made.state)
            shutil.rmtree(place, ignore_errors=True)


def new_key(server: Server, tenant: str, *scopes: str, **more: Any) -> str:
    return str(made_key(server, tenant, *scopes, **more)["key"])


def made_key(server: Server, tenant: str, *scopes: str, **more: Any) -> dict[str, Any]:
    status, made = server.json("POST", "/v1/keys", {"tenant": tenant, "scopes": list(scopes) or ["run"], **more})
    assert status == 201, made
    return dict(made)


def called(
    server: Server, key: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    status, fields, raw = server.call(method, path, body, headers, key)
    kind = fields.get("content-type", "")
    return status, json.loads(raw) if "json" in kind and raw else raw, fields


# -- what is another's is not there ------------------------------------------------------------------------------------------------
BODIES: dict[str, Any] = {
    "POST /v1/sandboxes/{sandbox_id}/execs": {"argv": ["true"]},
    "POST /v1/sandboxes/{sandbox_id}/files/move": {"from": "/workspace/a", "to": "/workspace/b"},
    "POST /v1/sandboxes/{sandbox_id}/files/mkdir": {"path": "/workspace/d"},
    "PUT /v1/sandboxes/{sandbox_id}/files": b"x",
    "PUT /v1/sandboxes/{sandbox_id}/files/archive": b"\0" * 1024,
    "POST /v1/execs/{exec_id}/signal": {"signal": "TERM"},
    "POST /v1/execs/{exec_id}/resize": {"rows": 10, "cols": 10},
    "POST /v1/execs/{exec_id}/stdin": b"x",
    "POST /v1/sandboxes/{sandbox_id}/attach": {"owner": "me/1", "ttl_s": 10},
    "POST /v1/sandboxes/{sandbox_id}/renew": {"owner": "me/1", "ttl_s": 10},
    "POST /v1/sandboxes/{sandbox_id}/release": {"owner": "me/1"},
    "PATCH /v1/users/{user_id}": {"disabled": True},
    "PATCH /v1/tenants/{tenant_id}": {"disabled": True},
}
KINDS = {"run_id": "run", "sandbox_id": "sbx", "exec_id": "exe", "key_id": "key"}


def test_every_route_with_an_id_of_another_tenant_answers_as_for_one_that_never_was(server: Server) -> None:
    acme = new_key(server, "acme", "run", "tenant", user="li")
    bolt = new_key(server, "bolt", "run", "tenant")
    status, box, _ = called(server, acme, "POST", "/v1/sandboxes", {})
    assert status == 201, box
    at = f"/v1/sandboxes/{box['id']}"
    assert called(server, acme, "PUT", f"{at}/files?path=/workspace/a", b"secret")[0] == 201
    ended = called(
        server, acme, "POST", f"{at}/execs?wait=60", {"shell": "echo out; echo x > r.txt", "outputs": ["*"]}
    )[1]
    open_ = called(server, acme, "POST", f"{at}/execs?wait=0", {"argv": ["sleep", "300"]})[1]
    run = called(server, acme, "POST", "/v1/runs?wait=60", {"shell": "echo x > r.txt", "outputs": ["*"]})[1]
    assert ended["result"]["reason"] == run["result"]["reason"] == "ok", (ended, run)
    mine = {
        "run_id": [run["id"]],
        "sandbox_id": [box["id"]],
        "exec_id": [ended["id"], open_["id"]],
        "key_id": [called(server, acme, "GET", "/v1/whoami")[1]["key"]],
        "user_id": ["li"],
        "tenant_id": ["acme"],
        "path": ["r.txt"],
    }
    nobodys = {name: new_id(kind, NEVER_SEEN, b"\7" * 10) for name, kind in KINDS.items()}
    nobodys |= {"user_id": "nobody", "tenant_id": "nobodys", "path": "r.txt"}
    walked = 0
    for route in ROUTES:
        names = [name.partition(":")[0] for name in re.findall(r"{([^}]*)}", route.pattern)]
        if not set(names) & set(mine) - {"path"} or route.needs == "admin":
            continue
        for chosen in range(max(len(mine[name]) for name in names)):
            answers = []
            for ids in ({n: mine[n][min(chosen, len(mine[n]) - 1)] for n in names}, {n: nobodys[n] for n in names}):
                path = re.sub(r"{([^}:]*)[^}]*}", lambda found, ids=ids: ids[found[1]], route.pattern)
                query = "?path=/workspace/a&wait=0" if "files" in path else "?wait=0"
                body = BODIES.get(f"{route.method} {route.pattern}", {} if route.method in ("POST", "PATCH") else None)
                status, document, fields = called(
                    server, bolt, route.method, path + query, body, {"Corral-Lease": "1.1"}
                )
                shown = json.dumps(document, default=bytes.decode)
                for name in names:
                    shown = shown.replace(ids[name], f"<{name}>")
                told = {k: v for k, v in fields.items() if k not in ("date", "content-length")}
                answers.append((status, shown, told))
            assert answers[0] == answers[1], route
            # What no request at all could be is said before anything is looked for.
            assert answers[0][0] in (404, 422), (route, answers[0])
            walked += answers[0][0] == 404
    assert walked >= 30
    for exec_id in (open_["id"], nobodys["exec_id"]):
        with pytest.raises(InvalidStatus) as refused:
            server.socket(exec_id, key=bolt)
        assert refused.value.response.status_code == 404
        text = refused.value.response.body.decode().replace(exec_id, "<id>")
        assert json.loads(text)["code"] == "not_found"
    # As a cursor of a list, too.
    for kind, ours in (("runs", run["id"]), ("sandboxes", box["id"]), ("keys", mine["key_id"][0])):
        name = {"runs": "run_id", "sandboxes": "sandbox_id", "keys": "key_id"}[kind]
        theirs = called(server, bolt, "GET", f"/v1/{kind}?after={ours}")
        never = called(server, bolt, "GET", f"/v1/{kind}?after={nobodys[name]}")
        assert theirs[0] == never[0] == 404
        assert json.dumps(theirs[1]).replace(ours, "") == json.dumps(never[1]).replace(nobodys[name], "")
    assert called(server, acme, "GET", f"/v1/execs/{open_['id']}")[1]["state"] in ("starting", "running"), "untouched"
    assert called(server, acme, "GET", f"{at}/files?path=/workspace/a")[1] == b"secret"
    assert called(server, acme, "GET", "/v1/users/li")[1]["state"] == "active"
    called(server, acme, "DELETE", at)


def test_lists_show_ones_own_only(server: Server) -> None:
    acme, bolt = new_key(server, "acme", "run", "tenant"), new_key(server, "bolt", "run", "tenant")
    run = called(server, acme, "POST", "/v1/runs?wait=60", {"shell": "true"})[1]
    box = called(server, acme, "POST", "/v1/sandboxes", {})[1]
    for path, ident in (("/v1/runs", run["id"]), ("/v1/sandboxes", box["id"])):
        assert ident in [item["id"] for item in called(server, acme, "GET", path)[1]["items"]]
        assert ident not in [item["id"] for item in called(server, bolt, "GET", path)[1]["items"]]
    assert {item["tenant"] for item in called(server, bolt, "GET", "/v1/keys")[1]["items"]} == {"bolt"}
    assert {item["tenant"] for item in called(server, acme, "GET", "/v1/users")[1]["items"]} <= {"acme"}
    template = called(server, bolt, "GET", "/v1/templates/host")[1]
    assert template["sandboxes"] == [] and template["path"] is None, "a template names no sandbox of another"
    assert called(server, acme, "GET", "/v1/templates/host")[1]["sandboxes"].count(box["id"]) == 1
    assert box["id"] in server.json("GET", "/v1/templates/host")[1]["sandboxes"], "the operator sees all"
    called(server, acme, "DELETE", f"/v1/sandboxes/{box['id']}")


def test_idempotency_keys_of_tenants_do_not_meet(server: Server) -> None:
    acme, bolt = new_key(server, "acme"), new_key(server, "bolt")
    once = {"Idempotency-Key": "the-same"}
    first = called(server, acme, "POST", "/v1/runs?wait=60", {"shell": "echo acme"}, once)[1]
    other = called(server, bolt, "POST", "/v1/runs?wait=60", {"shell": "echo bolt"}, once)[1]
    again = called(server, acme, "POST", "/v1/runs?wait=60", {"shell": "echo acme"}, once)[1]
    assert first["id"] == again["id"] != other["id"] and other["result"]["stdout"]["text"] == "bolt\n"


# -- scopes ------------------------------------------------------------------------------------------------------------------------
def test_each_route_says_what_it_needs_and_every_other_key_is_forbidden(server: Server) -> None:
    expected = {
        "/v1/runs": ("read", "run"),
        "/v1/sandboxes": ("read", "run"),
        "/v1/execs": ("read", "run"),
        "/v1/leases": ("read", "run"),
        "/v1/queue": ("read", "run"),
        "/v1/templates": ("read", "admin"),
        "/v1/users": ("tenant", "tenant"),
        "/v1/keys": ("tenant", "tenant"),
        "/v1/webhooks": ("tenant", "tenant"),
        "/v1/tenants": ("admin", "admin"),
        "/v1/gc": ("admin", "admin"),
        "/v1/doctor": ("admin", "admin"),
        "/v1/whoami": (ANY_KEY, ANY_KEY),
        "/openapi.json": (ANY_KEY, ANY_KEY),
        "/healthz": (ANYBODY, ANYBODY),
        "/readyz": (ANYBODY, ANYBODY),
    }
    special = {
        "GET /v1/execs/{exec_id}/ws": "run",  # takes input
        "GET /v1/keys/{key_id}": ANY_KEY,  # one's own
        "GET /v1/tenants/{tenant_id}": "tenant",
    }
    keys = {scope: new_key(server, "bolt", scope) for scope in ("admin", "tenant", "run", "read")}
    holds = {"admin": {"admin", "tenant"}, "tenant": {"tenant"}, "run": {"run", "read"}, "read": {"read"}}
    for route in ROUTES:
        area = next((a for a in expected if route.pattern == a or route.pattern.startswith(f"{a}/")), None)
        assert area is not None, f"{route.pattern}: say here what it needs"
        needs = special.get(f"{route.method} {route.pattern}", expected[area][route.method not in ("GET", "HEAD")])
        assert route.needs == needs, route
        if needs in (ANYBODY, ANY_KEY):
            continue
        path = re.sub(r"{[^}]*}", "x", route.pattern)
        for scope, key in keys.items():
            if needs not in holds[scope]:
                status, document, _ = called(server, key, route.method, path)
                assert status == 403, (route, scope, document)
                assert route.method == "HEAD" or document["code"] == "forbidden"
    for key in (keys["read"], keys["tenant"]):
        with pytest.raises(InvalidStatus) as refused:
            server.socket("exe_x", key=key)
        assert refused.value.response.status_code == 403


def test_no_key_gives_what_it_has_not(server: Server) -> None:
    manager = new_key(server, "acme", "tenant", "run", expires_in_s=3600)
    ask = lambda **body: called(server, manager, "POST", "/v1/keys", body)  # noqa: E731
    assert ask(scopes=["run"], expires_in_s=60)[0] == 201
    assert ask(scopes=["read"], expires_in_s=60)[0] == 201
    assert ask(scopes=["admin"], expires_in_s=60)[1]["code"] == "forbidden"
    assert ask(scopes=["run"])[1]["code"] == "forbidden", "it would outlive its maker"
    assert ask(scopes=["run"], expires_in_s=7200)[1]["code"] == "forbidden"
    foreign, never = (
        ask(scopes=["run"], tenant="bolt", expires_in_s=60),
        ask(scopes=["run"], tenant="no", expires_in_s=60),
    )
    assert foreign[0] == never[0] == 404
    assert json.dumps(foreign[1]).replace("bolt", "no") == json.dumps(never[1])
    pure = new_key(server, "acme", "tenant")
    assert called(server, pure, "POST", "/v1/keys", {"scopes": ["run"]})[1]["code"] == "forbidden"
    assert called(server, pure, "GET", "/v1/runs")[0] == 403
    assert called(server, pure, "GET", "/v1/tenants/acme")[1]["id"] == "acme"


def test_a_reader_looks_at_files_and_leaves_the_lease_alone(server: Server) -> None:
    writer, reader = new_key(server, "acme", "run"), new_key(server, "acme", "read")
    box = called(server, writer, "POST", "/v1/sandboxes", {})[1]
    at = f"/v1/sandboxes/{box['id']}"
    assert called(server, writer, "PUT", f"{at}/files?path=/workspace/a", b"text")[0] == 201
    assert called(server, reader, "GET", f"{at}/files?path=/workspace/a")[:2] == (200, b"text")
    assert called(server, reader, "GET", f"{at}/files/list?path=/workspace")[0] == 200
    assert called(server, reader, "GET", f"{at}/files/archive?path=/workspace")[0] == 200
    assert called(server, reader, "PUT", f"{at}/files?path=/workspace/a", b"no")[0] == 403
    seen = called(server, reader, "GET", at)[1]
    assert seen["lease_version"] == box["lease_version"]
    assert (
        called(server, writer, "POST", f"{at}/execs?wait=60", {"shell": "cat a"})[1]["result"]["stdout"]["text"]
        == "text"
    )
    called(server, writer, "DELETE", at)


# -- what ends a key ---------------------------------------------------------------------------------------------------------------
def refused_within(server: Server, key: str, seconds: float) -> float:
    began = time.monotonic()
    while (status := called(server, key, "GET", "/v1/whoami")[0]) == 200:
        assert time.monotonic() - began < seconds, "still let in"
        time.sleep(0.02)
    assert status == 401
    return time.monotonic() - began


def test_unknown_wrong_expired_revoked_and_disabled_keys_hear_the_same(server: Server) -> None:
    assert server.json("POST", "/v1/tenants", {"id": "paused"})[0] == 201
    stopped = new_key(server, "paused")
    short, gone, users = (
        made_key(server, "bolt", expires_in_s=1),
        made_key(server, "bolt"),
        made_key(server, "bolt", user="zoe"),
    )
    assert called(server, gone["key"], "GET", "/v1/runs")[0] == 200
    assert server.json("DELETE", f"/v1/keys/{gone['id']}")[1]["state"] == "revoked"
    assert server.json("DELETE", f"/v1/keys/{gone['id']}")[0] == 200, "again"
    assert server.json("PATCH", "/v1/tenants/paused", {"disabled": True})[1]["state"] == "disabled"
    assert server.json("PATCH", "/v1/users/zoe?tenant=bolt", {"disabled": True})[1]["state"] == "disabled"
    good = new_key(server, "bolt")
    refused_within(server, short["key"], 3.0)
    wrong = [
        "",
        "x" * 40,
        "ck_" + "0" * 26 + "_" + "0" * 64,
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        "a.b.c",
        short["key"],
        gone["key"],
        stopped,
        users["key"],
    ]
    answers = {
        called(server, key, "GET", "/v1/runs")[0:1] + (json.dumps(called(server, key, "GET", "/v1/runs")[1]),)
        for key in wrong
    }
    assert len(answers) == 1 and next(iter(answers))[0] == 401
    assert called(server, good, "GET", "/v1/runs")[0] == 200
    assert server.json("PATCH", "/v1/tenants/paused", {"disabled": False})[0] == 200
    assert called(server, stopped, "GET", "/v1/runs")[0] == 200, "enabled again"


def test_a_revoked_key_is_refused_at_once_and_its_open_calls_end(server: Server) -> None:
    key = made_key(server, "acme")
    text = key["key"]
    box = called(server, text, "POST", "/v1/sandboxes", {})[1]
    at = f"/v1/sandboxes/{box['id']}"
    started = called(server, text, "POST", f"{at}/execs?wait=0", {"argv": ["sleep", "300"]})[1]["id"]

    def stream() -> bytes:
        return bytes(called(server, text, "GET", f"/v1/execs/{started}/stream")[1])

    def follow() -> str:
        try:
            return repr(called(server, text, "GET", f"/v1/execs/{started}/logs?follow=true")[:2])
        except http.client.HTTPException as error:
            return type(error).__name__

    def wait() -> tuple[int, Any]:
        return called(server, text, "GET", f"/v1/execs/{started}?wait=60")[:2]

    with ThreadPoolExecutor(3) as pool, server.socket(started, key=text) as socket:
        open_calls = [pool.submit(each) for each in (stream, follow, wait)]
        socket.recv(timeout=PATIENCE_S)
        time.sleep(0.5)
        began = time.monotonic()
        assert server.json("DELETE", f"/v1/keys/{key['id']}")[0] == 200
        assert refused_within(server, text, 1.0) < 1.0
        events, log, waited = (each.result(PATIENCE_S) for each in open_calls)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                socket.recv(timeout=PATIENCE_S)
        assert time.monotonic() - began < 10.0
    assert b"event: error" in events and b'"unauthorized"' in events
    assert log == "IncompleteRead" or "(401" in log
    assert waited[0] == 401 and waited[1]["code"] == "unauthorized"
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    other = new_key(server, "acme")
    assert called(server, other, "GET", f"/v1/execs/{started}")[1]["state"] == "running", "what runs goes on"
    called(server, other, "DELETE", at)


def test_a_rotation_keeps_scopes_user_and_leases_and_the_old_key_goes_on_for_a_while(server: Server) -> None:
    old = made_key(server, "acme", "run", "tenant", user="li", name="bot")
    box = called(server, old["key"], "POST", "/v1/sandboxes", {})[1]
    run_at = f"/v1/sandboxes/{box['id']}/execs?wait=60"
    status, new, _ = called(server, old["key"], "POST", f"/v1/keys/{old['id']}/rotate", {"overlap_s": 2})
    assert status == 201 and new["rotated_from"] == old["id"] and new["owner"] == old["owner"]
    assert (new["scopes"], new["user"], new["name"]) == (old["scopes"], "li", "bot")
    for text in (new["key"], old["key"], new["key"]):
        done = called(server, text, "POST", run_at, {"shell": "echo still mine"})
        assert done[0] == 200 and done[1]["lease_version"] == box["lease_version"], done
    assert called(server, new["key"], "GET", "/v1/whoami")[1]["owner"] == old["owner"]
    again = called(server, new["key"], "POST", f"/v1/keys/{old['id']}/rotate", {})
    assert again[0] == 409, again
    refused_within(server, old["key"], 5.0)
    assert called(server, new["key"], "POST", run_at, {"shell": "true"})[0] == 200
    called(server, new["key"], "DELETE", f"/v1/sandboxes/{box['id']}")


def test_a_lost_answer_to_the_making_of_a_key_costs_nothing(server: Server) -> None:
    once = {"Idempotency-Key": os.urandom(8).hex()}
    body = {"tenant": "acme", "scopes": ["run"]}
    first = server.json("POST", "/v1/keys", body, once)[1]
    second = server.json("POST", "/v1/keys", body, once)[1]
    assert first["id"] == second["id"] and first["key"] != second["key"]
    assert called(server, first["key"], "GET", "/v1/runs")[0] == 401, "the lost one is worth nothing"
    assert called(server, second["key"], "GET", "/v1/runs")[0] == 200
    assert server.json("POST", "/v1/keys", body, once)[1]["key"] is None, "it has arrived"
    assert server.json("POST", "/v1/keys", {**body, "scopes": ["read"]}, once)[1]["code"] == "idempotency_conflict"


# -- tenants -----------------------------------------------------------------------------------------------------------------------
def test_a_tenant_with_something_alive_is_not_deleted_and_its_name_is_never_given_again(server: Server) -> None:
    assert server.json("POST", "/v1/tenants", {"id": "brief", "name": "短"})[1]["name"] == "短"
    key = new_key(server, "brief")
    box = called(server, key, "POST", "/v1/sandboxes", {})[1]
    assert server.json("DELETE", "/v1/tenants/brief")[1]["code"] == "tenant_in_use", "not disabled"
    server.json("PATCH", "/v1/tenants/brief", {"disabled": True})
    assert server.json("DELETE", "/v1/tenants/brief")[1]["code"] == "tenant_in_use", "it has a sandbox"
    server.json("PATCH", "/v1/tenants/brief", {"disabled": False})
    assert called(server, key, "DELETE", f"/v1/sandboxes/{box['id']}")[0] == 200
    server.json("PATCH", "/v1/tenants/brief", {"disabled": True})
    status, gone = server.json("DELETE", "/v1/tenants/brief")
    assert status == 200 and gone["state"] == "deleted", gone
    assert server.json("GET", "/v1/tenants/brief")[0] == 404
    assert called(server, key, "GET", "/v1/runs")[0] == 401
    assert server.json("POST", "/v1/tenants", {"id": "brief"})[1]["code"] == "already_exists"
    assert server.json("PATCH", "/v1/tenants/default", {"disabled": True})[1]["code"] == "conflict"


# -- faces -------------------------------------------------------------------------------------------------------------------------
def corral(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    return subprocess.run(
        [sys.executable, "-c", "from corral.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**clean, **environment},
    )


def test_the_command_line_and_the_sdk_have_it_by_url(server: Server) -> None:
    admin = {"CORRAL_URL": server.url, "CORRAL_KEY": server.key}
    assert corral("tenant", "create", "cli", "--name", "命令行", **admin).stdout == "cli\n"
    made = corral("key", "create", "--tenant", "cli", "--user", "li", "--expires", "1h", **admin)
    text = made.stdout.strip()
    assert made.returncode == 0 and text.startswith("ck_") and text not in made.stderr
    mine = {"CORRAL_URL": server.url, "CORRAL_KEY": text}
    assert corral("run", "--shell", "echo 你好", **mine).stdout == "你好\n"
    refused = corral("key", "ls", "--json", **mine)
    assert refused.returncode == 125 and json.loads(refused.stdout)["error"]["code"] == "forbidden"
    listed = json.loads(corral("key", "ls", "--tenant", "cli", "--json", **admin).stdout)["items"]
    assert [(item["user"], item["state"]) for item in listed] == [("li", "active")]
    table = corral("tenant", "ls", **admin).stdout
    assert "命令行" in table and text not in table
    rotated = json.loads(corral("key", "rotate", listed[0]["id"], "--overlap", "0s", "--json", **admin).stdout)
    assert corral("key", "revoke", listed[0]["id"], **admin).stdout == f"{listed[0]['id']}: revoked\n"
    with Corral(url=server.url, key=rotated["key"]) as c:
        assert {"tenant": "cli", "user": "li", "by": "key", "scopes": ["run", "read"]}.items() <= c.whoami().items()
        with pytest.raises(CorralError, match="forbidden"):
            c.tenants.list()
    with Corral(url=server.url, key=server.key) as c:
        assert c.whoami()["scopes"] == ["admin", "tenant", "run", "read"]
        one = c.keys.create(["read"], tenant="cli", expires_in_s=60)
        assert c.keys.get(one["id"])["state"] == "active" and c.keys.revoke(one["id"])["state"] == "revoked"
        assert "cli" in [tenant["id"] for tenant in c.tenants.list()]
        assert c.tenants.disable("cli")["state"] == "disabled"
    assert corral("tenant", "rm", "cli", **admin).returncode == 0


def test_users_another_tenants_things_and_leases_on_the_command_line(server: Server, tmp_path: Path) -> None:
    admin = {"CORRAL_URL": server.url, "CORRAL_KEY": server.key}
    assert corral("tenant", "create", "words", **admin).returncode == 0
    assert corral("user", "create", "li", "--tenant", "words", "--name", "李", **admin).stdout == "li\n"
    mine = {"CORRAL_URL": server.url, "CORRAL_KEY": new_key(server, "words", user="li")}
    box = corral("sandbox", "create", **mine).stdout.strip()
    fence = corral("lease", "acquire", box, "--owner", "会话/1", "--ttl", "600", **mine).stdout.split()[1]
    (tmp_path / "a").write_text("你好")
    target = f"{box}:/workspace/a"
    held = corral("cp", str(tmp_path / "a"), target, **mine)
    assert held.returncode == 125 and "lease_held" in held.stderr, held
    assert corral("cp", str(tmp_path / "a"), target, "--lease", fence, **mine).returncode == 0
    assert corral("shell", box, "--lease", fence, "--command", "cat", "a", **mine).stdout == "你好"
    stale = corral("cp", str(tmp_path / "a"), target, "--lease", "1.0", **mine)
    assert stale.returncode == 125 and "lease_lost" in stale.stderr, stale
    assert corral("user", "disable", "li", "--tenant", "words", **admin).returncode == 0
    out = corral("sandbox", "ls", "--json", **mine)
    assert out.returncode == 125 and json.loads(out.stdout)["error"]["code"] == "unauthorized"
    assert corral("user", "enable", "li", "--tenant", "words", **admin).returncode == 0
    assert corral("sandbox", "ls", **mine).returncode == 0
    assert corral("tenant", "disable", "words", **admin).returncode == 0
    out = corral("sandbox", "ls", "--json", **mine)
    assert out.returncode == 125 and json.loads(out.stdout)["error"]["code"] == "unauthorized"
    listed = json.loads(corral("sandbox", "ls", "--tenant", "words", "--json", **admin).stdout)["items"]
    assert [item["id"] for item in listed] == [box]
    assert corral("tenant", "rm", "words", **admin).returncode == 125
    assert corral("sandbox", "rm", box, "--tenant", "words", **admin).returncode == 0
    assert corral("user", "rm", "li", "--tenant", "words", **admin).stdout == "li\n"
    assert corral("tenant", "rm", "words", **admin).returncode == 0


def test_embedded_the_state_directory_is_the_admin(tmp_path: Path) -> None:
    here = {"CORRAL_STATE_DIR": str(tmp_path / "state"), "CORRAL_RUNTIMES": "fake"}
    assert corral("tenant", "create", "acme", **here).returncode == 0
    text = corral("key", "create", "--tenant", "acme", **here).stdout.strip()
    for file in (tmp_path / "state").rglob("*"):
        if file.is_file():
            assert text.encode() not in file.read_bytes() and text[-64:].encode() not in file.read_bytes(), file
    listed = json.loads(corral("key", "ls", "--json", **here).stdout)["items"]
    assert [item["tenant"] for item in listed] == ["acme"] and "key" not in listed[0]
    bad = corral("key", "create", "--expires", "soon", **here)
    assert bad.returncode == 2 and "duration" in bad.stderr


def test_who_did_what_to_keys_is_in_the_audit(server: Server) -> None:
    manager = made_key(server, "acme", "tenant", "run", user="li")
    made = called(server, manager["key"], "POST", "/v1/keys", {"scopes": ["run"]})[1]
    called(server, manager["key"], "DELETE", f"/v1/keys/{made['id']}")
    called(server, "ck_" + manager["id"][4:] + "_" + "0" * 64, "GET", "/v1/runs")
    import sqlite3

    with sqlite3.connect(f"file:{server.state}/corral.db?mode=ro", uri=True) as database:
        rows = database.execute(
            "SELECT kind, actor, data FROM audit WHERE tenant_id = 'acme' AND subject = ? ORDER BY audit_id",
            (made["id"],),
        ).fetchall()
        refusals = database.execute("SELECT data FROM audit WHERE kind = 'auth.refused'").fetchall()
    assert [(kind, actor) for kind, actor, _ in rows] == [
        (kind, f"key:{manager['id'].removeprefix('key_')}") for kind in ("key.created", "key.revoked")
    ]
    assert all(json.loads(data)["user"] == "li" for _, _, data in rows)
    assert 1 <= len(refusals) <= 60 and not any("0" * 64 in data for (data,) in refusals)


# -- those who try (last: from then on this address is told to wait) ----------------------------------------------------------------
def test_wrong_keys_are_slowed_down_and_right_ones_never(server: Server) -> None:
    good = new_key(server, "bolt")
    for _ in range(100):
        status, document, fields = called(server, "ck_" + "0" * 26 + "_" + os.urandom(32).hex(), "GET", "/v1/runs")
        if status == 429:
            break
        assert status == 401
    assert document["code"] == "rate_limited" and 1 <= int(fields["retry-after"]) <= 60
    assert called(server, good, "GET", "/v1/runs")[0] == 200
    assert server.call("GET", "/v1/runs")[0] == 200, "the server's own key"


# -- several tenants on a host where limits are only watched -----------------------------------------------------------------------
def test_a_second_tenant_demands_limits_that_the_kernel_holds_unless_the_policy_says_otherwise(tmp_path: Path) -> None:
    """The runtime that runs nothing says of its limits what it is told; here it only watches them."""
    import yaml

    from corral.domain.limits import LimitModes
    from corral.domain.placement import RuntimeFacts, choose
    from corral.domain.policy import Policy

    document = yaml.safe_load((Path(__file__).parents[2] / "policy" / "default.yaml").read_text())
    policy = Policy.from_dict(document)
    from dataclasses import replace

    from corral.domain.grade import Grade

    watched = RuntimeFacts(
        "bubblewrap",
        True,
        None,
        0,
        10.0,
        LimitModes(memory="watched", pids="watched", disk="watched"),
        Grade("C", "x", None),
    )
    assert choose([watched], None, policy.needs(None)).runtime == "bubblewrap"
    for asked in (None, "bubblewrap"):
        with pytest.raises(CorralError) as refused:
            choose([watched], asked, replace(policy, shared=True).needs(None))
        assert refused.value.code == "isolation_unavailable"
        assert "isolation.require_enforced" in (refused.value.hint or "") and "several tenants" in refused.value.detail
    document["isolation"]["require_enforced"] = []
    assert choose([watched], None, replace(Policy.from_dict(document), shared=True).needs(None)).runtime == "bubblewrap"


def test_beyond_loopback_keys_of_tenants_need_tls_as_the_first_one_does(tmp_path: Path) -> None:
    here = {"CORRAL_STATE_DIR": str(tmp_path / "state"), "CORRAL_RUNTIMES": "fake"}
    assert corral("tenant", "create", "acme", **here).returncode == 0
    refused = corral("serve", "--host", "0.0.0.0", "--port", "0", **here)
    assert refused.returncode == 2 and "TLS" in refused.stderr and refused.stdout == ""


def test_a_token_of_the_configured_issuer_opens_what_its_claims_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(tmp_path)
    state = _state("fake", tmp_path, monkeypatch)
    state.mkdir(mode=0o700)
    (state / "config.toml").write_text(
        f"[oidc]\nissuer = '{issuer.url}'\naudience = 'corral'\ntenant_claim = 'tenant'\nca_file = '{issuer.ca_file}'\n"
        "leeway_s = 0\n[oidc.scopes]\nsandboxes = ['run']\nlook = ['read']\n"
    )
    server = Server(state).started(first=True)
    try:
        assert server.json("POST", "/v1/tenants", {"id": "acme"})[0] == 201
        good = issuer.token()
        status, who, _ = called(server, good, "GET", "/v1/whoami")
        assert (
            status == 200 and {"tenant": "acme", "user": "li", "by": "token", "owner": "user:li"}.items() <= who.items()
        )
        with Corral(url=server.url, key=good) as c, pytest.raises(CorralError, match="several tenants") as weak:
            c.run(shell="true", runtime="fake")  # it only watches
        assert "isolation.require_enforced" in str(weak.value.hint)
        assert called(server, issuer.token("two", scope="look"), "GET", "/v1/runs")[0] == 200
        assert called(server, issuer.token(scope="look"), "POST", "/v1/runs", {"shell": "true"})[0] == 403
        assert called(server, issuer.token(scope="nothing"), "GET", "/v1/runs")[0] == 403
        for bad in (
            issuer.token(tenant="nobodys"),
            issuer.token(aud="other"),
            issuer.token(exp=int(time.time()) - 1),
            good[:-8] + "AAAAAAAA",
        ):
            assert called(server, bad, "GET", "/v1/runs")[0] == 401
        issuer.stop()
        assert called(server, issuer.token(), "GET", "/v1/runs")[0] == 200, "known keys go on without the issuer"
        brief = issuer.token(exp=int(time.time()) + 2)
        assert called(server, brief, "GET", "/v1/runs")[0] == 200
        refused_within(server, brief, 5.0)
    finally:
        _, said = server.ended()
        issuer.stop()
    assert "Traceback" not in said and good not in said
