"""Write what a run left as artifacts into a local directory. The paths come from a sandbox and are not trusted."""

from __future__ import annotations

import os
from typing import Any

from corral.client import Transport
from corral.errors import CorralError

Json = dict[str, Any]


def write(transport: Transport, document: Json, directory: str) -> None:
    """Each artifact under `directory`: its path below /workspace/out if all lie there, else its path below /workspace."""
    artifacts = (document.get("result") or {}).get("artifacts") or []
    paths = [_parts(str(a["path"])) for a in artifacts]
    if paths and all(len(parts) > 1 and parts[0] == "out" for parts in paths):
        paths = [parts[1:] for parts in paths]
    try:
        os.makedirs(directory, exist_ok=True)
        for artifact, parts in zip(artifacts, paths, strict=True):
            _fetch(transport, str(artifact["url"]), os.path.join(directory, *parts))
    except OSError as error:
        raise CorralError(
            "infra_error",
            f"cannot write {error.filename or directory!r}: {error.strerror}",
            hint=f"the run has ended; its artifacts are kept under {document.get('id')}",
            field="--out",
            retryable=False,
        ) from error


def _parts(path: str) -> list[str]:
    parts = path.removeprefix("/workspace/").lstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise CorralError("infra_error", f"the service named an artifact {path!r}", retryable=False)
    return parts


def _fetch(transport: Transport, url: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    part = f"{target}.{os.getpid()}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            for block in transport.download(url):
                file.write(block)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise
