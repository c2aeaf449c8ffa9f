# SPDX-License-Identifier: Apache-2.0
"""All benches, or those that are named, as root. The exit status says whether they ran.

    python -m tests.bench [NAME...] [--output FILE]

They print Markdown. `--output` writes it as a document, once all have run: `make performance`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import (
    bench_bpf,
    bench_exposition,
    bench_files,
    bench_guest,
    bench_process,
    bench_scrape,
    bench_throughput,
    peers,
)
from tests.bench.tables import Goal, print_table, print_text
from writeback_exporter import __version__

BENCHES: dict[str, tuple[str, Callable[[Sequence[str]], list[Goal]]]] = {
    "events": ("Time an event", bench_bpf.main),
    "throughput": ("Throughput", bench_throughput.main),
    "guest": ("bcc, in a guest", bench_guest.main),
    "process": ("The process", bench_process.main),
    "scrapes": ("Growth of a scrape", bench_scrape.main),
    "files": ("Files of cgroups", bench_files.main),
    "exposition": ("The writer against prometheus-client's", bench_exposition.main),
}

HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by `make performance`. -->
# What it costs

One run of `make performance`, which measures as `make bench` does and writes this page. {machine};
writeback-exporter {version}; {peers}; {date}.

How to read it: a ratio below 1 is in our favour. Ratios are medians of pairs that were measured
moments apart, so that they hold on a busy machine too; nanoseconds and seconds are those of this
machine, at that time. In brackets are quartiles. Where a peer answers less than we do, the text at
its table says so: it is not the same work for less.

## Goals
"""


def machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().split("\n\n")
    names = (line.partition(": ")[2] for line in cpus[0].splitlines() if "model name" in line)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024 / 1e9
    return (
        f"{next(names, platform.machine())}, {len(cpus) - 1} CPUs, {memory:.0f} GB; "
        f"Linux {platform.release()}; Python {platform.python_version()}"
    )


class _Both(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        return super().write(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a document")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHES.keys():
        parser.error(f"no bench is named {', '.join(unknown)}: there are {', '.join(BENCHES)}")
    if options.output and options.names:
        parser.error("a document has all benches: no NAME beside --output")
    goals: list[Goal] = []
    failed: list[str] = []
    begin = time.monotonic()
    with contextlib.redirect_stdout(_Both()) as body:
        for name in options.names or BENCHES:
            title, bench = BENCHES[name]
            print(f"\n## {title}")
            try:
                goals += bench([])
            except (Exception, SystemExit):
                traceback.print_exc()
                failed.append(name)
    with contextlib.redirect_stdout(_Both()) as head:
        print_text(f"{machine()}; {time.monotonic() - begin:.0f} s.")
        print_table("", ("goal", "measured", "wanted", ""), [goal.cells() for goal in goals])
    if failed:
        print(f"did not run: {', '.join(failed)}", file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(_head() + head.getvalue().partition(" s.\n")[2] + body.getvalue())
    return 0


def _head() -> str:
    versions = ", ".join(f"{package} {peers.version(package)}" for package in peers.PACKAGES)
    date = time.strftime("%-d %B %Y", time.gmtime())
    return HEAD.format(machine=machine(), version=__version__, peers=versions, date=date)


if __name__ == "__main__":
    sys.exit(main())
