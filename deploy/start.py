"""Become the command line of this checkout; started by `./corral` as `python -I -S`.

The guards stand before the packages are even looked for (`site`), so that a signal in the first milliseconds ends like any other:
no traceback, and the document of `--json`.
"""

import _signal

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until the guards stand: to die without a word
import sys

sys.path.insert(0, __file__.removesuffix("deploy/start.py") + "src")
from corral.cli import leaving

leaving.guard(sys.argv[1:])
import site  # noqa: E402 - it takes as long as all before it

site.main()
from corral.cli.main import main  # noqa: E402

main()
