"""The kind `debian`: a root file system of the distribution's packages.

With `configure` the packages' maintainer scripts run in the new tree, as on any machine of that distribution: alternatives,
certificates and the loader's cache are there afterwards. Without it packages are only unpacked. Root builds in mount and pid
namespaces of its own, which end with this process; an ordinary user needs a subordinate id range, or gets what apt and dpkg
alone can unpack.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from corral.node.templates_recipe import Recipe
from corral.node.templates_sealing import PROGRAM_PATH, resolve_inside

Progress = Callable[[str, float | None], None]
RANGE = 65536
_BUILD_S = 2 * 3600.0
_VOLATILE = ("var/log", "var/cache", "var/lib/apt/lists", "run", "tmp", "var/tmp", "dev", "proc", "sys")
"""Directories whose content differs from build to build, or is made by who runs the sandbox."""
_SECRET_BY_NAME = ("shadow", "gshadow", "shadow-", "gshadow-", "passwd-", "group-", ".pwd.lock", "machine-id")


def cannot_build(recipe: Recipe) -> str | None:
    """Why this host cannot build it; None if it can."""
    if shutil.which("mmdebstrap", path=PROGRAM_PATH):
        if os.geteuid() == 0 or _has_subordinate_range():
            return None
        lacking = f"a subordinate range of {RANGE} ids (/etc/subuid, /etc/subgid) for this user"
    else:
        lacking = "mmdebstrap on the host"
    if recipe.configure or recipe.suite or recipe.exclude:  # without it: what is named, of this host's release, whole
        return f"needs {lacking}"
    if shutil.which("apt-get", path=PROGRAM_PATH) and shutil.which("dpkg-deb", path=PROGRAM_PATH):
        return None
    return f"needs {lacking}, or apt-get with dpkg-deb"


def unpack(recipe: Recipe, root: Path, progress: Progress) -> None:
    """Fill `root`, which is empty; OSError says what failed. What is outside of `root.parent` is not touched."""
    progress(f"template {recipe.name}: fetching {len(recipe.packages)} packages and what they need", 0.05)
    if shutil.which("mmdebstrap", path=PROGRAM_PATH) and (os.geteuid() == 0 or _has_subordinate_range()):
        _mmdebstrap(recipe, root, progress)
    else:
        _apt_download(recipe.packages, root)
    for place in _VOLATILE:
        found = resolve_inside(root, f"/{place}")  # a package may have made it a link
        for inside in found.iterdir() if found is not None and found.is_dir() else ():
            shutil.rmtree(inside) if inside.is_dir() and not inside.is_symlink() else inside.unlink()
    if (etc := resolve_inside(root, "/etc")) is not None:
        for name in _SECRET_BY_NAME:
            (etc / name).unlink(missing_ok=True)
    if recipe.busybox_applets:
        _link_applets(root)


def packages_of(root: Path) -> dict[str, str]:
    """Name -> version of each package that the tree's own dpkg knows as installed; empty where there is no dpkg."""
    found: dict[str, str] = {}
    path = resolve_inside(root, "/var/lib/dpkg/status")  # of a stranger's tree: no link leads out
    if path is None or not path.is_file():
        return found
    status = path.read_text(encoding="utf-8", errors="replace")
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if {"Package", "Version"} <= fields.keys() and not fields.get("Status", "").startswith("deinstall"):
            found[fields["Package"]] = fields["Version"]
    return found


def _has_subordinate_range() -> bool:
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        return all(
            any(
                len(parts := line.split(":")) == 3 and parts[0] in (name, str(os.geteuid())) and int(parts[2]) >= RANGE
                for line in Path(f"/etc/sub{kind}").read_text(encoding="utf-8").splitlines()
            )
            for kind in ("uid", "gid")
        )
    except (OSError, KeyError, ValueError):
        return False


def host_suite() -> str:
    """The code name of the host's own release."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    return release.get("VERSION_CODENAME", "stable").strip('"')


def _mmdebstrap(recipe: Recipe, root: Path, progress: Progress) -> None:
    command = [
        "mmdebstrap",
        f"--variant={'essential' if recipe.configure else 'extract'}",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.exclude),
    ]
    suite = recipe.suite or host_suite()
    if os.geteuid() == 0:
        # Mounts and processes of the build end with this process, however that ends: what it leaves can be removed.
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]
        _follow(
            ["setpriv", "--pdeathsig=KILL", "--", *own, *command, "--mode=root", suite, str(root)], recipe, progress
        )
        return
    # It unpacks as ids of the subordinate range, in a directory of its own that it removes itself; only a stream comes here.
    made = ["setpriv", "--pdeathsig=TERM", "--", *command, "--mode=unshare", "--format=tar", suite, "-"]
    # Unpacked by tar as this process's own user, without the numbered owners and device files of the archive.
    tar = ["tar", "-xf", "-", "-C", str(root), "--no-same-owner", "--no-same-permissions", "--exclude=./dev/*"]
    with subprocess.Popen(tar, stdin=subprocess.PIPE, env=environment()) as unpacking:
        try:
            _follow(made, recipe, progress, into=unpacking)
        finally:
            if unpacking.stdin is not None:
                unpacking.stdin.close()
    if unpacking.returncode != 0:
        raise OSError(f"tar ended with {unpacking.returncode}")


def _follow(
    command: list[str], recipe: Recipe, progress: Progress, into: subprocess.Popen[bytes] | None = None
) -> None:
    """Run it and tell each of its own lines as progress; the last lines say why it failed."""
    last: deque[str] = deque(maxlen=60)
    steps = 0
    with subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if into is None else into.stdin,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        late = threading.Timer(_BUILD_S, process.kill)  # a mirror that stands still must not hold every other build
        late.daemon = True
        late.start()
        for line in process.stderr or ():
            last.append(text := " ".join(line.split())[:300])
            if text.startswith("I: ") and not text.startswith("I: removing"):
                steps += 1
                progress(f"template {recipe.name}: {text.removeprefix('I: ')}", min(0.8, 0.05 + 0.07 * steps))
        late.cancel()
    if process.returncode != 0:
        # the cause stands among the last lines, before the tool tells that it cleans up
        told = [text for text in last if "error" in text.lower() or text.startswith(("E:", "W:"))] or list(last)[-6:]
        raise OSError(f"mmdebstrap ended with {process.returncode}: {' '.join(told)[:800]}")


def _apt_download(packages: Sequence[str], root: Path) -> None:
    work = root.parent / "debs"
    work.mkdir()
    _run(["apt-get", "download", *packages], cwd=work)
    for deb in work.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(deb), str(root)])


def _link_applets(root: Path) -> None:
    paths = (resolve_inside(root, "/bin/busybox"), resolve_inside(root, "/usr/bin/busybox"))
    busybox = next((path for path in paths if path is not None and path.is_file()), None)
    if busybox is None:
        raise OSError("busybox_applets: no package of the recipe brings a busybox")
    applets = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        link = busybox.parent / applet
        if not link.exists() and not link.is_symlink():
            link.symlink_to("busybox")


def environment() -> dict[str, str]:
    """Of programs that build: nothing of this process's own but how the package index is reached."""
    passed = ("http_proxy", "https_proxy", "no_proxy")
    return {
        "PATH": PROGRAM_PATH,
        "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent",
        "TMPDIR": tempfile.gettempdir(),
        "DEBIAN_FRONTEND": "noninteractive",
        **{name: os.environ[name] for name in passed if name in os.environ},
    }


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=_BUILD_S,
    )
    if done.returncode != 0:
        raise OSError(f"{command[0]} ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
