"""The console script: guards first, then the command line and all that it needs."""

from __future__ import annotations

import sys

from corral.cli import leaving


def main() -> None:
    """Run the command line of this process; raises SystemExit."""
    arguments = sys.argv[1:]
    leaving.guard(arguments)
    from corral.cli import commands, terminal

    terminal.claim_standard_streams()
    sys.exit(commands.call(arguments))
