"""Files that a request brings with it."""

from __future__ import annotations

from typing import Any

from corral.domain.quantities import shown
from corral.domain.request.asked import FileIn, ResourceWishes
from corral.domain.request.fields import Fields
from corral.domain.values import bytes_of, file_mode, invalid, nearest, pointer, relative_path, utf8_of

MAX_FILES = 10_000


def read_files(fields: Fields) -> tuple[FileIn, ...]:
    value = fields.doc.get("files")
    if value is None:
        return ()
    if not isinstance(value, list):
        fields.fail(
            "files", f"files is a list of objects, not {shown(value)}", 'like [{"path": "a.txt", "content": "…"}]'
        )
    if len(value) > MAX_FILES:
        fields.fail(
            "files", f"there are {len(value)} files; at most {MAX_FILES} go inline", "send a tar by the file API"
        )
    seen: dict[str, FileIn] = {}
    for index, item in enumerate(value):
        made = _file(item, index)
        if made.path in seen:
            invalid(pointer("files", index, "path"), f"{shown(made.path)} is given twice", "leave one of them out")
        seen[made.path] = made
    for index, path in enumerate(seen):
        parts = path.split("/")
        for cut in range(1, len(parts)):
            above = seen.get("/".join(parts[:cut]))
            if above is not None and above.content is not None:
                invalid(
                    pointer("files", index, "path"),
                    f"{shown(path)} lies below {shown(above.path)}, which is a file",
                    "rename one of them",
                )
    return tuple(seen.values())


def _file(item: Any, index: int) -> FileIn:
    at = pointer("files", index)
    if not isinstance(item, dict):
        invalid(at, f"a file is an object, not {shown(item)}", 'like {"path": "a.txt", "content": "…"}')
    known = ("path", "content", "base64", "mode", "type")
    for name in item:
        if name not in known:
            guess = nearest(str(name), known)
            hint = f"did you mean {guess}?" if guess else f"known: {', '.join(known)}"
            invalid(pointer("files", index, name), f"a file has no field {shown(name)}", hint)
    path = relative_path(item.get("path"), f"{at}/path")
    text, encoded, kind = item.get("content"), item.get("base64"), item.get("type")
    if kind not in (None, "file", "dir"):
        invalid(f"{at}/type", f"there is no type {shown(kind)}", "file (the default) or dir")
    if kind == "dir":
        if text is not None or encoded is not None:
            invalid(at, f"the directory {shown(path)} has content", "put files below it")
        mode = 0o755 if item.get("mode") is None else file_mode(item["mode"], f"{at}/mode")
        return FileIn(path, None, mode)
    if (text is None) == (encoded is None):
        invalid(at, f"the file {shown(path)} needs exactly one of content and base64", "content is text, base64 bytes")
    if encoded is not None:
        content = bytes_of(encoded, f"{at}/base64")
    elif isinstance(text, str):
        content = utf8_of(text, f"{at}/content")
    else:
        invalid(f"{at}/content", f"content is text, not {shown(text)}", "bytes go as base64")
    return FileIn(path, content, file_mode(item.get("mode"), f"{at}/mode"))


def must_fit(fields: Fields, files: tuple[FileIn, ...], wishes: ResourceWishes) -> None:
    """Files that the wished disk cannot hold are the caller's mistake, told before anything is made."""
    size = sum(len(file.content or b"") for file in files)
    if wishes.disk_bytes is not None and size > wishes.disk_bytes:
        fields.fail("files", f"the files have {size} bytes, the disk {wishes.disk_bytes}", "ask for a larger disk")
