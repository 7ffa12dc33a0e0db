"""Archives and image layouts for tests, good ones and hostile ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Item = tuple[str, str, Any]
"""(kind, name, content or link): kind is file, program, dir, link, hard, char or fifo."""
_TYPES = {
    "dir": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "char": tarfile.CHRTYPE,
    "fifo": tarfile.FIFOTYPE,
}


def tar_of(items: Sequence[Item], form: int = tarfile.PAX_FORMAT) -> bytes:
    """An uncompressed tar of these entries, in this order, names as they are."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form, errors="surrogateescape") as tar:
        for kind, name, what in items:
            info = tarfile.TarInfo(name)
            info.mode = 0o6777 if kind == "program" else 0o755 if kind == "dir" else 0o644
            info.uid = info.gid = 12345
            info.type = _TYPES.get(kind, tarfile.REGTYPE)
            content = b""
            if kind in ("link", "hard"):
                info.linkname = what
            elif kind in ("file", "program"):
                content = what if isinstance(what, bytes) else str(what).encode()
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


class Layout:
    """An OCI image layout that is written blob by blob, so that a test can spoil any part."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "blobs" / "sha256").mkdir(parents=True)
        (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, content: bytes, media_type: str, **more: Any) -> Json:
        digest = hashlib.sha256(content).hexdigest()
        (self.place / "blobs" / "sha256" / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content), **more}

    def image(
        self,
        layers: Sequence[bytes],
        *,
        pack: Callable[[bytes], bytes] = gzip.compress,
        architecture: str = "amd64",
        config: Json | None = None,
        **more: Any,
    ) -> Json:
        """The descriptor of a manifest whose layers are these tars."""
        document = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(json.dumps(document).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(pack(tar), "application/vnd.oci.image.layer.v1.tar+gzip") for tar in layers],
        }
        return self.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json", **more)

    def index(self, *images: Json) -> Path:
        (self.place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(images)}))
        return self.place
