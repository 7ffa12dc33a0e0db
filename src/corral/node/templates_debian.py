"""The kind `debian`: a root file system of the distribution's packages.

With `configure` the packages' maintainer scripts run in the new tree, as on any machine of that distribution: alternatives,
certificates and the loader's cache are there afterwards. Without it packages are only unpacked.

Nothing of a package runs as a user of this host, see `templates_confined`. Where that cannot be, apt and dpkg alone tell what packages
hold, and it is unpacked like an archive of a stranger: no link of one package leads the files of another out of the tree.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from corral.errors import CorralError
from corral.node import templates_confined
from corral.node.templates_confined import Lack, on_host
from corral.node.templates_recipe import Recipe
from corral.node.templates_sealing import PROGRAM_PATH, SECRET_BY_NAME, resolve_inside
from corral.node.templates_tar import Refused
from corral.node.templates_unpacking import Caps, Tree

Progress = Callable[[str, float | None], None]
_BUILD_S = 2 * 3600.0
MAX_BUSYBOX = 64 * 1024 * 1024
MAX_STATUS = 64 * 1024 * 1024
"""A host with every package of the distribution would have about as much."""
MAX_PACKAGES = 20_000
MAX_WORD = 200
MAX_LINE = 65536
MAX_APPLETS = 10_000
_VOLATILE = ("var/log", "var/cache", "var/lib/apt/lists", "run", "tmp", "var/tmp", "dev", "proc", "sys")
"""Directories whose content differs from build to build, or is made by who runs the sandbox."""
_APPLET = re.compile(rb"\[\[?|[a-z0-9][a-z0-9_.+-]{0,40}")


def cannot_build(recipe: Recipe) -> Lack | None:
    """Why this host cannot build it; None if it can."""
    lack = _no_mmdebstrap()
    if lack is None:
        return None
    # Without it: what is named, of this host's release, whole.
    if recipe.configure or recipe.suite or recipe.exclude or recipe.sources:
        return lack
    if on_host("apt-get") and on_host("dpkg-deb"):
        return None
    return Lack(f"{lack.reason}, or apt-get with dpkg-deb", lack.hint)


def _no_mmdebstrap() -> Lack | None:
    if not on_host("mmdebstrap"):
        return Lack("needs mmdebstrap on the host", "install the package mmdebstrap")
    return templates_confined.lack()


def unpack(recipe: Recipe, root: Path, progress: Progress, base: int | None) -> None:
    """Fill `root`, which is empty; OSError says what failed. What is outside of `root.parent` is not touched.

    As root, packages have the host ids from `base` on; files that are theirs stay so until the tree is sealed.
    """
    progress(f"template {recipe.name}: fetching {len(recipe.packages)} packages and what they need", 0.05)
    if _no_mmdebstrap() is None:
        _mmdebstrap(recipe, root, progress, base)
    else:
        _apt_download(recipe, root)
    for place in _VOLATILE:
        found = resolve_inside(root, f"/{place}")  # a package may have made it a link
        for inside in found.iterdir() if found is not None and found.is_dir() else ():
            shutil.rmtree(inside) if inside.is_dir() and not inside.is_symlink() else inside.unlink()
    if (etc := resolve_inside(root, "/etc")) is not None:
        for name in SECRET_BY_NAME:
            (etc / name).unlink(missing_ok=True)
    if recipe.busybox_applets:
        _link_applets(root)


def packages_of(root: Path) -> dict[str, str]:
    """Name -> version of each package that the tree's own dpkg knows as installed; empty where there is no dpkg.

    The tree may be a stranger's: no link leads out, and of its list no more is read than a list of packages has.
    """
    found: dict[str, str] = {}
    path = resolve_inside(root, "/var/lib/dpkg/status")
    if path is None or not path.is_file():
        return found
    with path.open("rb") as file:
        status = file.read(MAX_STATUS)
    for paragraph in status.decode("utf-8", "replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if {"Package", "Version"} <= fields.keys() and not fields.get("Status", "").startswith("deinstall"):
            found[fields["Package"][:MAX_WORD]] = fields["Version"][:MAX_WORD]
            if len(found) == MAX_PACKAGES:
                break
    return found


def host_suite() -> str:
    """The code name of the host's own release."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    release = dict(line.split("=", 1) for line in lines if "=" in line)
    return release.get("VERSION_CODENAME", "stable").strip('"')


def _mmdebstrap(recipe: Recipe, root: Path, progress: Progress, base: int | None) -> None:
    """Run it and tell each of its own lines as progress; the last lines say why it failed."""
    command = [
        *("env", f"TMPDIR={os.path.dirname(templates_confined.TREE)}"),
        "mmdebstrap",
        "--mode=unshare",
        f"--variant={'essential' if recipe.configure else 'extract'}",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.exclude),
        *(recipe.suite or host_suite(), templates_confined.TREE, *recipe.sources),
    ]
    last: deque[str] = deque(maxlen=60)
    steps = 0
    try:
        process = templates_confined.begin(command, root, base, environment())
    except PermissionError as error:
        raise _not_begun(recipe, str(error.strerror)) from error
    with process:
        late = threading.Timer(_BUILD_S, process.kill)  # a mirror that stands still must not hold every other build
        late.daemon = True
        late.start()
        try:
            # Scripts of packages write there too: a line need not end.
            while process.stderr is not None and (line := process.stderr.readline(MAX_LINE)):
                last.append(text := " ".join(line.split())[:300])
                if text.startswith("I: ") and not text.startswith("I: removing"):
                    steps += 1
                    progress(f"template {recipe.name}: {text.removeprefix('I: ')}", min(0.8, 0.05 + 0.07 * steps))
        except BaseException:
            process.kill()
            raise
        finally:
            late.cancel()
    if process.returncode == templates_confined.NOT_BEGUN:
        raise _not_begun(recipe, " ".join(last))
    if process.returncode != 0:
        # the cause stands among the last lines, before the tool tells that it cleans up
        told = [text for text in last if "error" in text.lower() or text.startswith(("E:", "W:"))] or list(last)[-6:]
        told_all = f"mmdebstrap ended with {process.returncode}: {' '.join(told)[:800]}"
        full = any(os.strerror(errno.ENOSPC) in text for text in last)
        raise OSError(errno.ENOSPC, told_all) if full else OSError(told_all)


def _not_begun(recipe: Recipe, why: str) -> CorralError:
    return CorralError(
        "template_unavailable",
        f"template {recipe.name}: packages cannot be given ids of their own: {why}",
        hint="allow user namespaces; `corral doctor --security` tells what forbids them",
    )


def _apt_download(recipe: Recipe, root: Path) -> None:
    work = root.parent / "debs"
    work.mkdir()
    _run(["apt-get", "download", *recipe.packages], cwd=work)
    tree = Tree(recipe.name, root, Caps().within(root.parent))
    for deb in sorted(work.glob("*.deb")):
        command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=said) as process,
        ):
            assert process.stdout is not None
            refused = None
            try:
                tree.unpack(process.stdout)
            except Refused as error:
                refused = Refused(f"{deb.name}: {error}")
                if process.stdout.read(1):
                    process.kill()
                    raise refused from None
            # Of a package that it cannot read it tells nothing, or half.
            if process.wait() != 0:
                said.seek(0)
                raise _ended(command, process.returncode, said.read(65536).decode("utf-8", "replace"))
            if refused is not None:
                raise refused


def _link_applets(root: Path) -> None:
    paths = (resolve_inside(root, "/bin/busybox"), resolve_inside(root, "/usr/bin/busybox"))
    busybox = next((path for path in paths if path is not None and path.is_file()), None)
    if busybox is None:
        raise OSError("busybox_applets: no package of the recipe brings a busybox")
    with busybox.open("rb") as file:
        program = file.read(MAX_BUSYBOX)
    for applet in applets_of(program):
        link = busybox.parent / applet
        if not link.exists() and not link.is_symlink():
            link.symlink_to("busybox")


def applets_of(program: bytes) -> list[str]:
    """The names that a busybox answers to, read from the sorted table in it: a foreign program is not run to be asked."""
    found: list[str] = []
    for name in program[max(0, program.find(b"\0[\0[[\0")) :].split(b"\0", MAX_APPLETS)[1:MAX_APPLETS]:
        if not _APPLET.fullmatch(name) or (found and name.decode() <= found[-1]):
            break
        found.append(name.decode())
    if not {"cat", "ls", "sh"} <= set(found):
        raise OSError("busybox_applets: the busybox of the recipe's packages has no table of applets")
    return found


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
        raise _ended(command, done.returncode, done.stderr)


def _ended(command: list[str], status: int, said: str) -> OSError:
    return OSError(f"{command[0]} ended with {status}: {' '.join(said.split())[-300:]}")
