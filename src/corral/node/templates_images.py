"""The kinds `archive` (a tar of a root file system) and `oci` (an image layout, a directory or its tar), both of strangers.

Every blob of a layout is read once, while its digest is computed, and what was made of it is thrown away if that is another than the
manifest says; the digests of the unpacked layers are compared too. A layer is searched for credentials even where a later one removes
the file. The image's own words about users, environment and entry point are noted, not obeyed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from corral.errors import CorralError
from corral.node.templates_recipe import Recipe
from corral.node.templates_sealing import refuse_credential
from corral.node.templates_tar import Counted, Refused
from corral.node.templates_unpacking import Caps, Tree

Json = dict[str, Any]
Progress = Callable[[str, float | None], None]
MAX_DOCUMENT = 4 * 1024 * 1024
MAX_LAYERS = 512
MAX_INDEXES = 4
MAX_IMAGES = 1000
"""Of a layout, through all of its indexes: with four levels of a thousand each, reading them would not end."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
_MANIFESTS = frozenset(
    {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm/v7", "i686": "386"}
_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")


def unpack_archive(recipe: Recipe, root: Path, progress: Progress, caps: Caps) -> Json:
    """Fill `root`; -> what there is to tell about the archive. `template_unavailable` names the entry to blame."""
    progress(f"template {recipe.name}: unpacking {recipe.archive}", 0.1)
    tree = Tree(recipe.name, root, caps.within(root))
    with _blamed(recipe, recipe.archive or ""), _opened(recipe.archive or "") as (file, size):
        raw = Counted(file, size)
        tree.unpack(raw)
        found = raw.finish()
        if recipe.sha256 is not None and found != recipe.sha256:
            raise Refused(f"its SHA-256 is {found}, the recipe says {recipe.sha256}")
    return {"archive": {"sha256": found, "left_out": dict(tree.left_out)}}


def pin(path: Path) -> str:
    """The `sha256` of a recipe for what lies there now: of the file, or of a layout directory's index.json."""
    with _inside(path, "index.json") if path.is_dir() else _opened(path) as (file, size):
        return Counted(file, size).finish()


def unpack_image(recipe: Recipe, root: Path, progress: Progress, caps: Caps) -> Json:
    """Fill `root` from the layers of one manifest; -> the image's digest, platform and configuration."""
    layout = Path(recipe.image or "")
    with _blamed(recipe, str(layout)):
        if not layout.is_dir():
            progress(f"template {recipe.name}: opening {layout}", 0.05)
            layout, caps = _unpack_layout(recipe, layout, root.parent / "layout", caps)
        return _Image(recipe, layout, progress).unpack(Tree(recipe.name, root, caps.within(root)))


def _unpack_layout(recipe: Recipe, packed: Path, into: Path, caps: Caps) -> tuple[Path, Caps]:
    """-> the layout, and what is left of the caps for its layers."""
    into.mkdir()
    tree = Tree(recipe.name, into, caps.within(into))
    with _opened(packed) as (file, size):
        raw = Counted(file, size)
        tree.unpack(raw)
        found = raw.finish()
    if recipe.sha256 is not None and found != recipe.sha256:
        raise Refused(f"its SHA-256 is {found}, the recipe says {recipe.sha256}")
    return into, tree.left()


class _Image:
    """One image of a layout."""

    def __init__(self, recipe: Recipe, layout: Path, progress: Progress) -> None:
        self._recipe = recipe
        self._layout = layout
        self._progress = progress
        self._descriptors = 0

    def unpack(self, tree: Tree) -> Json:
        try:
            with _inside(self._layout, "oci-layout") as (file, _):
                mark = _parsed(file.read(MAX_DOCUMENT), "oci-layout")
        except FileNotFoundError:
            raise Refused("this is no OCI layout: it has no file oci-layout") from None
        if str(mark.get("imageLayoutVersion", "")).partition(".")[0] != "1":
            raise Refused("oci-layout: this is no layout of version 1")
        try:
            with _inside(self._layout, "index.json") as (file, _):
                raw = file.read(MAX_DOCUMENT)
        except FileNotFoundError:
            raise Refused("the layout has no index.json") from None
        found = hashlib.sha256(raw).hexdigest()
        if Path(self._recipe.image or "").is_dir() and self._recipe.sha256 not in (None, found):
            raise Refused(f"the SHA-256 of its index.json is {found}, the recipe says {self._recipe.sha256}")
        index = _parsed(raw, "index.json")
        chosen = self._choose(list(self._images(index, 0)))
        manifest = self._document(chosen, "manifest")
        config_raw = self._blob(manifest.get("config"), "config")
        refuse_credential(self._recipe.name, b"the image's configuration", config_raw)
        config = _parsed(config_raw, "config")
        self._check_platform(config)
        layers = manifest.get("layers")
        diffs = _member(config, "rootfs").get("diff_ids")
        if not isinstance(layers, list) or not isinstance(diffs, list) or len(layers) != len(diffs):
            raise Refused("manifest and configuration do not have the same number of layers")
        if len(layers) > MAX_LAYERS:
            raise Refused(f"there are more than {MAX_LAYERS} layers")
        inside = _member(config, "config")
        told = {
            "env": _texts(inside, "Env"),
            "entrypoint": _texts(inside, "Entrypoint"),
            "cmd": _texts(inside, "Cmd"),
            "working_dir": _text(inside, "WorkingDir"),
            "user": _text(inside, "User"),
        }
        for number, (layer, diff) in enumerate(zip(layers, diffs, strict=True)):
            self._progress(
                f"template {self._recipe.name}: layer {number + 1} of {len(layers)}", 0.1 + 0.7 * number / len(layers)
            )
            self._layer(tree, layer, diff)
        return {
            "image": {
                "digest": chosen["digest"],
                "platform": _platform_of(config),
                "layers": [layer["digest"] for layer in layers],
                "left_out": dict(tree.left_out),
                **told,
            }
        }

    def _images(self, index: Json, depth: int) -> Iterator[Json]:
        """Descriptors of manifests; of nested indexes too. The tag on an index holds for what is in it."""
        manifests = index.get("manifests")
        if depth > MAX_INDEXES or not isinstance(manifests, list):
            raise Refused("the index is damaged, or indexes are nested too deeply")
        self._descriptors += len(manifests)
        if self._descriptors > MAX_IMAGES:
            raise Refused(f"its indexes name more than {MAX_IMAGES} images")
        for descriptor in manifests:
            _check_descriptor(descriptor, "index")
            if str(descriptor.get("mediaType")) in _INDEXES:
                names = {name: value for name, value in _annotations(descriptor).items() if name in _NAMES}
                for inner in self._images(self._document(descriptor, "index"), depth + 1):
                    yield {**inner, "annotations": {**names, **_annotations(inner)}}
            elif str(descriptor.get("mediaType")) in _MANIFESTS:
                yield descriptor

    def _choose(self, images: list[Json]) -> Json:
        wanted = self._recipe.platform or _host_platform()
        named = [
            image
            for image in images
            if self._recipe.reference is None
            or self._recipe.reference in (_annotations(image).get(name) for name in _NAMES)
        ]
        told = [image for image in named if isinstance(image.get("platform"), dict)]
        fitting = [image for image in told if _fits(_platform_of(image["platform"]), wanted)]
        # An image that does not tell its platform in the index tells it in its configuration.
        found = fitting or [image for image in named if image not in told]
        if len({image["digest"] for image in found}) == 1:
            return found[0]
        known = sorted(
            {f"{_annotations(i).get(_NAMES[0]) or i['digest']} ({_platform_of(i.get('platform'))})" for i in images}
        )
        if not found:
            what = f"{self._recipe.reference or 'image'} for {wanted}"
            raise Refused(f"there is no {what}; the layout has: {', '.join(known) or 'nothing'}")
        raise Refused(f"there are several images, name one as reference: {', '.join(known)}")

    def _check_platform(self, config: Json) -> None:
        wanted = self._recipe.platform or _host_platform()
        found = _platform_of(config)
        if not _fits(found, wanted):
            raise Refused(f"the image is for {found}, not {wanted}")

    def _layer(self, tree: Tree, descriptor: Any, diff: Any) -> None:
        _check_descriptor(descriptor, "layer")
        digest = descriptor["digest"]
        if "+encrypted" in str(descriptor.get("mediaType", "")):
            raise Refused(f"layer {digest} is encrypted")
        with self._read(descriptor) as raw:
            try:
                plain, _ = tree.unpack(raw, layer=digest)
            except Refused as error:
                _same(digest, raw, f"layer {digest}")  # other bytes than were meant is the better explanation
                raise Refused(f"layer {digest}: {error}") from None
            _same(digest, raw, f"layer {digest}")
        if isinstance(diff, str) and diff.startswith("sha256:") and diff != f"sha256:{plain}":
            raise Refused(f"layer {digest} unpacks to sha256:{plain}, the configuration says {diff}")

    def _document(self, descriptor: Any, what: str) -> Json:
        return _parsed(self._blob(descriptor, what), what)

    def _blob(self, descriptor: Any, what: str) -> bytes:
        _check_descriptor(descriptor, what)
        if descriptor["size"] > MAX_DOCUMENT:
            raise Refused(f"the {what} has {descriptor['size']} bytes")
        with self._read(descriptor) as raw:
            content = b"".join(iter(lambda: raw.read(65536), b""))
            _same(descriptor["digest"], raw, f"{what} {descriptor['digest']}")
        return content

    @contextmanager
    def _read(self, descriptor: Json) -> Iterator[Counted]:
        algorithm, _, name = descriptor["digest"].partition(":")
        try:
            with _inside(self._layout, "blobs", algorithm, name) as (file, size):
                if size != descriptor["size"]:
                    raise Refused(f"{descriptor['digest']} has {size} bytes, its descriptor says {descriptor['size']}")
                yield Counted(file, size, algorithm)
        except FileNotFoundError:
            raise Refused(f"{descriptor['digest']} is not in the layout") from None


def _same(digest: str, raw: Counted, what: str) -> None:
    found = f"{digest.partition(':')[0]}:{raw.finish()}"
    if found != digest:
        raise Refused(f"{what}: its content has the digest {found}")


def _check_descriptor(descriptor: Any, what: str) -> None:
    if not isinstance(descriptor, dict) or not _DIGEST.fullmatch(str(descriptor.get("digest"))):
        raise Refused(f"the {what} has no descriptor with a SHA-256 or SHA-512 digest")
    size = descriptor.get("size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise Refused(f"the descriptor of {descriptor['digest']} has no size")


def _annotations(descriptor: Json) -> Json:
    found = descriptor.get("annotations")
    return found if isinstance(found, dict) else {}


def _parsed(raw: bytes, what: str) -> Json:
    try:
        document = json.loads(raw)
        json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate could be neither shown nor kept
    except (ValueError, RecursionError):
        raise Refused(f"{what} is no JSON") from None
    if not isinstance(document, dict):
        raise Refused(f"{what} is no JSON object")
    return document


def _member(document: Json, name: str) -> Json:
    found = document.get(name)
    if found is not None and not isinstance(found, dict):
        raise Refused(f"{name} of the configuration is no JSON object")
    return found or {}


def _texts(document: Json, name: str) -> list[str]:
    found = document.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise Refused(f"{name} of the configuration is no list of texts")
    return found


def _text(document: Json, name: str) -> str | None:
    found = document.get(name)
    if found is not None and not isinstance(found, str):
        raise Refused(f"{name} of the configuration is no text")
    return found or None


def _platform_of(document: Any) -> str:
    if not isinstance(document, dict):
        return "unknown"
    parts = [document.get("os"), document.get("architecture"), document.get("variant")]
    return "/".join(str(part) for part in parts if part)


def _fits(found: str, wanted: str) -> bool:
    """A variant counts where both name one."""
    (kind, arch, variant), (kind_wanted, arch_wanted, variant_wanted) = (
        (*text.split("/", 2), "", "")[:3] for text in (found, wanted)
    )
    same_variant = variant == variant_wanted or not variant or not variant_wanted
    return (kind, arch) == (kind_wanted, arch_wanted) and same_variant


def _host_platform() -> str:
    return f"linux/{_MACHINES.get(platform.machine(), platform.machine())}"


@contextmanager
def _opened(path: str | Path, directory: int | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size, whatever else may lie there is not opened; with `directory` a name in it, which is no link."""
    follow = os.O_NOFOLLOW if directory is not None else 0
    place = os.open(path, os.O_PATH | os.O_CLOEXEC | follow, dir_fd=directory)
    try:
        info = os.fstat(place)
        if not stat.S_ISREG(info.st_mode):
            raise Refused(f"{os.path.basename(path)} is {'a link' if stat.S_ISLNK(info.st_mode) else 'no file'}")
        fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(place)
    with open(fd, "rb") as file:
        yield file, info.st_size


@contextmanager
def _inside(layout: Path, *parts: str) -> Iterator[tuple[BinaryIO, int]]:
    """A file of a layout, which may be a stranger's: no link is followed at any level below it."""
    directory = os.open(layout, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            try:
                below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except NotADirectoryError:
                raise Refused(f"{part} is no directory, or a link") from None
            os.close(directory)
            directory = below
        with _opened(parts[-1], directory) as found:
            yield found
    finally:
        os.close(directory)


@contextmanager
def _blamed(recipe: Recipe, what: str) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise CorralError(
            "template_unavailable",
            f"template {recipe.name}: {what}: {error}",
            hint=f"nothing of its content was kept; mend or re-export it and build again, or: corral template rm {recipe.name}",
        ) from None
