# SPDX-License-Identifier: Apache-2.0
"""Runs the exporter with all collectors on this kernel and writes to /out/offer.json what it can do
here, what the kernel says that it attached, and what its programs cost; see ../offer.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests import lab
from tests.lab import BUFFERED_WRITER, DIRECT_READER, DIRECT_WRITER

from .kernel import dirty_limits
from .test_main_signals import FAST, MIB, SLOW

SYNC_WRITER = """
fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT)
for i in range(40):
    os.pwrite(fd, b"x" * 4096, i * 4096)
    os.fsync(fd)
"""


def busy(mount: Path) -> None:
    """Makes most programs run."""
    with lab.cgroup(lab.hierarchies().io, "busy") as group, dirty_limits(MIB, 2 * MIB):
        (group.directory / "io.max").write_text(f"{FAST.dev} rbps={2 * MIB}")
        lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 300, 0)
        lab.run_in([group], DIRECT_READER, FAST.path, 65536, 20, 0)
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 8 * MIB)
        lab.run_in([group], SYNC_WRITER, mount / "synced")


def enabled_functions() -> list[str]:
    """The functions whose entry calls a BPF trampoline, as ftrace lists them."""
    text = Path("/sys/kernel/tracing/enabled_functions").read_text()
    # A line that begins with space, if any, belongs to the function before it.
    entries = re.split(r"\n(?=\S)", text)
    return sorted(entry.split()[0] for entry in entries if "->bpf_trampoline" in entry)


def main() -> None:
    Path("/proc/sys/kernel/bpf_stats_enabled").write_text("1")
    directory = Path("/tmp")
    with (
        lab.ext4(SLOW, directory) as mount,
        lab.Exporter("--collector.page_flow", "--collector.memory_stall") as exporter,
    ):
        exporter.scrape()
        busy(mount)
        scrape = exporter.scrape()
        programs = json.loads(lab.sh("bpftool", "-j", "prog", "show"))
        links = json.loads(lab.sh("bpftool", "-j", "link", "show"))
        features = map(dict, scrape.select("exporter_feature_available"))
        offer = {
            "release": Path("/proc/sys/kernel/osrelease").read_text().strip(),
            "features": {labels["feature"]: labels["reason"] for labels in features},
            "programs": sorted(scrape.values("exporter_program_runs_total", "program")),
            "kernel_programs": {
                program["id"]: {
                    "name": program["name"],
                    "runs": program.get("run_cnt", 0),
                    "nanoseconds": program.get("run_time_ns", 0),
                }
                for program in programs
            },
            "tracepoints": {
                link["prog_id"]: link["tp_name"]
                for link in links
                if link["type"] == "raw_tracepoint"
            },
            "functions": enabled_functions(),
            "links": sorted(link["prog_id"] for link in links),
            "pauses": int(scrape.sum("dirty_throttle_seconds_count")),
            "requested_seconds": scrape.sum("dirty_throttle_requested_seconds_total"),
            "measured_seconds": scrape.sum("dirty_throttle_seconds_sum"),
        }
    Path("/out/offer.json").write_text(json.dumps(offer))
    Path("/out/btf").write_bytes(Path("/sys/kernel/btf/vmlinux").read_bytes())


if __name__ == "__main__":
    main()
