# SPDX-License-Identifier: Apache-2.0
"""Block IO from maps to families. The maps are in memory; their layout is the object's."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory import MachineOfCgroups, Memory, Values, added, changed, extent, load
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names import cgroups as cgroups_module
from writeback_exporter.names.cgroups import (
    OTHER,
    RETENTION_SECONDS,
    UNATTRIBUTED,
    EventKind,
)
from writeback_exporter.probes.block_io import BlockIo, error_name

# Status ------------------------------------------------------------------------------------------

# include/linux/blk_types.h: the numbers that no kernel from 5.10 on has changed.
STATUS = {
    1: ("BLK_STS_NOTSUPP", "not_supported"),
    2: ("BLK_STS_TIMEOUT", "timeout"),
    3: ("BLK_STS_NOSPC", "no_space"),
    4: ("BLK_STS_TRANSPORT", "transport"),
    5: ("BLK_STS_TARGET", "target"),
    6: ("BLK_STS_NEXUS, since 6.5 BLK_STS_RESV_CONFLICT", "reservation_conflict"),
    7: ("BLK_STS_MEDIUM", "medium"),
    8: ("BLK_STS_PROTECTION", "protection"),
    9: ("BLK_STS_RESOURCE", "no_resource"),
    10: ("BLK_STS_IOERR", "io"),
    11: ("BLK_STS_DM_REQUEUE", "requeue"),
    12: ("BLK_STS_AGAIN", "again"),
    13: ("BLK_STS_DEV_RESOURCE", "device_resource"),
}
# blk_errors[] of block/blk-core.c in 5.10 to 5.17, by which blk_status_to_errno() went. Numbers as
# in include/uapi/asm-generic/errno.h, which x86-64 and aarch64 share.
ERRNO = {
    1: 95,  # EOPNOTSUPP
    2: 110,  # ETIMEDOUT
    3: 28,  # ENOSPC
    4: 67,  # ENOLINK
    5: 121,  # EREMOTEIO
    6: 52,  # EBADE
    7: 61,  # ENODATA
    8: 84,  # EILSEQ
    9: 12,  # ENOMEM
    10: 5,  # EIO
    11: 78,  # EREMCHG
    12: 11,  # EAGAIN
    13: 16,  # EBUSY
}
RENUMBERED = range(14, 256)
"""blk_status_t is a byte. 14 was BLK_STS_ZONE_RESOURCE and is BLK_STS_ZONE_OPEN_RESOURCE."""


@pytest.mark.parametrize("status", STATUS)
def test_status(status: int) -> None:
    assert error_name(status) == STATUS[status][1]


def test_status_whose_number_depends_on_the_kernel() -> None:
    assert {error_name(status) for status in RENUMBERED} == {"other"}


@pytest.mark.parametrize("status", ERRNO)
def test_errno_before_5_18_is_named_as_its_status(status: int) -> None:
    assert error_name(-ERRNO[status]) == error_name(status)


@pytest.mark.parametrize("errno", [59, 75, 1, 22, 9999])  # ETOOMANYREFS, EOVERFLOW: zones
def test_errno_that_stands_for_no_one_status(errno: int) -> None:
    assert error_name(-errno) == "other"


@given(st.integers(-(2**31), 2**31 - 1))
def test_any_status_has_a_name(status: int) -> None:
    name = error_name(status)
    assert name == "other" or name in {label for _, label in STATUS.values()}


# The machine ------------------------------------------------------------------------------------


class Machine(MachineOfCgroups["Scraped"]):
    """A machine's disks, cgroups and IO, and the probe that reads them.

    Its methods do to the maps what bpf/block_io.bpf.c does.
    """

    def __init__(self, sysfs: Path) -> None:
        self.probe = BlockIo()
        super().__init__(sysfs, self.probe, Scraped)
        file = self.probe.file
        self.plugged = 0
        self.maps = {
            "block_io": Memory(16, file.struct("io_histograms").size, 32768),
            "block_io_errors": Memory(24, 8, 4096),
            "requests_spilled": Memory(8, 64, 16384),
            "disks": Memory(4, file.struct("disk").size, 1024, array=True),
            "disk_index": Memory(16, 4, 1024),
            "disk_owner": Memory(4, 16, 1024),
        }
        load(self.probe, self.maps, {"drop_disk": self._drop_disk})

    def _drop_disk(self, index: int, heir: int) -> int:
        layout = self.probe.file.struct("disk")
        disks, place = self.maps["disks"], struct.pack("=I", index)
        row = disks.entries[place]
        if heir < disks.max_entries:
            heirs = disks.entries[struct.pack("=I", heir)]
            for counters in (
                extent(layout, "depth.sum", "depth.slots"),
                extent(layout, "other[0].device_ns", "other[4].size_slots"),
            ):
                heirs = added(heirs, row, counters)
            disks.update(struct.pack("=I", heir), heirs)
        disks.update(place, bytes(layout.size))
        self.maps["disk_index"].delete(self.maps["disk_owner"].entries[place])
        self.maps["disk_owner"].delete(place)
        return 1

    def plug(self, index: int, name: str, dev: tuple[int, int], gendisk: int) -> None:
        file = self.probe.file
        place = self.sysfs / "block" / name.replace("/", "!")
        place.mkdir(parents=True, exist_ok=True)
        (place / "dev").write_text("{}:{}\n".format(*dev))
        identity = changed(
            file.struct("disk_id"), None, {"gendisk": gendisk, "dev": dev[0] << 32 | dev[1]}
        )
        self.maps["disk_index"].update(identity, struct.pack("=I", index))
        self.maps["disk_owner"].update(struct.pack("=I", index), identity)
        self.plugged += 1
        self.change_disk(index, {"name": name.encode(), "since_ns": self.plugged})

    def unplug(self, name: str) -> None:
        (self.sysfs / "block" / name / "dev").unlink()
        (self.sysfs / "block" / name).rmdir()

    def change_disk(self, index: int, values: Values) -> None:
        disks, layout = self.maps["disks"], self.probe.file.struct("disk")
        key = struct.pack("=I", index)
        disks.update(key, changed(layout, disks.lookup(key), values))

    def io(self, cgroup: int, disk: int, op: int, times: int = 1) -> None:
        """Requests of 4096 bytes, each 2^20 ns in the device and 2^14 ns in the queue."""
        file = self.probe.file
        layout, io = file.struct("io_histograms"), self.maps["block_io"]
        latency, size = (
            file.enum(f"io_{name}_exponents")[f"IO_{name.upper()}_FIRST"]
            for name in ("latency", "size")
        )
        key = changed(file.struct("io_key"), None, {"cgroup": cgroup, "disk": disk, "op": op})
        row = bytearray(io.lookup(key) or bytes(layout.size))
        for total, slots, value, first in (
            ("device_ns", "device_slots", 1 << 20, latency),
            ("queue_ns", "queue_slots", 1 << 14, latency),
            ("size_bytes", "size_slots", 1 << 12, size),
        ):
            slot = layout.fields[slots].offset + 8 * (value.bit_length() - 1 - first)
            for place, number in ((layout.fields[total].offset, value), (slot, 1)):
                (before,) = struct.unpack_from("=Q", row, place)
                struct.pack_into("=Q", row, place, before + times * number)
        io.update(key, bytes(row))

    def error(self, cgroup: int, disk: int, op: int, status: int, times: int = 1) -> None:
        layout, errors = self.probe.file.struct("io_error_key"), self.maps["block_io_errors"]
        values = {"cgroup": cgroup, "disk": disk, "op": op, "status": status}
        key = changed(layout, None, values)
        (before,) = struct.unpack("=Q", errors.lookup(key) or bytes(8))
        errors.update(key, struct.pack("=Q", before + times))


class Scraped:
    """What one collection found, read at once as rendering does."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.histograms = {
            h.metric: {labels: (list(slots), total) for labels, slots, total in h.rows()}
            for h in snapshot.histograms
        }
        self.first = {h.metric: h.first_exponent for h in snapshot.histograms}
        self.samples = {family.metric.name: dict(family.rows) for family in snapshot.families}

    @property
    def counts(self) -> dict[Labels, int]:
        """Requests by label set."""
        found = self.histograms[catalogue.BLOCK_IO_DEVICE_SECONDS]
        return {labels: sum(slots) for labels, (slots, _) in found.items()}

    @property
    def errors(self) -> dict[Labels, float]:
        return self.samples[catalogue.BLOCK_IO_ERRORS.name]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with the disks sda and nvme0n1 and the cgroups /a and /b (5 and 6)."""
    machine = Machine(tmp_path / "sys")
    machine.plug(3, "sda", (8, 0), 0xFFFF888000001000)
    machine.plug(4, "nvme0n1", (259, 0), 0xFFFF888000002000)
    machine.event(EventKind.MKDIR, 5, "/a")
    machine.event(EventKind.MKDIR, 6, "/b")
    return machine


def test_maps_here_are_those_of_the_object(machine: Machine) -> None:
    for name, memory in machine.maps.items():
        layouts = machine.probe.file.map(name)
        assert layouts.key is None or layouts.key.size == memory.key_size
        assert layouts.value is None or layouts.value.size == memory.value_size


# Families ----------------------------------------------------------------------------------------


def test_labels_of_ops_are_those_of_the_enum(machine: Machine) -> None:
    enum = machine.probe.file.enum("io_op")
    ops = {value: name for name, value in enum.items() if name != "IO_OPS"}
    assert sorted(ops) == list(range(enum["IO_OPS"])) == list(range(5))
    for op in ops:
        machine.io(5, 3, op, times=op + 1)
        machine.error(5, 3, op, 10)
    scraped = machine.scrape()
    labels = {op: name.removeprefix("IO_").lower() for op, name in ops.items()}
    assert set(labels.values()) == {"read", "write", "discard", "flush", "other"}
    assert scraped.counts == {("/a", "sda", labels[op]): op + 1 for op in ops}
    assert scraped.errors == {("/a", "sda", labels[op], "io"): 1 for op in ops}


def test_slots_and_sums_of_each_histogram(machine: Machine) -> None:
    machine.io(5, 3, 0, times=7)
    scraped = machine.scrape()
    for metric, value in (
        (catalogue.BLOCK_IO_DEVICE_SECONDS, 1 << 20),
        (catalogue.BLOCK_IO_QUEUE_SECONDS, 1 << 14),
        (catalogue.BLOCK_IO_SIZE_BYTES, 1 << 12),
    ):
        ((slots, total),) = scraped.histograms[metric].values()
        assert total == 7 * value
        assert {scraped.first[metric] + i: n for i, n in enumerate(slots) if n} == {
            value.bit_length() - 1: 7
        }


def test_owners(machine: Machine) -> None:
    for cgroup in (0, 5, 6, 77):
        machine.io(cgroup, 4, 1)
    assert machine.scrape().counts == {
        (name, "nvme0n1", "write"): 1 for name in (UNATTRIBUTED, "/a", "/b", OTHER)
    }


def test_errors_of_one_name_are_summed(machine: Machine) -> None:
    for status in (10, -5, 14, 200, -9999):
        machine.error(5, 3, 0, status, times=2)
    assert machine.scrape().errors == {
        ("/a", "sda", "read", "io"): 4,
        ("/a", "sda", "read", "other"): 6,
    }


def test_disks(machine: Machine) -> None:
    slots = [0] * machine.probe.file.struct("io_depth").fields["slots"].count
    slots[0], slots[2] = 9, 1
    machine.change_disk(3, {"inflight": 2, "depth.sum": 12, "depth.slots": slots})
    scraped = machine.scrape()
    empty = [0] * len(slots)
    assert scraped.samples[catalogue.BLOCK_IO_INFLIGHT.name] == {("sda",): 2, ("nvme0n1",): 0}
    assert scraped.histograms[catalogue.BLOCK_IO_DEPTH] == {
        ("sda",): (slots, 12),
        ("nvme0n1",): (empty, 0),
    }
    assert scraped.first[catalogue.BLOCK_IO_DEPTH] == 0


def test_what_found_no_room_is_others(machine: Machine) -> None:
    count = machine.probe.file.struct("io_histograms").fields["device_slots"].count
    values: Values = {
        "other[1].device_ns": 5,
        "other[1].device_slots": [5] + [0] * (count - 1),
    }
    machine.change_disk(3, values)
    machine.io(99, 3, 1)  # of a cgroup that nobody knows: the same label
    assert machine.scrape().counts == {(OTHER, "sda", "write"): 6}


def test_name_of_a_disk_with_a_slash(machine: Machine) -> None:
    machine.plug(9, "cciss/c0d0", (104, 0), 0xFFFF888000009000)
    machine.io(5, 9, 0)
    assert machine.scrape_until_retention_is_over().counts == {("/a", "cciss/c0d0", "read"): 1}


# Coming and going --------------------------------------------------------------------------------


def test_exited_cgroup_is_exported_and_then_its_entries_go(machine: Machine) -> None:
    machine.io(5, 3, 0, times=4)
    machine.error(5, 3, 0, 10)
    machine.io(6, 3, 0)
    machine.exit(5, "/a")
    assert machine.scrape().counts[("/a", "sda", "read")] == 4
    assert machine.scrape(1.0).errors == {("/a", "sda", "read", "io"): 1}, "for a second Prometheus"
    scraped = machine.scrape_until_retention_is_over()
    assert (scraped.counts, scraped.errors) == ({("/b", "sda", "read"): 1}, {})
    assert len(machine.maps["block_io"].entries) == 1
    assert not machine.maps["block_io_errors"].entries


@pytest.mark.parametrize(("op", "name"), [(0, "read"), (1, "write")])
def test_restarted_service_counts_on(machine: Machine, op: int, name: str) -> None:
    machine.io(5, 3, op, times=4)
    machine.error(5, 3, op, 10)
    machine.exit(5, "/a")
    machine.event(EventKind.MKDIR, 50, "/a")
    machine.io(50, 3, op)
    assert machine.scrape().counts == {("/a", "sda", name): 5}
    scraped = machine.scrape_until_retention_is_over()
    assert scraped.counts == {("/a", "sda", name): 5}
    assert scraped.errors == {("/a", "sda", name, "io"): 1}
    assert len(machine.maps["block_io"].entries) == 1
    machine.exit(50, "/a")
    assert machine.scrape().counts == {("/a", "sda", name): 5}
    assert machine.scrape_until_retention_is_over().counts == {}


def test_unplugged_disk_is_exported_and_then_its_entries_go(machine: Machine) -> None:
    machine.io(5, 3, 0)
    machine.io(5, 4, 0)
    machine.unplug("sda")
    assert ("/a", "sda", "read") in machine.scrape().counts
    scraped = machine.scrape_until_retention_is_over()
    assert scraped.counts == {("/a", "nvme0n1", "read"): 1}
    assert scraped.samples[catalogue.BLOCK_IO_INFLIGHT.name] == {("nvme0n1",): 0}
    assert {len(machine.maps[name].entries) for name in ("disk_index", "disk_owner")} == {1}
    assert machine.maps["disks"].lookup(struct.pack("=I", 3)) == bytes(
        machine.maps["disks"].value_size
    )


def test_disk_that_comes_back_was_never_gone(machine: Machine) -> None:
    machine.io(5, 3, 0)
    machine.unplug("sda")
    machine.scrape(RETENTION_SECONDS / 2)
    machine.plug(3, "sda", (8, 0), 0xFFFF888000001000)
    machine.scrape(RETENTION_SECONDS)
    machine.unplug("sda")
    machine.scrape(1.0)
    assert ("/a", "sda", "read") in machine.scrape(RETENTION_SECONDS / 2).counts


def test_disk_replaced_under_its_name_counts_on(machine: Machine) -> None:
    io, depth = (machine.probe.file.struct(name) for name in ("io_histograms", "io_depth"))
    latencies = [1] + [0] * (io.fields["device_slots"].count - 1)
    depths = [1] + [0] * (depth.fields["slots"].count - 1)
    common: dict[str, int | bytes | list[int]] = {"depth.sum": 1, "depth.slots": depths}
    machine.io(5, 3, 0, times=4)
    machine.change_disk(3, {**common, "inflight": 1, "other[0].device_slots": latencies})
    machine.unplug("sda")
    machine.plug(7, "sda", (8, 16), 0xFFFF888000005000)
    machine.io(5, 7, 0)
    machine.change_disk(7, {**common, "inflight": 2, "other[0].device_slots": latencies})
    first, last = machine.scrape(), machine.scrape_until_retention_is_over()
    for scraped in (first, last):
        assert scraped.counts == {("/a", "sda", "read"): 5, (OTHER, "sda", "read"): 2}
        slots, total = scraped.histograms[catalogue.BLOCK_IO_DEPTH][("sda",)]
        assert (slots[0], total) == (2, 2)
    assert len(machine.maps["disk_index"].entries) == 2
    inflight = catalogue.BLOCK_IO_INFLIGHT.name
    assert (first.samples[inflight]["sda",], last.samples[inflight]["sda",]) == (3, 2)


def test_disk_that_gets_the_place_of_another(machine: Machine) -> None:
    """It is not gone since when the other one was."""
    machine.unplug("sda")
    machine.scrape_until_retention_is_over()
    machine.unplug("nvme0n1")
    machine.scrape()
    machine.maps["disk_index"].entries.clear()
    machine.plug(4, "sdc", (8, 32), 0xFFFF888000007000)
    machine.unplug("sdc")
    machine.io(5, 4, 0)
    machine.scrape(RETENTION_SECONDS)
    assert ("/a", "sdc", "read") in machine.scrape(1.0).counts


def test_disk_that_gets_its_own_place_again(machine: Machine) -> None:
    """Its gendisk is where that of one was which has just been forgotten: it is not gone since when
    that one was."""
    depth = machine.probe.file.struct("io_depth")
    machine.unplug("sda")
    machine.plug(7, "sda", (8, 0), 0xFFFF888000005000)
    machine.io(5, 7, 0, times=4)
    machine.scrape()
    machine.scrape(RETENTION_SECONDS)
    assert len(machine.maps["disk_index"].entries) == 2
    machine.plug(3, "sda", (8, 0), 0xFFFF888000001000)
    machine.io(5, 3, 0, times=8)
    slots = [8] + [0] * (depth.fields["slots"].count - 1)
    machine.change_disk(3, {"depth.sum": 8, "depth.slots": slots})
    machine.unplug("sda")
    for _ in range(3):
        scraped = machine.scrape()
        assert scraped.counts == {("/a", "sda", "read"): 12}
        assert scraped.histograms[catalogue.BLOCK_IO_DEPTH]["sda",][1] == 8


def test_disk_that_is_there_again_where_it_was_before(machine: Machine) -> None:
    """It has IO: it stays, though another one of its name came later and is now gone."""
    machine.unplug("sda")
    machine.plug(7, "sda", (8, 0), 0xFFFF888000005000)
    for number in range(1, 5):
        machine.scrape(RETENTION_SECONDS / 2)
        machine.change_disk(3, {"depth.sum": number})
    assert len(machine.maps["disk_index"].entries) == 3
    machine.scrape_until_retention_is_over()
    assert len(machine.maps["disk_index"].entries) == 2


def test_hidden_path_of_a_multipath_disk_has_no_number(machine: Machine) -> None:
    machine.plug(9, "nvme1c0n1", (0, 0), 0xFFFF888000009000)
    (machine.sysfs / "block/nvme1c0n1/dev").unlink()
    machine.io(5, 9, 0)
    assert machine.scrape_until_retention_is_over().counts == {("/a", "nvme1c0n1", "read"): 1}


def test_completion_after_the_disk_was_forgotten(machine: Machine) -> None:
    """A request of an unplugged disk can be stuck for minutes, and makes its entry at its end."""
    machine.unplug("sda")
    machine.scrape_until_retention_is_over()
    machine.io(5, 3, 0)
    machine.error(5, 3, 0, 10)
    machine.io(5, 4, 0)
    assert machine.scrape().counts == {("/a", "nvme0n1", "read"): 1}
    machine.scrape_until_retention_is_over()
    assert len(machine.maps["block_io"].entries) == 1, "nor does its entry stay"
    assert not machine.maps["block_io_errors"].entries


def test_map_recovers_from_a_time_without_scrapes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More cgroups exited than names are kept; their entries must not fill the map for ever."""
    monkeypatch.setattr(cgroups_module, "_EXITED_LIMIT", 10)
    for cgroup in range(100, 130):
        machine.event(EventKind.MKDIR, cgroup, f"/job-{cgroup}")
        machine.io(cgroup, 3, 0)
        machine.exit(cgroup, f"/job-{cgroup}")
    assert sum(machine.scrape().counts.values()) == 30
    assert machine.scrape_until_retention_is_over().counts == {(OTHER, "sda", "read"): 20}
    assert len(machine.maps["block_io"].entries) == 1, "that of OTHER"


# Steps of a life, in any order; each is (what, which).
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["io", "io", "start", "exit", "unplug", "plug", "scrape", "wait"]),
        st.integers(0, 5),
    ),
    max_size=60,
)
OPS = ("read", "write", "discard", "flush", "other")


@given(STEPS)
def test_nothing_is_lost_or_counted_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Each series has all of its IO, and ends only when no cgroup or no disk has its name.

    So no counter goes backwards, whatever comes and goes under its labels.
    """
    machine = Machine(tmp_path_factory.mktemp("sys"))
    paths = ["/a", "/b", "/a/c"]
    cgroups: dict[str, int] = {}
    disks: dict[str, int] = {}
    fresh = iter(range(1, 1000))
    done: dict[tuple[str, str, str], int] = {}
    for what, which in steps:
        path, disk, op = paths[which % 3], ("sda", "sdb")[which % 2], which % len(OPS)
        if what == "start" and path not in cgroups:
            cgroups[path] = next(fresh)
            machine.event(EventKind.MKDIR, cgroups[path], path)
        elif what == "exit" and path in cgroups:
            machine.exit(cgroups.pop(path), path)
        elif what == "plug" and disk not in disks:
            disks[disk] = number = next(fresh)
            machine.plug(number, disk, (8, number), number << 12)
        elif what == "unplug" and disk in disks:
            machine.unplug(disk)
            del disks[disk]
        elif what == "io" and path in cgroups and disk in disks:
            machine.io(cgroups[path], disks[disk], op)
            machine.error(cgroups[path], disks[disk], op, 10)
            labels = path, disk, OPS[op]
            done[labels] = done.get(labels, 0) + 1
        elif what in ("scrape", "wait"):
            scraped = machine.scrape(15.0 if what == "scrape" else RETENTION_SECONDS)
            assert scraped.counts == done
            assert scraped.errors == {(*key, "io"): count for key, count in done.items()}
            for key in done.keys() - machine.peek().counts.keys():
                assert key[0] not in cgroups or key[1] not in disks
                del done[key]


# The status page ----------------------------------------------------------------------------------


def sampled(machine: Machine) -> dict[Labels, list[int]]:
    """Requests by (device, op) in the buckets that have some."""
    sample = Sample(machine.now)
    machine.probe.read()
    machine.probe.sample(sample, machine.host)
    assert sample.io is not None
    metric = catalogue.BLOCK_IO_DEVICE_SECONDS
    assert {len(counts) for counts in sample.io.values()} <= {len(metric.edges) + 1}
    return {labels: [n for n in counts if n] for labels, counts in sample.io.items()}


def test_requests_of_all_cgroups_by_disk_and_op(machine: Machine) -> None:
    machine.io(5, 3, 0, times=4)
    machine.io(6, 3, 0, times=2)
    machine.io(0, 4, 3)
    slots = machine.probe.file.struct("io_histograms").fields["device_slots"].count
    values: Values = {"other[0].device_ns": 5, "other[0].device_slots": [7] + [0] * (slots - 1)}
    machine.change_disk(3, values)
    assert sampled(machine) == {("sda", "read"): [7, 6], ("nvme0n1", "flush"): [1]}


def test_requests_of_forgotten_cgroups_stay_while_the_disk_does(machine: Machine) -> None:
    for cgroup in (5, 6):
        machine.io(cgroup, 3, 0, times=4)
        machine.exit(cgroup, "/a")
        machine.scrape_until_retention_is_over()
        assert not machine.maps["block_io"].entries
        assert sampled(machine) == {("sda", "read"): [4 * (cgroup - 4)]}
    machine.unplug("sda")
    machine.scrape_until_retention_is_over()
    assert sampled(machine) == {}


def test_a_sample_changes_nothing(machine: Machine) -> None:
    machine.io(5, 3, 0)
    machine.exit(5, "/a")
    machine.scrape()
    for _ in range(100):
        machine.now += RETENTION_SECONDS
        assert sampled(machine) == {("sda", "read"): [1]}
    assert machine.peek().counts == {("/a", "sda", "read"): 1}
