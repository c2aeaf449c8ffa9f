# SPDX-License-Identifier: Apache-2.0
"""Block IO by (cgroup, disk, op): bpf/block_io.bpf.c."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature
from writeback_exporter.kernel.libbpf import BpfError
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import (
    HistogramFamily,
    Labels,
    Snapshot,
    bucket_counts,
    family,
)
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import (
    OTHER,
    Cgroups,
    Hierarchies,
    Hierarchy,
)
from writeback_exporter.names.devices import Devices
from writeback_exporter.probes.base import (
    Disk,
    Probe,
    Row,
    Table,
    c_string,
    disks_that_left,
)

log = logging.getLogger(__name__)

# BLK_STS_* (include/linux/blk_types.h); what follows 13 was renumbered between kernels.
_STATUS = {
    1: "not_supported",
    2: "timeout",
    3: "no_space",
    4: "transport",
    5: "target",
    6: "reservation_conflict",
    7: "medium",
    8: "protection",
    9: "no_resource",
    10: "io",
    11: "requeue",
    12: "again",
    13: "device_resource",
}
# Up to 5.17 the tracepoint gave the errno that blk_status_to_errno() makes of the status. EBUSY is
# the device's lack of resources (13).
_ERRNO = dict(
    # EOPNOTSUPP, ETIMEDOUT, ENOSPC, ENOLINK, EREMOTEIO, EBADE, ENODATA, EILSEQ, ENOMEM, EIO, ...
    zip((95, 110, 28, 67, 121, 52, 61, 84, 12, 5, 78, 11, 16), range(1, 14), strict=True)
)
_COUNT = struct.Struct("=Q")
_INDEX = struct.Struct("=I")


def error_name(status: int) -> str:
    """The label of a completion's status: BLK_STS_* where positive, -errno where negative."""
    return _STATUS.get(status if status > 0 else _ERRNO.get(-status, 0), "other")


@dataclass(slots=True, kw_only=True)
class _Disk(Disk):
    """A disk that had IO, as `read` found it."""

    index: int
    identity: bytes
    """Key in disk_index."""
    value: bytes


class BlockIo(Probe):
    """Device and queue time, size, errors by owner; depth and requests in flight by disk."""

    name = "block_io"
    main = True

    def __init__(self) -> None:
        super().__init__()
        histograms = self.file.struct("io_histograms")
        depth = self.file.struct("io_depth")
        disk = self._value_layout("disks")
        latency = self.file.enum("io_latency_exponents")["IO_LATENCY_FIRST"]
        self._histograms = [
            (metric, first, histograms.pick(total, slots))
            for metric, first, total, slots in (
                (catalogue.BLOCK_IO_DEVICE_SECONDS, latency, "device_ns", "device_slots"),
                (catalogue.BLOCK_IO_QUEUE_SECONDS, latency, "queue_ns", "queue_slots"),
                (
                    catalogue.BLOCK_IO_SIZE_BYTES,
                    self.file.enum("io_size_exponents")["IO_SIZE_FIRST"],
                    "size_bytes",
                    "size_slots",
                ),
            )
        ]
        self._depth = (
            self.file.enum("io_depth_exponents")["IO_DEPTH_FIRST"],
            depth.pick("sum", "slots"),
        )
        self._histograms_size = histograms.size
        self._ops = [
            op.removeprefix("IO_").lower() for op in self.file.enum("io_op") if op != "IO_OPS"
        ]
        self._other_at = [
            disk.fields[f"other[{i}].device_ns"].offset for i in range(len(self._ops))
        ]
        start = disk.fields["depth.sum"].offset
        self._depth_at = slice(start, start + depth.size)
        self._disk_state = disk.pick("since_ns", "inflight", "name")
        self._key = self._key_layout("block_io").pick("cgroup", "disk", "op")
        self._error_key = self._key_layout("block_io_errors").pick("cgroup", "disk", "op", "status")
        self._owner = self._key_layout("block_io").pick("cgroup", "disk")
        disk_field = self._key_layout("block_io").fields["disk"]
        self._owner_end = disk_field.offset + disk_field.size
        self._identity = self._key_layout("disk_index").pick("gendisk", "dev")

        self._hierarchy = Hierarchy(0, "")
        self._insert = ""
        self._io: list[tuple[bytes, memoryview]] = []
        self._errors: list[tuple[bytes, memoryview]] = []
        self._disks: dict[int, _Disk] = {}
        self._left = Table()
        """By (device, op), what has left block_io with cgroups, of disks in use."""

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        arity = kernel.arity("block_rq_issue", known=(1, 2))
        slots = kernel.has_cmpxchg()
        kind = "slots" if slots else "hash"
        events = ["complete", "requeue", "issue"]
        if kernel.btf.tracepoint_arity("block_rq_merge") is not None:
            events.insert(0, "merge")
        constants = {"queue_argument": int(arity == 2)}
        for enum in ("req_op", "req_opf"):  # its name since 6.0, and before
            number = kernel.btf.enum_value(enum, "REQ_OP_ZONE_APPEND")
            if number is not None:
                constants["zone_append_op"] = number
        self._insert = f"insert_{kind}"
        self.bpf = kernel.load(
            self.file,
            [f"{event}_{kind}" for event in events],
            constants,
            also=[self._insert],
        )
        if self._insert in self.bpf.attached:  # by the exporter before this one
            self._insert = ""
        self._hierarchy = hierarchies.io
        if slots:
            return [Feature("block_io_request_slots", True)]
        return [
            Feature(
                "block_io_request_slots",
                False,
                "no cmpxchg",
                "BPF cannot compare and exchange on this kernel: requests are kept in a hash map, "
                "which costs more time an IO and counts the same",
                "use a kernel from 5.12 on",
            )
        ]

    def read(self) -> None:
        # Histograms first: a disk or cgroup that is in them is then known to what is read later.
        self._io = self._dump("block_io")
        self._errors = self._dump("block_io_errors")
        self._dump("requests_spilled")
        self._read_disks()
        self._io = self._of_known("block_io", self._io, self._has_known_disk)
        self._errors = self._of_known("block_io_errors", self._errors, self._has_known_disk)

    def _has_known_disk(self, key: bytes) -> bool:
        _, disk = self._owner.unpack_from(key)
        return disk in self._disks

    def _read_disks(self) -> None:
        known, self._disks = self._disks, {}
        disks = self.map("disks")
        for identity, packed_index in self._dump("disk_index", "disks"):
            (index,) = _INDEX.unpack(packed_index)
            _, dev = self._identity.unpack(identity)
            value = disks.lookup(_INDEX.pack(index)) or b""
            since_ns, _, name = self._disk_state.unpack(value)
            disk = _Disk(
                index=index,
                identity=identity,
                dev=f"{dev >> 32}:{dev & 0xFFFFFFFF}",
                value=value,
                name=c_string(name),
                since_ns=since_ns,
            )
            old = known.get(index)
            # Its identity is another one's, too, whose gendisk is where the kernel had that of this
            # one: what had IO since is there again, whether its place is the same or taken anew.
            if old and (old.identity, old.value) == (disk.identity, disk.value):
                disk.gone_since = old.gone_since
            self._disks[index] = disk

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        self._attach_insert(host.devices)
        table = self._table(host.cgroups)
        snapshot.histograms += [table.histogram(*histogram) for histogram in self._histograms]
        snapshot.histograms.append(self._depth_family())

        inflight: dict[Labels, float] = {}
        for disk in self._disks.values():
            _, requests, _ = self._disk_state.unpack(disk.value)
            labels: Labels = (disk.name,)
            # Signed: a request that hung in a forgotten disk may end in this one's place.
            inflight[labels] = inflight.get(labels, 0) + max(requests, 0)
        snapshot.families.append(family(catalogue.BLOCK_IO_INFLIGHT, inflight.items()))

        errors = Table()
        for _, labels, row in self._error_rows(host.cgroups):
            errors.add(labels, row)
        snapshot.families.append(
            family(
                catalogue.BLOCK_IO_ERRORS,
                ((labels, _COUNT.unpack(row)[0]) for labels, row in errors.rows.items()),
            )
        )

    def _attach_insert(self, devices: Devices) -> None:
        """Attaches `insert` once a disk needs it, for it costs 35 ns an IO also where it does not:
        the kernel stamps arrival itself unless iostats and the scheduler are off."""
        assert self.bpf is not None
        if self._insert and devices.has_disk_without_iostats():
            program, self._insert = self._insert, ""
            try:
                self.bpf.attach(program)
            except BpfError as error:
                log.warning("queue time of disks without iostats is not known: %s", error)

    def _table(self, cgroups: Cgroups) -> Table:
        table = Table()
        for _, labels, row in self._rows(cgroups):
            table.add(labels, row)
        for labels, row in self._other_rows(self._disks):
            table.add(labels, row)
        return table

    def _other_rows(self, disks: Mapping[int, _Disk]) -> Iterator[tuple[Labels, bytes]]:
        """What found no room in block_io, by disk and op."""
        empty = bytes(self._histograms_size)
        for disk in disks.values():
            for op, start in zip(self._ops, self._other_at, strict=True):
                row = disk.value[start : start + self._histograms_size]
                if row != empty:
                    yield (OTHER, disk.name, op), row

    def _depth_family(self) -> HistogramFamily:
        table = Table()
        for disk in self._disks.values():
            table.add((disk.name,), disk.value[self._depth_at])
        return table.histogram(catalogue.BLOCK_IO_DEPTH, *self._depth)

    def _rows(self, cgroups: Cgroups) -> Iterator[Row]:
        for key, row in self._io:
            cgroup, disk, op = self._key.unpack(key)
            name = cgroups.name(self._hierarchy, cgroup)
            yield key, (name, self._disks[disk].name, self._ops[op]), row

    def _error_rows(self, cgroups: Cgroups) -> Iterator[Row]:
        for key, row in self._errors:
            cgroup, disk, op, status = self._error_key.unpack(key)
            name = cgroups.name(self._hierarchy, cgroup)
            yield key, (name, self._disks[disk].name, self._ops[op], error_name(status)), row

    def sample(self, sample: Sample, host: Host) -> None:
        table = Table()
        for labels, row in self._left.rows.items():
            table.add(labels, row)
        for key, row in self._io:
            _, disk, op = self._key.unpack(key)
            table.add((self._disks[disk].name, self._ops[op]), row)
        for labels, other in self._other_rows(self._disks):
            table.add(labels[1:], other)
        metric, first, picked = self._histograms[0]
        rows = table.histogram(metric, first, picked).rows()
        sample.io = {labels: bucket_counts(metric, first, slots) for labels, slots, _ in rows}

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        disks = disks_that_left(self._disks, host.devices, now)
        cgroups = {cgroup for tree, cgroup in gone if tree == self._hierarchy.id}
        if not disks and not cgroups:
            return
        heirs = host.cgroups.heirs(self._hierarchy, gone)

        def drop(bpf_map: str, rows: Iterator[Row]) -> list[tuple[Labels, bytes]]:
            """What had no heir."""
            lost = []
            for key, labels, _ in list(rows):
                cgroup, disk = self._owner.unpack_from(key)
                if cgroup not in cgroups and disk not in disks:
                    continue
                owner = heirs.get(labels[0]) if cgroup in cgroups else cgroup
                heir = disks.get(disk, disk)
                if owner is not None and heir is not None:
                    end = self._owner_end
                    heirs_key = self._owner.pack(owner, heir)[:end] + key[end:]
                    self._bequeath(bpf_map, key, heirs_key)
                elif row := self.map(bpf_map).lookup_and_delete(key):
                    lost.append((labels, row))
            return lost

        for labels, row in drop("block_io", self._rows(host.cgroups)):
            self._left.add(labels[1:], row)
        drop("block_io_errors", self._error_rows(host.cgroups))
        for index, heir in disks.items():
            self.run("drop_disk", index, self.map("disks").max_entries if heir is None else heir)
        names = {disk.name for index, disk in self._disks.items() if index not in disks}
        for labels in [labels for labels in self._left.rows if labels[0] not in names]:
            del self._left.rows[labels]
