"""Threat: an exec writes what is not its own, reads the host through a mount or /proc, or plants names for the host to trip over.

Controls: the same look finds what is there on the host; the same plants, touched by a naive program on the host, lead out.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.client.trees import unpack
from corral.errors import CorralError
from corral.testing.hostile.files import KERNEL_FILES, RAISED, TARGETS, WRITABLE, WRITE, who_am_i
from corral.testing.hostile.prelude import PRELUDE, TELL

from .conftest import Box, Lab, Refused
from .probes import AS_USER, USER, on_the_host


def test_only_the_named_places_are_writable(box: Box) -> None:
    answers = box.ask(WRITE)
    assert {path for path, answer in answers.items() if answer == "ok"} == WRITABLE
    assert len(answers) > 20
    assert not list((box.lab.state / "rootfs").glob("**/.probe"))


def test_doors_of_proc_sys_and_dev_are_shut(box: Box) -> None:
    answers = box.ask(KERNEL_FILES, json.dumps(TARGETS))
    opened = {name: answer for name, answer in answers.items() if answer == "ok"}
    assert not opened
    for name in ("/proc/kcore", "/proc/keys", "/proc/timer_list"):
        assert answers[f"read {name}"] in ("nothing", "ENOENT", "EACCES"), (name, answers)


@pytest.mark.root
def test_control_root_of_the_host_finds_them(box: Box) -> None:
    answers = on_the_host(KERNEL_FILES, json.dumps(TARGETS))
    assert {
        "read /proc/keys",
        "write /proc/sys/kernel/core_pattern",
        "write /proc/sys/vm/drop_caches",
        "enter /sys",
    } <= {name for name, answer in answers.items() if answer == "ok"}, answers


def test_kernel_pointers_and_the_hosts_log_are_not_told(box: Box) -> None:
    shown = box.run("/bin/cat", "/proc/kallsyms")
    addresses = {line.split()[0] for line in shown.stdout.decode().splitlines() if line}
    assert addresses <= {"0" * 16}, "addresses of the kernel"


MOUNTS = PRELUDE + 'answers["mounts"] = open("/proc/self/mountinfo").read().splitlines()\n' + TELL


def test_mounts_are_the_sandboxs_own_and_carry_no_rights(box: Box) -> None:
    rows = [line.partition(" - ") for line in box.ask(MOUNTS)["mounts"]]
    points: dict[str, set[str]] = {}
    for left, _, right in rows:
        fields, kind = left.split(), right.split()[0]
        point, options = fields[4], set(fields[5].split(","))
        points[point] = options
        # A file masked by a device node of the sandbox's own /dev is the one bind that may allow devices.
        masked = point.startswith(("/proc/", "/dev/")) or point in ("/dev", "/dev/null")
        if masked or kind == "devpts":
            continue
        assert "nosuid" in options, (point, options)
        if point != "/proc":
            assert "nodev" in options, (point, options)
    assert {"ro"} <= points["/"] and {"ro"} <= points["/.corral"], points
    outside = {p for p in points if not p.startswith(("/proc", "/dev"))} - {"/", "/.corral", "/run", "/sys"} - WRITABLE
    assert not outside, outside
    # What lies on a device of the host is read-only or the sandbox's own disk.
    for left, _, right in rows:
        if right.split()[0] not in ("tmpfs", "proc", "devpts", "mqueue", "sysfs", "devtmpfs"):
            assert left.split()[4] in ({"/", "/.corral"} | WRITABLE), (left, right)


def test_dev_is_minimal(box: Box) -> None:
    listed = box.run("/bin/find", "/dev", "-type", "b", "-o", "-type", "c").stdout.decode().split()
    devices = {name for name in listed if not name.startswith("/dev/pts/")}
    usual = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")}
    assert devices <= usual, devices - usual
    assert "/dev/null" in devices


def test_a_set_uid_program_raises_nobody(box: Box) -> None:
    assert (box.lab.state / "rootfs/bin/raised").stat().st_mode & stat.S_ISUID
    answers = box.ask(RAISED, "/bin/raised", *sorted(WRITABLE))
    assert answers.pop("as it is") == str(box.exec_uid & 255), answers
    # Where programs may not be run at all it is no question.
    assert set(answers.values()) <= {str(box.exec_uid & 255), "EACCES"}, answers


@pytest.mark.root
def test_control_the_same_program_raises_an_ordinary_user_of_the_host(host_canary: Path) -> None:
    program = host_canary.parent / "raised"
    program.write_bytes(who_am_i())
    program.chmod(0o755)
    assert on_the_host(RAISED, str(program), **AS_USER) == {"as it is": str(USER & 255)}
    program.chmod(0o4755)
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        pytest.skip("the temporary directory of this host is mounted nosuid")
    assert on_the_host(RAISED, str(program), **AS_USER) == {"as it is": "0"}


# -- what the host may trip over ---------------------------------------------------------------------------------------------

PLANT = r"""
set -e
cd /workspace
mkdir -p out out/deep real
echo mine > out/fine
ln -s CANARY out/link
ln -s PARENT out/directory
ln -s PARENT linked
ln -s / root
ln -s ../../../../../../../..PARENT out/up
ln -s /proc/self/environ out/environ
ln -s /proc/1/root/PARENT out/proc
ln -s loop out/loop
mkfifo out/fifo
mkfifo waiting
: > 'out/new
line'
ln out/fine out/hard
: > out/-rf
ln -s CANARY main.py
"""


@pytest.fixture
def planted(box: Box, host_canary: Path) -> Box:
    script = PLANT.replace("CANARY", str(host_canary)).replace("PARENT", str(host_canary.parent))
    outcome = box.sh(script)
    assert outcome.facts.exit_code == 0, outcome.stderr
    return box


@pytest.fixture
def into() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="corral-into-"))
    place.chmod(0o777)
    yield place
    shutil.rmtree(place, ignore_errors=True)


def holds(place: Path, text: bytes) -> list[Path]:
    """Regular files below that contain the text; never through a link."""
    found = []
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink() and text in path.read_bytes():
            found.append(path)
    return found


def test_collection_and_artifacts_take_nothing_of_the_host(planted: Box, host_canary: Path, into: Path) -> None:
    text = host_canary.read_bytes()
    collected = planted.lab.call("collect", instance=planted.instance, outputs=["/workspace/out/**", "/workspace/**"], into=str(into / "a"))  # fmt: skip
    taken = {one["path"] for one in collected["artifacts"]}
    assert taken >= {"/workspace/out/fine", "/workspace/out/new\nline", "/workspace/out/-rf"}, taken
    for name in ("link", "directory", "up", "environ", "proc", "loop", "fifo"):
        assert not any(path.startswith(f"/workspace/out/{name}") for path in taken), taken
    assert not holds(into, text)
    assert all(not path.is_symlink() and (path.is_file() or path.is_dir()) for path in into.rglob("*"))
    # Control: a program of the host that opens the same names is led out.
    assert (planted.tree / "workspace/out/link").read_bytes() == text
    assert (planted.tree / "workspace/linked/canary").read_bytes() == text


def test_files_put_by_the_host_do_not_leave_the_workspace(planted: Box, host_canary: Path) -> None:
    text = host_canary.read_bytes()
    before = sorted(host_canary.parent.iterdir())
    written = base64.b64encode(b"written by the host").decode()
    for path in ("out/link", "out/directory/canary", "out/directory/new", "linked/canary", "linked/a/b", "root/tmp/x",
                 "out/up/canary", "main.py", "../canary", "/etc/passwd", "a/../../canary", "waiting", "out/fifo"):  # fmt: skip
        try:
            planted.lab.call("put", instance=planted.instance, files=[[path, 0o644, written]])
        except Refused as refusal:
            assert refusal.code in ("invalid_value", "infra_error", "not_found", "conflict"), refusal
        assert host_canary.read_bytes() == text, path
        assert sorted(host_canary.parent.iterdir()) == before, path
    # Control: a naive program of the host writes through the same link.
    (planted.tree / "workspace/linked/naive").write_text("led out")
    assert (host_canary.parent / "naive").read_text() == "led out"


def test_a_file_put_by_the_host_has_no_special_mode_and_is_the_sandboxs(box: Box) -> None:
    data = base64.b64encode(b"#!/bin/sh\nid -u\n").decode()
    box.lab.call("put", instance=box.instance, files=[["tool", 0o6755, data]])
    seen = os.stat(box.tree / "workspace/tool")
    assert not seen.st_mode & 0o7000, oct(seen.st_mode)
    assert box.sh("stat -c %u /workspace/tool").stdout.strip() == str(box.exec_uid).encode()


def hostile_tars(canary: Path) -> dict[str, bytes]:
    """Archives that try to leave the place where they are unpacked."""

    def archive(*members: tuple[str, bytes, str, bytes]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, kind, target, data in members:
                one = tarfile.TarInfo(name)
                one.type, one.linkname, one.size = kind, target, len(data)
                one.mode = 0o6777
                tar.addfile(one, io.BytesIO(data))
        return packed.getvalue()

    file, link, hard = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    return {
        "up": archive(("../../up", file, "", b"x")),
        "absolute": archive((str(canary), file, "", b"x")),
        "link then file": archive(("d", link, str(canary.parent), b""), ("d/canary", file, "", b"x")),
        "link replaced": archive(("l", link, str(canary), b""), ("l", file, "", b"x")),
        "hard link": archive(("h", hard, str(canary), b"")),
        "hard link up": archive(("h", hard, "../../../etc/passwd", b"")),
        "device": archive(("null", tarfile.CHRTYPE, "", b"")),
        "fifo": archive(("pipe", tarfile.FIFOTYPE, "", b"")),
        "set-id": archive(("raised", file, "", b"x")),
    }


def test_an_archive_unpacked_inside_stays_inside(box: Box, host_canary: Path) -> None:
    text = host_canary.read_bytes()
    for name, data in hostile_tars(host_canary).items():
        place = name.replace(" ", "-")
        try:
            box.lab.call("put_tar", instance=box.instance, tar=base64.b64encode(data).decode(), dest=f"/workspace/{place}")  # fmt: skip
        except Refused as refusal:
            assert refusal.code in ("invalid_value", "infra_error", "not_found"), (name, refusal)
        assert host_canary.read_bytes() == text, name
    strange = box.sh("find /workspace -type b -o -type c -o -type p; find /workspace -perm -4000 -o -perm -2000")
    assert strange.stdout == b"", strange.stdout
    assert not (box.tree / "up").exists() and not (box.tree / "workspace/up").is_symlink()


def test_control_a_naive_unpack_on_the_host_is_led_out(host_canary: Path, into: Path) -> None:
    data = hostile_tars(host_canary)["link then file"]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:  # what `extractall` did before it had filters
            target = into / member.name
            if member.issym():
                target.symlink_to(member.linkname)
            else:
                extracted = archive.extractfile(member)
                assert extracted is not None
                target.write_bytes(extracted.read())
    assert host_canary.read_bytes() == b"x"


def test_what_is_copied_out_is_links_as_links_and_nothing_of_the_host(
    planted: Box, host_canary: Path, into: Path
) -> None:
    told = planted.lab.call("get_tar", instance=planted.instance, path="/workspace")
    data = base64.b64decode(told["data"])
    assert host_canary.read_bytes() not in data
    kinds = {name.rpartition("workspace/")[2]: (kind, target) for name, kind, target in told["members"]}
    assert kinds["out/link"][0] == tarfile.SYMTYPE.decode()
    # The command line's own unpacking, into a directory where earlier links lie in wait.
    (into / "workspace").mkdir()
    (into / "workspace/out").symlink_to(host_canary.parent)
    before = sorted(path.name for path in host_canary.parent.iterdir())
    with tarfile.open(fileobj=io.BytesIO(data)) as archive, contextlib.suppress(CorralError, OSError):
        unpack(archive, str(into), "workspace")
    assert sorted(path.name for path in host_canary.parent.iterdir()) == before
    assert not holds(into, host_canary.read_bytes())


def test_swapping_directories_for_links_while_the_host_works_leads_nowhere(
    box: Box, host_canary: Path, into: Path
) -> None:
    text = host_canary.read_bytes()
    before = sorted(path.name for path in host_canary.parent.iterdir())
    box.sh("mkdir -p /workspace/swap /workspace/out; echo mine > /workspace/swap/canary")
    racer = box.start_python(
        PRELUDE
        + r"""
os.chdir("/workspace")
os.symlink(sys.argv[1], "other")
os.symlink(sys.argv[1], "out/other")
os.mkdir("out/swap")
open("out/swap/canary", "w").write("mine")
exchange = 316 if os.uname().machine == "x86_64" else 276
end = time.monotonic() + 25
while time.monotonic() < end:
    for a, b in ((b"swap", b"other"), (b"out/swap", b"out/other")):
        libc.syscall(ctypes.c_long(exchange), -100, a, -100, b, 2)
""",
        str(host_canary.parent),
    )
    data = base64.b64encode(b"written by the host").decode()
    reached: set[str] = set()
    for turn in range(60):
        for path in ("swap/canary", "swap/new", "out/swap/canary"):
            try:
                box.lab.call("put", instance=box.instance, files=[[path, 0o644, data]])
                reached.add("put")
            except Refused as refusal:
                assert refusal.code in ("invalid_value", "infra_error", "not_found", "conflict"), refusal
        if turn % 6 == 0:
            box.lab.call("collect", instance=box.instance, outputs=["out/**", "swap/**"], into=str(into / str(turn)))
    box.lab.call("end", exec_id=racer, why="cancelled")
    assert reached, "no write ever met the directory: nothing was tried"
    assert host_canary.read_bytes() == text
    assert sorted(path.name for path in host_canary.parent.iterdir()) == before
    assert not holds(into, text)


def test_the_trees_of_other_sandboxes_and_of_the_node_are_not_inside(lab: Lab) -> None:
    secret = f"mark-{os.urandom(8).hex()}"
    with lab.box() as first, lab.box() as second:
        first.sh(f"echo {secret} > /workspace/{secret}")
        found = second.sh(
            f"find / -xdev -name '*{secret}*' 2>/dev/null; find /workspace /home /var/tmp /tmp /run -name '*{secret}*'"
        )
        assert found.stdout == b"", found.stdout
        again = first.sh(f"find / -name '*{secret}*' 2>/dev/null")
        assert secret.encode() in again.stdout, "the search finds what is there"
