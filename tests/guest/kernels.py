# SPDX-License-Identifier: Apache-2.0
"""Debian cloud kernels for the guests: fetched with apt, unpacked, kept in a cache.

`fetch("6.1")` gives the newest 6.1 kernel that Debian offers for this machine's architecture.
Nothing is installed and the system's apt state stays as it is: lists, downloads and the (empty)
dpkg status live in the cache while a fetch lasts. The mirrors are the ones that this system's own
apt uses.

    $XDG_CACHE_HOME/writeback-exporter/kernels/
      6.1-amd64/
        lock            flock(2): one fetch at a time
        current         the version in use; its mtime is when apt was last asked
        6.1.192-1/      complete as soon as it exists, for it is renamed into place
          vmlinuz
          lib/modules/6.1.0-53-cloud-amd64/
          headers/    build, source and what they lead to; once a bench has asked
"""

import fcntl
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

# Which suites to ask. A suite that ends in -security comes from the security mirror. bookworm and
# trixie have the kernel of their last point release in the main suite and newer ones in -security;
# bullseye's is newer in -security only. UNBOOTED serve for their types alone: of some the mirrors
# have no modules.
UNBOOTED = ("6.16", "6.17", "6.19", "7.0", "7.1", "7.2")
SUITES = {
    "5.10": ("bullseye-security",),
    "6.1": ("bookworm", "bookworm-security"),
    "6.12": ("trixie", "trixie-security"),
    "6.18": ("trixie-backports",),
    "7.3": ("trixie-backports",),
    **dict.fromkeys(UNBOOTED, ("trixie-backports",)),
}

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Debian's name of the architecture: a guest runs the host's userland, so no other one will do.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# How long a cached kernel is used without asking apt for a newer one: asking takes 2-6 s.
REFRESH_SECONDS = 24 * 3600
# 50 MB at 1 MB/s takes a minute; apt has its own, shorter timeouts for a network that is down.
APT_TIMEOUT_SECONDS = 600


class KernelUnavailable(Exception):
    """A kernel that cannot be had: what was tried, the answer and what to do, in one line."""


class AptError(Exception):
    """What an apt or dpkg command answered, in one line."""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel.

    `name` is the key in SUITES, `version` the Debian package's version, `release` what `uname -r`
    says in the guest. `note` is empty, or says why this may not be the newest one.
    """

    name: str
    version: str
    release: str
    directory: Path
    note: str = ""

    @property
    def vmlinuz(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def modules(self) -> Path:
        """The directory of this release's modules, with modules.dep."""
        return self.directory / "lib/modules" / self.release


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/writeback-exporter`, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")  # the specification: a relative path is to be ignored
    top = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return top / "writeback-exporter"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Alone with a part of the cache, whichever process: waits for a fetch that is under way."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(name: str) -> Kernel:
    """The newest kernel of the series `name`; from the cache if apt was asked within a day.

    Where apt fails, a cached kernel is used and its `note` says so. Takes 3-10 s the first time,
    no time from the cache. Raises KernelUnavailable.
    """
    machine = platform.machine()
    if name not in SUITES:
        raise KernelUnavailable(f"kernel {name}: unknown; known are {', '.join(SUITES)}")
    if machine not in ARCHITECTURES:
        raise KernelUnavailable(f"kernel {name}: Debian has no cloud kernel for {machine}")
    store = _Store(name, ARCHITECTURES[machine])
    with locked(store.directory):
        cached = store.current()
        if cached and store.age() < REFRESH_SECONDS:
            return cached
        try:
            return store.refresh()
        except AptError as error:
            if cached:
                return replace(cached, note=f"from the cache, for apt failed: {error}")
            raise KernelUnavailable(
                f"kernel {name}: not in {store.directory}, and apt could not fetch "
                f"{store.pattern} from {' or '.join(SUITES[name])}: {error}. Remedy: see that "
                "`apt-get update` works here, or copy that directory from a machine where it does"
            ) from error


def headers(kernel: Kernel) -> Path:
    """A directory with "build" and "source", as /lib/modules/RELEASE has them where the kernel's
    headers are installed: what bcc compiles against. Cached beside the kernel. Raises
    KernelUnavailable."""
    store = _Store(kernel.name, ARCHITECTURES[platform.machine()])
    ready = kernel.directory / "headers"
    with locked(store.directory):
        if not ready.is_dir():
            try:
                store.add_headers(kernel, ready)
            except AptError as error:
                raise KernelUnavailable(
                    f"headers of kernel {kernel.release}: apt could not fetch them: {error}"
                ) from error
    return ready


class _Store:
    """The cached versions of one kernel series on one architecture, and the way to newer ones."""

    def __init__(self, name: str, architecture: str) -> None:
        self.name = name
        self.architecture = architecture
        self.directory = cache_directory() / "kernels" / f"{name}-{architecture}"
        # linux-image-6.1.0-53-cloud-amd64, linux-image-6.18.15+deb13-cloud-arm64; neither the
        # meta package linux-image-cloud-amd64 nor the -dbg and -unsigned packages. The dot after
        # the name matters: bookworm-security has a 6.12 beside its 6.1.
        self.pattern = rf"linux-image-{re.escape(name)}\..*-cloud-{architecture}"

    def current(self) -> Kernel | None:
        try:
            version = (self.directory / "current").read_text().strip()
            directory = self.directory / version
            (release,) = os.listdir(directory / "lib/modules")
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return Kernel(self.name, version, release, directory)

    def age(self) -> float:
        """Seconds since apt was last asked."""
        return abs(time.time() - (self.directory / "current").stat().st_mtime)

    def refresh(self) -> Kernel:
        """Ask apt for the newest version, and fetch it unless it is here. Raises AptError."""
        for stale in self.directory.glob("partial.*"):  # of a killed fetch, as the lock is ours
            shutil.rmtree(stale, ignore_errors=True)  # its apt may not have noticed yet
        previous = self.current()
        with tempfile.TemporaryDirectory(prefix="partial.", dir=self.directory) as partial:
            apt = _Apt(Path(partial), self.architecture, SUITES[self.name])
            package, version = apt.newest(self.pattern)
            if not (self.directory / version).is_dir():
                whole = self.name not in UNBOOTED
                modules = "|modules" if whole else ""
                apt.download(package, version, rf"\blinux-(?:binary{modules})-[^\s,|]+")
                _unpack(apt.downloads, Path(partial) / "kernel", whole)
                (Path(partial) / "kernel").rename(self.directory / version)
            (Path(partial) / "current").write_text(version + "\n")
            (Path(partial) / "current").rename(self.directory / "current")
        current = self.current()
        if current is None:
            raise AptError(f"{package} {version} unpacked to something that is no kernel")
        # A guest may be running on the version before this one, hardly on one before that.
        for old in self.directory.glob("*/vmlinuz"):
            if old.parent.name not in {version, previous.version if previous else version}:
                shutil.rmtree(old.parent)
        return current

    def add_headers(self, kernel: Kernel, ready: Path) -> None:
        """Fetches the kernel's headers and makes the directory `ready` of them. Raises AptError."""
        with tempfile.TemporaryDirectory(prefix="partial.", dir=self.directory) as partial:
            apt = _Apt(Path(partial), self.architecture, SUITES[self.name])
            apt.update()
            package = f"linux-headers-{kernel.release}"
            apt.download(package, kernel.version, r"\blinux-headers-[^\s,|]+-common\b")
            made = Path(partial) / "headers"
            for archive in sorted(apt.downloads.glob("*.deb")):
                answer(["dpkg-deb", "--extract", str(archive), str(made)])
            (common,) = (made / "usr/src").glob("linux-headers-*-common")
            (made / "build").symlink_to(f"usr/src/{package}")
            (made / "source").symlink_to(f"usr/src/{common.name}")
            made.rename(ready)


class _Apt:
    """apt with a private state below `state`: nothing of the system's is read but its mirrors."""

    def __init__(self, state: Path, architecture: str, suites: Sequence[str]) -> None:
        self.downloads = state / "downloads"
        for directory in ("downloads", "lists/partial", "cache/archives/partial"):
            (state / directory).mkdir(parents=True)
        (state / "status").touch()
        # Without `target=` an installed apt-file or appstream makes every update fetch their
        # indexes as well; without `arch=` so do foreign architectures.
        option = f"signed-by={KEYRING} arch={architecture} target=Packages"
        lines = [f"deb [{option}] {mirror(suite)} {suite} main\n" for suite in suites]
        (state / "sources.list").write_text("".join(lines))
        settings = {
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State::Lists": state / "lists",
            "Dir::State::status": state / "status",  # else an installed kernel counts as on offer
            "Dir::Cache": state / "cache",
            "Acquire::Languages": "none",
            "Acquire::PDiffs": "false",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
            "Acquire::https::Timeout": "20",
            # bullseye's long-term support has ended: its lists are not signed anew any more.
            "Acquire::Check-Valid-Until": "false",
            # By default `apt-get update` without a network warns and succeeds.
            "APT::Update::Error-Mode": "any",
            # The user _apt cannot write below /root.
            "APT::Sandbox::User": "root",
        }
        self._options = [f"-o{key}={value}" for key, value in settings.items()]

    def update(self) -> None:
        """Fetches the lists. Raises AptError."""
        answer(["apt-get", *self._options, "-q", "update"])

    def newest(self, pattern: str) -> tuple[str, str]:
        """Name and version of the newest package whose name matches. Raises AptError."""
        self.update()
        names = answer(["apt-cache", *self._options, "pkgnames", "linux-image-"]).split()
        names = [name for name in names if re.fullmatch(pattern, name)]
        if not names:
            raise AptError("no such package")
        shown = answer(["apt-cache", *self._options, "show", *names])
        found: list[tuple[str, str]] = re.findall(
            r"^Package: (\S+)$.*?^Version: (\S+)$", shown, re.MULTILINE | re.DOTALL
        )
        by_version = functools.cmp_to_key(_compare)
        return max(found, key=lambda package: by_version(package[1]))

    def download(self, package: str, version: str, parts: str) -> None:
        """The package and, of its dependencies, those that match `parts`, which are of the same
        kernel. Raises AptError."""
        answer(
            ["apt-get", *self._options, "-q", "download", f"{package}={version}"], self.downloads
        )
        (archive,) = self.downloads.glob(f"{package}_*.deb")
        depends = answer(["dpkg-deb", "--field", str(archive), "Depends"])
        # From 7.x on linux-image-* is empty: the kernel is in linux-binary-*, which depends on
        # linux-modules-*. Both have the image's version.
        for part in sorted(set(re.findall(parts, depends))):
            if not any(self.downloads.glob(f"{part}_*.deb")):
                self.download(part, version, parts)


def mirror(suite: str) -> str:
    """The address where this system's apt finds suites of this kind. Raises AptError."""
    label = "Debian-Security" if suite.endswith("-security") else "Debian"
    targets = answer(
        ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    )
    for line in targets.splitlines():
        found, _, address = line.partition(" ")
        if found == label:
            return address
    raise AptError(
        f"this system's apt has no lists labelled {label} (run `apt-get update` on a Debian system)"
    )


def _compare(a: str, b: str) -> int:
    """Negative, zero, positive: Debian version `a` is older than, equal to, newer than `b`."""
    if a == b:
        return 0
    command = ["dpkg", "--compare-versions", a, "gt", b]
    return 1 if subprocess.run(command, check=False).returncode == 0 else -1


def _unpack(archives: Path, kernel: Path, whole: bool) -> None:
    """Unpack the packages in `archives`, and make `kernel` from what a guest needs of them, or if
    not the `whole` is wanted then the image and an empty directory of modules."""
    tree = archives / "tree"
    for archive in sorted(archives.glob("*.deb")):
        answer(["dpkg-deb", "--extract", str(archive), str(tree)])
    # bookworm has /lib/modules, trixie /usr/lib/modules; 7.x has vmlinuz beside the modules, the
    # others in /boot.
    modules = [*tree.glob("lib/modules/*"), *tree.glob("usr/lib/modules/*")]
    images = [*tree.glob("boot/vmlinuz-*"), *(path / "vmlinuz" for path in modules)]
    images = [path for path in images if path.is_file()]
    if not whole:
        names = [image.name.removeprefix("vmlinuz-") for image in images if image.name != "vmlinuz"]
        modules = [archives / (names[0] if names else modules[0].name)]
        modules[0].mkdir()
    if len(modules) != 1 or not images:
        raise AptError(f"the packages have {len(modules)} module trees, {len(images)} kernels")
    release = modules[0].name
    (kernel / "lib/modules").mkdir(parents=True)
    images[0].rename(kernel / "vmlinuz")
    modules[0].rename(kernel / "lib/modules" / release)
    # 7.x ships modules.dep; for the others the package's postinst makes it, which did not run.
    if whole and not (kernel / "lib/modules" / release / "modules.dep").exists():
        answer(["depmod", "--basedir", str(kernel), release])


def answer(command: Sequence[str], directory: Path | None = None) -> str:
    """What `command` prints. Raises AptError with what it complained about, in one line."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # depmod, also for non-root
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "LC_ALL": "C", "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise AptError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise AptError(f"{command[0]} had no answer in {APT_TIMEOUT_SECONDS} s") from error
    if done.returncode == 0:
        return done.stdout
    # apt: "E: Failed to fetch ..." and "W: ..." ; the first one names the cause. debootstrap's are
    # among what it prints.
    complaints = re.findall(r"^[EW]: ?(.*)$", done.stderr + done.stdout, re.MULTILINE)
    complaint = complaints[0] if complaints else " ".join(done.stderr.split())
    raise AptError(f"{command[0]}: {complaint or f'exit code {done.returncode}'}")
