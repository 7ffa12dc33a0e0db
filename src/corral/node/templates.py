"""Templates: recipe (YAML, from the operator) -> immutable, content-addressed base tree under STATE/base.

Two kinds. `frozen`: an allow-list of the host's programs, each with its links, its interpreter and every library that the
loader names, plus globs of data, copied once; /etc is generated, nothing of the host's /etc, /home or /root comes along.
`debian`: packages unpacked by mmdebstrap (`extract`: no maintainer script runs), or by apt and dpkg alone for an ordinary
user without a subordinate id range.

A base is named by the digest of its content (paths, kinds, modes, bytes), is complete or absent (built aside, then renamed),
and stays what it is when the host is upgraded; `refresh` builds a new one. A build fails when a file looks like a
credential (A4). Every base has the directories that runtimes mount over, and `sandbox` (1000) in /etc/passwd.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.errors import CorralError
from corral.node import templates_debian
from corral.node.templates_frozen import freeze
from corral.node.templates_recipe import Recipe, parse
from corral.node.templates_sealing import find_program, furnish, seal

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Template:
    """A built base: `path` is the root file system, `languages` those whose tool is in it."""

    name: str
    digest: str
    path: str
    languages: tuple[str, ...]


class Templates:
    """The operator's recipes of `recipes` (a directory of YAML files) and their bases under `state_dir`."""

    def __init__(self, state_dir: str | os.PathLike[str], recipes: str | os.PathLike[str]) -> None:
        self._state = Path(state_dir)
        self._recipes = Path(recipes)
        self._building = threading.Lock()

    def names(self) -> list[str]:
        """Known template names."""
        return sorted(p.stem for p in self._recipes.glob("*.yaml"))

    def built(self, name: str) -> Template | None:
        """The base of a template if it is there; does no work."""
        try:
            record = json.loads((self._state / "base" / f"{name}.json").read_bytes())
            template = Template(name, record["digest"], record["path"], tuple(record["languages"]))
        except (OSError, ValueError, KeyError):
            return None
        return template if os.path.isdir(template.path) else None

    def describe(self) -> list[dict[str, Any]]:
        """`{"name","digest","available","reason","languages","description"}` per template; builds nothing."""
        answer = []
        for name in self.names():
            recipe, built = self._recipe(name), self.built(name)
            reason = None if built else self._cannot_build(recipe)
            languages = list(built.languages) if built else sorted(recipe.languages)
            answer.append(
                {
                    "name": name,
                    "digest": built.digest if built else None,
                    "available": built is not None or reason is None,
                    "reason": reason,
                    "languages": languages,
                    "description": recipe.description,
                }
            )
        return answer

    async def ensure(self, name: str, progress: Progress | None = None, *, refresh: bool = False) -> Template:
        """The base, built on first use. `not_found` for an unknown name, `template_unavailable` when it cannot be built."""
        if not refresh and (built := self.built(name)) is not None:
            return built
        return await asyncio.to_thread(self._ensure, name, progress, refresh)

    def _ensure(self, name: str, progress: Progress | None, refresh: bool) -> Template:
        recipe = self._recipe(name)
        if reason := self._cannot_build(recipe):
            raise CorralError("template_unavailable", f"template {name}: {reason}", hint="see `corral template ls`")
        store = self._state / "base"
        store.mkdir(parents=True, exist_ok=True)
        store.chmod(0o755)
        with self._building, open(store / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not refresh and (built := self.built(name)) is not None:
                return built
            for stale in store.glob(".build-*"):
                _remove(stale)
            work = Path(tempfile.mkdtemp(prefix=".build-", dir=store))
            root = work / "root"
            root.mkdir()
            try:
                return self._build(name, recipe, root, progress or (lambda _text, _part: None))
            except (OSError, subprocess.SubprocessError) as error:
                raise CorralError(
                    "template_unavailable",
                    f"template {name} cannot be built: {error}",
                    hint="check free space in the state directory and, for packages, the package index",
                ) from error
            finally:
                _remove(work)

    def _build(self, name: str, recipe: Recipe, root: Path, progress: Progress) -> Template:
        if recipe.kind == "frozen":
            freeze(recipe, root, progress)
        else:
            templates_debian.unpack(recipe, root, progress)
        furnish(root)
        progress(f"template {name}: checking", 0.9)
        sealed = seal(name, root)
        digest = sealed.digest
        final = self._state / "base" / digest.removeprefix("sha256:")[:24]
        if not final.exists():
            root.chmod(0o755)
            os.rename(root, final)
        languages = tuple(sorted(lang for lang, tool in recipe.languages.items() if find_program(final, tool)))
        record = {"digest": digest, "path": str(final), "languages": languages}
        temporary = self._state / "base" / f".{name}.json.new"
        temporary.write_text(json.dumps(record))
        os.replace(temporary, self._state / "base" / f"{name}.json")
        progress(f"template {name}: ready", 1.0)
        return Template(name, digest, str(final), languages)

    def _recipe(self, name: str) -> Recipe:
        import yaml  # costs 50 ms, needed for building and listing only

        path = self._recipes / f"{name}.yaml"
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not path.is_file():
            known = ", ".join(self.names())
            raise CorralError(
                "not_found", f"there is no template {name!r}", hint=f"known templates: {known}", field="/template"
            )
        return parse(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)

    @staticmethod
    def _cannot_build(recipe: Recipe) -> str | None:
        return templates_debian.cannot_build(recipe) if recipe.kind == "debian" else None


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
