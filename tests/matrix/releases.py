# SPDX-License-Identifier: Apache-2.0
"""The other Debian release, 13 on 12 and 12 on 13, as a directory to chroot into: its compiler, its
libbpf, its Python. Made with debootstrap from the mirrors that this system's apt uses, and kept in
the cache beside the kernels: 1 GB, a minute."""

import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from tests.guest import kernels, vm

# Debian's name; the version in /etc/os-release of the system that it is the other one for.
OTHER = {"12": "trixie", "13": "bookworm"}
PACKAGES = (
    *("ca-certificates", "make", "git", "clang", "llvm", "libbpf-dev", "libbpf1", "bpftool"),
    *("linux-libc-dev", "python3", "python3-venv", "util-linux", "kmod"),
)
REFRESH_SECONDS = 30 * 24 * 3600


# The certificates and mirrors of this machine are those of the release too.
_CONFIGURATION = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


class ReleaseUnavailable(Exception):
    """A release that cannot be had: what was tried, the answer and what to do, in one line."""


def other_release() -> str:
    text = platform.freedesktop_os_release()
    if text.get("ID") != "debian" or text.get("VERSION_ID") not in OTHER:
        raise ReleaseUnavailable(
            f"no other release is known for {text.get('PRETTY_NAME')}: run this on Debian 12 or 13"
        )
    return OTHER[text["VERSION_ID"]]


def root(release: str) -> Path:
    """The directory; made where it is not there or a month old. Raises ReleaseUnavailable."""
    directory = kernels.cache_directory().with_name("releases") / release
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = directory / ".made"
        if made.exists() and time.time() - made.stat().st_mtime < REFRESH_SECONDS:
            return directory
        shutil.rmtree(directory, ignore_errors=True)
        try:
            mirror = kernels.mirror(release)
        except kernels.AptError as error:
            raise ReleaseUnavailable(f"Debian {release}: {error}") from error
        command = [
            *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
            *(release, str(directory), mirror),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReleaseUnavailable(
                f"Debian {release}: debootstrap said {done.stdout.splitlines()[-1:]}. Remedy: see "
                "that it works here, as root and with a network"
            )
        made.touch()
    return directory


def enter(directory: Path, checkout: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell command as root in the release, in the `checkout`, which is there at its own
    path, with this host's /proc, /sys and network. The mounts are of this run alone."""
    mounts = [
        f"cd {shlex.quote(str(directory))}",
        "mount --rbind /proc proc",
        "mount --rbind /sys sys",
        "mount --rbind /dev dev",
        "mount -t tmpfs tmpfs tmp",
        f"mkdir -p .{shlex.quote(str(checkout))}",
        f"mount --bind {shlex.quote(str(checkout))} .{shlex.quote(str(checkout))}",
        "cat /etc/resolv.conf >etc/resolv.conf",
        *(f"[ ! -e {file} ] || cat {file} >.{file}" for file in _CONFIGURATION),
        f"exec chroot . sh -c {shlex.quote(f'cd {shlex.quote(str(checkout))} && {command}')}",
    ]
    return subprocess.run(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", " && ".join(mounts)],
        env={**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )


def clone(directory: Path) -> Path:
    """A fresh clone of this checkout, with what is not committed yet."""
    made = directory / "checkout"
    subprocess.run(["git", "clone", "--quiet", vm.CHECKOUT, made], check=True)
    changed = subprocess.run(
        ["git", "ls-files", "--modified", "--others", "--exclude-standard"],
        cwd=vm.CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in changed.stdout.splitlines():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(vm.CHECKOUT / name, made / name)
    return made
