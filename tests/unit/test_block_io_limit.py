# SPDX-License-Identifier: Apache-2.0
"""Waits for limits from maps to families. The maps are in memory; their layout is the object's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import pytest

from tests.unit.memory import MachineOfCgroups, Memory, Values, changed, load
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.libbpf import BpfError
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import OTHER, OTHER_ID, RETENTION_SECONDS, EventKind
from writeback_exporter.probes import block_io_limit
from writeback_exporter.probes import block_io_limit as module
from writeback_exporter.probes.block_io_limit import BlockIoLimit

MAX, QOS = 0, 1
WAIT_NS = 1 << 20
"""In slot 6 of a histogram that begins at 2^14."""


def waits_of(snapshot: Snapshot) -> dict[Labels, tuple[int, int]]:
    """(waits, their nanoseconds) by labels."""
    (family,) = snapshot.histograms
    assert family.metric is catalogue.BLOCK_IO_LIMIT_SECONDS
    rows = {}
    for labels, slots, total in family.rows():
        assert labels not in rows
        assert slots[6] == sum(slots)
        rows[labels] = sum(slots), total
    return rows


class Machine(MachineOfCgroups[dict[Labels, tuple[int, int]]]):
    """A machine's disks, cgroups and limits, and the probe that reads what they held.

    Its methods do to the maps what bpf/block_io_limit.bpf.c does.
    """

    def __init__(self, sysfs: Path) -> None:
        self.probe = BlockIoLimit()
        super().__init__(sysfs, self.probe, waits_of)
        file = self.probe.file

        def hash_map(name: str, key: int | None = None) -> Memory:
            layout = file.map(name)
            assert layout.value is not None
            key_size = key or (layout.key.size if layout.key else 0)
            return Memory(key_size, layout.value.size, 64)

        self.maps = {
            "block_io_limit": hash_map("block_io_limit"),
            "limit_disks": hash_map("limit_disks"),
            "limit_held": hash_map("limit_held", key=8),
        }
        load(self.probe, self.maps)
        self.probe._rows.make_room(self.hierarchy, rests=())

    def plug(self, name: str, major: int, minor: int) -> None:
        directory = self.sysfs / "block" / name
        directory.mkdir()
        (directory / "dev").write_text(f"{major}:{minor}\n")

    def unplug(self, name: str) -> None:
        (self.sysfs / "block" / name / "dev").unlink()
        (self.sysfs / "block" / name).rmdir()

    def know(self, name: str, gendisk: int, dev: int) -> None:
        """The first hold on a disk."""
        file = self.probe.file
        identity = changed(file.struct("limit_disk_id"), None, {"gendisk": gendisk, "dev": dev})
        layout = file.struct("limit_disk")
        self.maps["limit_disks"].update(identity, changed(layout, None, {"name": name.encode()}))
        for limit in (MAX, QOS):
            self.wait(OTHER_ID, gendisk, dev, limit, times=0)

    def wait(self, cgroup: int, gendisk: int, dev: int, limit: int, times: int = 1) -> None:
        file, waits = self.probe.file, self.maps["block_io_limit"]
        values: Values = {"cgroup": cgroup, "gendisk": gendisk, "dev": dev, "limit": limit}
        key = changed(file.struct("limit_key"), None, values)
        layout = file.struct("limit_histogram")
        total, *slots = layout.pick("ns", "slots").unpack(waits.lookup(key) or bytes(layout.size))
        slots[6] += times
        waits.update(key, changed(layout, None, {"ns": total + times * WAIT_NS, "slots": slots}))

    def hold(
        self, address: int, gendisk: int, dev: int, limit: int = 0, seconds: float = 0.0
    ) -> None:
        """IO that has been held for so long."""
        layout = self.probe.file.struct("hold")
        since_ns = max(0, time.monotonic_ns() - int(seconds * 1e9))
        values: Values = {"key.gendisk": gendisk, "key.dev": dev, "key.limit": limit}
        value = changed(layout, None, {**values, "since_ns": since_ns})
        self.maps["limit_held"].update(address.to_bytes(8, "little"), value)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.event(EventKind.MKDIR, 1, "/")
    made.event(EventKind.MKDIR, 7, "/a")
    made.event(EventKind.MKDIR, 8, "/b")
    return made


VDA = (0xFFFF888000001000, 254 << 20 | 16)
VDA_AGAIN = (0xFFFF888000002000, 254 << 20 | 16)


def test_waits_by_cgroup_disk_and_limit(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX, times=3)
    machine.wait(7, *VDA, QOS)
    machine.wait(8, *VDA, MAX, times=2)
    machine.wait(0, *VDA, QOS)
    assert machine.scrape() == {
        ("/a", "vda", "max"): (3, 3 * WAIT_NS),
        ("/a", "vda", "qos"): (1, WAIT_NS),
        ("/b", "vda", "max"): (2, 2 * WAIT_NS),
        ("unattributed", "vda", "qos"): (1, WAIT_NS),
    }


def test_where_nothing_was_held_there_is_no_series(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    assert machine.scrape() == {}


def test_those_who_found_no_room(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(OTHER_ID, *VDA, MAX, times=4)
    assert machine.scrape() == {(OTHER, "vda", "max"): (4, 4 * WAIT_NS)}


def test_a_removed_cgroup_goes_and_its_successor_carries_on(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX, times=3)
    machine.exit(7, "/a")
    machine.event(EventKind.MKDIR, 9, "/a")
    machine.wait(9, *VDA, MAX)
    assert machine.scrape_until_retention_is_over() == {("/a", "vda", "max"): (4, 4 * WAIT_NS)}
    machine.exit(9, "/a")
    machine.scrape_until_retention_is_over()
    assert machine.scrape() == {}
    assert len(machine.maps["block_io_limit"].entries) == 2, "of cgroup other"


def test_an_unplugged_disk_goes_with_all_it_held(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX)
    machine.hold(0xFFFF888000100000, *VDA)
    machine.unplug("vda")
    assert machine.scrape() == {("/a", "vda", "max"): (1, WAIT_NS)}
    machine.scrape_until_retention_is_over()
    assert machine.scrape() == {}
    assert {name: len(bpf_map.entries) for name, bpf_map in machine.maps.items()} == dict.fromkeys(
        machine.maps, 0
    )


def test_a_disk_under_an_old_number_inherits_nothing_after_retention(machine: Machine) -> None:
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX, times=5)
    machine.unplug("vda")
    machine.scrape_until_retention_is_over()
    machine.scrape()
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA_AGAIN)
    machine.wait(7, *VDA_AGAIN, MAX)
    assert machine.scrape() == {("/a", "vda", "max"): (1, WAIT_NS)}


def test_a_disk_that_is_back_at_once_carries_on(machine: Machine) -> None:
    """No counter goes backwards while its series is exported."""
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX, times=5)
    machine.hold(0xFFFF888000100000, *VDA)
    machine.hold(0xFFFF888000100100, *VDA_AGAIN)
    machine.scrape()
    machine.know("vda", *VDA_AGAIN)
    machine.wait(7, *VDA_AGAIN, MAX)
    for _ in range(12):
        assert machine.scrape() == {("/a", "vda", "max"): (6, 6 * WAIT_NS)}
    assert len(machine.maps["limit_disks"].entries) == 1
    assert len(machine.maps["limit_held"].entries) == 1, "what the new disk holds stays"


def test_a_disk_that_is_known_again_once_it_was_forgotten(machine: Machine) -> None:
    """By the address of another one: it is not gone since when that one was."""
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.scrape()
    machine.know("vda", *VDA_AGAIN)
    machine.wait(7, *VDA_AGAIN, MAX)
    machine.scrape()
    machine.scrape(RETENTION_SECONDS)
    assert len(machine.maps["limit_disks"].entries) == 1
    machine.know("vda", *VDA)
    machine.wait(7, *VDA, MAX, times=5)
    machine.unplug("vda")
    for _ in range(3):
        assert machine.scrape() == {("/a", "vda", "max"): (6, 6 * WAIT_NS)}


def test_a_task_that_nobody_wakes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It got room before it slept; what io.max holds may be held for as long."""
    monkeypatch.setattr(module, "_STALE_NS", 10**9)
    machine.plug("vda", 254, 16)
    machine.know("vda", *VDA)
    machine.hold(0xFFFF888000100000, *VDA, QOS, seconds=2)
    machine.hold(0xFFFF888000100100, *VDA, QOS)
    machine.hold(0xFFFF888000100200, *VDA, MAX, seconds=2)
    machine.scrape()
    assert {int.from_bytes(key, "little") for key in machine.maps["limit_held"].entries} == {
        0xFFFF888000100100,
        0xFFFF888000100200,
    }


def test_a_wait_that_ends_after_its_disk_was_forgotten(machine: Machine) -> None:
    machine.wait(7, *VDA, MAX)
    assert machine.scrape() == {}
    assert not machine.maps["block_io_limit"].entries


# Loading -----------------------------------------------------------------------------------------


class Btf:
    """What a kernel's BTF says of functions: names and numbers of arguments; and that fexit of
    those that sleep is safe, or not."""

    def __init__(self, functions: Mapping[str, int], safe: bool) -> None:
        self.functions = functions
        self.structs = ("bpf_tramp_image",) if safe else ()

    def has_struct(self, name: str) -> bool:
        return name in self.structs

    def has_function(self, name: str) -> bool:
        return name in self.functions

    def function_arity(self, name: str) -> int | None:
        return self.functions.get(name)


def kernel(functions: Mapping[str, int], safe: bool = True) -> Kernel:
    made = Kernel.__new__(Kernel)
    made.btf = Btf(functions, safe)  # type: ignore[assignment]
    made._pins = None
    return made


@pytest.mark.parametrize(
    "functions",
    [
        {},
        {"throtl_pop_queued": 2},
        {"throtl_pop_queued": 4, "throtl_add_bio_tg": 3},
        {"rq_qos_wait": 4},
    ],
    ids=["none", "one of two", "arguments that are not known", "nobody who waits there"],
)
def test_kernels_without_functions_to_hook(machine: Machine, functions: dict[str, int]) -> None:
    with pytest.raises(Refused) as refusal:
        BlockIoLimit().load(kernel(functions), machine.cgroups.hierarchies)
    assert refusal.value.reason == "not in this kernel"


ALL = {
    "throtl_add_bio_tg": 3,
    "throtl_pop_queued": 2,
    "iocg_kick_waitq": 3,
    "iocg_wake_fn": 4,
    "prepare_to_wait_exclusive": 3,
    "rq_qos_wake_function": 4,
    "rq_qos_wait": 4,
    "wbt_inflight_cb": 2,
    "iolat_acquire_inflight": 2,
}
BUG = Refused("refused by the verifier", "invalid mem access", "report this")


class Loaded:
    """An object whose programs a kernel has taken."""

    maps: ClassVar[dict[str, object]] = {"block_io_limit": None}

    def __init__(self, programs: Sequence[str], cannot_attach: str) -> None:
        self.programs = programs
        self.attached: list[str] = []
        self._cannot_attach = cannot_attach

    def attach(self, program: str) -> None:
        assert program in self.programs
        assert program not in self.attached, "its hook would run twice"
        if program == self._cannot_attach:
            raise BpfError(524, f"attach {program}")
        self.attached.append(program)

    def close(self) -> None:
        pass


Loading = Callable[..., tuple[dict[str, str], list[str]]]


@pytest.fixture
def loading(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Loading:
    """Loads the probe on a kernel without some functions, whose verifier refuses a program and
    which cannot attach another. Returns reasons by feature, empty where it is available, and the
    programs in the order of their attachment."""

    def run(
        *, without: str = "", bad: str = "", cannot_attach: str = "", safe: bool = True
    ) -> tuple[dict[str, str], list[str]]:
        def load(
            file: object,
            programs: object,
            constants: object,
            also: Sequence[str],
            targets: object = None,
        ) -> Loaded:
            assert len(set(also)) == len(also)
            if bad in also:
                raise BUG
            return Loaded(also, cannot_attach)

        for user in (block_io_limit, loader):
            monkeypatch.setattr(user, "load", load)
        functions = {name: arity for name, arity in ALL.items() if name != without}
        probe = BlockIoLimit()
        found = probe.load(kernel(functions, safe), machine.cgroups.hierarchies)
        reasons = {f.name.removeprefix("block_io_limit_"): f.reason for f in found}
        return reasons, cast(Loaded, probe.bpf).attached

    return run


WBT = ["wbt_release", "wbt_hold"]
IOLATENCY = ["iolatency_exit", "iolatency_enter"]
FIRST = ["throttle_release", "throttle_hold", "iocost_release", "iocost_hold"]
NOT_THERE = "not in this kernel"


@pytest.mark.parametrize(
    ("without", "absent", "last"),
    [
        ("", set(), [*WBT, *IOLATENCY]),
        ("iolat_acquire_inflight", {"iolatency"}, WBT),
        ("wbt_inflight_cb", {"wbt"}, IOLATENCY),
        ("rq_qos_wait", {"iolatency"}, WBT),
        ("prepare_to_wait_exclusive", {"wbt"}, IOLATENCY),
    ],
    ids=["all", "no io.latency", "no wbt", "inlined", "inlined elsewhere"],
)
def test_programs_are_those_of_the_policies_that_the_kernel_has(
    loading: Loading, without: str, absent: set[str], last: list[str]
) -> None:
    reasons, attached = loading(without=without)
    assert reasons == {
        name: NOT_THERE if name in absent else "" for name in ("max", "iocost", "wbt", "iolatency")
    }
    assert attached == FIRST + last


def test_a_refused_program_takes_no_other_policy_down(loading: Loading) -> None:
    reasons, attached = loading(bad="wbt_hold", cannot_attach="iocost_hold")
    assert reasons == {
        "max": "",
        "iocost": "needs fentry",
        "wbt": BUG.reason,
        "iolatency": "",
    }
    assert attached == [*FIRST[:3], *IOLATENCY]


def test_where_fexit_of_sleepers_is_not_safe_it_is_not_used(loading: Loading) -> None:
    reasons, attached = loading(safe=False)
    assert reasons == {
        "max": "",
        "iocost": "",
        "wbt": "",
        "iolatency": "unsafe fexit",
    }
    assert attached == FIRST + WBT
