"""`python -m corral.testing.runtime CONFIG ID`: see `corral.testing.runtime`."""

import sys

from corral.testing.runtime.elsewhere import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
