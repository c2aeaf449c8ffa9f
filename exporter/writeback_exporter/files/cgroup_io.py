# SPDX-License-Identifier: Apache-2.0
"""Block IO by cgroup and disk, its limits and weights, and iocost, from the io controller's files.

Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/blkio-controller.rst. v2's io.stat counts bios
of a cgroup and those below it. v1's blkio.throttle.* counts are a cgroup's own, since the
*_recursive ones lose what a cgroup had when it is removed (6.18), and counters must not go back.
Where blk-throttle is set up with a disk's first limit (6.18), v1 counts only from then on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content, nested
from writeback_exporter.files.cgroup_files import Seldom
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import Family, Labels, Samples, Snapshot, family
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

_MICROSECONDS = 1_000_000
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class _Field:
    """Where a number of a file goes: labels after cgroup and device, and what one of the metric's
    unit is in the kernel's."""

    metric: Metric
    labels: Labels = ()
    divisor: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file, how it is split into (device, key, value), its fields by key, and the value that
    stands for nothing."""

    name: bytes
    split: Callable[[bytes], Iterable[tuple[bytes, bytes, bytes]]]
    fields: Mapping[bytes, _Field]
    nothing: bytes
    written_as: tuple[bytes, ...] = ()
    """Other files by which one sets what is in it."""


def _lines(text: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(device, key, value) of lines of "device key value" or "device value"."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3:
            yield words[0], words[1], words[2]
        elif len(words) == 2:
            yield words[0], b"", words[1]


def _weight(name: bytes, policy: str, *written_as: bytes) -> _File:
    fields = {b"": _Field(catalogue.CGROUP_IO_WEIGHT, (policy,))}
    return _File(name, _lines, fields, b"0", written_as)


# Ten of the fourteen lines that a cgroup has of each disk are sums, or 0.
_V1_COUNT = re.compile(rb"^([0-9:]+) (Read|Write|Discard) ([1-9][0-9]*)$", re.MULTILINE)


def _v1_counts(name: bytes, metric: Metric) -> _File:
    ops = ("read", "write", "discard")
    fields = {op.capitalize().encode(): _Field(metric, (op,)) for op in ops}
    return _File(b"blkio.throttle." + name, _V1_COUNT.findall, fields, b"0")


def _v1_limit(name: bytes, metric: Metric, op: str) -> _File:
    return _File(b"blkio.throttle." + name, _lines, {b"": _Field(metric, (op,))}, b"0")


# Files of counts are there wherever the controller is on. A cgroup has a line for each disk that it
# has used; an op that it has not used has no sample.
_V2_COUNTS: tuple[_File, ...] = (
    _File(
        b"io.stat",
        nested,
        {
            b"rbytes": _Field(catalogue.CGROUP_IO_BYTES, ("read",)),
            b"wbytes": _Field(catalogue.CGROUP_IO_BYTES, ("write",)),
            b"dbytes": _Field(catalogue.CGROUP_IO_BYTES, ("discard",)),
            b"rios": _Field(catalogue.CGROUP_IO_OPERATIONS, ("read",)),
            b"wios": _Field(catalogue.CGROUP_IO_OPERATIONS, ("write",)),
            b"dios": _Field(catalogue.CGROUP_IO_OPERATIONS, ("discard",)),
            b"cost.usage": _Field(catalogue.IOCOST_USAGE_SECONDS, (), _MICROSECONDS),
            b"cost.wait": _Field(catalogue.IOCOST_WAIT_SECONDS, (), _MICROSECONDS),
        },
        b"0",
    ),
)
_V2_LIMITS: tuple[_File, ...] = (
    _File(
        b"io.max",
        nested,
        {
            b"rbps": _Field(catalogue.CGROUP_IO_MAX_BYTES, ("read",)),
            b"wbps": _Field(catalogue.CGROUP_IO_MAX_BYTES, ("write",)),
            b"riops": _Field(catalogue.CGROUP_IO_MAX_OPERATIONS, ("read",)),
            b"wiops": _Field(catalogue.CGROUP_IO_MAX_OPERATIONS, ("write",)),
        },
        b"max",
    ),
    _File(
        b"io.latency",
        nested,
        {b"target": _Field(catalogue.CGROUP_IO_LATENCY_TARGET_SECONDS, (), _MICROSECONDS)},
        b"max",
    ),
    _weight(b"io.weight", "iocost"),
    _weight(b"io.bfq.weight", "bfq"),
)
_V1_COUNTS: tuple[_File, ...] = (
    _v1_counts(b"io_service_bytes", catalogue.CGROUP_IO_BYTES),
    _v1_counts(b"io_serviced", catalogue.CGROUP_IO_OPERATIONS),
)
_V1_LIMITS: tuple[_File, ...] = (
    _v1_limit(b"read_bps_device", catalogue.CGROUP_IO_MAX_BYTES, "read"),
    _v1_limit(b"write_bps_device", catalogue.CGROUP_IO_MAX_BYTES, "write"),
    _v1_limit(b"read_iops_device", catalogue.CGROUP_IO_MAX_OPERATIONS, "read"),
    _v1_limit(b"write_iops_device", catalogue.CGROUP_IO_MAX_OPERATIONS, "write"),
    # The weight for all disks is shown in this one and set by the other (block/bfq-cgroup.c).
    _weight(b"blkio.bfq.weight_device", "bfq", b"blkio.bfq.weight"),
)
# Of v2's root alone, and of disks: without a cgroup in their labels.
_IOCOST: tuple[_File, ...] = (
    _File(
        b"io.stat",
        nested,
        {b"cost.vrate": _Field(catalogue.IOCOST_VRATE_RATIO, (), _PERCENT)},
        b"",
    ),
    _File(
        b"io.cost.qos",
        nested,
        {
            b"enable": _Field(catalogue.IOCOST_ENABLED),
            b"rlat": _Field(catalogue.IOCOST_QOS_LATENCY_SECONDS, ("read",), _MICROSECONDS),
            b"wlat": _Field(catalogue.IOCOST_QOS_LATENCY_SECONDS, ("write",), _MICROSECONDS),
            b"rpct": _Field(catalogue.IOCOST_QOS_RATIO, ("rpct",), _PERCENT),
            b"wpct": _Field(catalogue.IOCOST_QOS_RATIO, ("wpct",), _PERCENT),
            b"min": _Field(catalogue.IOCOST_QOS_RATIO, ("min",), _PERCENT),
            b"max": _Field(catalogue.IOCOST_QOS_RATIO, ("max",), _PERCENT),
        },
        b"",
    ),
    _File(
        b"io.cost.model",
        nested,
        {
            b"rbps": _Field(catalogue.IOCOST_MODEL_BYTES, ("read",)),
            b"wbps": _Field(catalogue.IOCOST_MODEL_BYTES, ("write",)),
            b"rseqiops": _Field(catalogue.IOCOST_MODEL_OPERATIONS, ("read", "sequential")),
            b"rrandiops": _Field(catalogue.IOCOST_MODEL_OPERATIONS, ("read", "random")),
            b"wseqiops": _Field(catalogue.IOCOST_MODEL_OPERATIONS, ("write", "sequential")),
            b"wrandiops": _Field(catalogue.IOCOST_MODEL_OPERATIONS, ("write", "random")),
        },
        b"",
    ),
)


_Set = tuple[_File, bytes, list[tuple[str, str | None]]]
"""A file with what is set, its text, and which disk had each number in it then: by now it may be
another's."""


class CgroupIo(Reader):
    """Block IO of each cgroup as the kernel counts it, its limits and weights as they are set, and
    iocost."""

    name = "cgroup_io"

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        self._hierarchy = host.cgroups.hierarchies.io
        v2 = self._hierarchy.id == 0
        self._counts = _V2_COUNTS if v2 else _V1_COUNTS
        self._limits = _V2_LIMITS if v2 else _V1_LIMITS
        self._of_root = _IOCOST if v2 else ()
        sign = os.path.join(os.fsencode(self._hierarchy.mount), self._counts[0].name)
        if content(sign) is None:
            raise Refused(
                "no io controller",
                f"cannot read {os.fsdecode(sign)}",
                "run a kernel with CONFIG_BLK_CGROUP and CONFIG_BLK_DEV_THROTTLING; in a cgroup "
                "namespace, mount the host's cgroup file system",
            )
        self._files, self._devices = host.files, host.devices
        self._kept = [(file, host.files.kept(self._hierarchy, file.name)) for file in self._counts]
        self._set: Seldom[list[_Set]] = host.files.seldom(
            self._hierarchy,
            [name for file in self._limits for name in (file.name, *file.written_as)],
        )
        return []

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        samples = _Samples((*self._counts, *self._limits, *self._of_root), host.devices)
        for cgroup, label, directory in host.cgroups.listed(self._hierarchy):
            owner = (label,)
            for file, kept in self._kept:
                text = kept.read(cgroup, directory)
                if text is None:  # it has gone, or the controller is off there
                    self._set.forget(cgroup)
                    break
                samples.add(file, text, owner)
            else:
                for file, text, _ in self._limits_of(cgroup, directory):
                    samples.add(file, text, owner)
                if label == "/":
                    for file in self._of_root:
                        samples.add(file, content(os.path.join(directory, file.name)) or b"", ())
        snapshot.families += samples.families()

    def _limits_of(self, cgroup: int, directory: bytes) -> list[_Set]:
        try:
            found = self._set.get(cgroup, directory, self._read_limits)
            for _, _, names in found:
                if any(self._devices.name(number) != name for number, name in names):
                    self._set.forget(cgroup)
                    return self._set.get(cgroup, directory, self._read_limits)
        except OSError:  # it has gone meanwhile, or its directory has been closed to us
            return []
        return found

    def _read_limits(self, cgroup: int, directory: bytes) -> list[_Set]:
        """Of the files that are there, as those of bfq are with its module, and not empty."""
        names = (file.name for file in self._limits)
        texts = self._files.contents(cgroup, directory, names)
        return [
            (file, text, self._names_in(file, text))
            for file, text in zip(self._limits, texts, strict=True)
            if text
        ]

    def _names_in(self, file: _File, text: bytes) -> list[tuple[str, str | None]]:
        numbers = {os.fsdecode(number) for number, _, _ in file.split(text)} - {"default"}
        return [(number, self._devices.name(number)) for number in numbers]


class _Samples:
    """Samples by metric, of these files."""

    def __init__(self, files: Iterable[_File], devices: Devices) -> None:
        metrics = {field.metric.name: field.metric for f in files for field in f.fields.values()}
        self._rows: dict[str, tuple[Metric, Samples]] = {
            name: (metric, []) for name, metric in metrics.items()
        }
        self._fields: dict[_File, dict[bytes, tuple[Samples, Labels, int]]] = {
            file: {
                key: (self._rows[field.metric.name][1], field.labels, field.divisor)
                for key, field in file.fields.items()
            }
            for file in files
        }

        @cache  # for one scrape: by the next, the number may be another disk's
        def device(number: bytes) -> str | None:
            return "default" if number == b"default" else devices.name(os.fsdecode(number))

        self._device = device

    def add(self, file: _File, text: bytes, owner: Labels) -> None:
        """Takes what is in the file's text; what is no number is left out, and so are disks that
        have just gone."""
        fields = self._fields[file]
        for number, key, value in file.split(text):
            field = fields.get(key)
            if field is None or value == file.nothing:
                continue
            device = self._device(number)
            if device is None:
                continue
            rows, labels, divisor = field
            try:
                amount = int(value) if divisor == 1 else float(value) / divisor
            except ValueError:
                continue
            rows.append(((*owner, device, *labels), amount))

    def families(self) -> Iterator[Family]:
        for metric, rows in self._rows.values():
            yield family(metric, rows)
