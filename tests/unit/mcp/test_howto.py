"""The examples of the how-to page are what they say: they parse, and Corral takes the words that they give it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from corral.cli.mcp import DEFAULT_PORT, KEY_VARIABLE, command
from corral.mcp.calls import SESSION_HEADER
from corral.mcp.http import PATH

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "howto" / "mcp.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(json|toml)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CLIENTS = ["Claude Code", "Claude Desktop", "Cursor", "VS Code", "Codex CLI", "Gemini CLI"]


def servers(kind: str, text: str) -> list[dict[str, Any]]:
    document = json.loads(text) if kind == "json" else tomllib.loads(text)
    found = [document[name] for name in ("mcpServers", "servers", "mcp_servers") if name in document]
    assert len(found) == 1 and list(found[0]) == ["corral"]
    return list(found[0].values())


def test_every_client_has_an_example() -> None:
    sections = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(CLIENTS)
    assert all("```json\n" in text or "```toml\n" in text for text in sections.values())


@pytest.mark.parametrize(("kind", "text"), BLOCKS)
def test_an_example_parses_and_its_words_are_options_of_the_command(kind: str, text: str) -> None:
    for server in servers(kind, text):
        if "url" in server:
            assert server["url"] == f"http://127.0.0.1:{DEFAULT_PORT}{PATH}"
            assert set(map(str.lower, server.get("headers", {}))) <= {"authorization", SESSION_HEADER}
            assert server.get("bearer_token_env_var", KEY_VARIABLE) == KEY_VARIABLE
            continue
        words = [server["command"], *server["args"]]
        ours = words[words.index("/opt/corral/corral") + 1 :]
        assert ours[0] == "mcp"
        command.make_context("mcp", ours[1:])
        assert set(server.get("env", {})) <= {"CORRAL_URL", "CORRAL_KEY"}


def test_the_page_names_every_tool_and_every_option_of_its_own() -> None:
    from corral.mcp.tools import WAIT_S
    from unit.mcp.test_tools import NAMES

    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == NAMES
    assert f"{WAIT_S:.0f} seconds" in PAGE
    shared = {"memory", "cpu", "pids", "disk", "tmp", "runtime", "template", "isolation", "network", "session", "dep"}
    own = {option for parameter in command.params if parameter.name not in shared for option in parameter.opts}
    missing = [option for option in own if not re.search(rf"{option}(?![\w-])", PAGE)]
    assert not missing
