"""K20: a stream that is cut at random is resumed by its cursor: every byte once, in order, and the end that it had."""

from __future__ import annotations

import http.client
import itertools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import MODES
from .serving import PATIENCE_S, CuttingProxy, Refusal, Server, quoted

CUTS = 10
NUMBERS = """
import sys, time
began = time.monotonic()
for n in range(1, 2001):
    for stream in (sys.stdout, sys.stderr):
        print(n, "\\u2615", file=stream, flush=True)
    time.sleep(max(0, began + n * 0.005 - time.monotonic()))
sys.exit(7)
"""
EXPECTED = "".join(f"{n} \u2615\n" for n in range(1, 2001)).encode()
SILENT = 'echo begun >> starts; sleep "$1"; wc -l < starts; exit 7'


class Follower:
    """Somebody who follows a stream over a network that breaks, and comes back with the last cursor that was whole."""

    def __init__(self, server: Server, path: str, port: int, encoding: str = "text", by_header: bool = False) -> None:
        self.server, self.path, self.port = server, path, port
        self.encoding, self.by_header = encoding, by_header
        self.got = {"stdout": bytearray(), "stderr": bytearray()}
        self.kinds: list[str] = []

    def follow(self) -> dict[str, Any]:
        """-> the result that `ended` brings."""
        cursor: str | None = None
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            target, headers = f"{self.path}?encoding={self.encoding}", {}
            if cursor is not None and self.by_header:
                headers["Last-Event-ID"] = cursor
            elif cursor is not None:
                target += f"&cursor={quoted(cursor)}"
            try:
                for event in self.server.events(target, port=self.port, headers=headers):
                    self.kinds.append(event.kind)
                    cursor = event.cursor or cursor
                    if event.kind in self.got:
                        assert event.data["offset"] == len(self.got[event.kind]), "a hole, or something twice"
                        self.got[event.kind] += event.output
                    elif event.kind == "ended":
                        result = event.data["result"]
                        assert isinstance(result, dict)
                        return result
                    else:
                        assert event.kind in ("started", ":"), event
            except (OSError, http.client.HTTPException):
                continue  # cut
        raise AssertionError(f"no end of {self.path}; so far {self.kinds[-5:]}")


def proxy_of(server: Server, seed: int, *, most_s: float, most_bytes: int = 60_000) -> CuttingProxy:
    return CuttingProxy(server.port, seed, CUTS, most_bytes=most_bytes, most_s=most_s)


def test_each_number_comes_once_in_order_on_both_streams_whatever_is_cut(server: Server) -> None:
    sandbox = server.create()
    exec_id = server.start(sandbox, "python3", "-c", NUMBERS, timeout=100)
    run = server.call(
        "POST",
        "/v1/runs",
        document={"runtime": server.box.runtime, "command": ["python3", "-c", NUMBERS], "timeout": 100},
        wait=0,
    )
    assert run.status == 202, str(run)
    proxies = [proxy_of(server, seed, most_s=1.0) for seed in range(3)]
    followers = [
        Follower(server, f"/v1/execs/{exec_id}/stream", proxies[0].port),
        Follower(server, f"/v1/execs/{exec_id}/stream", proxies[1].port, "base64", by_header=True),
        Follower(server, f"/v1/runs/{run.document['id']}/stream", proxies[2].port),
    ]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(Follower.follow, followers))
    for follower, proxy, result in zip(followers, proxies, results, strict=True):
        proxy.close()
        assert proxy.cut == CUTS, "the network was as bad as was meant"
        assert follower.got["stdout"] == EXPECTED and follower.got["stderr"] == EXPECTED
        assert (result["reason"], result["exit_code"]) == ("nonzero_exit", 7)
        for name in ("stdout", "stderr"):
            assert result[name]["bytes"] == len(EXPECTED) and not result[name]["truncated"]
    assert server.result(exec_id)["stdout"]["text"] == EXPECTED.decode()
    assert server.delete(sandbox).status == 200


def test_a_silent_exec_gives_its_result_whatever_is_cut(serve: Callable[[str], Server]) -> None:
    def silent(server: Server) -> None:
        sandbox = server.create()
        document = {"argv": ["sh", "-c", SILENT, "sh", "30"], "timeout": 100, "wait": 100}
        key = {"Idempotency-Key": f"silent-{sandbox}"}
        proxies = [proxy_of(server, seed, most_s=2.8, most_bytes=400) for seed in range(3)]

        def repeated(method: str, target: str, port: int, **more: Any) -> dict[str, Any]:
            for _ in range(CUTS + 20):
                try:
                    answer = server.call(method, target, port=port, **more)
                except (OSError, http.client.HTTPException):
                    continue  # cut
                assert answer.status == 200, str(answer)
                return answer.document
            raise AssertionError("no answer")

        with ThreadPoolExecutor(4) as pool:
            # The call that starts it is cut too; its key finds the exec again, which runs once.
            execs = f"/v1/sandboxes/{sandbox}/execs"
            starting = pool.submit(repeated, "POST", execs, proxies[0].port, document=document, headers=key)
            while not (items := server.call("GET", execs).document["items"]):
                time.sleep(0.05)
            exec_id = items[0]["id"]
            target = f"/v1/execs/{exec_id}"
            asking = pool.submit(repeated, "GET", target, proxies[1].port, wait=100)
            follower = Follower(server, f"{target}/stream", proxies[2].port)
            patient = Follower(server, f"{target}/stream", server.port)
            following, listening = pool.submit(follower.follow), pool.submit(patient.follow)
            results = [starting.result()["result"], asking.result()["result"], following.result(), listening.result()]
        for result in results:
            assert (result["reason"], result["exit_code"], result["stdout"]["bytes"]) == ("nonzero_exit", 7, 2)
            assert result["timings"]["running_ms"] >= 29_000
        assert [result["stdout"]["text"] for result in results[:2]] == ["1\n"] * 2, "it ran once"
        for proxy in proxies:
            proxy.close()
            assert proxy.cut == CUTS, "the network was as bad as was meant"
        assert follower.got == patient.got == {"stdout": b"1\n", "stderr": b""}
        assert ":" in patient.kinds, "a silent stream shows that it lives"
        assert starting.result()["id"] == exec_id and len(server.call("GET", execs).document["items"]) == 1
        assert server.delete(sandbox).status == 200

    with ThreadPoolExecutor(len(MODES)) as pool:
        list(pool.map(lambda mode: silent(serve(mode)), MODES))


@pytest.mark.parametrize("kind", ["exec", "run"])
def test_a_cursor_whose_output_is_gone_is_410_with_how_much_there_was(server: Server, kind: str) -> None:
    argv = ["sh", "-c", "printf 12345; sleep 0.3; printf 678; printf 90 >&2; exit 7"]
    sandbox = None
    if kind == "exec":
        sandbox = server.create()
        exec_id = server.start(sandbox, *argv)
        path = f"/v1/execs/{exec_id}/stream"
    else:
        done = server.call("POST", "/v1/runs", document={"runtime": server.box.runtime, "command": argv}, wait=100)
        path = f"/v1/runs/{done.document['id']}/stream"
    events = list(server.events(path))
    output = [event for event in events if event.kind in ("stdout", "stderr")]
    assert b"".join(event.output for event in output if event.kind == "stdout") == b"12345678"
    cursors = [event.cursor for event in output]
    spools = list((server.box.state / "spool").iterdir())
    assert spools
    for spool in spools:  # as if what was kept had been given up for room
        shutil.rmtree(spool)
    for cursor in cursors[:-1]:
        with pytest.raises(Refusal) as caught:
            list(server.events(f"{path}?cursor={quoted(cursor or '')}"))
        answer = caught.value.answer
        assert (answer.status, answer.code) == (410, "cursor_gone"), str(answer)
        assert answer.document["bytes"] == 10 and answer.document["hint"]
    again = list(server.events(path))
    gaps = {event.data["stream"]: event.data["bytes"] for event in again if event.kind == "gap"}
    assert gaps == {"stdout": 8, "stderr": 2}, [event.kind for event in again]
    assert again[-1].kind == "ended" and again[-1].data["result"]["exit_code"] == 7
    assert not any(event.kind in ("stdout", "stderr") for event in again)
    if sandbox is not None:
        assert server.delete(sandbox).status == 200


def test_what_is_no_cursor_of_the_stream_is_refused_and_never_an_end(server: Server) -> None:
    sandbox = server.create()
    exec_id = server.start(sandbox, "sh", "-c", "printf 12345; exec sleep 60")
    path = f"/v1/execs/{exec_id}/stream"
    stream = server.events(path)
    first = next(event for event in stream if event.kind == "stdout")
    stream.close()
    assert first.cursor is not None and first.output == b"12345"
    beyond = first.cursor.replace("5", "6")
    for cursor, by_header in itertools.product(
        ("x", "1", "1.2", "-1.0.0.0", "1.0.x", beyond, f"{first.cursor}.9", "9" * 30 + ".0.0.0", "5.0.5.0\0", "é"),
        (False, True),
    ):
        if by_header and not cursor.isprintable():
            continue
        headers = {"Last-Event-ID": cursor} if by_header else {}
        target = path if by_header else f"{path}?cursor={quoted(cursor)}"
        with pytest.raises(Refusal) as caught:
            list(server.events(target, headers=headers))
        assert caught.value.answer.status in (410, 422), (cursor, str(caught.value.answer))
    assert server.call("POST", f"/v1/execs/{exec_id}/cancel").document["result"]["reason"] == "cancelled"
    rest = list(server.events(f"{path}?cursor={quoted(first.cursor)}"))
    assert [event.kind for event in rest] == ["ended"] and rest[0].data["result"]["reason"] == "cancelled"
    assert server.delete(sandbox).status == 200
