"""Bases under any order of building, beginning, ending, removing and sweeping: what somebody stands on stays whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from corral.errors import CorralError
from corral.node.templates import Template, Templates

NAMES = st.sampled_from(["mine", "yours", "shipped"])
CONTENTS = st.sampled_from(["one", "two"])
OLD = (1, 1)


class Bases(RuleBasedStateMachine):
    """`begun` are made of a base and not noted yet, `standing` are noted; removal asks for those only, as the node does."""

    def __init__(self) -> None:
        super().__init__()
        self._left = contextlib.ExitStack()
        self.state = Path(self._left.enter_context(tempfile.TemporaryDirectory()))
        for place in ("shipped", "templates", "content"):
            (self.state / place).mkdir()
        self.templates = Templates(self.state, self.state / "shipped")
        for name in ("mine", "yours", "shipped"):
            self.write(name, "one")
        self.begun: list[tuple[contextlib.ExitStack, Template, str]] = []
        self.standing: list[tuple[Template, str]] = []

    def teardown(self) -> None:
        self._left.close()

    def recipe(self, name: str) -> Path:
        return self.state / ("shipped" if name == "shipped" else "templates") / f"{name}.yaml"

    def content(self, base: Template) -> str:
        [found] = (Path(base.path) / str(self.state / "content").lstrip("/")).iterdir()
        return found.name

    def in_use(self) -> frozenset[str]:
        return frozenset(base.digest for base, _ in self.standing)

    @rule(name=NAMES, content=CONTENTS)
    def write(self, name: str, content: str) -> None:
        """The operator says what the template is from now on; two templates may come to the same base."""
        tree = self.state / "content" / content
        tree.mkdir(exist_ok=True)
        self.recipe(name).write_text(f'{{"name": "{name}", "kind": "frozen", "trees": ["{tree}"]}}')

    @rule(name=NAMES, refresh=st.booleans())
    def build(self, name: str, refresh: bool) -> None:
        if self.recipe(name).exists():
            asyncio.run(self.templates.ensure(name, current=True, refresh=refresh))

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        if self.recipe(name).exists():
            held = contextlib.ExitStack()
            held.enter_context(self.templates.hold(name))
            base = asyncio.run(self.templates.ensure(name))
            self.begun.append((held, base, self.content(base)))

    @precondition(lambda self: self.begun)
    @rule(which=st.integers(0, 9))
    def note(self, which: int) -> None:
        held, base, content = self.begun.pop(which % len(self.begun))
        self.standing.append((base, content))
        held.close()

    @precondition(lambda self: self.standing)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        self.standing.pop(which % len(self.standing))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        known = self.recipe(name).exists()
        built = self.templates.built(name)
        try:
            gone = self.templates.remove(name, self.in_use)
        except CorralError as error:
            assert error.code == ("template_in_use" if known else "not_found")
            return
        assert name not in {base.name for _, base, _ in self.begun}
        assert self.templates.built(name) is None
        assert gone["digest"] == (built.digest if built else None)
        assert self.recipe(name).exists() == (name == "shipped")
        if gone["freed_bytes"]:
            assert built is not None
            assert not os.path.exists(built.path)

    @rule()
    def sweep(self) -> None:
        self.templates.sweep(self.in_use, age_s=3600.0)

    @precondition(lambda self: not self.begun)
    @rule()
    def sweep_a_day_later(self) -> None:
        """Then what nobody has is gone."""
        for note in (self.state / "base").glob("*.about.json"):
            os.utime(note, OLD)
        self.templates.sweep(self.in_use)
        bases = {base.path for base, _ in self.standing}
        bases |= {built.path for name in self.templates.names() if (built := self.templates.built(name))}
        here = {str(path) for path in (self.state / "base").glob("*") if path.is_dir()}
        assert here <= bases

    @invariant()
    def what_somebody_stands_on_is_whole(self) -> None:
        for base, content in [*self.standing, *((base, content) for _, base, content in self.begun)]:
            assert os.path.isdir(base.path)
            assert self.content(base) == content


Bases.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestBases = Bases.TestCase
