# SPDX-License-Identifier: Apache-2.0
"""NVMe: a plain disk is one of its own. Behind multipath the disk that is used has no requests; its
paths, which have them, are hidden."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from tests.lab import Scrape

from . import kernels, vm

# The head is not there at once, and has no capacity before a path is live. Which is which, the size
# tells, for controllers are numbered as they come.
HEAD, PLAIN = 16 << 20, 8 << 20
WRITE_AND_SCRAPE = f"""
import json, pathlib
from tests import lab
from tests.waiting import wait_for
block = pathlib.Path("/sys/block")
def disks():
    found = {{int(size.read_text()) * 512: size.parent.name for size in block.glob("nvme?n1/size")}}
    paths = [*block.glob("nvme*c*n1")]
    return found if {{{HEAD}, {PLAIN}}} <= found.keys() and len(paths) == 2 else None
found = wait_for(disks, what="the disks")
head, plain = (lab.Disk("/dev/" + found[size]) for size in ({HEAD}, {PLAIN}))
with lab.Exporter() as exporter, lab.cgroup(lab.hierarchies().io, "nvme") as group:
    before = plain.settled()
    lab.run_in([group], lab.DIRECT_WRITER, head.path, 4096, 40, 0)
    lab.run_in([group], lab.DIRECT_WRITER, plain.path, 8192, 25, 0)
    lab.run_in([group], lab.DIRECT_READER, plain.path, 4096, 30, 0)
    truth = plain.settled() - before
    pathlib.Path("/out/metrics").write_bytes(exporter.get("/metrics"))
counts = [truth.reads, truth.read_bytes, truth.writes, truth.written_bytes]
pathlib.Path("/out/plain").write_text(json.dumps([plain.name, *counts]))
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


def test_a_plain_disk_and_paths_that_join_their_head(
    kernel: kernels.Kernel, tmp_path: Path
) -> None:
    vm.run(
        kernel,
        shlex.join([sys.executable, "-c", WRITE_AND_SCRAPE]),
        out=tmp_path,
        disks=[TwoPaths(HEAD), vm.Disk(PLAIN, model="nvme")],
        modules=["nvme"],
    )
    scrape = Scrape((tmp_path / "metrics").read_text())
    name, *counts = json.loads((tmp_path / "plain").read_text())
    assert counts == [30, 30 * 4096, 25, 25 * 8192]
    assert [
        scrape.sum(f"block_io_size_bytes_{part}", cgroup="/nvme", device=name, op=op)
        for op in ("read", "write")
        for part in ("count", "sum")
    ] == counts
    assert scrape.values("device_info", "parents", device=name) == {""}

    (head,) = scrape.values("device_info", "disk", kind="path")
    paths = scrape.values("device_info", "device", kind="path")
    assert len(paths) == 2
    assert all(re.fullmatch(head.replace("n1", r"c\dn1"), path) for path in paths)
    assert scrape.values("device_info", "parents", device=head) == {",".join(sorted(paths))}
    assert scrape.values("device_disk_info", "disk", device=head) == paths
    # All other IO of the cgroup is on the paths, and on nothing else.
    written = {
        dict(series)["device"]: count
        for series, count in scrape.select(
            "block_io_size_bytes_count", cgroup="/nvme", op="write"
        ).items()
    }
    assert written.pop(name) == 25
    assert written.keys() <= paths
    assert sum(written.values()) == 40
