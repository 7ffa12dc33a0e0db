"""The file program inside a sandbox: one call of the file API, as the exec's own user.

The guest starts it as an exec; nothing imports it. Content comes on standard input and goes to standard output, facts as lines of
JSON. A refusal is one such line on standard error, `{"code","detail","entry","size"}`, and exit status 3. Only what a call needs is
imported: who asks for a file's size waits for the start of this program.
"""

from __future__ import annotations

import errno
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from corral.guest import protocol
from corral.guest.entries import Refused, raw, refusal_of


def perform(words: list[str]) -> None:
    """`unpack DEST MAX_BYTES MAX_ENTRIES`, `pack PATH`, or an operation of `fileops` or `filewatch`."""
    operation, given = words[0], words[1:]
    if operation == "unpack":
        from corral.guest import archive

        archive.unpack(given[0], int(given[1]), int(given[2]))
    elif operation == "pack":
        from corral.guest import archive

        archive.pack(given[0])
    else:
        try:
            _perform(operation, given)
        except BrokenPipeError:
            raise
        except OSError as error:
            path = raw(given[0])
            if error.errno == errno.ENOTDIR and operation in ("write", "mkdir"):
                raise Refused("not_a_directory", f"{given[0]!r} leads through what is no directory", given[0]) from None
            raise refusal_of(error, path) from None


def _perform(operation: str, given: list[str]) -> None:
    if operation == "watch":
        from corral.guest import filewatch

        filewatch.watch(raw(given[0]), recursive=given[1] == "1")
        return
    from corral.guest import fileops

    known = fileops.OPERATIONS.get(operation)
    if known is None:
        raise Refused("bad_request", f"no operation {operation!r}")
    known(*given)


def complain(refused: Refused) -> int:
    told = {
        "code": refused.code,
        "detail": refused.detail[:2000],
        "entry": None if refused.entry is None else refused.entry[:4096],
        "size": refused.size,
    }
    os.write(2, protocol.dumps(told) + b"\n")
    return 3


def main(words: list[str]) -> int:
    """-> exit status."""
    try:
        perform(words)
    except Refused as refused:
        return complain(refused)
    except RecursionError:
        return complain(Refused("invalid_value", "the tree is too deep"))
    except BrokenPipeError:
        return 4
    except OSError as error:
        return complain(Refused("invalid_value", str(error.strerror)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
