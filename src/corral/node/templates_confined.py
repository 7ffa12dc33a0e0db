"""Programs that work on a new tree as ids that are nobody's of this host.

They run in a user namespace whose ids are a subordinate range, as its uid 0, with pid and mount namespaces that end with this process,
however that ends. The tree is at `TREE` for them: on the host no other user comes near it, whatever set-id programs it holds for the
moment, and where it lies need not be open to the range. Root maps a range that it is given. An ordinary user first becomes uid 0 of a
namespace of its own, in which newuidmap has mapped its range from `OWN_BASE` on, and does from there what root does.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.linux import userns
from corral.linux.userns import SIZE
from corral.node.templates_sealing import PROGRAM_PATH

TREE = "/tmp/root"  # noqa: S108 - of a mount namespace of its own
OWN_BASE = 1
"""First id of an ordinary user's range in the namespace where that user is 0."""

NOT_BEGUN = 91
"""Status of what could not be run so."""

# Process 1 of its pid namespace, and root of the outer user namespace: it must not take other ids itself, because a process that does
# forgets that it was to die with its parent. The program begins when its namespace has its ids, and then is uid 0 in it.
_CONFINED = f"""
cd "$1" && base=$2 && shift 2 &&
mount -t tmpfs -o mode=1777,size=16m,nosuid,nodev corral /tmp && mkdir -m 755 {TREE} &&
mount --no-canonicalize --bind . {TREE} && cd / && chmod 755 {TREE} && chown "$base:$base" {TREE} &&
mkfifo /tmp/there /tmp/go && exec 3<> /tmp/there 4<> /tmp/go && rm /tmp/there /tmp/go || exit {NOT_BEGUN}
{{
  setpriv "--reuid=$base" "--regid=$base" --clear-groups -- \\
    unshare --user -- sh -c 'echo $$ >&3; read -r _ <&4 && exec "$@" 3>&- 4>&-' sh "$@"
  ended=$?; echo over >&3; exit $ended
}} &
read -r pid <&3
[ "$pid" != over ] && echo "0 $base {SIZE}" > "/proc/$pid/uid_map" && echo "0 $base {SIZE}" > "/proc/$pid/gid_map" &&
echo >&4 || exit {NOT_BEGUN}
wait $!
ended=$?
if [ "$base" = {OWN_BASE} ]; then chown -hR 0:0 {TREE} && chmod -R u+rwX {TREE} || exit 1; fi
exit $ended
"""
_OWN = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--")
_MAPPED = 'echo; read -r _ && exec setpriv --pdeathsig=KILL -- "$@" < /dev/null > /dev/null'


@dataclass(frozen=True)
class Lack:
    """What a host needs before it can build something, and how it comes to have it."""

    reason: str
    hint: str


def on_host(program: str) -> bool:
    """Whether the host has it."""
    return shutil.which(program, path=PROGRAM_PATH) is not None


def lack() -> Lack | None:
    """Why nothing can be run so, as far as can be told without trying."""
    if sysctl("user/max_user_namespaces") == 0:
        return Lack("needs user namespaces", "allow them: sysctl user.max_user_namespaces")
    if os.geteuid() == 0:
        return None
    if sysctl("kernel/unprivileged_userns_clone") == 0:
        return Lack("needs user namespaces", "allow them: sysctl kernel.unprivileged_userns_clone=1")
    if not (on_host("newuidmap") and on_host("newgidmap")):
        return Lack("needs newuidmap and newgidmap on the host", "install the package uidmap")
    if None in (userns.subordinate("uid", SIZE), userns.subordinate("gid", SIZE)):
        who = userns.own_names()[0]
        return Lack(
            f"needs a subordinate range of {SIZE} ids (/etc/subuid, /etc/subgid) for the user {who}",
            f"as root: usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST {who}, with {SIZE} ids that nobody has",
        )
    return None


def sysctl(name: str) -> int | None:
    """A number of /proc/sys, or None."""
    try:
        return int(Path("/proc/sys", name).read_bytes())
    except (OSError, ValueError):
        return None


def begin(command: Sequence[str], tree: Path, base: int | None, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start it; its errors are to be read, its output goes nowhere. OSError says why it cannot be run so.

    `base` is the range's first id on this host, for root; an ordinary user has its own. While it runs the tree belongs to the range,
    afterwards to the user of this process, or to whom it did as root.
    """
    words = [*_OWN, "sh", "-c", _CONFINED, "sh", str(tree), str(OWN_BASE if base is None else base), *command]
    if base is not None:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "--", *words],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    return _as_root_of_own(words, env)


def _as_root_of_own(words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        ["unshare", "--user", "--", "sh", "-c", _MAPPED, "sh", *words],
        env=env,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.read(1) != "\n":
            raise OSError(errno.EPERM, f"user namespaces do not work here: {process.stderr.read().strip()}")
        for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            mapping = [f"new{kind}map", process.pid, 0, own, 1, OWN_BASE, userns.subordinate(kind, SIZE), SIZE]
            done = subprocess.run([str(word) for word in mapping], env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise OSError(errno.EPERM, f"new{kind}map: {done.stderr.strip()}")
        process.stdin.write("\n")
    except BaseException:
        # Without its line it ends by itself.
        process.communicate()
        raise
    process.stdin.close()
    process.stdin = None  # `communicate` would write to it
    return process


def remove(path: Path, env: Mapping[str, str]) -> None:
    """Remove a tree that a build of this ordinary user may have left to ids of its range; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and os.geteuid() != 0 and lack() is None:
        try:
            _as_root_of_own(["rm", "-rf", "--", str(path)], env).communicate()
        except OSError:
            pass
