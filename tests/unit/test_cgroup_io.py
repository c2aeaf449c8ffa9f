# SPDX-License-Identifier: Apache-2.0
"""The files of the io controller, of both versions, with and without what kernels lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cgroupfs import HYBRID, V1, V2, Opened, Place, by, change_unseen, remove
from writeback_exporter.features import Refused
from writeback_exporter.files import inotify
from writeback_exporter.files.cgroup_files import SELDOM_SECONDS
from writeback_exporter.files.cgroup_io import CgroupIo

DISKS = {"8:0": "sda", "259:3": "nvme0n1", "104:0": "cciss!c0d0"}
OWNED = ("cgroup", "device", "op")

STAT = "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n"
NO_STAT = {"io.stat": ""}


def throttle(**files: str) -> dict[str, str]:
    """The files that v1 has everywhere, empty but for these."""
    names = ("io_service_bytes", "io_serviced")
    limits = (f"{op}_{kind}_device" for op in ("read", "write") for kind in ("bps", "iops"))
    none = {**dict.fromkeys(names, "Total 0\n"), **dict.fromkeys(limits, "")}
    return {f"blkio.throttle.{name}": text for name, text in {**none, **files}.items()}


def counts_v1(number: str, read: int, write: int, discard: int) -> str:
    counts = {"Read": read, "Write": write, "Sync": read, "Async": write, "Discard": discard}
    lines = {**counts, "Total": read + write + discard}
    return "".join(f"{number} {op} {count}\n" for op, count in lines.items())


def test_io_stat(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, DISKS)
    text = (
        "7:7 \n"  # as 6.1 and later write disks without IO
        "259:3 rbytes=512 wbytes=0 rios=1 wios=0 dbytes=1048576 dios=3\n"
        "104:0 dios=0 wios=9 unknown=4 rios=0 nested.key.more=1 depth=max avg_lat=10 wbytes=4608\n"
        "7:1 7:0 8:0 rbytes=18014398509481984 wbytes=8192 rios=2199023255552 wios=2\n"
    )
    place.hierarchy("", {"/": {"io.stat": ""}, "/a.slice/b.service": {"io.stat": text}})
    scrape = Opened(CgroupIo(), place).scrape()
    b = "/a.slice/b.service"
    assert by(scrape, "cgroup_io_bytes_total", *OWNED) == {
        (b, "nvme0n1", "read"): 512,
        (b, "nvme0n1", "discard"): 1048576,
        (b, "cciss/c0d0", "write"): 4608,
        (b, "sda", "read"): 18014398509481984,
        (b, "sda", "write"): 8192,
    }
    assert by(scrape, "cgroup_io_operations_total", *OWNED) == {
        (b, "nvme0n1", "read"): 1,
        (b, "nvme0n1", "discard"): 3,
        (b, "cciss/c0d0", "write"): 9,
        (b, "sda", "read"): 2199023255552,
        (b, "sda", "write"): 2,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "8:0",
        "8:0 \n",
        "= == =\n",
        "rbytes=4096 wbytes=8192\n",
        "8:0 rbytes=many wbytes= dbytes\n",
        "../.. rbytes=1\n",
        ".. rbytes=1\n",
        "\udcff:\udcfe rbytes=1\n",
        "default rbytes\n",
    ],
)
def test_junk_is_left_out(tmp_path: Path, text: str) -> None:
    place = Place(tmp_path, V2, DISKS)
    place.hierarchy("", {"/": {"io.stat": ""}, "/a": NO_STAT, "/b": {"io.stat": STAT}})
    (tmp_path / "cgroup/a/io.stat").write_bytes(text.encode(errors="surrogateescape"))
    scrape = Opened(CgroupIo(), place).scrape()
    assert by(scrape, "cgroup_io_bytes_total", *OWNED) == {
        ("/b", "sda", "read"): 4096,
        ("/b", "sda", "write"): 8192,
    }


def test_limits_and_weights(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, DISKS)
    place.hierarchy(
        "",
        {
            "/": {"io.stat": ""},
            "/a": {
                "io.stat": STAT,
                "io.max": "8:0 rbps=max wbps=2097152 riops=120 wiops=max\n259:3 rbps=1 wbps=max\n",
                "io.weight": "default 100\n8:0 250\n",
                "io.bfq.weight": "default 300\n",
                "io.latency": "8:0 target=75000\n",
            },
            "/b": {
                "io.stat": "",
                "io.max": "",
                "io.weight": "default 100\n",
                "io.bfq.weight": "default 100\n9:9 5\n",  # a disk that is gone
                "io.latency": "",
            },
        },
    )
    scrape = Opened(CgroupIo(), place).scrape()
    assert by(scrape, "cgroup_io_max_bytes", *OWNED) == {
        ("/a", "sda", "write"): 2097152,
        ("/a", "nvme0n1", "read"): 1,
    }
    assert by(scrape, "cgroup_io_max_operations", *OWNED) == {("/a", "sda", "read"): 120}
    assert by(scrape, "cgroup_io_weight", "cgroup", "device", "policy") == {
        ("/a", "default", "iocost"): 100,
        ("/a", "sda", "iocost"): 250,
        ("/a", "default", "bfq"): 300,
        ("/b", "default", "iocost"): 100,
        ("/b", "default", "bfq"): 100,
    }
    target = by(scrape, "cgroup_io_latency_target_seconds", "cgroup", "device")
    assert target == {("/a", "sda"): 0.075}


def test_iocost(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, DISKS)
    place.hierarchy(
        "",
        {
            "/": {
                "io.stat": f"{STAT.rstrip()} cost.vrate=87.50 cost.usage=3000000\n",
                "io.cost.qos": (
                    "8:0 enable=1 ctrl=user rpct=95.00 rlat=10000 wpct=90.00 wlat=20000 "
                    "min=50.00 max=150.00\n"
                    "259:3 enable=0 ctrl=auto rpct=0.00 rlat=0 wpct=0.00 wlat=0 min=1.00 "
                    "max=10000.00\n"
                ),
                "io.cost.model": (
                    "8:0 ctrl=user model=linear rbps=1000 rseqiops=10 rrandiops=5 wbps=900 "
                    "wseqiops=8 wrandiops=4\n"
                ),
            },
            "/a": {"io.stat": f"{STAT.rstrip()} cost.usage=1500000 cost.wait=250000\n"},
            "/b": {"io.stat": "8:0 cost.vrate=1.00\n"},  # which only the root's has
        },
    )
    scrape = Opened(CgroupIo(), place).scrape()
    usage = by(scrape, "iocost_usage_seconds_total", "cgroup", "device")
    assert usage == {("/", "sda"): 3, ("/a", "sda"): 1.5}
    wait = by(scrape, "iocost_wait_seconds_total", "cgroup", "device")
    assert wait == {("/a", "sda"): 0.25}
    assert by(scrape, "iocost_vrate_ratio", "device") == {("sda",): 0.875}
    assert by(scrape, "iocost_enabled", "device") == {("sda",): 1, ("nvme0n1",): 0}
    latency = by(scrape, "iocost_qos_latency_seconds", "device", "op")
    assert latency["sda", "read"] == 0.01
    assert latency["sda", "write"] == 0.02
    ratio = by(scrape, "iocost_qos_ratio", "device", "parameter")
    assert {
        parameter: value for (device, parameter), value in ratio.items() if device == "sda"
    } == {
        "rpct": 0.95,
        "wpct": 0.9,
        "min": 0.5,
        "max": 1.5,
    }
    model = by(scrape, "iocost_model_bytes", "device", "op")
    assert model == {("sda", "read"): 1000, ("sda", "write"): 900}
    assert by(scrape, "iocost_model_operations", "device", "op", "pattern") == {
        ("sda", "read", "sequential"): 10,
        ("sda", "read", "random"): 5,
        ("sda", "write", "sequential"): 8,
        ("sda", "write", "random"): 4,
    }


@pytest.mark.parametrize("kind", [HYBRID, V1])
def test_v1_as_docker_lays_it_out(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind, DISKS)
    container = "/docker/" + 64 * "5"
    place.hierarchy(
        "blkio",
        {
            "/": throttle(),
            "/docker": throttle(
                # The parent's recursive counts go back when the container goes.
                io_service_bytes_recursive=counts_v1("8:0", 4096, 8192, 0),
                io_serviced_recursive=counts_v1("8:0", 1, 2, 0),
            ),
            container: throttle(
                io_service_bytes=counts_v1("8:0", 4096, 8192, 0)
                + counts_v1("259:3", 0, 0, 512)
                + counts_v1("9:9", 1, 1, 1)  # a disk that is gone
                + "Total 12803\n",
                io_serviced=counts_v1("8:0", 1, 2, 0) + "8:0\n8:0 Read\n8:0 Read x\nTotal 3\n",
                write_bps_device="8:0 1048576\n259:3 2097152\n",
                read_bps_device="8:0 4194304\n",
                write_iops_device="8:0 100\n",
                read_iops_device="8:0 200\n",
            ),
        },
    )
    place.hierarchy("memory", {})
    if kind == HYBRID:
        place.hierarchy("unified", {container: {}})
    scrape = Opened(CgroupIo(), place).scrape()
    assert by(scrape, "cgroup_io_bytes_total", *OWNED) == {
        (container, "sda", "read"): 4096,
        (container, "sda", "write"): 8192,
        (container, "nvme0n1", "discard"): 512,
    }
    assert by(scrape, "cgroup_io_operations_total", *OWNED) == {
        (container, "sda", "read"): 1,
        (container, "sda", "write"): 2,
    }
    assert by(scrape, "cgroup_io_max_bytes", *OWNED) == {
        (container, "sda", "write"): 1048576,
        (container, "nvme0n1", "write"): 2097152,
        (container, "sda", "read"): 4194304,
    }
    assert by(scrape, "cgroup_io_max_operations", *OWNED) == {
        (container, "sda", "write"): 100,
        (container, "sda", "read"): 200,
    }


def test_bfq_weights_of_v1(tmp_path: Path) -> None:
    place = Place(tmp_path, V1, DISKS)
    # The first is what the second has as its default.
    weights = {
        "blkio.bfq.weight": "100\n",
        "blkio.bfq.weight_device": "default 100\n8:0 500\n",
    }
    place.hierarchy("blkio", {"/": throttle(), "/a": {**throttle(), **weights}})
    place.hierarchy("memory", {})
    opened = Opened(CgroupIo(), place)
    assert by(opened.scrape(), "cgroup_io_weight", "cgroup", "device", "policy") == {
        ("/a", "default", "bfq"): 100,
        ("/a", "sda", "bfq"): 500,
    }


def test_files_that_come_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of bfq, once its module is loaded: within a minute."""
    monkeypatch.setattr(inotify, "WATCHES_LIMIT", 0)
    place = Place(tmp_path, V2, DISKS)
    place.hierarchy("", {"/": NO_STAT, "/a": NO_STAT, "/b": NO_STAT})
    opened = Opened(CgroupIo(), place)
    assert by(opened.scrape(), "cgroup_io_weight", "cgroup", "device", "policy") == {}
    weight = {"io.bfq.weight": "default 100\n"}
    place.hierarchy("", {"/a": weight, "/b": weight})
    opened.now += SELDOM_SECONDS
    assert by(opened.scrape(), "cgroup_io_weight", "cgroup", "device", "policy") == {
        ("/a", "default", "bfq"): 100,
        ("/b", "default", "bfq"): 100,
    }


def test_the_weight_of_v1_that_is_set_by_another_file(tmp_path: Path) -> None:
    place = Place(tmp_path, HYBRID, DISKS)
    name = "blkio.bfq.weight_device"
    place.hierarchy("blkio", {"/": throttle(), "/a": {**throttle(), name: "default 100\n"}})
    place.hierarchy("memory", {})
    place.hierarchy("unified", {})
    opened = Opened(CgroupIo(), place)
    for weight in (100, 500, 200):
        change_unseen(place, "blkio", "/a", {name: f"default {weight}\n"})
        place.hierarchy("blkio", {"/a": {"blkio.bfq.weight": f"{weight}\n"}})
        assert opened.scrape().sum("cgroup_io_weight", cgroup="/a", device="default") == weight


def test_a_disk_with_a_limit_goes_at_once(tmp_path: Path) -> None:
    """What is remembered of a limit is the number of its disk, which may be another's by now."""
    place = Place(tmp_path, V2, DISKS)
    limited = {"io.stat": STAT, "io.max": "8:0 rbps=1 wbps=max riops=max wiops=max\n"}
    place.hierarchy("", {"/": NO_STAT, "/a": limited})
    opened = Opened(CgroupIo(), place)
    assert opened.scrape().values("cgroup_io_max_bytes", "device") == {"sda"}
    opened.now += SELDOM_SECONDS
    assert opened.scrape().values("cgroup_io_max_bytes", "device") == {"sda"}
    place.unplug("8:0")
    place.hierarchy("", {"/a": {"io.max": ""}})  # as the kernel has it then
    place.plug("8:0", "sdb")
    assert opened.scrape().values("cgroup_io_max_bytes", "device") == set()


def test_cgroups_without_the_controller_and_gone(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, DISKS)
    limited = {"io.stat": STAT, "io.max": "8:0 rbps=1 wbps=max riops=max wiops=max\n"}
    place.hierarchy("", {"/": NO_STAT, "/gone": limited, "/off": {}, "/on": limited})
    opened = Opened(CgroupIo(), place)
    remove(place, "", "/gone")
    scrape = opened.scrape()
    assert scrape.values("cgroup_io_bytes_total", "cgroup") == {"/on"}
    assert scrape.values("cgroup_io_max_bytes", "cgroup") == {"/on"}


def test_a_number_that_another_disk_takes(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, DISKS)
    place.hierarchy("", {"/": {"io.stat": STAT}})
    opened = Opened(CgroupIo(), place)
    assert opened.scrape().values("cgroup_io_bytes_total", "device") == {"sda"}
    place.unplug("8:0")
    assert opened.scrape().values("cgroup_io_bytes_total", "device") == set()
    place.plug("8:0", "sdb")
    assert opened.scrape().values("cgroup_io_bytes_total", "device") == {"sdb"}


@pytest.mark.parametrize("kind", [V2, V1])
def test_no_io_controller(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind, DISKS)
    for name in ("",) if kind == V2 else ("blkio", "memory"):
        place.hierarchy(name, {"/a": {}})
    with pytest.raises(Refused) as refused:
        Opened(CgroupIo(), place)
    assert refused.value.reason == "no io controller"
