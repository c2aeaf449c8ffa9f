# SPDX-License-Identifier: Apache-2.0
"""Other tools that count IO in BPF, as Debian ships them, for the benches to measure.

A tool is started as a user starts it. Once it has attached its programs we take hold of them and
end the tool: what the kernel runs is then what the tool compiled, with its maps and constants, and
can be attached and detached in turns with ours, where a tool's start takes a second.
"""

from __future__ import annotations

import ctypes as C
import fcntl
import os
import platform
import re
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import lab
from writeback_exporter.kernel.libbpf import Runs

UNPACKED = Path(__file__).parents[2] / "build/peers"
_PATIENCE = 60
"""Seconds until a tool has attached: bcc compiles C, in a guest fifteen times as slowly."""
_TRACEFS = "test -d /sys/kernel/tracing/events || mount -t tracefs tracefs /sys/kernel/tracing"

_libbpf = C.CDLL("libbpf.so.1", use_errno=True)
_libc = C.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """A tool that cannot be measured here: its own words."""


def version(package: str) -> str:
    """Of the Debian package that was unpacked."""
    (archive,) = UNPACKED.glob(f"{package}_*.deb")
    return archive.name.split("_")[1]


# Programs of others -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What ends when it is closed."""

    number: int

    def close(self) -> None:
        os.close(self.number)


@dataclass(frozen=True, slots=True)
class Attached:
    """What bpf(BPF_TASK_FD_QUERY) says of a link or perf event: program, and where it is."""

    program: int
    kind: int
    """enum bpf_task_fd_type, include/uapi/linux/bpf.h."""
    event: str
    """A tracepoint's name, or a function's."""


_RAW_TRACEPOINT, _TRACEPOINT, _KPROBE = range(3)
_TRACING = 26  # BPF_PROG_TYPE_TRACING: knows itself where to


class Adopted:
    """A program that another process loaded and attached."""

    def __init__(self, attached: Attached) -> None:
        self._at = attached
        self.fd = _checked(_libbpf.bpf_prog_get_fd_by_id(attached.program), "take a program")

    def _about(self, key: str) -> int:
        text = Path(f"/proc/self/fdinfo/{self.fd}").read_text()
        found = re.search(rf"^{key}:\t(\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def attach(self) -> Descriptor:
        """Where it was."""
        if self._at.kind == _RAW_TRACEPOINT:
            name = None if self._about("prog_type") == _TRACING else self._at.event.encode()
            link = _libbpf.bpf_raw_tracepoint_open(name, self.fd)
            return Descriptor(_checked(link, f"attach to {self._at.event}"))
        if self._at.kind == _TRACEPOINT:
            event = _perf_event(2, _tracepoint_id(self._at.event))  # PERF_TYPE_TRACEPOINT
        else:
            kind = int(Path("/sys/bus/event_source/devices/kprobe/type").read_text())
            event = _perf_event(kind, 0, self._at.event)
        fcntl.ioctl(event, 0x40042408, self.fd)  # PERF_EVENT_IOC_SET_BPF
        fcntl.ioctl(event, 0x2400, 0)  # PERF_EVENT_IOC_ENABLE
        return Descriptor(event)

    def runs(self) -> Runs:
        return Runs(
            self._about("run_cnt"), self._about("run_time_ns"), self._about("recursion_misses")
        )

    def close(self) -> None:
        os.close(self.fd)


def _checked(result: int, tried: str) -> int:
    if result < 0:
        raise OSError(-result, f"{tried}: {os.strerror(-result)}")
    return result


def _perf_event(kind: int, config: int, function: str = "") -> int:
    """perf_event_open(2), on CPU 0 as the tools do: the BPF program runs on every CPU."""
    name = C.create_string_buffer(function.encode())
    # struct perf_event_attr: type, size, config, sample_period, sample_type, read_format, flags,
    # wakeup_events, bp_type, config1 (the function's name), config2 (an offset in it).
    attributes = struct.pack(
        "=IIQQQQQIIQQ", kind, 72, config, 1, 0, 0, 0, 0, 0, C.addressof(name) if function else 0, 0
    )
    number = {"x86_64": 298, "aarch64": 241}[platform.machine()]
    event: int = _libc.syscall(number, attributes, -1, 0, -1, 8)  # PERF_FLAG_FD_CLOEXEC
    if event < 0:
        raise OSError(C.get_errno(), f"perf_event_open: {os.strerror(C.get_errno())}")
    return event


def _tracepoint_id(name: str) -> int:
    """From a tracefs of our own: this machine may have none, and is left as it is."""
    pattern = f"cat /sys/kernel/tracing/events/*/{name}/id"
    return int(lab.sh(*lab.with_mounts(_TRACEFS), "sh", "-c", pattern))


def _attached(pid: int) -> Iterator[Attached]:
    """What a process has attached. Raises nothing where it ends meanwhile."""
    program, kind = C.c_uint32(), C.c_uint32()
    offset, address = C.c_uint64(), C.c_uint64()
    with suppress(FileNotFoundError, ProcessLookupError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            name, size = C.create_string_buffer(128), C.c_uint32(128)
            out = (program, kind, offset, address)
            if (
                _libbpf.bpf_task_fd_query(
                    pid, int(number), 0, name, C.byref(size), *map(C.byref, out)
                )
                == 0
            ):
                yield Attached(program.value, kind.value, name.value.decode())


# Tools --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tool:
    """A command, below the unpacked packages, and the events that its programs are for."""

    label: str
    answers: str
    command: tuple[str, ...]
    events: Mapping[str, str]
    """By the tracepoint or function that it attaches to."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def programs(self) -> Iterator[list[tuple[str, Adopted]]]:
        """Its programs, detached, by event. Raises Unavailable."""
        found = self._take()
        try:
            yield [(self.events[at.event], program) for at, program in found]
        finally:
            for _, program in found:
                program.close()

    def _take(self) -> list[tuple[Attached, Adopted]]:
        path, *arguments = self.command
        library = UNPACKED / f"usr/lib/{platform.machine()}-linux-gnu"
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [*lab.with_mounts(_TRACEFS), str(UNPACKED / path), *arguments],
                env={**os.environ, "LD_LIBRARY_PATH": str(library), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            try:
                if found := self._wait(process):
                    return [(at, Adopted(at)) for at in found]
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            said.seek(0)
            lines = said.read().strip().splitlines() or ["no word"]
        raise Unavailable(f"{self.label}: {lines[-1]}")

    def _wait(self, process: subprocess.Popen[bytes]) -> list[Attached]:
        """What it attached once that is all; nothing where it ended or takes too long."""
        deadline = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            found = list(_attached(process.pid))
            if {at.event for at in found} == self.events.keys():
                return found
            time.sleep(0.05)
        return []


PACKAGES = ("libbpf-tools", "bpftrace", "bpfcc-tools", "prometheus-node-exporter")

_ISSUE, _COMPLETE = {"block_rq_issue": "issue"}, {"block_rq_complete": "complete"}
_TIMES = {"block_rq_insert": "insert", **_ISSUE, **_COMPLETE}


def _biolatency(answers: str, *flags: str) -> Tool:
    events = _TIMES if "-Q" in flags else _ISSUE | _COMPLETE
    label = " ".join(("libbpf-tools biolatency", *flags))
    return Tool(label, answers, ("usr/sbin/biolatency", *flags), events)


def _bpftrace(answers: str, program: str, events: Mapping[str, str]) -> Tool:
    # Of IO that is under way when a program comes or goes @start keeps an entry: 4096 get full.
    room = {"BPFTRACE_MAP_KEYS_MAX": "65536"}
    return Tool("bpftrace one-liner", answers, ("usr/bin/bpftrace", "-e", program), events, room)


def _bcc(answers: str, *flags: str) -> Tool:
    arrival, issue = {"blk_account_io_start": "insert"}, {"blk_mq_start_request": "issue"}
    return Tool(
        " ".join(("bcc biolatency", *flags)),
        answers,
        ("usr/sbin/biolatency-bpfcc", *flags),
        (arrival if "-Q" in flags else issue) | {"blk_account_io_done": "complete"},
        {"PYTHONPATH": str(UNPACKED / "usr/lib/python3/dist-packages")},
    )


BIOLATENCY = _biolatency("device time, of the host")
THREE = (
    _biolatency("device time by disk, flags", "-D", "-F"),
    _biolatency("queue and device time in one by disk, flags", "-D", "-F", "-Q"),
    Tool("libbpf-tools bitesize", "size by command", ("usr/sbin/bitesize",), _ISSUE),
)
"""That together answer nearly what block_io does: for no cgroup, and without sums."""
BPFTRACE_TIMES = _bpftrace(
    "device time by disk",
    "tracepoint:block:block_rq_issue { @start[args->dev, args->sector] = nsecs; } "
    "tracepoint:block:block_rq_complete /@start[args->dev, args->sector]/ { "
    "@[args->dev] = hist(nsecs - @start[args->dev, args->sector]); "
    "delete(@start[args->dev, args->sector]); }",
    _ISSUE | _COMPLETE,
)
BPFTRACE_PAUSES = _bpftrace(
    "requested pause by cgroup, BDI",
    "tracepoint:writeback:balance_dirty_pages /args->pause > 0/ { "
    "@[args->cgroup_ino, args->bdi] = hist(args->pause); "
    "@sum[args->cgroup_ino, args->bdi] = sum(args->pause); }",
    {"balance_dirty_pages": "throttled"},
)
BCC = (
    _bcc("device time by disk", "-D"),
    _bcc("queue and device time in one by disk", "-D", "-Q"),
)
