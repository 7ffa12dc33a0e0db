"""What a client sees: tools, answers, refusals, sessions; over a fake Corral, by the real client."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from typing import Any, get_args

import pytest

from corral.domain.runner import LANGUAGES
from corral.errors import CorralError
from corral.mcp import commands, sessions
from corral.mcp.sessions import Wishes
from corral.mcp.tools import Language
from unit.mcp.fake_corral import FakeCorral, served, words

NAMES = [
    "code_run",
    "command_run",
    "command_status",
    "command_interrupt",
    "file_read",
    "file_write",
    "file_list",
    "sandbox_info",
    "sandbox_reset",
]
both_eras = pytest.mark.parametrize("mode", ["auto", "legacy"])


@both_eras
async def test_the_nine_tools_are_there_with_schemas_and_hints_about_what_they_do(
    corral: FakeCorral, mode: str
) -> None:
    async with served(corral, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == NAMES
        for tool in tools.values():
            assert tool.description and tool.title and tool.output_schema
            assert tool.input_schema["additionalProperties"] is False
            assert all(
                "description" in p or "enum" in p or "default" in p for p in tool.input_schema["properties"].values()
            )
        assert tools["file_read"].annotations is not None and tools["file_read"].annotations.read_only_hint
        assert tools["sandbox_reset"].annotations is not None and tools["sandbox_reset"].annotations.destructive_hint
    assert corral.calls == [], "looking at the tools needs no sandbox and no service"
    assert len(json.dumps([t.model_dump(mode="json", exclude_none=True) for t in tools.values()])) < 24_000


def test_the_languages_are_those_of_the_service() -> None:
    assert set(get_args(Language)) == set(LANGUAGES)


@both_eras
async def test_a_command_answers_with_the_agent_view_and_the_same_in_structure(corral: FakeCorral, mode: str) -> None:
    async with served(corral, mode=mode) as client:
        answer = await client.call_tool("command_run", {"command": "say 你好, 世界"})
    assert not answer.is_error and words(answer) == "你好, 世界\n[ok]"
    assert answer.structured_content is not None
    assert answer.structured_content["output"] == "你好, 世界\n[ok]"
    assert answer.structured_content["state"] == "ended" and answer.structured_content["exit_code"] == 0
    assert answer.structured_content["files"] == ["created /workspace/made"]


async def test_a_program_that_fails_is_an_answer_and_one_without_outcome_an_error(corral: FakeCorral) -> None:
    async with served(corral) as client:
        failed = await client.call_tool("command_run", {"command": "exit 3"})
        assert not failed.is_error and failed.structured_content is not None
        assert failed.structured_content["exit_code"] == 3 and failed.structured_content["hint"] == "see its output"
        for reason in ("infra_error", "missing_tool", "policy_denied"):
            none = await client.call_tool("command_run", {"command": f"fail {reason}"})
            assert none.is_error and reason in words(none)


async def test_parameters_reach_the_service_under_its_own_names(corral: FakeCorral) -> None:
    async with served(corral) as client:
        await client.call_tool(
            "code_run",
            {
                "code": "say x",
                "language": "bash",
                "args": ["a", "b"],
                "stdin": '{"k": [1]}',
                "cwd": "d",
                "timeout_s": 5,
            },
        )
        await client.call_tool("command_run", {"command": "say x", "env": {"A": "1"}})
        await client.call_tool("code_run", {"wait_s": 0, "code": '["a list", "in JSON"]'})
    assert corral.asked[0] == {
        "code": "say x",
        "language": "bash",
        "args": ["a", "b"],
        "stdin": '{"k": [1]}',
        "cwd": "d",
        "timeout_s": 5,
        "attached": True,
    }
    assert corral.asked[1] == {"shell": "say x", "env": {"A": "1"}, "attached": True}
    assert corral.asked[2]["code"] == '["a list", "in JSON"]'


async def test_what_a_tool_does_not_take_is_refused_by_name_with_a_next_step(corral: FakeCorral) -> None:
    async with served(corral) as client:

        async def refused(name: str, arguments: dict[str, Any]) -> str:
            answer = await client.call_tool(name, arguments)
            assert answer.is_error and answer.structured_content is None
            text = words(answer)
            assert "\nnext: " in text and "Traceback" not in text and "pydantic" not in text
            return text

        assert "did you mean command?" in await refused("command_run", {"comand": "say x"})
        assert "did you mean timeout_s?" in await refused("command_run", {"command": "say x", "timeout": 3})
        assert "did you mean command_run?" in await refused("comand_run", {"command": "say x"})
        assert "parameter command" in await refused("command_run", {})
        assert "parameter timeout_s" in await refused("command_run", {"command": "say x", "timeout_s": -1})
        assert "parameter language" in await refused("code_run", {"code": "x", "language": "cobol"})
        assert "known commands: none" in await refused("command_status", {"command_id": "exe_nope"})
        assert "parameter path" in await refused("file_read", {})
    assert corral.asked == []


@both_eras
async def test_a_refusal_of_the_service_says_code_detail_parameter_and_next_step(corral: FakeCorral, mode: str) -> None:
    corral.refuse = CorralError("cwd_not_found", "there is no /nope", hint="make it first", field="/cwd")
    async with served(corral, mode=mode) as client:
        answer = await client.call_tool("command_run", {"command": "say x", "cwd": "/nope"})
    assert answer.is_error
    assert words(answer) == "error cwd_not_found: there is no /nope (parameter cwd)\nnext: make it first"


async def test_a_defect_of_ours_shows_no_traceback(corral: FakeCorral, capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    corral.request = broken  # type: ignore[assignment]
    async with served(corral) as client:
        answer = await client.call_tool("command_run", {"command": "say x"})
    assert answer.is_error and "ZeroDivisionError" in words(answer)
    assert "secret" not in words(answer) and "Traceback" not in words(answer)
    assert "secret" in capfd.readouterr().err


async def test_many_calls_at_once_share_one_sandbox(corral: FakeCorral) -> None:
    async with served(corral) as client:
        answers = await asyncio.gather(*(client.call_tool("command_run", {"command": f"say {n}"}) for n in range(40)))
        assert [words(a) for a in answers] == [f"{n}\n[ok]" for n in range(40)]
        assert len(corral.created) == 1
    assert corral.alive() == [] and corral.closed


async def test_each_client_has_a_sandbox_of_its_own_that_ends_with_it(corral: FakeCorral) -> None:
    async with served(corral) as first, served(corral) as second:
        one = await first.call_tool("command_run", {"command": "say 1"})
        two = await second.call_tool("command_run", {"command": "say 2"})
        assert one.structured_content is not None and two.structured_content is not None
        assert one.structured_content["sandbox_id"] != two.structured_content["sandbox_id"]
        assert len(corral.alive()) == 2
    assert corral.alive() == []


async def test_a_lost_sandbox_is_told_once_and_the_next_call_makes_another(corral: FakeCorral) -> None:
    async with served(corral) as client:
        await client.call_tool("command_run", {"command": "say 1"})
        corral.kill("sbx_1")
        met = await client.call_tool("command_run", {"command": "say 2"})
        assert met.is_error and "sandbox_lost" in words(met) and "new sandbox" in words(met)
        again = await client.call_tool("command_run", {"command": "say 3"})
        assert not again.is_error and again.structured_content is not None
        assert "sbx_2 is a new, empty sandbox" in words(again) and "its files with it" in words(again)
        assert "sbx_2 is a new, empty sandbox" in str(again.structured_content["note"])
        quiet = await client.call_tool("command_run", {"command": "say 4"})
        assert words(quiet) == "4\n[ok]"


async def test_a_sandbox_that_is_lost_under_a_command_is_an_error_with_its_output(corral: FakeCorral) -> None:
    async with served(corral) as client:
        waiting = asyncio.create_task(client.call_tool("command_run", {"command": "hang half"}))
        while not corral.execs:
            await asyncio.sleep(0.01)
        corral.kill("sbx_1")
        answer = await waiting
        assert answer.is_error and "half" in words(answer) and "sandbox_lost" in words(answer)
        assert "new, empty sandbox" in words(await client.call_tool("command_run", {"command": "say 1"}))


async def test_the_sandbox_of_a_failed_start_is_tried_again(corral: FakeCorral) -> None:
    corral.refuse = CorralError("runtime_unavailable", "no runtime", hint="see corral doctor")
    async with served(corral) as client:
        assert "runtime_unavailable" in words(await client.call_tool("command_run", {"command": "say 1"}))
        corral.refuse = None
        assert words(await client.call_tool("command_run", {"command": "say 1"})) == "1\n[ok]"


async def test_a_connection_that_fails_is_tried_again_by_the_next_call(corral: FakeCorral) -> None:
    from mcp import Client

    from corral.mcp.server import make_server

    attempts = []

    def connect() -> FakeCorral:
        attempts.append(1)
        if len(attempts) == 1:
            raise CorralError("state_locked", "in use")
        return corral

    async with Client(make_server(connect)) as client:
        assert "state_locked" in words(await client.call_tool("command_run", {"command": "say 1"}))
        assert words(await client.call_tool("command_run", {"command": "say 1"})) == "1\n[ok]"


async def test_reset_gives_a_fresh_sandbox_and_forgets_the_commands(corral: FakeCorral) -> None:
    async with served(corral) as client:
        await client.call_tool("command_run", {"command": "hang x", "background": True})
        answer = await client.call_tool("sandbox_reset", {})
        assert answer.structured_content is not None and answer.structured_content["sandbox_id"] == "sbx_2"
        assert answer.structured_content["commands"] == [] and answer.structured_content["note"] is None
        assert corral.alive() == ["sbx_2"]
        assert words(await client.call_tool("command_run", {"command": "say 1"})) == "1\n[ok]"


async def test_info_makes_no_sandbox_and_tells_limits_and_commands_once_there_is_one(corral: FakeCorral) -> None:
    async with served(corral) as client:
        none = await client.call_tool("sandbox_info", {})
        assert none.structured_content is not None and none.structured_content["state"] == "none"
        assert corral.created == []
        await client.call_tool("command_run", {"command": "hang x\nmore", "background": True})
        there = await client.call_tool("sandbox_info", {})
        assert there.structured_content is not None
        assert there.structured_content["limits"] == {"memory": "512 MiB", "wall": "60.0 s"}
        assert there.structured_content["commands"] == [
            {"command_id": "exe_1", "command": "hang x", "state": "running"}
        ]
        corral.kill("sbx_1")
        assert (await client.call_tool("sandbox_info", {})).is_error


# -- commands that take long ---------------------------------------------------------------------------------------------------
async def test_a_command_that_outlives_the_wait_goes_on_and_is_looked_at_and_interrupted(corral: FakeCorral) -> None:
    async with served(corral) as client:
        running = await client.call_tool("command_run", {"command": "hang 进行中", "wait_s": 0.2})
        assert not running.is_error and running.structured_content is not None
        assert running.structured_content["state"] == "running" and running.structured_content["exit_code"] is None
        ident = running.structured_content["command_id"]
        assert ident in words(running) and "command_status" in words(running)
        seen = words(running)
        if "进行中" not in seen:
            seen = words(await client.call_tool("command_status", {"command_id": ident, "wait_s": 1}))
        assert "进行中" in seen
        assert "进行中" not in words(await client.call_tool("command_status", {"command_id": ident})), "told already"
        whole = await client.call_tool("command_status", {"command_id": ident, "cursor": 0})
        assert "进行中" in words(whole) and whole.structured_content is not None
        assert whole.structured_content["cursor"] == 3
        ended = await client.call_tool("command_interrupt", {"command_id": ident})
        assert ended.structured_content is not None and ended.structured_content["reason"] == "signal"
        again = await client.call_tool("command_interrupt", {"command_id": ident})
        assert not again.is_error and again.structured_content is not None
        assert again.structured_content["state"] == "ended", "interrupting what has ended says how it ended"


async def test_background_answers_at_once_and_may_run_long(corral: FakeCorral) -> None:
    async with served(corral) as client:
        answer = await client.call_tool("command_run", {"command": "hang x", "background": True})
        assert answer.structured_content is not None and answer.structured_content["state"] == "running"
        assert corral.asked[-1]["timeout_s"] == 3600
        corral.finish("exe_1")
        ended = await client.call_tool("command_status", {"command_id": "exe_1", "wait_s": 60})
        assert ended.structured_content is not None and ended.structured_content["reason"] == "ok"


async def test_a_default_over_the_cap_gives_way_and_a_wish_over_it_is_refused(corral: FakeCorral) -> None:
    corral.cap_timeout_s = 100
    async with served(corral) as client:
        ours = await client.call_tool("command_run", {"command": "hang x", "background": True})
        assert not ours.is_error and "timeout_s" not in corral.asked[-1]
        theirs = await client.call_tool("command_run", {"command": "say x", "timeout_s": 200})
        assert theirs.is_error and "policy_denied" in words(theirs) and "ask for less" in words(theirs)


@both_eras
async def test_a_cancelled_call_ends_its_command(corral: FakeCorral, mode: str) -> None:
    async with served(corral, mode=mode) as client:
        waiting = asyncio.create_task(client.call_tool("command_run", {"command": "hang x"}))
        while not corral.execs:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(corral.over["exe_1"].wait, 30)
        assert corral.execs["exe_1"]["result"]["reason"] == "cancelled"
        assert words(await client.call_tool("command_run", {"command": "say 1"})) == "1\n[ok]"


@both_eras
async def test_progress_comes_where_it_was_asked_for(corral: FakeCorral, mode: str) -> None:
    heard: list[tuple[float, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        heard.append((done, message))
        if len(heard) == 2:
            corral.finish("exe_1")

    async with served(corral, mode=mode) as client:
        await client.call_tool("command_run", {"command": "hang 第一步"}, progress_callback=progress)
    assert [message for _, message in heard] == ["第一步", "第一步"]
    assert heard[0][0] < heard[1][0]


async def test_ended_commands_are_forgotten_when_there_are_many_and_running_ones_never(
    corral: FakeCorral, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOST_COMMANDS", 3)
    async with served(corral) as client:
        await client.call_tool("command_run", {"command": "hang x", "background": True})
        for n in range(6):
            await client.call_tool("command_run", {"command": f"say {n}"})
        known = (await client.call_tool("sandbox_info", {})).structured_content
        assert known is not None
        assert [c["command_id"] for c in known["commands"]] == ["exe_1", "exe_6", "exe_7"]


# -- files ---------------------------------------------------------------------------------------------------------------------
async def test_text_comes_exact_and_by_lines_and_says_what_is_missing(corral: FakeCorral) -> None:
    lines = [f"第 {n} 行\n" for n in range(1, 1001)]
    corral.files["/workspace/t.txt"] = "".join(lines).encode()
    async with served(corral) as client:
        whole = await client.call_tool("file_read", {"path": "t.txt"})
        assert whole.content[0].text == "".join(lines) and len(whole.content) == 1  # type: ignore[union-attr]
        part = await client.call_tool("file_read", {"path": "t.txt", "start_line": 10, "end_line": 12})
        assert part.content[0].text == "".join(lines[9:12])  # type: ignore[union-attr]
        first = await client.call_tool("file_read", {"path": "t.txt", "max_chars": 200})
        assert first.structured_content is not None and first.structured_content["truncated"]
        assert first.structured_content["total_lines"] == 1000
        assert f"start_line={first.structured_content['next_line']}" in words(first)
        far = await client.call_tool("file_read", {"path": "t.txt", "start_line": 2000})
        assert far.is_error and "has 1000 lines" in words(far)
        none = await client.call_tool("file_read", {"path": "nope"})
        assert none.is_error and "there is no /workspace/nope" in words(none)
        assert not (await client.call_tool("command_run", {"command": "say 1"})).is_error, (
            "a missing file loses nothing"
        )
        assert len(corral.created) == 1


async def test_binary_comes_as_a_resource_and_an_image_as_an_image(corral: FakeCorral) -> None:
    data, picture = bytes(range(256)), b"\x89PNG\r\n\x1a\n" + bytes(100)
    corral.files |= {"/workspace/b": data, "/workspace/p.png": picture, "/workspace/big": bytes(5 << 20)}
    async with served(corral) as client:
        binary = await client.call_tool("file_read", {"path": "b"})
        resource = binary.content[1]
        assert resource.type == "resource" and base64.b64decode(resource.resource.blob) == data  # type: ignore[union-attr]
        assert resource.resource.uri == "file:///workspace/b"
        image = (await client.call_tool("file_read", {"path": "p.png"})).content[1]
        assert image.type == "image" and image.mime_type == "image/png" and base64.b64decode(image.data) == picture
        forced = (await client.call_tool("file_read", {"path": "p.png", "encoding": "base64"})).content[1]
        assert forced.type == "resource"
        big = await client.call_tool("file_read", {"path": "big"})
        assert big.is_error and "too_large" in words(big) and str(5 << 20) in words(big)


async def test_what_is_written_is_read_back(corral: FakeCorral) -> None:
    async with served(corral) as client:
        made = await client.call_tool("file_write", {"path": "d/t.txt", "content": "你好\n"})
        assert words(made) == "created /workspace/d/t.txt, 7 bytes"
        again = await client.call_tool("file_write", {"path": "d/t.txt", "content": "AAEC", "encoding": "base64"})
        assert words(again) == "replaced /workspace/d/t.txt, 3 bytes"
        assert corral.files["/workspace/d/t.txt"] == b"\0\1\2"
        wrong = await client.call_tool("file_write", {"path": "x", "content": "nö!", "encoding": "base64"})
        assert wrong.is_error and "parameter content" in words(wrong)
        listed = await client.call_tool("file_list", {})
        assert listed.structured_content is not None
        assert [e["path"] for e in listed.structured_content["entries"]] == ["/workspace/d/t.txt"]


async def test_a_long_list_comes_in_pages(corral: FakeCorral) -> None:
    corral.files |= {f"/workspace/{n:03}": b"" for n in range(25)}
    async with served(corral) as client:
        names: list[str] = []
        after = ""
        while True:
            page = (await client.call_tool("file_list", {"limit": 10, "after": after})).structured_content
            assert page is not None
            names += [entry["path"] for entry in page["entries"]]
            if page["next"] is None:
                break
            after = page["next"]
        assert names == sorted(corral.files)


# -- sessions ------------------------------------------------------------------------------------------------------------------
async def test_an_idle_session_is_ended_and_makes_a_sandbox_again(corral: FakeCorral) -> None:
    async with served(corral, Wishes(idle_s=0.05)) as client:
        await client.call_tool("command_run", {"command": "say 1"})
        async with asyncio.timeout(60):
            while corral.alive():
                await asyncio.sleep(0.01)
        assert words(await client.call_tool("command_run", {"command": "say 1"})) == "1\n[ok]"


async def test_a_session_is_not_idle_while_a_call_or_a_command_is_under_way(corral: FakeCorral) -> None:
    many = sessions.Sessions(lambda: corral, Wishes(idle_s=100))
    session, _ = many.get("a")
    later = session.last_used + 101
    assert many.idle(later) == ["a"] and many.idle(later - 2) == []
    async with many.using(session):
        assert many.idle(later + 1000) == []
    later = session.last_used + 101
    sandbox = await session.sandbox()
    command = await commands.start(session.backend, sandbox["id"], "hang", {"shell": "hang x"}, 0, 200)
    session.remember(command)
    assert many.idle(later) == []
    corral.finish(command.ident)
    await command.wait(60)
    assert many.idle(later) == ["a"]
    await many.close()
    assert corral.alive() == []


async def test_an_idle_session_that_is_used_again_while_another_one_is_ended_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = sessions.Sessions(FakeCorral, Wishes(idle_s=0))
    used = [many.get(name)[0] for name in "ab"][1]
    ended: list[str] = []

    async def end(key: str) -> None:
        ended.append(key)
        used.busy = 1

    async def one_round(seconds: float) -> None:
        if ended:
            raise asyncio.CancelledError

    monkeypatch.setattr(many, "end", end)
    monkeypatch.setattr(sessions.anyio, "sleep", one_round)
    with pytest.raises(asyncio.CancelledError):
        await many.sweep()
    assert ended == ["a"]


async def test_more_sessions_than_allowed_are_refused() -> None:
    many = sessions.Sessions(FakeCorral, Wishes(most_sessions=1))
    many.get("a")
    with pytest.raises(CorralError) as caught:
        many.get("b")
    assert caught.value.code == "quota_exceeded" and not many.get("a")[1]


async def test_a_session_that_has_ended_makes_no_sandbox(corral: FakeCorral) -> None:
    session, _ = sessions.Sessions(lambda: corral, Wishes()).get("a")
    await session.close()
    with pytest.raises(CorralError) as caught:
        await session.sandbox()
    assert caught.value.code == "shutting_down" and corral.created == []


async def test_closing_while_a_sandbox_is_being_made_ends_that_one(corral: FakeCorral) -> None:
    session, _ = sessions.Sessions(lambda: corral, Wishes()).get("a")
    making = asyncio.create_task(session.sandbox())
    await asyncio.sleep(0)
    await session.close()
    await asyncio.gather(making, return_exceptions=True)
    assert corral.alive() == []


def test_other_commands_do_not_load_it() -> None:
    code = (
        "import sys, corral.cli.commands, corral.cli.run\nprint([m for m in sys.modules if m.split('.')[0] == 'mcp'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
