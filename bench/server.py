"""A `corral serve` of a benchmark: a process of its own on a scratch state directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


class Server:
    """Started at once; `close` ends it and what it left in its state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.key = secrets.token_urlsafe(32)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**clean, "CORRAL_STATE_DIR": str(state), "CORRAL_ADMIN_KEY": self.key},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("corral: listening on "):
            raise RuntimeError(f"corral serve did not start: {line!r}")
        self.url = line.split()[-1]

    def client(self) -> Any:
        """The SDK on this server."""
        from corral.client import Corral

        return Corral(self.url, self.key)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


class Memory:
    """The most that a process holds from here on, over what it held before."""

    def __init__(self, pid: int | None = None) -> None:
        self._proc = Path(f"/proc/{pid or os.getpid()}")
        with contextlib.suppress(OSError):  # then the peak counts from the start of the process, which is more
            (self._proc / "clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def growth(self) -> int:
        """Bytes."""
        return self._status("VmHWM") - self._before

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
