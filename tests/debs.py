"""A distribution of three packages on loopback: enough for mmdebstrap to make a tree of, and for maintainer scripts to run in it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from corral.node.templates_frozen import freeze
from corral.node.templates_recipe import parse

SUITE = "small"
WHAT_DPKG_NEEDS = "sh env dpkg dpkg-deb dpkg-split dpkg-query dpkg-trigger tar rm diff ldconfig start-stop-daemon true cat chown chmod sleep"


def package(
    place: Path,
    name: str,
    files: dict[str, str],
    postinst: str | None = None,
    fields: str = "",
    tree: Path | None = None,
) -> None:
    """Make NAME.deb in `place`."""
    root = tree or place / f"{name}.tree"
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    control = root / "DEBIAN"
    control.mkdir(parents=True)
    (control / "control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a test <test@example.org>\nDescription: {name}\n{fields}"
    )
    if postinst is not None:
        (control / "postinst").write_text(f"#!/bin/sh\nset -e\n{postinst}")
        (control / "postinst").chmod(0o755)
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, place / f"{name}.deb"]
    subprocess.run(build, check=True, capture_output=True)


def base(place: Path) -> None:
    """The package that every system has: a shell and dpkg, as they are on this host."""
    tree = place / "base.tree"
    tree.mkdir()
    recipe = parse({"name": "base", "kind": "frozen", "programs": WHAT_DPKG_NEEDS.split()}, "test")
    freeze(recipe, tree, lambda _text, _part: None)
    passwd = "root:x:0:0:root:/root:/bin/sh\nmail:x:8:8:mail:/var/mail:/bin/sh\n"
    files = {"etc/passwd": passwd, "etc/group": "root:x:0:\nmail:x:8:\n"}
    for directory in ("proc", "sys", "dev", "tmp", "root", "var/lib/dpkg", "var/mail"):
        (tree / directory).mkdir(parents=True, exist_ok=True)
    package(place, "base", files, fields="Essential: yes\n", tree=tree)


@contextlib.contextmanager
def served(place: Path) -> Iterator[str]:
    """The packages of `place` as a source of apt; -> its line."""
    listed = []
    for deb in sorted(place.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", deb], check=True, capture_output=True, text=True).stdout
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        listed.append(f"{control.rstrip()}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")
    packages = "\n".join(listed).encode()
    (place / "Packages").write_bytes(packages)
    (place / "Release").write_text(
        f"Suite: {SUITE}\nCodename: {SUITE}\nDate: Thu, 01 Jan 2026 00:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages\n"
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(place))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"deb [trusted=yes] http://127.0.0.1:{server.server_port}/ ./"
        finally:
            server.shutdown()
            thread.join()
