# SPDX-License-Identifier: Apache-2.0
"""What tests on a real kernel make, and unmake: disks, file systems, cgroups, writers, exporters.

Everything is a context manager that cleans up after itself also when its test fails. Used on the
host and, unchanged, in guests.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter import exporter
from writeback_exporter.metrics.exposition import negotiate, render
from writeback_exporter.names.cgroups import Hierarchies, Hierarchy, find_hierarchies
from writeback_exporter.settings import Settings

PROGRAM = Path(sys.executable).with_name("writeback-exporter")


def sh(*command: str | Path) -> str:
    """Runs a command that must succeed; its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


# Disks ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A line of /proc/diskstats (Documentation/admin-guide/iostats.rst): requests, bytes, ms."""

    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    written_bytes: int
    write_ms: int
    discards: int
    discarded_bytes: int
    flushes: int
    inflight: int

    def __sub__(self, earlier: DiskStats) -> DiskStats:
        return DiskStats(
            *(getattr(self, f) - getattr(earlier, f) for f in self.__dataclass_fields__)
        )


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device: its node, its kernel name, its "MAJOR:MINOR", which is also its BDI's."""

    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def dev(self) -> str:
        return Path("/sys/block", self.name, "dev").read_text().strip()

    def stats(self) -> DiskStats:
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            if fields[2] == self.name:
                n = [int(field) for field in fields[3:]]
                return DiskStats(
                    reads=n[0],
                    read_bytes=n[2] * 512,
                    read_ms=n[3],
                    writes=n[4],
                    written_bytes=n[6] * 512,
                    write_ms=n[7],
                    inflight=n[8],
                    discards=n[11],
                    discarded_bytes=n[13] * 512,
                    flushes=n[15],
                )
        raise AssertionError(f"{self.name} is not in /proc/diskstats")

    def settled(self) -> DiskStats:
        """Its counts once nothing is in flight: completion is counted a moment after wakeup."""
        for _ in range(200):
            stats = self.stats()
            time.sleep(0.01)
            if stats.inflight == 0 and stats == self.stats():
                return stats
        raise AssertionError(f"{self.name} does not settle: {self.stats()}")

    @contextmanager
    def queue(self, **attributes: str) -> Iterator[None]:
        """Settings of the disk's queue, for a while: a loop device outlives its file."""
        directory = Path("/sys/block", self.name, "queue")
        before = {name: (directory / name).read_text() for name in attributes}
        try:
            for name, value in attributes.items():
                (directory / name).write_text(value)
            yield
        finally:
            for name, value in before.items():
                # A scheduler's file reads "[none] mq-deadline".
                (directory / name).write_text(value.partition("[")[2].partition("]")[0] or value)


@contextmanager
def loop_disk(directory: Path, size: int = 64 << 20) -> Iterator[Disk]:
    """A loop device over a sparse file."""
    image = directory / "image"
    with image.open("wb") as stream:
        stream.truncate(size)
    disk = Disk(sh("losetup", "-f", "--show", image))
    # udev leaves a locked disk alone, and else reads it after each writer.
    lock = os.open(disk.path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield disk
    finally:
        _end_children()
        os.close(lock)
        sh("losetup", "-d", disk.path)
        image.unlink()


_MKFS = {
    "ext4": ("-q", "-F", "-E", "nodiscard,lazy_itable_init=0"),
    "xfs": ("-q", "-f", "-K"),  # wants 300 MB
    "btrfs": ("-q", "-f", "-K"),  # wants 110 MB
}


@contextmanager
def file_system(disk: Disk, directory: Path, kind: str, *options: str) -> Iterator[Path]:
    """A file system of that kind on the disk, mounted; `options` are for its mkfs."""
    sh(f"mkfs.{kind}", *_MKFS[kind], *options, disk.path)
    mount = directory / "mount"
    mount.mkdir()
    sh("mount", "-t", kind, disk.path, mount)
    try:
        yield mount
    finally:
        _end_children()
        sh("umount", mount)
        mount.rmdir()


def ext4(disk: Disk, directory: Path) -> AbstractContextManager[Path]:
    """An ext4 file system on the disk, mounted."""
    return file_system(disk, directory, "ext4")


@contextmanager
def strict_limit(disk: Disk, limit: int) -> Iterator[None]:
    """A strict limit of that many dirty bytes on the disk's BDI: throttles its writers, and no
    other's (Documentation/ABI/testing/sysfs-class-bdi; kernel 6.2)."""
    bdi = Path("/sys/class/bdi", disk.dev)
    if not (bdi / "strict_limit").exists():
        pytest.skip("this kernel has no strict_limit in sysfs (6.2); the guests' tests throttle")
    before = {name: (bdi / name).read_text() for name in ("strict_limit", "max_ratio_fine")}
    try:
        (bdi / "strict_limit").write_text("1")
        (bdi / "max_bytes").write_text(str(limit))
        yield
    finally:
        for name, value in before.items():
            (bdi / name).write_text(value)


# Cgroups ----------------------------------------------------------------------------------------


def hierarchies() -> Hierarchies:
    return find_hierarchies("/sys/fs/cgroup", "/proc")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A child cgroup: its directory, and the label it must have."""

    directory: Path
    label: str

    @property
    def id(self) -> int:
        return self.directory.stat().st_ino


@contextmanager
def cgroup(hierarchy: Hierarchy, name: str) -> Iterator[Cgroup]:
    """A cgroup right below the root of a hierarchy."""
    made = Cgroup(Path(hierarchy.mount, name), f"/{name}")
    made.directory.mkdir()
    try:
        yield made
    finally:
        _end_children()
        wait_for(lambda: removed(made.directory), what=f"the end of {made.label}'s processes")


def removed(directory: Path) -> bool:
    """Removes a cgroup; False as long as a process that has just ended is still in it."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


_JOIN = """
import os, sys
for directory in filter(None, sys.argv[1].split("\\n")):
    with open(directory + "/cgroup.procs", "w") as procs:
        procs.write("0")
arguments = sys.argv[2:]
"""


def spawn_in(cgroups: Sequence[Cgroup], code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts Python code in cgroups (of different hierarchies); `arguments` is a list of str."""
    directories = "\n".join(str(c.directory) for c in cgroups)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JOIN + code, directories, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    _children.append(process)
    return process


_children: list[subprocess.Popen[str]] = []


def _end_children() -> None:
    """Ends what a failed test left running, for it keeps mounts and cgroups busy."""
    while _children:
        process = _children.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def run_in(cgroups: Sequence[Cgroup], code: str, *arguments: object) -> str:
    """Runs Python code in cgroups; what it printed."""
    process = spawn_in(cgroups, code, *arguments)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, f"the code in {[c.label for c in cgroups]} failed"
    return output


DIRECT_WRITER = """
import mmap
path, size, count, offset = arguments[0], *map(int, arguments[1:4])
buffer = mmap.mmap(-1, size)
fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
for i in range(count):
    assert os.pwrite(fd, buffer, offset + i * size) == size
"""
"""Writes COUNT times SIZE bytes to PATH from OFFSET on, each an IO of its own."""

DIRECT_READER = DIRECT_WRITER.replace("O_WRONLY", "O_RDONLY").replace(
    "os.pwrite(fd, buffer", "os.preadv(fd, [buffer]"
)

BUFFERED_WRITER = """
path, total = arguments[0], int(arguments[1])
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
block = b"x" * 65536
for i in range(total // len(block)):
    os.write(fd, block)
"""


# The exporter -----------------------------------------------------------------------------------


class Scrape:
    """One answer of /metrics, parsed by prometheus-client."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                series = self.samples.setdefault(sample.name, {})
                assert labels not in series, f"{sample.name}{labels} is there twice"
                series[labels] = sample.value

    def __sub__(self, earlier: Scrape) -> Scrape:
        """By how much each series has grown; without those that have not."""
        grown = Scrape("")
        for name, series in self.samples.items():
            before = earlier.samples.get(name, {})
            growth = {labels: value - before.get(labels, 0) for labels, value in series.items()}
            grown.samples[name] = {labels: value for labels, value in growth.items() if value}
        return grown

    def select(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The series of a metric that have these labels, by all their labels."""
        wanted = labels.items()
        return {
            series: value
            for series, value in self.samples.get(f"writeback_{name}", {}).items()
            if wanted <= dict(series).items()
        }

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.select(name, **labels).values())

    def values(self, name: str, label: str, **labels: str) -> set[str]:
        """The values of a label in a metric's series."""
        return {dict(series)[label] for series in self.select(name, **labels)}

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Cumulative counts by upper edge, over all series with these labels."""
        result: dict[float, float] = {}
        for series, value in self.select(f"{name}_bucket", **labels).items():
            edge = float(dict(series)["le"])
            result[edge] = result.get(edge, 0) + value
        return result


def only(*collectors: str) -> list[str]:
    """Flags for these collectors alone: in a guest each BPF object takes a second to load."""
    return [
        f"--{'' if name in collectors else 'no-'}collector.{name}" for name in exporter.COLLECTORS
    ]


class Exporter:
    """A running writeback-exporter, as a user starts it; `prefix` runs a command otherwise."""

    def __init__(self, *flags: str, prefix: Sequence[str] = ()) -> None:
        self._flags = flags
        self._prefix = prefix
        self._stack = ExitStack()

    def __enter__(self) -> Exporter:
        self.process = subprocess.Popen(
            [*self._prefix, PROGRAM, "--web.listen-address=127.0.0.1:0", *self._flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        patience = threading.Timer(PATIENCE_SECONDS, self.process.kill)  # then its stderr ends
        patience.start()
        try:
            for line in self.process.stderr:
                self.log.append(line)
                if "listening on" in line:
                    self.url = line.split("listening on ")[1].split("/metrics")[0]
                    return self
        finally:
            patience.cancel()
        raise AssertionError(f"the exporter did not start: {self.log}")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            body: bytes = response.read()
            if response.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            return body

    def scrape(self) -> Scrape:
        return Scrape(self.get("/metrics").decode())

    def stop(self) -> int:
        """Ends it as systemd does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=PATIENCE_SECONDS)
        self.log += rest.splitlines()
        return self.process.returncode

    def kill(self) -> None:
        """Ends it as the kernel's OOM killer does."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_SECONDS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.process.kill()


@contextmanager
def exporter_in_process(*collectors: str) -> Iterator[exporter.Exporter]:
    """An exporter with these collectors in this process, for tests that reach into it."""
    settings = Settings(
        listen=(),
        telemetry_path="/metrics",
        collectors=frozenset(collectors),
        procfs="/proc",
        sysfs="/sys",
        cgroupfs="/sys/fs/cgroup",
    )
    made = exporter.Exporter(settings)
    try:
        made.start()
        yield made
    finally:
        made.close()


def scrape(running: exporter.Exporter) -> Scrape:
    """What an exporter in this process would answer."""
    return Scrape(b"".join(render(running.collect(), negotiate(""))).decode())


@dataclass(frozen=True, slots=True)
class Report:
    """What `doctor` said: its exit status, the reason of each feature (empty where it works)."""

    status: int
    reasons: dict[str, str]
    text: str


def doctor(*flags: str, prefix: Sequence[str | Path] = ()) -> Report:
    """Runs it; `prefix` runs a command otherwise."""
    command = [*prefix, PROGRAM, "doctor", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    reasons = {}
    for answer, name, why in re.findall(
        r"^(ok |NO ) (.+)\n(?: +why: +.*\[(.+)\]$)?", done.stdout, re.MULTILINE
    ):
        assert (answer == "NO ") == bool(why), done.stdout
        reasons[name] = why
    return Report(done.returncode, reasons, done.stdout)


TWO_CAPABILITIES = ("setpriv", "--bounding-set=-all,+bpf,+perfmon", "--inh-caps=-all")
"""Runs a command with CAP_BPF and CAP_PERFMON and no other."""


def as_user(*capabilities: str) -> tuple[str, ...]:
    """Runs a command as a user who owns nothing, with these capabilities (CAP_BPF and so on) as
    ambient ones: as systemd's DynamicUser= and AmbientCapabilities= have it."""
    held = ",".join(["-all", *(name.lower().replace("cap_", "+") for name in capabilities)])
    return (
        *("setpriv", "--reuid=61184", "--regid=61184", "--clear-groups"),
        *(f"--{kind}={held}" for kind in ("bounding-set", "inh-caps", "ambient-caps")),
    )


@dataclass(frozen=True, slots=True)
class Rights:
    """Of a thread, as the kernel tells (proc_pid_status(5)): numbers of capabilities."""

    inheritable: frozenset[int]
    permitted: frozenset[int]
    effective: frozenset[int]
    bounding: frozenset[int]
    ambient: frozenset[int]
    no_new_privileges: bool


def rights(process: int) -> dict[str, Rights]:
    """Of each of its threads, by id."""
    found = {}
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        fields = dict(line.split(":\t") for line in text.splitlines())
        masks = (int(fields[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
        inh, prm, eff, bnd, amb = (
            frozenset(n for n in range(64) if mask >> n & 1) for mask in masks
        )
        found[status.parent.name] = Rights(inh, prm, eff, bnd, amb, fields["NoNewPrivs"] == "1")
    return found


def with_mounts(*commands: str) -> tuple[str, ...]:
    """Runs a command where these shell commands have changed the mounts, for it alone."""
    return ("unshare", "--mount", "sh", "-c", " && ".join((*commands, 'exec "$@"')), "sh")


_DENY = """
import ctypes, os, struct, sys
call, error, *first = map(int, sys.argv[1].split())
compare = [(0x20, 0, 0, 0), (0x15, 0, 3 if first else 1, call)]  # the number of the system call
if first:
    compare += [(0x20, 0, 0, 16), (0x15, 0, 1, first[0])]  # its first argument
filter = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        *compare,
        (0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    )
)
buffer = ctypes.create_string_buffer(filter, len(filter))
class Program(ctypes.Structure):
    _fields_ = ("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)
program = Program(len(filter) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP, a filter
os.execvp(sys.argv[2], sys.argv[2:])
"""
BPF_CALL = {"x86_64": 321, "aarch64": 280}[platform.machine()]
BPF_OBJ_PIN = 6  # include/uapi/linux/bpf.h


def denied(call: int, error: int, *first: int) -> tuple[str, ...]:
    """Runs a command under a seccomp filter that answers a system call with an error, if it is one
    with that first argument."""
    numbers = " ".join(map(str, (call, error, *first)))
    return (sys.executable, "-I", "-S", "-c", _DENY, numbers)
