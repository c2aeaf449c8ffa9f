# SPDX-License-Identifier: Apache-2.0
"""io.stat against writers of known size and our own events, limits, iocost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.lab import DIRECT_READER, DIRECT_WRITER, Cgroup, Scrape

from .test_main_signals import FAST, SLOW, io_stat

OPS = ("read", "write", "discard")


@pytest.fixture(scope="module")
def exporter() -> Iterator[lab.Exporter]:
    """One for all: it takes seconds to start here."""
    with lab.Exporter(*lab.only("cgroup_io", "block_io")) as running:
        yield running


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    """Each test's own."""
    with lab.cgroup(lab.hierarchies().io, request.node.name) as made:
        yield made


def shown(scrape: Scrape, metric: str, *names: str, **labels: str) -> dict[tuple[str, ...], float]:
    """The series with these labels, by the values of others."""
    return {
        tuple(dict(series)[name] for name in names): value
        for series, value in scrape.select(metric, **labels).items()
    }


def test_counts_equal_io_stat_the_writer_and_our_own_events(
    exporter: lab.Exporter, group: Cgroup
) -> None:
    before, whole_before = FAST.settled(), exporter.scrape()
    for size, count in ((512, 20), (4096, 100), (65536, 30)):
        lab.run_in([group], DIRECT_WRITER, FAST.path, size, count, 0)
    lab.run_in([group], DIRECT_READER, FAST.path, 16384, 40, 0)
    truth, own, scrape = FAST.settled() - before, io_stat(group, FAST), exporter.scrape()
    disk = {"device": FAST.name}
    expected = {"read": (40, 40 * 16384), "write": (150, 20 * 512 + 100 * 4096 + 30 * 65536)}
    assert expected["read"] == (truth.reads, truth.read_bytes)
    assert expected["write"] == (truth.writes, truth.written_bytes)
    for op, both in expected.items():
        labels = {**disk, "op": op, "cgroup": group.label}
        files = (
            scrape.sum("cgroup_io_operations_total", **labels),
            scrape.sum("cgroup_io_bytes_total", **labels),
        )
        events = (
            scrape.sum("block_io_size_bytes_count", **labels),
            scrape.sum("block_io_size_bytes_sum", **labels),
        )
        assert files == events == both == (own[f"{op[0]}ios"], own[f"{op[0]}bytes"])
        # The root's are the disk's.
        root = {**disk, "op": op, "cgroup": "/"}
        grown = scrape.sum("cgroup_io_bytes_total", **root) - whole_before.sum(
            "cgroup_io_bytes_total", **root
        )
        assert grown == both[1]
    assert shown(scrape, "cgroup_io_bytes_total", "device", "op", cgroup=group.label).keys() == {
        (FAST.name, "read"),
        (FAST.name, "write"),
    }


def test_a_parent_has_its_childrens_counts_also_when_they_are_gone(
    exporter: lab.Exporter, group: Cgroup
) -> None:
    (group.directory / "cgroup.subtree_control").write_text("+io")
    child = Cgroup(group.directory / "child", f"{group.label}/child")
    child.directory.mkdir()
    labels = {"device": FAST.name, "op": "write"}
    try:
        lab.run_in([child], DIRECT_WRITER, FAST.path, 4096, 25, 0)
        scrape = exporter.scrape()
        for cgroup in (group, child):
            assert scrape.sum("cgroup_io_operations_total", cgroup=cgroup.label, **labels) == 25
    finally:
        child.directory.rmdir()
    scrape = exporter.scrape()
    assert scrape.sum("cgroup_io_operations_total", cgroup=group.label, **labels) == 25
    assert not scrape.select("cgroup_io_operations_total", cgroup=child.label)


# As a container's manager does that sees a hierarchy of its own.
IN_A_NAMESPACE = """
mount -t cgroup2 cgroup2 "$1"
echo "$3" >"$1$2/io.max"
"""


def test_limits_are_shown_as_they_are_set(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    file = group.directory / "io.max"
    file.write_text(f"{FAST.dev} wbps=2097152 riops=120")
    file.write_text(f"{SLOW.dev} rbps=8388608 wiops=77")
    scrape = exporter.scrape()
    assert shown(scrape, "cgroup_io_max_bytes", "device", "op", cgroup=group.label) == {
        (FAST.name, "write"): 2097152,
        (SLOW.name, "read"): 8388608,
    }
    assert shown(scrape, "cgroup_io_max_operations", "device", "op", cgroup=group.label) == {
        (FAST.name, "read"): 120,
        (SLOW.name, "write"): 77,
    }
    for metric in ("cgroup_io_max_bytes", "cgroup_io_max_operations"):
        assert scrape.values(metric, "cgroup") == {group.label}
    file.write_text(f"{FAST.dev} wbps=max riops=max")
    scrape = exporter.scrape()
    assert scrape.values("cgroup_io_max_bytes", "device", cgroup=group.label) == {SLOW.name}
    text = f"{SLOW.dev} rbps=4194304 wiops=max"
    command = ("sh", "-ec", IN_A_NAMESPACE, "sh", tmp_path, group.label, text)
    lab.sh("unshare", "--cgroup", "--mount", *command)
    assert shown(exporter.scrape(), "cgroup_io_max_bytes", "op", cgroup=group.label) == {
        ("read",): 4194304
    }


def test_a_controller_that_is_switched_off_and_on_again(
    exporter: lab.Exporter, group: Cgroup
) -> None:
    """The file that is open is of the past then: reading it is refused; and so are its limits."""
    control = group.directory / "cgroup.subtree_control"
    child = Cgroup(group.directory / "child", f"{group.label}/child")
    child.directory.mkdir()
    labels = {"cgroup": child.label, "device": FAST.name, "op": "write"}
    try:
        for count in (25, 7):
            control.write_text("+io")
            lab.run_in([child], DIRECT_WRITER, FAST.path, 4096, count, 0)
            scrape = exporter.scrape()
            written = io_stat(child, FAST)["wios"]
            assert scrape.sum("cgroup_io_operations_total", **labels) == written >= count
            assert not scrape.select("cgroup_io_max_bytes", cgroup=child.label)
            (child.directory / "io.max").write_text(f"{FAST.dev} wbps=1073741824")
            assert exporter.scrape().sum("cgroup_io_max_bytes", **labels) == 1 << 30
            control.write_text("-io")
            if count == 25:  # unseen
                continue
            assert not exporter.scrape().select("cgroup_io_operations_total", cgroup=child.label)
    finally:
        child.directory.rmdir()


QOS = "ctrl=user rpct=95.00 rlat=10000 wpct=90.00 wlat=20000 min=50.00 max=150.00"
MODEL = (
    "rbps=1000000000 rseqiops=100000 rrandiops=90000 wbps=900000000 wseqiops=80000 wrandiops=70000"
)


@pytest.fixture
def iocost() -> Iterator[None]:
    """iocost on the fast disk."""
    qos = Path("/sys/fs/cgroup/io.cost.qos")
    if not qos.exists():
        pytest.skip("this kernel has no iocost (CONFIG_BLK_CGROUP_IOCOST)")
    qos.write_text(f"{FAST.dev} enable=1 {QOS}")
    Path("/sys/fs/cgroup/io.cost.model").write_text(f"{FAST.dev} ctrl=user model=linear {MODEL}")
    try:
        yield
    finally:
        qos.write_text(f"{FAST.dev} enable=0")


def test_weights(exporter: lab.Exporter, iocost: None, group: Cgroup) -> None:
    file = group.directory / "io.weight"
    file.write_text("default 321")
    file.write_text(f"{FAST.dev} 50")
    with lab.cgroup(lab.hierarchies().io, "usual") as usual:
        weights = shown(exporter.scrape(), "cgroup_io_weight", "cgroup", "device", policy="iocost")
    assert weights[usual.label, "default"] == 100
    own = {device: weight for (label, device), weight in weights.items() if label == group.label}
    assert own == {"default": 321, FAST.name: 50}


def test_iocost(exporter: lab.Exporter, iocost: None, group: Cgroup) -> None:
    lab.run_in([group], DIRECT_WRITER, FAST.path, 65536, 200, 0)
    for _ in range(50):  # usage is summed up once a period, until the disk has been idle
        before = group_and_root_usage(group)
        scrape = exporter.scrape()
        if before == group_and_root_usage(group) and min(before[:2]) > 0:
            break
    own, root, vrate = before
    usage = shown(scrape, "iocost_usage_seconds_total", "cgroup", device=FAST.name)
    assert usage == {("/",): root / 1e6, (group.label,): own / 1e6}
    # 200 writes of 64 KiB at 900 MB/s are 15 ms of the disk's time, and their IOs' on top.
    assert 200 * 65536 / 900e6 < usage[(group.label,)] < 60
    assert shown(scrape, "iocost_vrate_ratio", "device") == {(FAST.name,): vrate / 100}
    assert 0.5 <= vrate / 100 <= 1.5
    assert shown(scrape, "iocost_enabled", "device") == {(FAST.name,): 1}
    assert shown(scrape, "iocost_qos_latency_seconds", "op", device=FAST.name) == {
        ("read",): 0.01,
        ("write",): 0.02,
    }
    assert shown(scrape, "iocost_qos_ratio", "parameter", device=FAST.name) == {
        ("rpct",): 0.95,
        ("wpct",): 0.9,
        ("min",): 0.5,
        ("max",): 1.5,
    }
    assert shown(scrape, "iocost_model_bytes", "op", device=FAST.name) == {
        ("read",): 1e9,
        ("write",): 9e8,
    }
    operations = shown(scrape, "iocost_model_operations", "op", "pattern", device=FAST.name)
    assert operations == {
        ("read", "sequential"): 100000,
        ("read", "random"): 90000,
        ("write", "sequential"): 80000,
        ("write", "random"): 70000,
    }


def group_and_root_usage(group: Cgroup) -> tuple[int, int, float]:
    """cost.usage of the cgroup and of the root, in us, and cost.vrate, in percent."""
    values: dict[str, str] = {}
    for owner, directory in (("own", group.directory), ("root", Path("/sys/fs/cgroup"))):
        for line in (directory / "io.stat").read_text().splitlines():
            if line.startswith(f"{FAST.dev} "):
                for field in line.split()[1:]:
                    key, _, value = field.partition("=")
                    values[f"{owner} {key}"] = value
    return (
        int(values.get("own cost.usage", 0)),
        int(values.get("root cost.usage", 0)),
        float(values.get("root cost.vrate", 0)),
    )
