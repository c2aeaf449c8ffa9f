# SPDX-License-Identifier: Apache-2.0
"""NVMe multipath: the disk that is used has no requests; its paths, which have them, are hidden."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.lab import Scrape

from . import kernels, vm

# The head is not there at once, and has no capacity before a path is live.
WRITE_AND_SCRAPE = """
import pathlib, time
from tests import lab
for _ in range(100):
    heads = [size.parent.name for size in pathlib.Path("/sys/block").glob("nvme[01]n1/size")
             if int(size.read_text())]
    if heads:
        break
    time.sleep(0.1)
with lab.Exporter() as exporter, lab.cgroup(lab.hierarchies().io, "nvme") as group:
    lab.run_in([group], lab.DIRECT_WRITER, f"/dev/{heads[0]}", 4096, 40, 0)
    pathlib.Path("/out/metrics").write_bytes(exporter.get("/metrics"))
"""


class TwoPaths(vm.Disk):
    """A disk behind two controllers of one subsystem, which have its serial number."""

    def arguments(self, index: int, file: Path) -> list[str]:
        return [
            *("-drive", f"file={file},id=disk{index},if=none,format=raw,cache=unsafe"),
            *("-device", "nvme-subsys,id=subsystem,nqn=subsystem"),
            *("-device", "nvme,id=first,serial=both,subsys=subsystem"),
            *("-device", "nvme,id=second,serial=both,subsys=subsystem"),
            *("-device", f"nvme-ns,drive=disk{index},bus=first,nsid=1,shared=on"),
        ]


def test_paths_join_their_head(kernel: kernels.Kernel, tmp_path: Path) -> None:
    vm.run(
        kernel,
        shlex.join([sys.executable, "-c", WRITE_AND_SCRAPE]),
        out=tmp_path,
        disks=[TwoPaths(16 << 20)],
        modules=["nvme"],
    )
    scrape = Scrape((tmp_path / "metrics").read_text())
    # It has the number of the controller that was first.
    (head,) = {"nvme0n1", "nvme1n1"} & scrape.values("device_info", "device")
    paths = {head.replace("n1", f"c{number}n1") for number in (0, 1)}
    assert scrape.values("device_info", "device", kind="path") == paths
    assert scrape.values("device_info", "disk", kind="path") == {head}
    assert scrape.values("device_info", "parents", device=head) == {",".join(sorted(paths))}
    assert scrape.values("device_disk_info", "disk", device=head) == paths
    # All IO of the cgroup is on the paths, and on nothing else.
    written = scrape.select("block_io_size_bytes_count", cgroup="/nvme", op="write")
    assert {dict(series)["device"] for series in written} <= paths
    assert sum(written.values()) == 40
