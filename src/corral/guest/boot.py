"""Start file of the guest: finds the package beside itself (inside a sandbox) or around itself (a source tree) and runs it."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if os.path.basename(_here) == "guest":
    _here = os.path.dirname(os.path.dirname(_here))
sys.path.insert(0, _here)

from corral.guest.main import main  # noqa: E402

main(sys.argv[1:])
