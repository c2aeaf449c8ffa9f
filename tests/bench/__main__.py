# SPDX-License-Identifier: Apache-2.0
"""All benches, or those that are named, as root. The exit status says whether they ran.

    python -m tests.bench [NAME...] [--output FILE]

They print Markdown. `--output` writes a document of all, those that are not named as they were
measured last: `make performance`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from tests.bench.tables import Goal, filled, print_table, print_text
from writeback_exporter import __version__

BENCHES: dict[str, tuple[str, Callable[[Sequence[str]], list[Goal]]]] = {
    "events": ("Time an event", bench_bpf.main),
    "throughput": ("Throughput", bench_throughput.main),
    "process": ("The process", bench_process.main),
    "scrapes": ("Growth of a scrape", bench_scrape.main),
    "files": ("Files of cgroups", bench_files.main),
    "exposition": ("The writer against prometheus-client's", bench_exposition.main),
    "guest": ("bcc, in a guest", bench_guest.main),
}

HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by `make performance`. -->
# What it costs

{run}

{reading}

{losses}

## Goals
"""
RUN = """What `make performance` found, which measures as `make bench` does and writes this page:
{machine}; writeback-exporter {version}; Debian's {peers}. At the end of each section is when it
was measured; where the load average there is above the number of CPUs, others were at work."""
READING = """How to read it: a ratio below 1 is in our favour. Ratios are medians of pairs that
were measured moments apart, so they hold on a busy machine too; nanoseconds and seconds are those
of this machine at that time. Quartiles are in brackets, unless it is said otherwise. Where a peer
answers less than we do the table says what: it is not the same work for less."""
LOSSES = """Where we lose: in rows whose ratio is above 1, and in goals that FAIL. The text at each
table says why."""


def machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().split("\n\n")
    names = (line.partition(": ")[2] for line in cpus[0].splitlines() if "model name" in line)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024 / 1e9
    return (
        f"{next(names, platform.machine())}, {len(cpus) - 1} CPUs, {memory:.0f} GB; "
        f"Linux {platform.release()}; Python {platform.python_version()}"
    )


KEPT = Path(__file__).parents[2] / "build/bench/sections"


class _Both(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        return super().write(text)


@dataclass(frozen=True, slots=True)
class Section:
    """What a bench printed, and its goals as cells."""

    text: str
    goals: list[list[str]]


def measured(name: str) -> Section:
    """Runs a bench and keeps what it found."""
    title, bench = BENCHES[name]
    with contextlib.redirect_stdout(_Both()) as printed:
        print(f"\n## {title}")
        goals = [goal.cells() for goal in bench([])]
        end = time.strftime("%-d %B %Y, %H:%M UTC", time.gmtime())
        load, cpus = os.getloadavg()[1], os.cpu_count()
        print_text(f"*{end}, load average of five minutes {load:.1f} on {cpus} CPUs.*")
    KEPT.mkdir(parents=True, exist_ok=True)
    section = Section(printed.getvalue(), goals)
    (KEPT / name).write_text(json.dumps(asdict(section)))
    return section


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a document")
    options = parser.parse_args()
    names: list[str] = options.names or list(BENCHES)
    if unknown := set(names) - BENCHES.keys():
        parser.error(f"no bench is named {', '.join(unknown)}: there are {', '.join(BENCHES)}")
    print(machine())
    goals: list[list[str]] = []
    failed: list[str] = []
    for name in names:
        try:
            goals += measured(name).goals
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(name)
    _print_goals(goals)
    if failed:
        print(f"did not run: {', '.join(failed)}", file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(document())
    return 0


def _print_goals(goals: list[list[str]]) -> None:
    print_table("", ("goal", "measured", "wanted", ""), goals)


def document() -> str:
    """Of what was measured last of each. Raises FileNotFoundError where one never was."""
    sections = [Section(**json.loads((KEPT / name).read_text())) for name in BENCHES]
    with contextlib.redirect_stdout(io.StringIO()) as reached:
        _print_goals([goal for section in sections for goal in section.goals])
    return _head() + reached.getvalue() + "".join(section.text for section in sections)


def _head() -> str:
    run = RUN.format(
        machine=machine(),
        version=__version__,
        peers=", ".join(f"{package} {peers.version(package)}" for package in peers.PACKAGES),
    )
    return HEAD.format(run=filled(run), reading=filled(READING), losses=filled(LOSSES))


if __name__ == "__main__":
    sys.exit(main())
