"""K03: what the program wrote is what the caller gets, byte for byte."""

import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Box

ALL_BYTES = bytes(range(256)) * 100
SLOW = (
    "import os, time\n"
    "for b in 'café ☕ 你好'.encode():\n"
    "    os.write(1, bytes([b])); os.write(2, bytes([b])); time.sleep(0.01)\n"
)
CASES = {
    "every byte value": ("import os; os.write(1, bytes(range(256))*100)", ALL_BYTES, b"", 0),
    "characters split over writes": (SLOW, "café ☕ 你好".encode(), "café ☕ 你好".encode(), 0),
    "two hundred thousand wide characters": ("print('你'*200000, end='')", ("你" * 200000).encode(), b"", 0),
    "invalid UTF-8 and exit 7": (
        "import os; os.write(1, b'\\xff\\xfe\\x80ok'); os._exit(7)",
        b"\xff\xfe\x80ok",
        b"",
        7,
    ),
    "one line of eight mebibytes": ("import sys; sys.stdout.write('y'*(8<<20))", b"y" * (8 << 20), b"", 0),
    "nothing at all": ("pass", b"", b"", 0),
}


def kept(stream: dict) -> bytes:
    return base64.b64decode(stream["base64"]) if stream["base64"] is not None else stream["text"].encode()


@pytest.mark.parametrize("name", CASES)
def test_json_carries_the_exact_bytes(box: Box, name: str) -> None:
    code, out, err, status = CASES[name]
    exit_status, doc = box.document("run", "--json", "--runtime", box.runtime, "-c", code)
    result = doc["result"]
    assert exit_status == result["exit_code"] == status
    for stream, expected in (("stdout", out), ("stderr", err)):
        assert result[stream]["bytes"] == result[stream]["kept_bytes"] == len(expected)
        assert result[stream]["truncated"] is False
        assert hashlib.sha256(kept(result[stream])).digest() == hashlib.sha256(expected).digest()
        try:
            assert result[stream]["text"] == expected.decode()
            assert result[stream]["base64"] is None
        except UnicodeDecodeError:
            assert "\ufffd" in result[stream]["text"]


@pytest.mark.parametrize("name", CASES)
def test_pass_through_writes_the_exact_bytes(box: Box, name: str) -> None:
    code, out, err, status = CASES[name]
    done = box("run", "--runtime", box.runtime, "-c", code)
    assert done.returncode == status
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(out).digest()
    assert done.stderr == err


@pytest.mark.slow
def test_five_hundred_short_outputs_without_newline_arrive_whole(box: Box) -> None:
    sandbox = box.sandbox()
    # One process that calls 500 times would hide start-up races, 500 command lines would take minutes: 60 commands, 8 at once,
    # and the rest inside the sandbox's own loop.
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: box("exec", sandbox, "--", "printf", "x").stdout, range(60)))
    assert outs == [b"x"] * 60
    assert box("sandbox", "rm", sandbox).returncode == 0


def test_more_than_what_is_kept_is_marked_with_exact_totals(box: Box) -> None:
    code = "import sys; sys.stdout.write('a'*3000 + 'b'*3000)"
    _, doc = box.document("run", "--json", "--runtime", box.runtime, "--output-limit", "1K", "-c", code)
    stdout = doc["result"]["stdout"]
    assert (stdout["bytes"], stdout["kept_bytes"], stdout["truncated"], stdout["head_bytes"]) == (6000, 1024, True, 512)
    assert stdout["text"] == "a" * 512 + "[… 4976 bytes omitted …]" + "b" * 512 or stdout["text"].replace("\n", "") == (
        "a" * 512 + "[… 4976 bytes omitted …]" + "b" * 512
    )
    assert base64.b64decode(stdout["base64"]) == b"a" * 512 + b"b" * 512
    assert doc["result"]["reason"] == "ok"
    raw = box("logs", doc["id"], "--stream", "stdout")
    assert raw.stdout == b"a" * 3000 + b"b" * 3000


def test_a_flood_over_the_kill_limit_ends_the_program(box: Box) -> None:
    done, doc = box.document(
        "run", "--json", "--runtime", box.runtime, "--output-limit", "64K", "--output-kill", "1M", "--", "yes"
    )
    result = doc["result"]
    assert (done, result["reason"]) == (137, "output_limit")
    assert result["stdout"]["truncated"] is True
    assert result["stdout"]["kept_bytes"] == 64 * 1024
    assert result["limits"]["output"]["hit"] is True
    assert "1 MiB" in result["hint"] or "1024" in result["hint"]
