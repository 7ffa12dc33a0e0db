"""K08: no call of the file API, no archive and no collected output reads or writes a byte of the host; what is refused is named."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import secrets
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .serving import DOCUMENTED, Answer, Peak, Server

MEMORY = 48 << 20
MANY = 1000
"""API writes while directories are swapped for links, over all runtimes."""


@dataclass
class Canary:
    """A directory of the host that anybody may read and write: what keeps a sandbox out of it is not a permission."""

    directory: Path
    secret: str

    @property
    def file(self) -> Path:
        return self.directory / "secret"

    def is_well(self) -> None:
        assert os.listdir(self.directory) == ["secret"], "something was written beside the canary"
        info = os.lstat(self.file)
        assert self.file.read_text() == self.secret and (info.st_mode & 0o7777, info.st_nlink) == (0o666, 1)

    def is_not_in(self, content: bytes) -> None:
        assert self.secret.encode() not in content


@pytest.fixture
def canary(shared: Path) -> Iterator[Canary]:
    directory = shared / f"canary-{secrets.token_hex(8)}"
    directory.mkdir()
    directory.chmod(0o777)
    made = Canary(directory, f"CANARY {secrets.token_hex(32)}\n")
    made.file.write_text(made.secret)
    made.file.chmod(0o666)
    yield made
    made.is_well()


class Files:
    """The file API of one sandbox. Every answer is looked at: no canary, no failure of the service, refusals with a code and a name."""

    def __init__(self, server: Server, sandbox: str, canary: Canary) -> None:
        self.server, self.sandbox, self.canary = server, sandbox, canary

    def target(self, tail: str = "") -> str:
        return f"/v1/sandboxes/{self.sandbox}/files{tail}"

    def call(self, method: str, tail: str = "", body: Any = None, **more: Any) -> Answer:
        answer = self.server.call(method, self.target(tail), body, **more)
        self.canary.is_not_in(answer.body)
        assert answer.status < 500, (method, tail, more, str(answer))
        if answer.status >= 400 and method != "HEAD":
            assert answer.code in DOCUMENTED, str(answer)
            named = answer.document.get("entry") or answer.document.get("field")
            assert named, f"{method} {tail} {more} is refused without the name of what is to blame: {answer}"
        return answer

    def sh(self, script: str, **more: Any) -> dict[str, Any]:
        return self.server.run(self.sandbox, "sh", "-c", script, **more)

    def works(self) -> None:
        """The sandbox and its file API are still of use."""
        assert self.call("PUT", body=b"fine", path="still-here").status in (200, 201)
        assert self.sh("cat still-here")["stdout"]["text"] == "fine"


@pytest.fixture
def files(server: Server, canary: Canary) -> Iterator[Files]:
    made = Files(server, server.create(disk="64M"), canary)
    yield made
    assert server.delete(made.sandbox).status == 200


def archive_of(content: bytes) -> dict[str, tuple[bytes, bytes]]:
    """Name -> (type, content or link) of what was downloaded as an archive."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            found[member.name] = (member.type, file.read() if file else os.fsencode(member.linkname))
    return found


# -- links and paths -----------------------------------------------------------------------------------------------------------
PLANT = """set -e
ln -s /etc/passwd s; ln -s / d; ln -s ../../.. up; ln -s "$1/secret" c; ln -s "$1" cd
ln -s /proc/self/root root; ln -s /proc/1/root one; ln -s loop loop; ln -s c chain; ln -s "../../../../../../..$1" rel
python3 -c 'import os; os.mkfifo("fifo")'; ln -s fifo tofifo; ln -s /dev/zero zero; echo mine > plain; ln plain hard
"""


def plant(files: Files, canary: Canary) -> None:
    script = PLANT.replace('"$1', f'"{canary.directory}').replace("..$1", f"..{canary.directory}")
    if files.server.box.own_kernel:
        # gVisor forgets what comes behind a link to exactly "/": it leads to its own root, whatever the rest says.
        script = script.replace("ln -s / d;", "ln -s /. d;")
    assert files.sh(script)["exit_code"] == 0


def ways(host: str) -> list[str]:
    """Ways that a program which resolves names on the host would go to `host`."""
    return [
        host,
        f"../../../../../..{host}",
        f"d{host}",
        f"up{host}",
        f"root{host}",
        f"one{host}",
        f"./d/../d//.{host}",
        f"up/workspace/up{host}",
        f"/proc/self/cwd/../..{host}",
        f"/workspace/../proc/1/root{host}",
    ]


def test_links_and_dots_lead_no_call_to_the_host(files: Files, canary: Canary) -> None:
    plant(files, canary)
    box, secret, directory = files.server.box, str(canary.file), str(canary.directory)
    strangers = [str(box.state / "admin.key"), str(box.state / "corral.db"), "/etc/shadow"]

    links = ("c", "chain", "loop")

    def read(path: str) -> None:
        for tail in ("", "/stat", "/list", "/archive", "/watch"):
            if tail != "/archive" or path not in links:  # a link itself may be packed, as one
                assert files.call("GET", tail, path=path).status >= 400, (tail, path)
        assert files.call("HEAD", path=path).status >= 400
        assert files.call("GET", headers={"Range": "bytes=0-6"}, path=path).status >= 400

    def write(path: str) -> None:
        for query in ({"parents": False}, {"parents": False, "overwrite": False, "mode": "0777"}):
            assert files.call("PUT", body=b"changed", path=path, **query).status >= 400, path
        for document in ({"path": path, "parents": False}, {"from": path, "to": "got"}, {"from": "plain", "to": path}):
            tail = "/mkdir" if "path" in document else "/move"
            assert files.call("POST", tail, document=document).status >= 400, document
        for recursive in (False, True):
            assert files.call("DELETE", path=path, recursive=recursive).status >= 400, path

    secrets_ = [*ways(secret), "cd/secret", "rel/secret", "s/../..", "s/x", "plain/../../.." + secret]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, [*secrets_, *links, *(way for host in strangers for way in ways(host)[1:5:3])]))
        list(pool.map(write, [*ways(secret + "/x"), *ways(directory + "/x"), "cd/new", "rel/new", "plain/x", "loop/x"]))
    for path in ("c", "chain", "loop", "s", "fifo", "tofifo", "zero"):
        assert files.call("PUT", body=b"changed", path=path, parents=False).status >= 400, path
    for path in ("fifo", "tofifo", "zero"):
        assert files.call("GET", path=path).code == "not_a_file"
    for path in links:
        assert [kind for kind, _ in archive_of(files.call("GET", "/archive", path=path).body).values()] == [L]
    canary.is_well()
    # With parents they are made inside, where the program inside may, and nowhere else.
    for path in (f"d{directory}/deep/x", "rel/deep/x", "cd/deep/x"):
        files.call("PUT", body=b"inside", path=path)
        files.call("POST", "/mkdir", document={"path": f"{path}/y"})
        canary.is_well()
    # What is inside is the template's: the host's accounts are not there, and a link is worth no more than its target.
    assert files.call("GET", path="s").body == files.call("GET", path="/etc/passwd").body
    assert files.call("GET", path="s").body != Path("/etc/passwd").read_bytes()
    assert files.call("PUT", body=b"root::0:0::/:/bin/sh\n", path="s").status == 403


def stamp(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns, info.st_mode


def test_what_holds_the_sandbox_up_cannot_be_written_moved_or_removed(files: Files) -> None:
    state = files.server.box.state
    watched = [path for top in ("base", "interpreter") for path in sorted((state / top).rglob("*")) if path.is_file()]
    before = {path: stamp(path) for path in watched}
    assert before
    for path in (
        "/usr/bin/python3",
        "/bin/sh",
        "/etc/passwd",
        "/.corral",
        "/.corral/site/corral/guest/files.pyc",
        "/usr",
    ):
        assert files.call("PUT", body=b"#!/bin/sh\n", path=path).status >= 400, path
        assert files.call("PUT", body=b"", path=f"{path}/new").status >= 400, path
        assert files.call("PUT", "/archive", tar_of(("new", tarfile.REGTYPE, "", b"x")), path=path).status >= 400, path
        assert files.call("DELETE", path=path, recursive=True).status >= 400, path
        assert files.call("POST", "/move", document={"from": path, "to": "got"}).status >= 400, path
    for path in ("/", ".", "..", "../", "/workspace", "/tmp", "/proc", "/dev", "/dev/null", "./.", "../workspace/"):
        assert files.call("DELETE", path=path, recursive=True).status >= 400, path
        assert files.call("POST", "/move", document={"from": path, "to": "/tmp/got"}).status >= 400, path
        assert files.call("PUT", body=b"x", path=path).status >= 400 or path == "/dev/null", path
    assert {path: stamp(path) for path in watched} == before
    files.works()


NAMES: list[str | bytes] = [
    "$(touch pwned)", "`touch pwned`", ";touch pwned;", "|touch pwned", "&touch pwned&", "a\ntouch pwned\n", "> pwned",
    'quo"te', "quo'te", "back\\slash", "-rf", "--help", "--", "*", "?", "[a]", "{a,b}", "~", "~root", "$HOME", "#x?path=plain&y",
    "%2e%2e", "%2e%2e%2f%2e%2e", "%00", "%", "+", " ", " .. ", "...", "..;", "..\\..\\x", "C:\\x", "\x01\x1b[31m", "\x7f", "\u202e",
    "你好 ☕", "a" * 255, b"\xff\xfe\x80", b"..\xc0\xaf..", "\ud83d".encode("utf-8", "surrogatepass"),
]  # fmt: skip


def test_names_are_names_whatever_they_hold(files: Files) -> None:
    def one(name: str | bytes) -> None:
        raw = name if isinstance(name, bytes) else name.encode()
        content = b"of " + raw
        made = files.call("PUT", body=content, path=raw, overwrite=False)
        assert made.status == 201, (name, str(made))
        assert made.document["path"].encode("utf-8", "surrogateescape") == b"/workspace/" + raw
        assert files.call("GET", path=raw).body == content
        assert archive_of(files.call("GET", "/archive", path=raw).body)[os.fsdecode(raw)] == (tarfile.REGTYPE, content)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, NAMES))
    listed = files.call("GET", "/list", path=".").document["items"]
    names = [item["name"].encode("utf-8", "surrogateescape") for item in listed]
    assert sorted(names) == sorted(name if isinstance(name, bytes) else name.encode() for name in NAMES)
    for item in listed[::4]:
        moved = files.call("POST", "/move", document={"from": item["path"], "to": item["path"][:200] + ".m"})
        assert moved.status == 200, (item, str(moved))
    found = files.sh("find / -xdev -name 'pwned*' 2>/dev/null; ls -A /workspace /tmp /home/sandbox | grep -x pwned")
    assert found["stdout"]["text"] == ""
    for place in ("/", files.server.box.state, Path.cwd(), os.environ.get("HOME", "/")):
        assert not os.path.lexists(os.path.join(place, "pwned"))


def test_what_is_no_path_is_refused_with_its_name(files: Files) -> None:
    long, deep = "n" * 256, "/".join(["d" * 100] * 45)
    for path in ("a\0b", "\0", "/etc/passwd\0.png", long, deep, ""):
        for method, tail, body in (
            ("GET", "", None),
            ("PUT", "", b"x"),
            ("DELETE", "", None),
            ("GET", "/archive", None),
        ):
            answer = files.call(method, tail, body, path=path)
            assert 400 <= answer.status < 500, (method, tail, path, str(answer))
        answer = files.call("PUT", "/archive", tar_of(("x", tarfile.REGTYPE, "", b"x")), path=path)
        assert 400 <= answer.status < 500, (path, str(answer))
        answer = files.call("POST", "/mkdir", document={"path": path})
        assert 400 <= answer.status < 500, (path, str(answer))
        answer = files.call("POST", "/move", document={"from": "x", "to": path})
        assert 400 <= answer.status < 500, (path, str(answer))
    assert files.call("GET", "/list", path=".").document["items"] == []


def test_paths_of_urls_lead_to_no_file_of_the_service(files: Files, canary: Canary) -> None:
    server, sandbox = files.server, files.sandbox
    done = server.run(sandbox, "sh", "-c", "echo x > out", outputs=["out"])
    assert [artifact["path"] for artifact in done["artifacts"]] == ["/workspace/out"]
    exec_id = server.start(sandbox, "true")
    outs = [
        "../" * 6,
        "..%2f" * 6,
        "%2e%2e/" * 6,
        "%2e%2e%2f" * 6,
        "..%252f" * 6,
        "/",
        "//",
        "%00/",
        "./" * 3 + "../" * 6,
    ]
    for out, name in itertools.product(outs, (str(canary.file)[1:], "admin.key", "corral.db", "etc/passwd")):
        for target in (
            f"/v1/execs/{exec_id}/artifacts/{out}{name}",
            f"/v1/sandboxes/{sandbox}/files/{out}{name}",
            f"/v1/sandboxes/{out}{name}/files?path=out",
            f"/v1/execs/{out}{name}/logs",
            f"/v1/runs/{out}{name}",
            f"/{out}{name}",
        ):
            answer = server.call("GET", target)
            assert answer.status in (400, 404), (target, str(answer))
            canary.is_not_in(answer.body)


# -- archives ------------------------------------------------------------------------------------------------------------------
Member = tuple[str, bytes, str, bytes]


def tar_of(*members: Member, form: int = tarfile.GNU_FORMAT) -> bytes:
    """(name, type, link, content) of each member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            member.mode = 0o755
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def block(
    name: bytes, kind: bytes, size: int, *, prefix: bytes = b"", link: bytes = b"", magic: bytes = b"ustar\x0000"
) -> bytearray:
    """One header, whatever it claims."""
    head = bytearray(512)
    head[: len(name)] = name
    head[100:108], head[108:116], head[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    head[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    head[136:148], head[156:157] = b"00000000000\0", kind
    head[157 : 157 + len(link)] = link
    head[257:265], head[345 : 345 + len(prefix)] = magic, prefix
    return summed(head)


def summed(head: bytearray) -> bytearray:
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return head


def pax(*records: tuple[str, bytes], kind: bytes = b"x") -> bytes:
    """An extended header with these records."""
    body = b""
    for name, value in records:
        rest = b" " + name.encode() + b"=" + value + b"\n"
        size = len(rest) + 1
        while size != len(str(size)) + len(rest):
            size = len(str(size)) + len(rest)
        body += str(size).encode() + rest
    return bytes(block(b"pax", kind, len(body))) + body.ljust(-(-len(body) // 512) * 512, b"\0")


def sparse(real: int, name: bytes = b"bomb") -> bytes:
    """1 KiB that says it is a file of `real` bytes: one byte at its end, the rest a hole."""
    head = block(name, b"S", 512, magic=b"ustar  \0")
    big = b"\x80" + (real - 1).to_bytes(11, "big")
    head[386:398], head[398:410], head[482] = big, b"%011o\0" % 1, 0
    head[483:495] = b"\x80" + real.to_bytes(11, "big")
    return bytes(summed(head)) + b"x".ljust(512, b"\0")


END = bytes(1024)
R, L, H, D = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def bad_archives(canary: Canary) -> dict[str, tuple[bytes, str | None]]:
    """What leads out, or is no archive that may be -> (its bytes, the entry that must be named; None: no entry is to blame)."""
    there, secret = str(canary.directory), str(canary.file)
    up = "../../../../../.."
    return {
        "up": (tar_of((f"{up}{secret}", R, "", b"x")), f"{up}{secret}"),
        "up behind a good one": (tar_of(("good", R, "", b"x"), ("a/../../x", R, "", b"x")), "a/../../x"),
        "up as a directory": (tar_of(("../d/", D, "", b"")), "../d"),
        "up as a link": (tar_of(("../l", L, secret, b"")), "../l"),
        "only dots": (tar_of(("..", D, "", b"")), ".."),
        "absolute": (tar_of((secret, R, "", b"x")), secret),
        "absolute with slashes": (tar_of((f"//{secret}", R, "", b"x")), f"//{secret}"),
        "up by the prefix of the header": (bytes(block(b"x", R, 0, prefix=b"../..")) + END, "../../x"),
        "absolute by the prefix of the header": (bytes(block(b"x", R, 0, prefix=b"/etc")) + END, "/etc/x"),
        "up by an extended header": (pax(("path", b"../../x")) + bytes(block(b"x", R, 0)) + END, "../../x"),
        "up by a global header": (pax(("path", b"../../x"), kind=b"g") + bytes(block(b"x", R, 0)) + END, "../../x"),
        "up by a long name": (tar_of(("../" + "y" * 200, R, "", b"x")), "../" + "y" * 200),
        "link, then file": (tar_of(("l", L, there, b""), ("l/secret", R, "", b"x")), "l/secret"),
        "link, then file, relative": (tar_of(("l", L, up + there, b""), ("l/new", R, "", b"x")), "l/new"),
        "link, then directory": (tar_of(("l", L, there, b""), ("l/new/", D, "", b"")), "l/new"),
        "link as directory": (tar_of(("l", L, there, b""), ("l/", D, "", b"")), "l"),
        "link, then link": (tar_of(("l", L, there, b""), ("l/new", L, "/", b"")), "l/new"),
        "link of a link": (tar_of(("l", L, "m", b""), ("m", L, there, b""), ("l/new", R, "", b"x")), "l/new"),
        "link in a directory": (tar_of(("a/", D, "", b""), ("a/l", L, up + there, b""), ("a/l/new", R, "", b"x")), "a/l/new"),
        "link by an extended header": (
            pax(("linkpath", there.encode())) + bytes(block(b"l", L, 0)) + tar_of(("l/new", R, "", b"x")), "l/new",
        ),
        "link that was there": (tar_of(("planted/new", R, "", b"x")), "planted/new"),
        "directory where a link was": (tar_of(("planted/", D, "", b"")), "planted"),
        "hard link out": (tar_of(("h", H, f"{up}{secret}", b"")), "h"),
        "hard link, absolute": (tar_of(("h", H, secret, b"")), "h"),
        "hard link through a link": (tar_of(("l", L, there, b""), ("h", H, "l/secret", b"")), "h"),
        "hard link to a link": (tar_of(("l", L, secret, b""), ("h", H, "l", b"")), "h"),
        "hard link to the planted link": (tar_of(("h", H, "planted", b""), ("h", R, "", b"x")), "h"),
        "hard link to a directory": (tar_of(("a/", D, "", b""), ("h", H, "a", b"")), "h"),
        "hard link to itself": (tar_of(("h", H, "h", b"")), "h"),
        "character device": (tar_of(("null", tarfile.CHRTYPE, "", b"")), "null"),
        "block device": (tar_of(("disk", tarfile.BLKTYPE, "", b"")), "disk"),
        "pipe": (tar_of(("pipe", tarfile.FIFOTYPE, "", b"")), "pipe"),
        "unknown type": (bytes(block(b"odd", b"Z", 0)) + END, "odd"),
        "no name": (bytes(block(b"", R, 0)) + END, ""),
        "dot as a file": (tar_of((".", R, "", b"x")), "."),
        "NUL in the name": (pax(("path", b"a\0../../b")) + bytes(block(b"x", R, 0)) + END, "a\0../../b"),
        "NUL in a link": (pax(("linkpath", b"a\0b")) + bytes(block(b"l", L, 0)) + END, "l"),
        "a name too long": (tar_of(("n" * 300, R, "", b"x")), "n" * 300),
        "a link too long": (tar_of(("l", L, "x" * 5000, b"")), "l"),
        "time without end": (pax(("mtime", b"inf")) + bytes(block(b"t", R, 0)) + END, "t"),
        "time too far": (pax(("mtime", b"1e300")) + bytes(block(b"t", R, 0)) + END, "t"),
        "damaged in the middle": (tar_of(("a", R, "", b"x")) [:1024] + b"x" * 512 + END, None),
        "no end": (tar_of(("a", R, "", b"x"))[:1024], None),
        "a name that fills the memory": (bytes(block(b"n", b"L", 1 << 40)) + bytes(4096), None),
        "negative size": (pax(("size", b"-512")) + bytes(block(b"t", R, 0)) + END, None),
        "cut short": (bytes(block(b"t", R, 5 << 20)) + b"x" * 512, "t"),
        "no archive": (b"no archive at all" * 100, None),
        "compressed": (gzip.compress(tar_of(("zeros", R, "", bytes(10 << 20)))), None),
        "sparse, 10 000 to 1": (sparse(100 << 20) + END, "bomb"),
        "sparse, all that can be said": (sparse(8 << 40) + END, "bomb"),
        "sparse by an extended header": (
            pax(("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.name", b"../../x"),
                ("GNU.sparse.realsize", b"1")) + bytes(block(b"t", R, 512)) + b"1\n0\n1\n".ljust(512, b"\0") + END, "../../x",
        ),
        "sparse list without end": (
            pax(("GNU.sparse.major", b"1"), ("GNU.sparse.minor", b"0"), ("GNU.sparse.realsize", b"1"))
            + bytes(block(b"t", R, 1024)) + b"99999999\n".ljust(1024, b"1") + END, None,
        ),
        "headers in headers": (bytes(block(b"x", b"L", 512)) * 1 + b"n".ljust(512, b"\0") + (bytes(block(b"x", b"L", 1)) + b"n".ljust(512, b"\0")) * 2000 + END, None),
        "more files than there may be": (b"".join(bytes(block(b"f%d" % n, R, 0)) for n in range(70_000)) + END, "f"),
    }  # fmt: skip


def test_archives_that_lead_out_are_refused_naming_the_entry(files: Files, canary: Canary) -> None:
    def one(case: tuple[str, tuple[bytes, str | None]]) -> str | None:
        name, (archive, entry) = case
        place = "at " + name
        planted = files.call("PUT", "/archive", tar_of(("planted", L, str(canary.directory), b"")), path=place)
        assert planted.status == 200, str(planted)
        answer = files.server.call("PUT", files.target("/archive"), archive, path=place)
        canary.is_not_in(answer.body)
        files.call("DELETE", path=place, recursive=True)
        if not 400 <= answer.status < 500:
            return f"{name}: {answer}"
        named = str(answer.document.get("entry") or "")
        if entry is not None and (named != entry if name[:4] != "more" else not named.startswith(entry)):
            return f"{name}: names {named!r}, not {entry[:80]!r}: {answer}"
        return None

    with Peak(files.server) as peak, ThreadPoolExecutor(3) as pool:
        wrong = [text for text in pool.map(one, bad_archives(canary).items()) if text]
    assert not wrong, "\n".join(wrong)
    canary.is_well()
    assert peak.growth < MEMORY, f"{peak.growth >> 20} MiB more than before"
    assert files.sh("ls -A /workspace /tmp /etc | grep -x -e x -e d -e pwned")["stdout"]["text"] == ""
    files.works()


# -- what the host collects and puts -------------------------------------------------------------------------------------------
def test_outputs_are_files_of_the_workspace_only(files: Files, canary: Canary) -> None:
    script = PLANT.replace('"$1', f'"{canary.directory}').replace("..$1", f"..{canary.directory}")
    result = files.sh(f"{script}mkdir -p a/b; ln -s {canary.directory} a/b/c; echo deep > a/b/f", outputs=["**"])
    assert result["exit_code"] == 0
    assert {item["path"] for item in result["artifacts"]} == {f"/workspace/{n}" for n in ("plain", "hard", "a/b/f")}
    kinds = {item["path"].rpartition("/")[2]: item["type"] for item in result["files"]}
    assert kinds["c"] == kinds["cd"] == kinds["d"] == kinds["up"] == "symlink"
    for item in result["artifacts"]:
        got = files.server.call("GET", item["url"])
        assert got.status == 200 and got.body in (b"mine\n", b"deep\n")
    for glob in ("c", "cd/*", "d/**", f"d{canary.file}", "up/**", "a/b/c/*", "rel/secret", "s", "zero", "fifo"):
        assert files.sh("true", outputs=[glob])["artifacts"] == [], glob
    for glob in ("../*", str(canary.file), "/workspace/../etc/passwd", "/workspace/../../etc/*", "a/../../*"):
        answer = files.server.call(
            "POST", f"/v1/sandboxes/{files.sandbox}/execs", document={"argv": ["true"], "outputs": [glob], "wait": 60}
        )
        assert answer.status == 422 or answer.document["result"]["artifacts"] == [], (glob, str(answer))
    download = files.call("GET", "/archive", path=".")
    assert {kind for kind, _ in archive_of(download.body).values()} <= {R, L, D}


def test_what_is_put_beside_an_exec_or_a_new_sandbox_stays_inside(files: Files, canary: Canary) -> None:
    there = canary.directory
    for script in (
        f"ln -s {there} .corral-exec",
        f"rm -rf .corral-exec; ln -s ../../../../../../..{there} .corral-exec",
    ):
        files.sh(script)
        document = {"code": "print('ran')", "language": "python", "wait": 60}
        answer = files.server.call("POST", f"/v1/sandboxes/{files.sandbox}/execs", document=document)
        assert answer.status < 500, str(answer)
        canary.is_well()
    files.sh("rm -rf .corral-exec")
    for path in (
        "../x",
        "/etc/x",
        "a/../../x",
        str(canary.file),
        f"{'../' * 9}{canary.file}",
        "a\0b",
        "..",
        ".",
        "",
        "/",
        "~/../../x",
    ):
        for route in ("/v1/sandboxes", "/v1/runs"):
            document = {"runtime": files.server.box.runtime, "files": [{"path": path, "content": "x"}]}
            document |= {"command": ["true"]} if route == "/v1/runs" else {}
            answer = files.server.call("POST", route, document=document)
            if answer.status == 201:  # taken as a name below the workspace
                assert files.server.delete(answer.document["id"]).status == 200
            else:
                assert answer.status in (200, 422), (path, str(answer))
                assert answer.status == 200 or answer.document["field"].startswith("/files/0"), str(answer)
            canary.is_well()


# -- a path that changes meanwhile ---------------------------------------------------------------------------------------------
SWAP = """
import ctypes, os, sys
there = sys.argv[1]
exchange = ctypes.CDLL(None).renameat2
os.mkdir("real"); os.mkdir("t"); os.mkdir("t/a")
open("plain", "w").write("of the sandbox")
for name, target in (("l", there), ("m", "../../../../../../.." + there), ("n", there + "/secret")):
    os.symlink(target, name)
open("f", "w").write("of the sandbox")
os.mkdir(".corral-exec")
print("swapping", flush=True)
while True:
    for one, two in ((b"t", b"l"), (b"t", b"m"), (b"f", b"n"), (b".corral-exec", b"l")):
        for _ in range(2):
            exchange(-100, one, -100, two, 2)
"""


def test_a_path_that_is_swapped_for_a_link_meanwhile_leads_no_write_out(files: Files, canary: Canary) -> None:
    swapping = files.server.start(files.sandbox, "python3", "-c", SWAP, str(canary.directory), timeout=280)
    stream = files.server.events(f"/v1/execs/{swapping}/stream")
    assert [next(stream).kind for _ in range(2)] == ["started", "stdout"]
    stream.close()
    counted: dict[int, int] = {}
    archive = tar_of(("t/", D, "", b""), ("t/g", R, "", b"x"), ("f", R, "", b"x"))

    def write(number: int) -> None:
        match number % 10:
            case 0 | 1 | 2:
                answer = files.call("PUT", body=b"x", path=f"t/f{number}")
            case 3:
                answer = files.call("PUT", body=b"x", path="t/secret", parents=False)
            case 4:
                answer = files.call("PUT", body=b"x", path="f", mode="0600")
            case 5:
                answer = files.call("PUT", "/archive", archive, path=".")
            case 6:
                answer = files.call("POST", "/mkdir", document={"path": f"t/d{number}/e"})
            case 7:
                answer = files.call("POST", "/move", document={"from": "plain", "to": "t/secret", "overwrite": True})
                files.call("PUT", body=b"of the sandbox", path="plain")
            case 8:
                answer = files.call("DELETE", path="t/secret" if number % 20 == 8 else "t/a", recursive=True)
            case _:
                document = {"code": "print(1)", "language": "python", "wait": 60, "outputs": ["**"], "timeout": 30}
                target = f"/v1/sandboxes/{files.sandbox}/execs"
                answer = files.server.call("POST", target, document=document)
                for artifact in answer.document["result"]["artifacts"] if answer.status == 200 else ():
                    canary.is_not_in(files.server.call("GET", artifact["url"]).body)
        assert answer.status < 500, (number, str(answer))
        counted[answer.status] = counted.get(answer.status, 0) + 1
        if number % 20 == 0:
            for path in ("t/secret", "f", "l/secret"):
                files.call("GET", path=path)
            files.call("GET", "/archive", path="t")

    with Peak(files.server) as peak, ThreadPoolExecutor(3) as pool:
        # Where names are followed by a kernel inside, none of these calls comes near the host; each costs a start in there.
        list(pool.map(write, range(60 if files.server.box.own_kernel else MANY // 3)))
    canary.is_well()
    assert peak.growth < MEMORY, f"{peak.growth >> 20} MiB more than before"
    assert files.server.call("POST", f"/v1/execs/{swapping}/cancel").document["result"]["reason"] == "cancelled"
    assert counted.keys() >= {200, 201} and any(status >= 400 for status in counted), f"nothing was swapped: {counted}"
    files.call("GET", "/archive", path=".")
    files.works()
