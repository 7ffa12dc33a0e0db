"""Templates of the operator: a root file system from an archive or an image runs programs on the runtimes of this host."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral import Corral
from corral.errors import CorralError
from described import unlike
from furnished import polyglot

BUSYBOX = shutil.which("busybox") or "/bin/busybox"
RUNTIMES = ("bubblewrap", "crun")
pytestmark = pytest.mark.skipif(not os.path.exists(BUSYBOX), reason="needs busybox-static")


def packed(*items: tuple[str, bytes | str]) -> bytes:
    """A tar: bytes are a program, text is a link's target, an empty name after .wh. a whiteout."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, what in items:
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if isinstance(what, str):
                info.type, info.linkname = tarfile.SYMTYPE, what
                tar.addfile(info)
            else:
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
    return made.getvalue()


def layout(place: Path, *layers: bytes) -> Path:
    """An OCI image layout of these layers for this host."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config = {
        "os": "linux",
        "architecture": machine,
        "config": {"Env": ["A=1"], "WorkingDir": "/srv"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(gzip.compress(tar), "layer.v1.tar+gzip") for tar in layers],
    }
    index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (place / "index.json").write_text(json.dumps(index))
    return place


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("templates") / "state"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def built(state: Path) -> dict[str, dict[str, Any]]:
    """`box` from a tar and `image` from a layout of two layers, by the command line."""
    program = Path(BUSYBOX).read_bytes()
    tar = state.parent / "box.tar.gz"
    tar.write_bytes(gzip.compress(packed(("bin/busybox", program), ("bin/sh", "busybox"), ("bin/echo", "busybox"))))
    lower = packed(
        ("bin/busybox", program), ("bin/sh", "busybox"), ("bin/ls", "busybox"), ("srv/old", b"x"), ("a", b"1")
    )
    place = layout(state.parent / "image", lower, packed(("srv/.wh..wh..opq", b""), ("srv/new", b"x"), (".wh.a", b"")))
    return {
        "box": template(state, "build", "--from-archive", tar, "--name", "box"),
        "image": template(state, "build", "--from-oci", place, "--name", "image"),
    }


def template(state: Path, *words: str | Path) -> dict[str, Any]:
    environ = {**os.environ, "CORRAL_STATE_DIR": str(state)}
    environ.pop("CORRAL_URL", None)
    program = "from corral.cli.main import main; main()"
    command = [sys.executable, "-c", program, "template", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, env=environ, timeout=300)
    document: dict[str, Any] = json.loads(done.stdout)
    assert ("error" in document) == (done.returncode != 0), done.stderr
    return document


@pytest.fixture(scope="module")
def client(state: Path, built: dict[str, dict[str, Any]]) -> Iterator[Corral]:
    with Corral(state_dir=state) as made:
        yield made


def test_what_was_built_is_told_by_every_door(client: Corral, state: Path, built: dict[str, dict[str, Any]]) -> None:
    for name, kind in (("box", "archive"), ("image", "oci")):
        found = client.templates.get(name)
        assert (found["kind"], found["digest"], found["allowed"]) == (kind, built[name]["digest"], True)
        assert found["languages"] == []
        assert os.path.isdir(found["path"])
        assert found == template(state, "show", name)
    assert found["image"]["working_dir"] == "/srv"
    assert client.templates.get("box")["archive"]["left_out"] == {}
    assert {"box", "image", "host"} <= {item["name"] for item in client.templates.list()}
    bases = client.request("GET", "/v1/doctor")["bases"]
    assert (bases["count"], bases["unused"]) == (2, 0)
    assert bases["size_bytes"] > 2 * os.path.getsize(BUSYBOX)


def test_every_answer_has_the_members_that_the_document_names_and_no_others(client: Corral, state: Path) -> None:
    for name in ("box", "image", "host"):  # of an archive, of an image, not built
        assert unlike(client.request("GET", f"/v1/templates/{name}"), "TemplateDetail") == []
    assert unlike(client.request("GET", "/v1/templates"), "TemplatePage") == []
    assert unlike(client.request("POST", "/v1/templates", {"name": "box"}), "TemplateDetail") == []
    (state / "base" / ".build-old").mkdir()
    plain = client.request("GET", "/v1/doctor")
    assert unlike(plain, "Doctor") == []
    assert "template_build" in {item["kind"] for item in plain["leftovers"]}
    graded = client.request("GET", "/v1/doctor", security="1")
    assert unlike(graded, "Doctor") == []
    assert graded["security"]["checks"]
    run = client.run(command=["echo"], template="box")
    assert unlike(client.request("GET", f"/v1/runs/{run.id}"), "Run") == []
    assert unlike(client.request("GET", "/v1/runs"), "RunPage") == []
    with client.sandboxes.create(template="box") as sandbox:
        sandbox.exec(["echo"])
        assert unlike(client.request("GET", f"/v1/sandboxes/{sandbox.id}"), "SandboxDetail") == []
        assert unlike(client.request("GET", f"/v1/sandboxes/{sandbox.id}/execs"), "ExecPage") == []
        assert unlike(client.request("GET", "/v1/sandboxes"), "SandboxPage") == []
    assert unlike(client.request("POST", "/v1/gc"), "Garbage") == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_programs_of_an_archive_and_of_an_image_run(client: Corral, runtime: str) -> None:
    known = {item["name"]: item for item in client.request("GET", "/v1/doctor")["runtimes"]}
    if not known[runtime]["usable"]:
        pytest.skip(f"{runtime}: {known[runtime]['reason']}")
    run = client.run(command=["echo", "你好"], template="box", runtime=runtime)
    assert (run.result.exit_code, run.result.stdout.text) == (0, "你好\n")
    with client.sandboxes.create(template="image", runtime=runtime) as sandbox:
        shown = sandbox.exec(["sh", "-c", "ls /srv; ls /a"])
        assert shown.stdout.text.splitlines()[0] == "new"
        assert "old" not in shown.stdout.text
        assert "/a: No such file" in shown.stderr.text
        with pytest.raises(CorralError) as caught:
            client.templates.delete("image")
        assert caught.value.code == "template_in_use"
        assert sandbox.id in str(caught.value.hint)


def test_a_refresh_that_finds_the_same_makes_no_second_base(client: Corral, built: dict[str, dict[str, Any]]) -> None:
    again = client.templates.build("box", refresh=True)
    assert again["digest"] == built["box"]["digest"]
    assert client.request("GET", "/v1/doctor")["bases"]["count"] == 2


def test_a_hostile_archive_is_refused_by_name_and_leaves_nothing(client: Corral, state: Path) -> None:
    bad = state.parent / "bad.tar"
    bad.write_bytes(packed(("../escape", b"x")))
    told = template(state, "build", "--from-archive", bad, "--name", "bad")["error"]
    assert told["code"] == "template_unavailable"
    assert "../escape: a name with .." in told["detail"]
    assert not (state / "escape").exists()
    assert client.templates.get("bad")["build"]["state"] == "failed"
    assert client.templates.delete("bad")["digest"] is None
    assert [item for item in client.request("GET", "/v1/doctor")["leftovers"] if item["kind"] == "template_build"] == []


def test_a_template_that_nobody_uses_is_removed_with_its_base(client: Corral) -> None:
    path = client.templates.get("box")["path"]
    gone = client.templates.delete("box")
    assert unlike(gone, "Removed") == []
    assert gone["freed_bytes"] > 0
    assert not os.path.exists(path)
    with pytest.raises(CorralError, match="not_found"):
        client.templates.get("box")


LIBRARIES = """
set -e
python3 -c 'import requests, httpx, numpy, pandas; print(int(pandas.DataFrame({"a": numpy.arange(4)}).a.sum()))'
node -e 'console.log(require("lodash").sum([1, 2, 3]), typeof require("axios").get)'
python3 -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 50)'
readlink -f "$(command -v java)" | grep -o jvm
TZ=Asia/Shanghai date +%Z
for tool in git make autoconf automake pkg-config cargo sqlite3 curl jq; do command -v $tool > /dev/null; done
find / -xdev -perm /6000 -type f 2> /dev/null | wc -l
find /usr/share/man /usr/share/doc /usr/share/locale -type f | wc -l
cat /etc/shadow 2> /dev/null | wc -l
"""


@pytest.mark.root
@pytest.mark.index
@pytest.mark.slow
def test_polyglot_has_the_libraries_of_its_ecosystems_and_nothing_that_no_base_has(
    client: Corral, state: Path, shared: Path
) -> None:
    polyglot(state, shared)
    found = client.templates.get("polyglot")
    assert len(found["languages"]) == 11
    assert {"python3-pandas", "rustc", "golang-go", "r-base-core", "node-typescript"} <= found["packages"].keys()
    run = client.run(shell=LIBRARIES, template="polyglot", memory="1G", timeout_s=120)
    assert run.result.stdout.text.split("\n") == ["6", "6 function", "True", "jvm", "CST", "0", "0", "0", ""], (
        run.result.stderr.text
    )
