"""Programs that try things, as text: they run inside a sandbox or, as a control, as a plain child on the host.

Standard library only. Each prints one JSON object: what was tried -> `ok` or why not (an errno's name).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

USER = 54321
"""The ordinary user of these tests, when root runs them."""
AS_USER: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []}


@cache
def user_python() -> str:
    """A Python that an ordinary user may run: this one, else the system's."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        probe = [candidate, "-c", "import sys; raise SystemExit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(probe, capture_output=True, cwd="/", **AS_USER).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.skip("no Python of at least 3.11 is executable by an ordinary user")


def on_the_host(code: str, *arguments: str, **options: Any) -> dict[str, Any]:
    """Run a probe as a plain child of ours: what it can do without a sandbox.

    As root it has mounts, names and IPC of its own: a probe that can do too much must not do it to the host.
    """
    apart = ["unshare", "--mount", "--uts", "--ipc", "--propagation", "private", "--"]
    as_root = os.geteuid() == 0 and "user" not in options
    done = subprocess.run(
        [
            *(apart if as_root else []),
            *(user_python() if "user" in options else sys.executable, "-I", "-c", code, *arguments),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        **{"start_new_session": True, **options},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers
