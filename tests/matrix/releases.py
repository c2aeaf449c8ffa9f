# SPDX-License-Identifier: Apache-2.0
"""Debian's releases, each in a root directory of its own.

`other_release()` is, on bookworm trixie and on trixie bookworm, what compiles and runs this
checkout: another clang, libbpf and Python. `clean_release()` is any of them, with a few packages.
They come from $XDG_CACHE_HOME/writeback-exporter/releases, where debootstrap makes them anew once a
month: 55 s and 0.85 GB the first. What runs there runs on this system's kernel and sees its /proc
and /sys. The mounts are of a mount namespace, and what is written is in a tmpfs: both end with the
command, whatever becomes of it.

    python -m tests.matrix.releases DIRECTORY    # has that clang compile the objects to DIRECTORY
    GUEST_OBJECTS=DIRECTORY pytest tests/guest   # has guests use them
"""

import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from tests import lab
from tests.guest.kernels import (
    ARCHITECTURES,
    KEYRING,
    AptError,
    answer,
    cache_directory,
    locked,
    mirror,
)
from tests.guest.vm import CHECKOUT
from writeback_exporter.kernel.loader import OBJECTS

OTHER = {"bookworm": "trixie", "trixie": "bookworm"}
# What `make build` and the unit tests call beside the Makefile's BUILD_PACKAGES.
PACKAGES = ("bpftool", "ca-certificates", "git", "make")
REFRESH_SECONDS = 30 * 24 * 3600
# How this system's pip comes to packages.
_NETWORK = [Path("/etc", name) for name in ("hosts", "pip.conf", "resolv.conf", "ssl/certs")]
_SYSTEM = [Path(name) for name in ("/dev", "/proc", "/sys")]
ENVIRONMENT = ("HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
"""For env(1) in a release."""


class ReleaseUnavailable(Exception):
    """A release that cannot be had: what was tried, the answer and what to do, in one line."""


@dataclass(frozen=True)
class Release:
    """A Debian release: its name and its files."""

    name: str
    root: Path

    def mounting(self, stage: Path, binds: Mapping[Path, Path]) -> tuple[str, ...]:
        """Shell commands for `lab.with_mounts` that leave its root at `root` in the working
        directory, to write to and to forget; `stage` is an empty directory. The sources of
        `binds`, if there, are at their keys."""
        return (
            f"cd {quote(str(stage))}",
            "mount -t tmpfs tmpfs .",
            f"cd {quote(str(stage))}",  # into the tmpfs
            "mkdir root new work",
            "mount -t overlay overlay root "
            f"-o lowerdir={quote(str(self.root))},upperdir=new,workdir=work",
            "mount -t tmpfs tmpfs root/tmp",  # unit tests want inode numbers that stay
            *_binding({path: path for path in _SYSTEM} | dict(binds)),
        )


@dataclass(frozen=True)
class Checkout:
    """A copy of this checkout without anything built, for use in another release."""

    release: Release
    directory: Path

    @property
    def objects(self) -> Path:
        """Where `make bpf` puts them."""
        return self._source / OBJECTS.relative_to(CHECKOUT)

    @property
    def _source(self) -> Path:
        return self.directory / "source"

    def prefix(self, objects: Path | None = None) -> tuple[str, ...]:
        """Runs a command in the release, as root in the copy, which is at this checkout's own path
        there; `objects` are in place of the copy's, if given."""
        binds = {path: path for path in _NETWORK} | {CHECKOUT: self._source}
        if objects:
            binds[OBJECTS] = objects
        commands = self.release.mounting(self.directory / "stage", binds)
        environment = (f"--chdir={CHECKOUT}", *ENVIRONMENT)
        return (*lab.with_mounts(*commands), "chroot", "root", "env", *environment)


def _binding(binds: Mapping[Path, Path]) -> list[str]:
    """Shell commands that bind what there is of the sources, each at its target below `root`."""
    commands = []
    for path, source in binds.items():
        if source.exists():
            target = quote(f"root{path}")
            make = "mkdir -p" if source.is_dir() else "touch"
            commands.append(f"{make} {target} && mount --rbind {quote(str(source))} {target}")
    return commands


def copy(directory: Path, release: Release) -> Checkout:
    """A copy below `directory` of what git knows or would add."""
    made = Checkout(release, directory)
    (directory / "stage").mkdir()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).exists():
            target = made.directory / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target)
    return made


def other_release() -> Release:
    """Debian's other release; from the cache if it is of this month. Raises ReleaseUnavailable."""
    ours = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if ours not in OTHER:
        raise ReleaseUnavailable(f"{ours or 'this system'} has no other: known are {list(OTHER)}")
    show = "--eval=show: ; @echo $(BUILD_PACKAGES)"
    needed = lab.sh("make", "-sC", CHECKOUT, show, "show").split()
    return _release(OTHER[ours], "", [*needed, *PACKAGES])


def clean_release(name: str, purpose: str, packages: Sequence[str]) -> Release:
    """That release with these packages and what they need, kept for this purpose; from the cache
    if it is of this month. Raises ReleaseUnavailable."""
    return _release(name, f"{purpose}-", packages)


def _release(name: str, kind: str, packages: Sequence[str]) -> Release:
    architecture = ARCHITECTURES.get(platform.machine())
    if not architecture:
        raise ReleaseUnavailable(f"{name}: none for {platform.machine()}, only {ARCHITECTURES}")
    directory = cache_directory() / "releases" / f"{name}-{kind}{architecture}"
    release = Release(name, directory / "root")
    with locked(directory):
        try:
            if not _is_recent(directory, ",".join(packages)):
                _bootstrap(release, architecture, ",".join(packages))
        except AptError as error:
            raise ReleaseUnavailable(
                f"{name}: no recent one in {directory}, and it could not be made: {error}. "
                "Remedy: see that `apt-get update` works here and that debootstrap is installed"
            ) from error
    return release


def _is_recent(directory: Path, packages: str) -> bool:
    made = directory / "packages"
    if not made.exists() or made.read_text() != packages:
        return False
    return abs(time.time() - made.stat().st_mtime) < REFRESH_SECONDS


def _bootstrap(release: Release, architecture: str, packages: str) -> None:
    """Makes the release's root anew. Raises AptError."""
    directory = release.root.parent
    for stale in directory.glob("partial.*"):  # of one that was killed, as the lock is ours
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix="partial.", dir=directory) as partial:
        root = Path(partial) / "root"
        options = ("--variant=minbase", f"--keyring={KEYRING}", f"--arch={architecture}")
        # In a mount namespace, for it mounts /proc in the new root.
        command = ["unshare", "--mount", "debootstrap", *options, f"--include={packages}"]
        answer([*command, release.name, str(root), mirror(release.name)])
        for archive in root.glob("var/cache/apt/archives/*.deb"):
            archive.unlink()
        (directory / "packages").unlink(missing_ok=True)
        if release.root.exists():
            release.root.rename(Path(partial) / "old")
        root.rename(release.root)
        (directory / "packages").write_text(packages)


def main() -> None:
    """Compiles the objects in the other release, to the directory that is the argument."""
    with tempfile.TemporaryDirectory() as directory:
        checkout = copy(Path(directory), other_release())
        lab.sh(*checkout.prefix(), "make", "bpf")
        shutil.copytree(checkout.objects, sys.argv[1], dirs_exist_ok=True)


if __name__ == "__main__":
    main()
