"""Templates of archives and image layouts: what strangers packed can fill its own tree and do nothing else."""

import asyncio
import bz2
import errno
import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from corral.errors import CorralError
from corral.node import templates_sealing
from corral.node.templates import Templates
from corral.node.templates_recipe import parse
from corral.node.templates_unpacking import Caps

from .layouts import Item, Layout, tar_of

SECRET = "token = ghp_" + "a1B2" * 9
PLATFORM = "linux/amd64"
GOOD: list[Item] = [
    ("dir", "bin", None),
    ("program", "bin/sh", b"#!"),
    ("link", "bin/ash", "sh"),
    ("file", "etc/motd", "你好"),
]


def templates(state: Path, caps: Caps | None = None, **members: Any) -> Templates:
    state.mkdir(exist_ok=True)
    (state / "shipped").mkdir(exist_ok=True)
    made = Templates(state, state / "shipped", caps)
    made.add(parse({"name": "mine", **members}, "test"))
    return made


def build(state: Path, tar: bytes, **more: Any) -> Path:
    state.mkdir(exist_ok=True)
    (state / "root.tar").write_bytes(tar)
    caps = more.pop("caps", None)
    made = templates(state, caps, kind="archive", archive=str(state / "root.tar"), **more)
    return Path(asyncio.run(made.ensure("mine")).path)


def build_image(state: Path, layout: Path, **more: Any) -> Path:
    members = {"kind": "oci", "image": str(layout), "platform": PLATFORM, **more}
    return Path(asyncio.run(templates(state, **members).ensure("mine")).path)


def refusal(state: Path, tar: bytes, **more: Any) -> str:
    """What the build says; nothing of it is left, nothing beside it was touched."""
    state.mkdir(exist_ok=True)
    outside = sorted(path for path in state.parent.rglob("*") if state not in path.parents)
    with pytest.raises(CorralError) as caught:
        build(state, tar, **more)
    assert caught.value.code == "template_unavailable"
    assert [path.name for path in (state / "base").iterdir()] == [".lock"]
    assert outside == sorted(path for path in state.parent.rglob("*") if state not in path.parents)
    return caught.value.detail


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir()
    return made


# -- the disk ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_fault_of_the_disk_is_not_the_archives(state: Path, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: bytes, *_: Any, **__: Any) -> None:
        raise OSError(fault, os.strerror(fault), path)

    monkeypatch.setattr(os, "utime", broken)
    with pytest.raises(CorralError, match=os.strerror(fault)) as caught:
        build(state, tar_of(GOOD))
    told = caught.value
    assert told.code == "template_unavailable"
    assert "mend" not in str(told.hint)
    assert ("the disk is full" in told.detail) == (fault != errno.EIO)
    assert ("free space on the disk of" in str(told.hint)) == (fault != errno.EIO)


def test_an_archive_that_the_disk_has_no_room_for_is_not_called_too_large(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(state)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    assert "the disk is full" in refusal(state, tar_of([*GOOD, ("file", "much", b"x" * 8192)]))


# -- archives ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"])
def test_an_archive_becomes_a_base_whatever_it_is_compressed_with(state: Path, pack: Any) -> None:
    root = build(state, pack(tar_of(GOOD)))
    assert (root / "bin/sh").read_bytes() == b"#!"
    assert os.readlink(root / "bin/ash") == "sh"
    assert (root / "etc/motd").read_text() == "你好"
    assert "sandbox:x:1000" in (root / "etc/passwd").read_text()


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the program zstd")
def test_an_archive_compressed_by_zstd_is_taken_and_a_damaged_one_refused(state: Path) -> None:
    packed = subprocess.run(["zstd", "-cq"], input=tar_of(GOOD), capture_output=True, check=True).stdout
    assert (build(state, packed) / "bin/sh").exists()
    spoiled = packed[:-40] + bytes(8) + packed[-32:]
    assert "damaged" in refusal(state / "other", spoiled)


def test_gzip_of_several_members_and_all_tar_formats_are_read(state: Path) -> None:
    long = "d/" * 60 + "n" * 120
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        items = [*GOOD] if form == tarfile.USTAR_FORMAT else [*GOOD, ("file", long, "x")]
        tar = tar_of(items, form)
        half = len(tar) // 2
        root = build(state / str(number), gzip.compress(tar[:half]) + gzip.compress(tar[half:]))
        assert (root / "etc/motd").read_text() == "你好"
        assert form == tarfile.USTAR_FORMAT or (root / long).read_text() == "x"


def test_owners_set_id_bits_and_devices_do_not_enter(state: Path) -> None:
    items: list[Item] = [("program", "bin/su", "x"), ("char", "dev/mem", None), ("fifo", "pipe", None)]
    root = build(state, tar_of(items))
    info = (root / "bin/su").stat()
    assert (info.st_mode & 0o7777, info.st_uid, info.st_gid) == (0o755, os.geteuid(), os.getegid())
    assert not (root / "dev/mem").exists()
    assert not (root / "pipe").exists()
    shown = templates(state, kind="archive", archive=str(state / "root.tar")).show("mine")
    assert shown["built_at"] is not None


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([("file", "../escape", "x")], "../escape: a name with .."),
        ([("file", "a/../../escape", "x")], "a name with .."),
        ([("file", "/tmp/escape", "x")], "/tmp/escape: an absolute name"),
        ([("dir", "/", None)], "an absolute name"),
        ([("file", "bad-\udcff", "x")], "the name is not UTF-8"),
        ([("hard", "own", "../../outside")], "own: hard link to ../../outside: a name with .."),
        ([("hard", "own", "/etc/passwd")], "an absolute name"),
        ([("link", "out", "/etc"), ("hard", "own", "out/passwd")], "which is no file of this tree"),
        ([("hard", "own", "nothing")], "which is no file of this tree"),
        ([("dir", "d", None), ("hard", "own", "d")], "which is no file of this tree"),
        ([("link", "a", "b"), ("link", "b", "a"), ("file", "a/x", "x")], "too many directories or links"),
        ([("file", "f", "x"), ("file", "f/x", "x")], "f is no directory"),
        ([("dir", "d/" * 300, None)], "300 directories in one another"),
        ([("file", "n" * 256, "x")], "a name of 256 bytes"),
        ([("link", "l", "")], "a link to nowhere"),
        ([("file", "home/me/.config", SECRET)], "home/me/.config looks like a credential"),
        ([("file", "twice", SECRET), ("file", "twice", "x")], "twice looks like a credential"),
    ],
    ids=lambda value: value[:24].replace("/", "_") if isinstance(value, str) else "",
)
def test_an_entry_that_no_tree_may_have_fails_the_build_and_is_named(state: Path, items: list[Item], told: str) -> None:
    form = tarfile.GNU_FORMAT if any("\udcff" in name for _, name, _ in items) else tarfile.PAX_FORMAT
    assert told in refusal(state, tar_of([*GOOD, *items], form))


def test_links_that_lead_out_are_resolved_inside_as_a_root_would(state: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    items: list[Item] = [
        ("link", "out", str(outside)),
        ("file", "out/kept", "theirs"),
        ("link", "up", "../../../../../../.." + str(outside)),
        ("file", "up/new", "theirs"),
        ("link", "etc", str(outside)),
        ("link", "var", "/"),
        ("link", "home", str(outside)),
    ]
    root = build(state, tar_of(items))
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "mine"
    assert (root / str(outside).lstrip("/") / "kept").read_text() == "theirs"
    assert (root / str(outside).lstrip("/") / "new").read_text() == "theirs"
    assert not (root / "etc").is_symlink()  # runtimes mount here, by the path on the host
    assert not (root / "var").is_symlink()
    assert (root / "var/tmp").is_dir()


def test_a_later_entry_replaces_an_earlier_one_and_not_what_shares_its_inode(state: Path) -> None:
    items: list[Item] = [
        ("file", "a", "first"), ("hard", "b", "a"), ("file", "a", "second"),
        ("dir", "d/e", None), ("file", "d/e/f", "x"), ("file", "d", "plain"),
    ]  # fmt: skip
    root = build(state, tar_of(items))
    assert ((root / "a").read_text(), (root / "b").read_text(), (root / "d").read_text()) == (
        "second",
        "first",
        "plain",
    )


def test_a_file_is_not_written_through_a_link_of_its_own_name(state: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    root = build(state, tar_of([("link", "x", str(target)), ("file", "x", "theirs")]))
    assert target.read_text() == "mine"
    assert (root / "x").read_text() == "theirs"


def test_bombs_end_at_the_caps(state: Path) -> None:
    caps = Caps(entries=50, size_bytes=1 << 20)
    many = tar_of([("file", f"f{n}", "") for n in range(60)])
    assert "more than 50 entries" in refusal(state / "many", many, caps=caps)
    large = gzip.compress(tar_of([("file", "big", bytes(2 << 20))]))
    assert "more than 1048576 bytes" in refusal(state / "large", large, caps=caps)
    linked = tar_of([("file", "a", bytes(300_000)), *(("hard", f"l{n}", "a") for n in range(5))])
    assert "more than 1048576 bytes" in refusal(state / "linked", linked, caps=caps)
    trailing = gzip.compress(tar_of(GOOD) + bytes(4 << 20))
    assert "unpacks to more than" in refusal(state / "trailing", trailing, caps=caps)


def test_a_header_with_an_extension_of_gigabytes_is_not_read_into_memory(state: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    info.size = 8 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    assert "an extension of 8589934592 bytes" in refusal(state, header + bytes(10240))


def test_sparse_files_and_unknown_types_are_refused(state: Path) -> None:
    for number, (kind, told) in enumerate(((tarfile.GNUTYPE_SPARSE, "sparse files"), (b"V", "unknown type"))):
        info = tarfile.TarInfo("odd")
        info.type = kind
        assert told in refusal(state / str(number), info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    modern = io.BytesIO()
    with tarfile.open(fileobj=modern, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("modern")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "99999999999"}
        tar.addfile(info)
    assert "modern: sparse files" in refusal(state / "modern", modern.getvalue())


def test_what_is_cut_off_or_no_archive_is_refused(state: Path) -> None:
    tar = tar_of([*GOOD, ("file", "long", b"x" * 5000)])
    packed = gzip.compress(os.urandom(4096) + tar)[: 4096 + 200]
    assert "cut off" in refusal(state / "plain", tar[:2000])
    assert "cut off" in refusal(state / "blocks", tar_of(GOOD)[: 512 * 4])
    assert "cut off" in refusal(state / "empty", b"")
    assert "tar archive" in refusal(state / "text", b"#!/bin/sh\n" * 200)
    assert "tar archive" in refusal(state / "packed", packed)
    assert "damaged" in refusal(state / "damaged", gzip.compress(tar)[:30] + b"\0" * 100)
    raw = zlib.compressobj(wbits=31)
    assert "cut off" in refusal(state / "half", raw.compress(tar) + raw.flush(zlib.Z_SYNC_FLUSH))


def test_a_digest_in_the_recipe_must_be_the_archives(state: Path) -> None:
    assert "the recipe says" in refusal(state, tar_of(GOOD), sha256="0" * 64)


# -- image layouts -------------------------------------------------------------------------------------------------------------
LOWER: list[Item] = [
    ("file", "etc/motd", "lower"), ("file", "gone", "x"), ("file", "tree/deep/x", "x"),
    ("file", "opaque/old", "x"), ("file", "opaque/sub/old", "x"), ("program", "bin/sh", "#!"),
]  # fmt: skip
UPPER: list[Item] = [
    ("file", "opaque/new", "x"), ("file", "opaque/sub/new", "x"), ("file", "opaque/.wh..wh..opq", ""),
    ("file", ".wh.gone", ""), ("file", ".wh.tree", ""), ("file", "etc/motd", "upper"), ("file", "fresh", "x"),
    ("file", ".wh.fresh", ""), ("hard", "bin/linked", "bin/sh"),
]  # fmt: skip


def test_layers_are_applied_in_order_with_whiteouts_and_opaque_directories(state: Path) -> None:
    layout = Layout(state / "image")
    config = {"Env": ["PATH=/bin", "A=1"], "WorkingDir": "/srv", "Entrypoint": ["/bin/sh"], "Cmd": ["-l"]}
    place = layout.index(layout.image([tar_of(LOWER), tar_of(UPPER)], config=config))
    root = build_image(state, place)
    assert (root / "etc/motd").read_text() == "upper"
    assert not (root / "gone").exists()
    assert not (root / "tree").exists()
    assert sorted(path.name for path in (root / "opaque").iterdir()) == ["new", "sub"]
    assert [path.name for path in (root / "opaque/sub").iterdir()] == ["new"]
    assert (root / "fresh").exists()  # a whiteout is about lower layers only
    assert (root / "bin/linked").read_text() == "#!"
    assert not list(root.rglob(".wh.*"))
    image = templates(state, kind="oci", image=str(place), platform=PLATFORM).show("mine")["image"]
    assert (image["env"], image["working_dir"], image["entrypoint"], image["cmd"]) == (
        config["Env"], "/srv", ["/bin/sh"], ["-l"],
    )  # fmt: skip
    assert image["platform"] == PLATFORM
    assert len(image["layers"]) == 2


def test_the_same_image_as_a_tar_gives_the_same_base(state: Path) -> None:
    layout = Layout(state / "image")
    place = layout.index(layout.image([tar_of(LOWER), tar_of(UPPER)]))
    packed = state / "image.tar"
    with tarfile.open(packed, "w") as tar:
        tar.add(place, ".")
    assert build_image(state / "a", place).name == build_image(state / "b", packed).name


def image_refusal(state: Path, layout: Path, **more: Any) -> str:
    with pytest.raises(CorralError) as caught:
        build_image(state, layout, **more)
    assert caught.value.code == "template_unavailable"
    assert [path.name for path in (state / "base").iterdir()] == [".lock"]
    return caught.value.detail


def test_a_credential_in_a_layer_fails_even_where_a_later_layer_deletes_it(state: Path) -> None:
    layout = Layout(state / "image")
    layers = [tar_of([("file", "root/.netrc", SECRET)]), tar_of([("file", "root/.wh..netrc", "")])]
    told = image_refusal(state, layout.index(layout.image(layers)))
    assert "root/.netrc of layer sha256:" in told
    assert "credential" in told


def test_a_credential_in_the_configuration_fails(state: Path) -> None:
    layout = Layout(state / "image")
    place = layout.index(layout.image([tar_of(LOWER)], config={"Env": [SECRET]}))
    assert "configuration looks like a credential" in image_refusal(state, place)


@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
def test_a_blob_with_another_digest_is_refused(state: Path, which: str) -> None:
    layout = Layout(state / "image")
    image = layout.image([tar_of(LOWER)])
    place = layout.index(image)
    blobs = place / "blobs" / "sha256"
    manifest = json.loads((blobs / image["digest"][7:]).read_text())
    chosen = {"manifest": image, "config": manifest["config"], "layer": manifest["layers"][0]}[which]
    path = blobs / chosen["digest"][7:]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    told = image_refusal(state, place)
    assert "its content has the digest" in told
    assert chosen["digest"] in told
    path.unlink()
    assert "is not in the layout" in image_refusal(state, place)


def test_a_layer_that_unpacks_to_something_else_than_the_configuration_says_is_refused(state: Path) -> None:
    layout = Layout(state / "image")
    place = layout.index(layout.image([tar_of(LOWER)], pack=lambda _: gzip.compress(tar_of(UPPER[:2]))))
    assert "the configuration says" in image_refusal(state, place)


@pytest.mark.parametrize(
    ("name", "told"),
    [(".wh...", "a whiteout of nothing"), (".wh.", "a whiteout of nothing"), ("../.wh.x", "a name with ..")],
)
def test_whiteouts_reach_nothing_but_names_of_the_tree(state: Path, name: str, told: str) -> None:
    layout = Layout(state / "image")
    place = layout.index(layout.image([tar_of(LOWER), tar_of([("file", name, "")])]))
    message = image_refusal(state, place)
    assert told in message
    assert f"{name}: " in message


def test_a_whiteout_below_a_link_that_leads_out_removes_nothing_outside(state: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    layout = Layout(state / "image")
    upper: list[Item] = [("file", "out/.wh.kept", ""), ("file", "out/.wh..wh..opq", "")]
    build_image(state, layout.index(layout.image([tar_of([("link", "out", str(outside))]), tar_of(upper)])))
    assert (outside / "kept").read_text() == "mine"


def test_the_platform_is_chosen_and_another_one_refused(state: Path) -> None:
    layout = Layout(state / "image")
    images = [
        layout.image(
            [tar_of([("file", "arch", arch)])], architecture=arch, platform={"os": "linux", "architecture": arch}
        )
        for arch in ("arm64", "amd64")
    ]
    note = layout.blob(b"{}", "application/vnd.oci.image.manifest.v1+json")
    index = {
        "schemaVersion": 2,
        "manifests": [*images, {**note, "platform": {"os": "unknown", "architecture": "unknown"}}],
    }
    nested = layout.blob(json.dumps(index).encode(), "application/vnd.oci.image.index.v1+json")
    place = layout.index(nested)
    assert (build_image(state / "a", place) / "arch").read_text() == "amd64"
    assert (build_image(state / "b", place, platform="linux/arm64") / "arch").read_text() == "arm64"
    assert "no image for linux/s390x" in image_refusal(state / "c", place, platform="linux/s390x")
    untold = layout.index(layout.image([tar_of(LOWER)], architecture="riscv64"))
    assert "the image is for linux/riscv64" in image_refusal(state / "d", untold)


def test_indexes_that_name_more_images_than_anybody_reads_are_refused_before_they_are_read(state: Path) -> None:
    layout = Layout(state / "image")
    kind = "application/vnd.oci.image.index.v1+json"
    nested = layout.blob(b"{}", "application/vnd.oci.image.manifest.v1+json")
    for _ in range(3):  # 600 references at each level: to follow all of them would take 600 ** 3 documents
        index = {"schemaVersion": 2, "manifests": [nested] * 600}
        nested = layout.blob(json.dumps(index).encode(), kind)
    assert "name more than 1000 images" in image_refusal(state, layout.index(nested))


def test_what_is_no_layout_is_told_as_that(state: Path) -> None:
    layout = Layout(state / "image")
    assert "has no index.json" in image_refusal(state, layout.place)
    (layout.place / "oci-layout").unlink()
    assert "this is no OCI layout" in image_refusal(state, layout.place)


def test_of_several_images_one_is_named_by_its_reference(state: Path) -> None:
    layout = Layout(state / "image")
    tag = "org.opencontainers.image.ref.name"
    place = layout.index(
        layout.image([tar_of([("file", "v", "1")])], annotations={tag: "one"}),
        layout.image([tar_of([("file", "v", "2")])], annotations={tag: "two"}),
    )
    assert "name one as reference: one" in image_refusal(state, place)
    assert (build_image(state, place, reference="two") / "v").read_text() == "2"


def test_without_a_platform_the_hosts_is_meant(state: Path) -> None:
    layout = Layout(state / "image")
    here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    place = layout.index(layout.image([tar_of(LOWER)], architecture=here))
    made = templates(state, kind="oci", image=str(place))
    assert asyncio.run(made.ensure("mine")).digest


def test_documents_that_are_none_are_refused(state: Path) -> None:
    layout = Layout(state / "image")
    (layout.place / "index.json").write_text("[" * 100_000)
    assert "index.json is no JSON" in image_refusal(state, layout.place)
    (layout.place / "index.json").write_text('{"manifests": [{"digest": "sha256:../../etc/passwd", "size": 1}]}')
    assert "no descriptor" in image_refusal(state, layout.place)
    (layout.place / "oci-layout").unlink()
    os.mkfifo(layout.place / "oci-layout")
    assert "oci-layout is no file" in image_refusal(state, layout.place)


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "tar"])
@pytest.mark.parametrize("what", ["oci-layout", "index.json", "blobs", "blobs/sha256", "manifest", "layer"])
def test_no_link_of_a_layout_is_followed_at_any_level(state: Path, tmp_path: Path, what: str, packed: bool) -> None:
    layout = Layout(state / "image")
    layer = tar_of(LOWER)
    image = layout.image([layer], pack=bytes)
    place = layout.index(image)
    digest = {"manifest": image["digest"][7:], "layer": hashlib.sha256(layer).hexdigest()}.get(what)
    path = place / "blobs/sha256" / digest if digest else place / what
    real = tmp_path / "real"  # its content is right: only that it is reached by a link is wrong
    path.rename(real)
    path.symlink_to(real)
    given = place
    if packed:
        given = state / "image.tar"
        with tarfile.open(given, "w") as tar:
            tar.add(place, ".")
    told = image_refusal(state, given)
    assert f"{path.name} is " in told
    assert "link" in told


def test_a_device_in_the_place_of_a_file_is_not_opened(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(state / "image")
    place = layout.index(layout.image([tar_of(LOWER)]))
    (place / "index.json").unlink()
    os.mkfifo(place / "index.json")
    opened: list[int] = []
    real = os.open

    def noting(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == "index.json":
            opened.append(flags)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", noting)
    assert "index.json is no file" in image_refusal(state, place)
    assert opened
    assert all(flags & os.O_PATH for flags in opened)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rootfs": [1]}, "rootfs of the configuration is no JSON object"),
        ({"config": "x"}, "config of the configuration is no JSON object"),
        ({"config": {"Env": [1]}}, "Env of the configuration is no list of texts"),
        ({"config": {"Cmd": "sh"}}, "Cmd of the configuration is no list of texts"),
        ({"config": {"User": 0}}, "User of the configuration is no text"),
        ({"config": {"WorkingDir": "\ud800"}}, "config is no JSON"),
    ],
)
def test_a_configuration_with_values_of_other_types_is_refused(state: Path, config: Any, told: str) -> None:
    layout = Layout(state / "image")
    layer = tar_of(LOWER)
    good = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "config": layout.blob(json.dumps(good | config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [layout.blob(layer, "application/vnd.oci.image.layer.v1.tar")],
    }
    image = layout.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    assert told in image_refusal(state, layout.index(image))


def test_a_media_type_that_is_no_text_is_refused(state: Path) -> None:
    layout = Layout(state / "image")
    place = layout.index({**layout.image([tar_of(LOWER)]), "mediaType": ["x"]})
    assert "the layout has: nothing" in image_refusal(state, place)


def test_directories_made_on_the_way_count_and_layers_share_one_budget(state: Path) -> None:
    caps = Caps(entries=60, size_bytes=1 << 20)
    deep = tar_of([("file", f"{n}/" + "d/" * 20 + "x", "") for n in range(3)])
    assert "more than 60 entries" in refusal(state / "deep", deep, caps=caps)
    layout = Layout(state / "image")
    # what is skipped in a layer (after its end mark) counts for the whole template
    layers = [tar_of([("file", f"f{n}", "x")]) + bytes(400_000) for n in range(4)]
    place = layout.index(layout.image(layers))
    made = templates(state, caps, kind="oci", image=str(place), platform=PLATFORM)
    with pytest.raises(CorralError, match="unpacks to more than"):
        asyncio.run(made.ensure("mine"))


def test_credentials_are_found_in_long_files_and_in_their_other_forms_and_password_files_do_not_enter(
    state: Path,
) -> None:
    body = "MIIEpAIBAAKCAQEA" * 8
    forms = {
        "json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\n' + body[:64] + "\\n" + body[64:] + '\\n"}',
        "pem": "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,AB\n\n" + body,
        "long": "\n" * ((1 << 20) - 20) + SECRET + "\n" * (1 << 20),
    }
    for name, content in forms.items():
        assert f"{name} looks like a credential" in refusal(state / name, tar_of([("file", name, content)]))
    root = build(state / "plain", tar_of([("file", "etc/shadow", "root:x"), ("file", "etc/gshadow-", "x")]))
    assert not (root / "etc/shadow").exists()
    assert not (root / "etc/gshadow-").exists()


def test_a_compiled_program_is_not_searched_however_long_it_is() -> None:
    key = b"AKIA" + b"A" * 16
    search = templates_sealing.CredentialSearch("t", b"usr/bin/program")
    for block in (b"\x7fELF".ljust(1 << 20, b"\0"), b" " + key + b" ", bytes(1 << 20), key):
        search.feed(block)
    search.finish()
    text = templates_sealing.CredentialSearch("t", b"etc/config")
    with pytest.raises(CorralError, match="looks like a credential"):
        for block in (bytes(1 << 20), b" " + key + b" ", bytes(1 << 20)):
            text.feed(block)


def test_what_was_left_out_of_an_archive_is_shown(state: Path) -> None:
    tar = tar_of([*GOOD, ("char", "dev/null", None), ("fifo", "dev/pipe", None)])
    build(state, tar)
    shown = Templates(state, state / "shipped").show("mine")
    assert shown["archive"] == {"sha256": hashlib.sha256(tar).hexdigest(), "left_out": {"device": 2}}
    assert shown["image"] is None
