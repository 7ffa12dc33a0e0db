"""A runtime whose program is anything but a runtime is told as unusable, with the reason; everything else works as without it."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import pytest

from .conftest import _empty, marked, root_box
from .serving import Server

PROGRAMS = {
    "garbage": r"""#!/bin/sh
printf 'program version \033[2J\377\376\n'; head -c 100000 /dev/urandom
""",
    "hangs": """#!/bin/sh
trap '' TERM; sleep {mark} & while :; do sleep {mark}; done
""",
    "starts-and-hangs": """#!/bin/sh
case "$*" in *--version*) echo program version 1.0; exit;; esac
trap '' TERM; setsid sleep {mark} & while :; do sleep {mark}; done
""",
    "ends-at-once": """#!/bin/sh
echo program version 1.0
""",
    "noise": "\x7fELF\x02\x01\x01 and nothing more",
    "closed": "#!/bin/sh\n",
    "lost": "#!/no/such/interpreter\n",
}


@pytest.mark.root
def test_programs_that_are_no_runtimes_take_neither_doctor_nor_the_service_down(shared: Path, tmp_path: Path) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    box = root_box(shared / f"broken-{worker}", shared, "bubblewrap")
    mark = f"600.0{secrets.randbelow(10**9)}"
    tables = []
    for name, text in PROGRAMS.items():
        path = tmp_path / name
        path.write_text(text.replace("{mark}", mark))
        path.chmod(0o644 if name == "closed" else 0o755)
        tables.append(f'[oci.{name}]\nprogram = "{path}"\n')
    (box.state / "config.toml").write_text("".join(tables))

    status, found = box.document("doctor", "--json", timeout=280)
    assert status == 0, found
    told = {runtime["name"]: runtime for runtime in found["runtimes"]}
    assert told["bubblewrap"]["usable"] and told[found["default"]]["usable"]
    for name in PROGRAMS:
        assert not told[name]["usable"], told[name]
        assert told[name]["reason"] and told[name]["reason"].isprintable() and len(told[name]["reason"]) < 3000
        assert told[name]["version"] in (None, "1.0")
    assert found["leftovers"] == []
    assert box("doctor", timeout=280).returncode == 0, "for people too"
    assert marked(mark) == [], "what they started has ended"

    server = Server(box)
    sandbox = server.create()
    assert server.run(sandbox, "true")["exit_code"] == 0
    assert server.call("POST", "/v1/sandboxes", document={"runtime": "hangs"}).status >= 400
    default = server.call("POST", "/v1/runs", document={"code": "print(1)", "language": "python"}, wait=100)
    assert default.document["result"]["stdout"]["text"] == "1\n", str(default)
    assert server.delete(sandbox).status == 200
    server.stop()
    assert "Traceback" not in server.said and marked(mark) == []
    (box.state / "config.toml").unlink()
    _empty(box)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.stat("/dev/null").st_uid == 0
