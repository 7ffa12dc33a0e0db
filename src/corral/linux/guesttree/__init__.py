"""The one package that touches trees made by sandboxes, on the host.

A tree is hostile: links that point out, names with any byte, nests deeper than a path may be long, devices, FIFOs, and a program that
swaps a directory for a link while we look. Therefore:

* Every name is opened as one component under an open directory by `openat2` with BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV; no
  path string of the guest is ever resolved by the host. Only directories and regular files are opened, the latter through an O_PATH
  descriptor whose type was checked first.
* The work runs in a thread of its own whose file-system uid, gid and groups are the sandbox's, so even a mistake here could do no
  more than the sandbox itself. The thread ends with the work; it never goes back to a pool with foreign ids. A scan may read what
  the sandbox has made unreadable for itself, nothing else: it copies nothing and writes nothing.
* Entries, depth, bytes and seconds are capped; what is beyond makes an answer `complete = False`, never an error or a hang.
"""

from __future__ import annotations

from corral.linux.guesttree.copying import Copied
from corral.linux.guesttree.looking import RACY_NS, DiskUse, Look, is_as_seen
from corral.linux.guesttree.removal import remove_tree
from corral.linux.guesttree.tree import GuestTree
from corral.linux.guesttree.walk import Caps

__all__ = ["RACY_NS", "Caps", "Copied", "DiskUse", "GuestTree", "Look", "is_as_seen", "remove_tree"]
