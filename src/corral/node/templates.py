"""Templates: recipe (YAML, from the operator) -> immutable, content-addressed base tree under STATE/base.

Recipes are the shipped ones and what the operator added under STATE/templates; no caller can name anything else. Four kinds:
`frozen`, an allow-list of the host's programs copied once with what they load; `debian`, the distribution's packages; `archive`, a
tar of a root file system; `oci`, an image layout. One module each (`templates_*`).

A base is named by the digest of its content (paths, kinds, modes, bytes), is complete or absent (built aside, then renamed), and is
never changed: `refresh`, or another recipe of the same name, makes a new one beside it, and sandboxes keep theirs. A build fails when
a file looks like a credential (A4). Every base has the directories that runtimes mount over, and `sandbox` (1000) in /etc/passwd.

STATE/base holds per template NAME.json (which base it has), per base a directory and DIGEST.about.json (what is known of it; its
time is when the base was last some template's), and `.build-*` while something is made or removed, under `.lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral import config
from corral.errors import CorralError
from corral.linux import userns
from corral.node import templates_confined, templates_debian
from corral.node.templates_confined import Lack
from corral.node.templates_frozen import freeze
from corral.node.templates_images import pin, unpack_archive, unpack_image
from corral.node.templates_recipe import NAME, TOOLS, Recipe, parse
from corral.node.templates_sealing import find_program, furnish, seal
from corral.node.templates_tar import Refused
from corral.node.templates_unpacking import Caps

Json = dict[str, Any]
Progress = Callable[[str, float | None], None]
InUse = Callable[[], frozenset[str]]
"""Digests of the bases that somebody stands on, as it is when it is called."""
FACTS = ("size_bytes", "files", "built_at", "build_s", "packages", "archive", "image")
"""What is told of a base from what its build noted."""
UNUSED_S = 24 * 3600.0
"""How long a base that no template has any more is kept."""


@dataclass(frozen=True)
class Template:
    """A built base: `path` is the root file system, `languages` those whose tool is in it."""

    name: str
    digest: str
    path: str
    languages: tuple[str, ...]
    seccomp: str = "default"
    """Profile of system calls that the recipe asked for when it was built."""


class Templates:
    """The operator's recipes (the directory `recipes`, and STATE/templates) and their bases under `state_dir`."""

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        recipes: str | os.PathLike[str],
        caps: Caps | None = None,
        ids: userns.SubordinateRange | None = None,
    ) -> None:
        """`ids`: of the installation, for what root builds as nobody of this host; without one this store claims its own."""
        self._state = Path(state_dir)
        self._ids = ids or userns.SubordinateRange(f"templates of {self._state}", state_dir=str(self._state))
        self._store = self._state / "base"
        self._places = (Path(recipes), self._state / "templates")
        self._caps = caps or Caps()
        self._building = threading.Lock()
        self._guard = threading.Lock()
        self._held: Counter[str] = Counter()
        self._parsed: dict[Path, tuple[tuple[int, int], Recipe]] = {}

    # -- recipes -------------------------------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Known template names."""
        return sorted({path.stem for place in self._places for path in place.glob("*.yaml")})

    def recipe(self, name: str) -> Recipe:
        """The recipe of a name; `not_found` with the known names."""
        if NAME.fullmatch(name):
            for path in (place / f"{name}.yaml" for place in self._places):
                with contextlib.suppress(FileNotFoundError):
                    return self._read(path)
        known = ", ".join(self.names())
        raise CorralError(
            "not_found", f"there is no template {name!r}", hint=f"known templates: {known}", field="/template"
        )

    def _read(self, path: Path) -> Recipe:
        info = path.stat()
        stamp = (info.st_mtime_ns, info.st_size)
        known = self._parsed.get(path)
        if known is None or known[0] != stamp:
            known = self._parsed[path] = (stamp, load(path, str(self._state / "cache")))
            if known[1].name != path.stem:
                raise CorralError("invalid_value", f"template recipe {path.name}: its name is {known[1].name}")
        return known[1]

    def add(self, recipe: Recipe) -> None:
        """Make a recipe of the operator known, in place of an earlier one; `already_exists` for a shipped name."""
        import yaml

        if (self._places[0] / f"{recipe.name}.yaml").exists():
            raise CorralError(
                "already_exists", f"the template {recipe.name} is shipped", hint="give the recipe another name"
            )
        place = self._places[1]
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe.document(), allow_unicode=True, sort_keys=False)
        _replace(place / f"{recipe.name}.yaml", text)

    def add_file(self, path: str, name: str | None = None) -> str:
        """Make the recipe in a file known; -> its name. Paths in it are relative to where it lies."""
        recipe = load(path, str(self._state / "cache"))
        here = os.path.dirname(os.path.abspath(path))
        changes: Json = {} if name is None else {"name": name}
        for member in ("archive", "image"):
            if (found := getattr(recipe, member)) is not None:
                changes[member] = os.path.normpath(os.path.join(here, found))
        recipe = parse(recipe.document() | changes, os.path.basename(path))
        self.add(recipe)
        return recipe.name

    def add_packed(self, kind: str, path: str, name: str, more: Json) -> str:
        """Make a recipe for an archive or image as it is now; another content later is another recipe."""
        path = os.path.abspath(path)
        try:
            found = pin(Path(path))
        except (OSError, Refused) as error:
            raise CorralError("invalid_value", f"{path}: {getattr(error, 'strerror', None) or error}") from None
        member = "archive" if kind == "archive" else "image"
        document = {"name": name, "kind": kind, member: path, "sha256": found, "languages": TOOLS}
        self.add(parse(document | {k: v for k, v in more.items() if v is not None}, path))
        return name

    # -- what there is -------------------------------------------------------------------------------------------------------------
    def built(self, name: str) -> Template | None:
        """The base of a template if it is there; does no work."""
        record = self._record(name)
        if record is None or not os.path.isdir(record["path"]):
            return None
        profile = record.get("seccomp") or "default"
        return Template(name, record["digest"], record["path"], tuple(record["languages"]), profile)

    def _record(self, name: str) -> Json | None:
        try:
            record: Json = json.loads((self._store / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return record if {"digest", "path", "languages"} <= record.keys() else None

    def describe(self) -> list[Json]:
        """`{"name","digest","available","reason","languages","description"...}` per template; builds nothing."""
        return [self._summary(name) for name in self.names()]

    def _summary(self, name: str) -> Json:
        try:
            recipe, reason = self.recipe(name), None
        except CorralError as error:  # one bad file is told of, and hides no other
            recipe, reason = Recipe(name, "frozen", "a recipe that cannot be read"), error.detail
        built = self.built(name)
        if built is None:
            lack = self._cannot_build(recipe)
            reason = reason or (lack.reason if lack else None)
        return {
            "name": name,
            "digest": built.digest if built else None,
            "available": built is not None or reason is None,
            "reason": None if built else reason,
            "languages": sorted(built.languages if built else recipe.languages),
            "description": recipe.description,
            "kind": recipe.kind,
            "skills": list(recipe.skills),
        }

    def show(self, name: str) -> Json:
        """Everything that is known of one template; `not_found`. Members that only a built base has are null before."""
        recipe, built = self.recipe(name), self.built(name)
        about = self._about(built.path) if built else {}
        document = recipe.document()
        return {
            **self._summary(name),
            "path": built.path if built else None,
            **{fact: about.get(fact) for fact in FACTS},
            "recipe": document,
            **{word: document.get(word) for word in ("start", "ready", "health", "stop_signal")},
        }

    def disk_use(self, keep: frozenset[str]) -> Json:
        """Of all bases: count and bytes, and how much of it no template has and no digest of `keep` needs."""
        used = {record["digest"] for name in self.names() if (record := self._record(name))} | keep
        bases = {path: self._about(str(path)) for path in self._bases()}
        unused = [about for about in bases.values() if about.get("digest") not in used]
        return {
            "count": len(bases),
            "size_bytes": sum(about.get("size_bytes") or 0 for about in bases.values()),
            "unused": len(unused),
            "unused_bytes": sum(about.get("size_bytes") or 0 for about in unused),
        }

    def _bases(self) -> list[Path]:
        return [path for path in self._store.glob("*") if len(path.name) == 24 and path.is_dir()]

    def _about(self, path: str) -> Json:
        """What is known of a base; what an earlier version did not note is found by looking, once."""
        note = Path(f"{path}.about.json")
        with contextlib.suppress(OSError, ValueError):
            about: Json = json.loads(note.read_bytes())
            return about
        records = [record for name in self.names() if (record := self._record(name))]
        digest = next((record["digest"] for record in records if record["path"] == path), None)
        files, size = _measure(path)
        about = {"digest": digest, "files": files, "size_bytes": size}
        if digest is not None and note.parent == self._store:
            _replace(note, json.dumps(about))
        return about

    # -- building ------------------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """While somebody makes a sandbox of this template it is not removed."""
        with self._guard:
            self._held[name] += 1
        try:
            yield
        finally:
            with self._guard:
                self._held[name] -= 1

    async def ensure(
        self, name: str, progress: Progress | None = None, *, refresh: bool = False, current: bool = False
    ) -> Template:
        """The base, built on first use; with `current` also when it was made by another recipe, with `refresh` always.

        `not_found` for an unknown name, `template_unavailable` when it cannot be built, and then nothing of it is left.
        """
        if not (refresh or current) and (built := self.built(name)) is not None:
            return built
        asked_at = time.time()

        def work() -> Template:
            try:
                return self._ensure(name, progress, refresh, current, asked_at)
            except CorralError:
                raise
            except (OSError, subprocess.SubprocessError) as error:
                raise self._failure(name, error) from error
            except Exception as error:  # whoever waits for a sandbox is to be told by a code, too
                told = f"the build of the template {name} failed: {type(error).__name__}: {error}"
                raise CorralError("infra_error", told, hint="this is a fault of Corral") from error

        return await _beside(work)

    def _there(self, recipe: Recipe, current: bool) -> Template | None:
        built, record = self.built(recipe.name), self._record(recipe.name) or {}
        if built is not None and current and record.get("recipe") not in (None, _digest_of(recipe)):
            return None
        return built

    def _ensure(self, name: str, progress: Progress | None, refresh: bool, current: bool, asked_at: float) -> Template:
        recipe = self.recipe(name)
        if not refresh and (built := self._there(recipe, current)) is not None:
            return built
        if lack := self._cannot_build(recipe):
            raise CorralError("template_unavailable", f"template {name}: {lack.reason}", hint=lack.hint)
        self._store.mkdir(parents=True, exist_ok=True)
        self._store.chmod(0o755)
        with self._building, self._locked():
            record = self._record(name) or {}
            # What was begun before may have read what this refresh is to take anew.
            while_we_waited = record.get("began_at", 0) >= asked_at
            if (not refresh or while_we_waited) and (built := self._there(recipe, current)) is not None:
                return built
            self._remove_unfinished()
            work = Path(tempfile.mkdtemp(prefix=".build-", dir=self._store))
            root = work / "root"
            root.mkdir()
            try:
                return self._build(recipe, root, progress or (lambda _text, _part: None), time.time())
            finally:
                self._discard(work)

    def _failure(self, name: str, error: Exception) -> CorralError:
        detail, hint = str(error), "check the state directory's disk and, for packages, the package index"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self._store).free >> 20
            detail = "the disk is full: " + ": ".join(str(word) for word in (error.strerror, error.filename) if word)
            hint = f"free space on the disk of {self._store} ({free} MiB are free), then build again"
        return CorralError("template_unavailable", f"template {name} cannot be built: {detail}", hint=hint)

    def _foreign_ids(self, work: Path) -> int | None:
        """The first of host ids that are nobody's, for root; `_discard` gives them back, and finds them by the name of the build."""
        return self._ids.allocate(work.name) if os.geteuid() == 0 else None

    def _build(self, recipe: Recipe, root: Path, progress: Progress, began: float) -> Template:
        name = recipe.name
        about: Json = {}
        if recipe.kind == "frozen":
            freeze(recipe, root, progress)
        elif recipe.kind == "debian":
            templates_debian.unpack(recipe, root, progress, self._foreign_ids(root.parent))
        elif recipe.kind == "archive":
            about = unpack_archive(recipe, root, progress, self._caps)
        else:
            about = unpack_image(recipe, root, progress, self._caps)
        furnish(root)
        progress(f"template {name}: checking", 0.9)
        sealed = seal(name, root)
        languages = tuple(sorted(lang for lang, tool in recipe.languages.items() if find_program(root, tool)))
        about |= {
            "digest": sealed.digest,
            "files": sealed.files,
            "size_bytes": sealed.size_bytes,
            "packages": templates_debian.packages_of(root),
            "built_at": time.time(),
            "build_s": round(time.time() - began, 1),
        }
        final = self._store / sealed.digest.removeprefix("sha256:")[:24]
        record = {
            "digest": sealed.digest,
            "path": str(final),
            "languages": languages,
            "seccomp": recipe.seccomp,
            "recipe": _digest_of(recipe),
            "began_at": began,
        }
        with self._guard:
            before = self.built(name)
            _replace(Path(f"{final}.about.json"), json.dumps(about, ensure_ascii=False))
            if not final.exists():
                root.chmod(0o755)
                os.rename(root, final)
            _replace(self._store / f"{name}.json", json.dumps(record))
            if before is not None and before.path != str(final):
                self._superseded(before.path)
        progress(f"template {name}: ready", 1.0)
        return Template(name, sealed.digest, str(final), languages, recipe.seccomp or "default")

    @staticmethod
    def _cannot_build(recipe: Recipe) -> Lack | None:
        if recipe.kind == "debian":
            return templates_debian.cannot_build(recipe)
        source = recipe.archive if recipe.kind == "archive" else recipe.image
        if source is not None and not os.path.exists(source):
            return Lack(f"{source} is not there", "put it back, or build the template from where it is now")
        return None

    # -- removing ------------------------------------------------------------------------------------------------------------------
    def remove(self, name: str, in_use: InUse) -> Json:
        """Forget the base, and the recipe if it is the operator's own; -> `{"name","digest","freed_bytes"}`.

        `template_in_use` while a sandbox is made of it or its base is one of `in_use`, `conflict` while anything is built or removed:
        it waits for nobody. A base that another template has too stays.
        """
        self.recipe(name)
        if not self._building.acquire(blocking=False):
            raise _busy(name)
        try:
            with self._locked(wait=False):
                return self._remove_locked(name, in_use)
        except BlockingIOError:
            raise _busy(name) from None
        finally:
            self._building.release()

    def _remove_locked(self, name: str, in_use: InUse) -> Json:
        built = self.built(name)
        path = Path(built.path) if built is not None else None
        freed = self._about(built.path).get("size_bytes") if built is not None else 0
        aside = None
        with self._guard:  # from here on nobody begins a sandbox of it
            if self._held[name] or (built is not None and built.digest in in_use()):
                raise CorralError(
                    "template_in_use", f"a sandbox uses the template {name}", hint="remove the sandbox first"
                )
            (self._store / f"{name}.json").unlink(missing_ok=True)
            (self._places[1] / f"{name}.yaml").unlink(missing_ok=True)
            if path is not None and path.parent == self._store and str(path) not in self._used_paths():
                if any(
                    self._held.values()
                ):  # of another template that had the same base a moment ago: the sweep takes it
                    self._superseded(str(path))
                else:
                    aside = self._set_aside(path)
        if aside is not None:
            _remove(aside)
        return {
            "name": name,
            "digest": built.digest if built is not None else None,
            "freed_bytes": freed if aside is not None or built is None else 0,
        }

    def sweep(self, in_use: InUse, age_s: float = UNUSED_S) -> dict[str, int]:
        """Remove what killed builds left and, after `age_s`, bases that no template has and nobody of `in_use` needs; -> counts."""
        counts = {"template_build": 0, "base": 0}
        if not self._store.is_dir():
            return counts
        with contextlib.suppress(BlockingIOError), self._locked(wait=False):
            counts["template_build"] = self._remove_unfinished()
            for path in self._bases():
                note = Path(f"{path}.about.json")
                since = (note if note.exists() else path).stat().st_mtime
                if time.time() - since < age_s or str(path) in self._used_paths():
                    continue
                digest = self._about(str(path)).get("digest")
                with self._guard:
                    keep = in_use()
                    if digest in keep or _digest_prefix(path.name, keep) or str(path) in self._used_paths():
                        continue
                    aside = self._set_aside(path)
                _remove(aside)  # minutes for a large one: not while somebody waits to begin a sandbox
                counts["base"] += 1
        return counts

    def _used_paths(self) -> set[str]:
        return {record["path"] for name in self.names() if (record := self._record(name))}

    def unfinished(self) -> list[Path]:
        """What killed builds left; empty while one is under way."""
        if not self._store.is_dir():
            return []
        with contextlib.suppress(BlockingIOError, OSError), self._locked(wait=False):
            return sorted(self._store.glob(".build-*"))
        return []

    def remove_unfinished(self) -> int:
        """Remove what killed builds left, unless a build is under way; -> how many."""
        if not self._store.is_dir():
            return 0
        with contextlib.suppress(BlockingIOError), self._locked(wait=False):
            return self._remove_unfinished()
        return 0

    def _remove_unfinished(self) -> int:
        """Only who holds the lock of the store calls this."""
        return sum(self._discard(path) for path in self._store.glob(".build-*"))

    def _discard(self, work: Path) -> bool:
        """Remove a build's directory and give its ids back, unless something of it is alive still: then it is for the next who looks."""
        base = self._ids.find(work.name) if os.geteuid() == 0 else None
        if base is not None and userns.processes_of(base):
            return False
        templates_confined.remove(work, templates_debian.environment())
        if base is not None:
            self._ids.release(work.name)
        return not work.exists()

    def _set_aside(self, path: Path) -> Path:
        """A base that is nobody's any more, to be removed: half a tree must never lie under the name of a whole one."""
        aside = Path(tempfile.mkdtemp(prefix=".build-", dir=self._store))
        os.rename(path, aside / "root")
        Path(f"{path}.about.json").unlink(missing_ok=True)
        return aside

    def _superseded(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(f"{path}.about.json")

    @contextlib.contextmanager
    def _locked(self, *, wait: bool = True) -> Iterator[None]:
        self._store.mkdir(parents=True, exist_ok=True)
        with open(self._store / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


async def _beside(work: Callable[[], Template]) -> Template:
    """In a thread that no process waits for at its end, unlike those of the pool: a build takes minutes, and what it has begun is found."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Template] = loop.create_future()

    def tell(result: Template | None, error: BaseException | None) -> None:
        if future.done():
            return  # whoever asked has gone
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result = error = None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="template", daemon=True).start()
    return await future


def _busy(name: str) -> CorralError:
    return CorralError(
        "conflict",
        f"the template {name} cannot be removed while one is built or removed",
        hint="try again when that is over; `corral template ls` shows what there is",
        retryable=True,
    )


def load(path: str | os.PathLike[str], cache: str) -> Recipe:
    """The recipe in a YAML file, through the cache of such files; `invalid_value` names what is wrong with it."""
    raw = Path(path).read_bytes()
    try:
        raw.decode("utf-8")
        document = config.parsed_yaml(raw, cache)
    except ValueError as error:
        told = " ".join(str(error).split())[:300]
        raise CorralError("invalid_value", f"template recipe {path}: {told}", hint="mend the recipe") from None
    return parse(document, Path(path).name)


def _digest_of(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(recipe.document(), sort_keys=True).encode()).hexdigest()


def _digest_prefix(name: str, digests: frozenset[str]) -> bool:
    return any(digest.removeprefix("sha256:").startswith(name) for digest in digests)


def _measure(path: str) -> tuple[int, int]:
    files = size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            info = os.lstat(os.path.join(directory, name))
            files += 1
            size += info.st_size
    return files, size


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
