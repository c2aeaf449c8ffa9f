# SPDX-License-Identifier: Apache-2.0
"""All benches: `make bench`, as root. The exit status says whether they ran, not how they did."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import bench_bpf, bench_exposition, bench_files, bench_scrape
from tests.bench.tables import Reach

BENCHES: dict[str, Callable[[Sequence[str]], list[Reach] | int]] = {
    "BPF programs": bench_bpf.main,
    "scrapes": bench_scrape.main,
    "files of cgroups": bench_files.main,
    "exposition": bench_exposition.main,
}


def machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().split("\n\n")
    names = (line.partition(": ")[2] for line in cpus[0].splitlines() if "model name" in line)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024 / 1e9
    return (
        f"{next(names, platform.machine())}, {len(cpus) - 1} CPUs, {memory:.0f} GB; "
        f"Linux {platform.release()}; Python {platform.python_version()}"
    )


def main() -> int:
    print(machine())
    verdicts: list[str] = []
    failed = False
    for name, bench in BENCHES.items():
        print(f"\n=== {name} ===", flush=True)
        try:
            result = bench([])
        except (Exception, SystemExit):
            failed = True
            traceback.print_exc()
            verdicts.append(f"{name}: did not run")
            continue
        if isinstance(result, int):
            verdicts.append(f"{name}: {'not all met' if result else 'all met'}")
        else:
            verdicts += map(str, result)
    print("\n=== reached ===", *verdicts, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
