# SPDX-License-Identifier: Apache-2.0
"""Debian's other release, on bookworm trixie and on trixie bookworm: its clang, libbpf and Python
in a root directory of its own.

`other_release()` gives it, from $XDG_CACHE_HOME/writeback-exporter/releases, where debootstrap
makes it anew once a month: 55 s, 0.85 GB. What runs there runs on this system's kernel and sees its
/proc and /sys. The mounts are of a mount namespace, and what is written is in a tmpfs: both end
with the command, whatever becomes of it.

    python -m tests.matrix.releases DIRECTORY    # has that clang compile the objects to DIRECTORY
    GUEST_OBJECTS=DIRECTORY pytest tests/guest   # has guests use them
"""

import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
_NETWORK = ("/etc/hosts", "/etc/pip.conf", "/etc/resolv.conf", "/etc/ssl/certs")


class ReleaseUnavailable(Exception):
    """A release that cannot be had: what was tried, the answer and what to do, in one line."""


@dataclass(frozen=True)
class Release:
    """A Debian release: its name and its files."""

    name: str
    root: Path


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
        stage = self.directory / "stage"
        binds = {path: path for path in map(Path, ("/dev", "/proc", "/sys", *_NETWORK))}
        binds[CHECKOUT] = self._source
        if objects:
            binds[OBJECTS] = objects
        commands = [
            f"cd {quote(str(stage))}",
            "mount -t tmpfs tmpfs .",
            f"cd {quote(str(stage))}",  # into the tmpfs
            "mkdir root new work",
            "mount -t overlay overlay root "
            f"-o lowerdir={quote(str(self.release.root))},upperdir=new,workdir=work",
            "mount -t tmpfs tmpfs root/tmp",  # unit tests want inode numbers that stay
            *_binding(binds),
        ]
        environment = (f"--chdir={CHECKOUT}", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
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
    if ours not in OTHER or platform.machine() not in ARCHITECTURES:
        raise ReleaseUnavailable(
            f"no other release for {ours or 'this system'} on {platform.machine()}; known are "
            f"{', '.join(OTHER)} on {', '.join(ARCHITECTURES)}"
        )
    name, architecture = OTHER[ours], ARCHITECTURES[platform.machine()]
    directory = cache_directory() / "releases" / f"{name}-{architecture}"
    release = Release(name, directory / "root")
    show = "--eval=show: ; @echo $(BUILD_PACKAGES)"
    packages = ",".join([*lab.sh("make", "-sC", CHECKOUT, show, "show").split(), *PACKAGES])
    with locked(directory):
        try:
            if not _is_recent(directory, packages):
                _bootstrap(release, architecture, packages)
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
