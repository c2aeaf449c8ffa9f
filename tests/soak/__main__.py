# SPDX-License-Identifier: Apache-2.0
"""Runs a soak, as root: `make soak`. See the package for what it is."""

from __future__ import annotations

import argparse
import http.client
import os
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests import lab
from tests.guest import kernels, vm
from tests.host.witness import Witness, witness
from tests.lab import Disk
from tests.soak import checks, troubles
from tests.soak.checks import BAD, Moment, Row, Samples
from tests.soak.churners import (
    Churner,
    Clients,
    Disks,
    Doer,
    Dying,
    Jobs,
    Loop,
    PressureFiles,
    Services,
    Truth,
    World,
    Writers,
)
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.names.cgroups import RETENTION_SECONDS

CGROUPS_A_SECOND = 100_000 / 1800
"""Made and removed in all, overflows included: 100,000 in half an hour."""
SCRAPE_SECONDS = 5.0
OVERFLOWS = 30.0, 240.0
"""When the first is, and how long after it the next, in seconds."""
EXHAUSTIONS = 70.0, 300.0
EXHAUSTED_SECONDS = 12.0
CLOCK_SECONDS = 15.0
GUEST_KERNEL, GUEST_MINUTES, GUEST_SHARE = "7.3", 8.0, 0.1
"""An emulated machine is some 10 times as slow; its churn is that share of the host's."""

FLAGS = [
    *(f"--collector.{name}" for name in COLLECTORS),  # what the machine refuses is left out
    "--sync.tracepoints",
    "--pressure.trigger=io some 150ms/2s",
    f"--pressure.trigger.cgroups={Services.TRIGGERS}",
]


class Scraper:
    """Scrapes as Prometheus does, over a connection that it keeps."""

    def __init__(self, exporter: lab.Exporter) -> None:
        self._pid = exporter.process.pid
        self._client = http.client.HTTPConnection(exporter.url.removeprefix("http://"), timeout=30)
        self._before: Samples | None = None

    def __call__(self, exhausted: bool) -> Moment:
        at = time.monotonic()
        self._client.request("GET", "/metrics")
        answer = self._client.getresponse()
        body = answer.read()
        seconds = time.monotonic() - at
        assert answer.status == 200, f"a scrape got {answer.status}: {body[:200]!r}"
        samples = self._before = Samples(body.decode(), self._before)
        status = Path(f"/proc/{self._pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return Moment(
            at=at,
            seconds=seconds,
            samples=samples,
            rss=int(fields["VmRSS"].split()[0]) * 1024,
            threads=int(fields["Threads"]),
            files=checks.process_files(self._pid),
            exhausted=exhausted,
        )


@dataclass(slots=True)
class Alarm:
    """Goes off at times that are some way apart."""

    due: float
    period: float

    def rings(self, now: float) -> bool:
        if now < self.due:
            return False
        self.due += self.period
        return True


class Soak:
    """One exporter, its churners, troubles and checks."""

    def __init__(self, seconds: float, share: float, step_clock: bool, seed: int) -> None:
        self._seconds, self._share, self._seed = seconds, share, seed
        self._step_clock = step_clock
        self._rows: list[Row] = []
        self._overflows = 0
        self._exhaustions = 0
        self._steps = 0
        self._random = random.Random(seed)

    def run(self, directory: Path) -> list[Row]:
        with ExitStack() as stack:
            self._world = World(stack, self._share)
            # Where completions are hidden from tracepoints; a guest's kernel hides none.
            self._witness: Witness | None = None
            if not self._step_clock:
                self._witness = stack.enter_context(witness(directory))
            # What others on this machine do in their cgroups is not of this soak: it is other's.
            own = f"--cgroup.include=/|{self._world.label}(/.*)?"
            self._exporter = stack.enter_context(lab.Exporter(*FLAGS, own))
            log = self._follow_log()
            self._disk = stack.enter_context(Loop(Disks.FIRST - 2, directory / "image-main")).disk
            below = stack.enter_context(Loop(Disks.FIRST - 1, directory / "image-files")).disk
            mount = stack.enter_context(lab.ext4(below, directory))
            stack.enter_context(lab.strict_limit(below, 65536))
            self._doer = stack.enter_context(Doer(self._world))
            self._set_up_checks()
            self._churners = self._make_churners(directory, mount)
            # Also when something fails, before their cgroups are removed.
            stack.callback(self._stop_churners)
            self._live()
            self._check_disks(below, mount)
            self._end(log)
        return self._report()

    def _set_up_checks(self) -> None:
        self._scrape = Scraper(self._exporter)
        self._begin = time.monotonic()
        warm = self._begin + max(RETENTION_SECONDS + 30, min(300.0, self._seconds / 4))
        self._growth = checks.Growth(warm)
        self._names = checks.Names(self._world)
        self._ledger = checks.Ledger()
        self._checks: list[checks.Check] = [
            checks.Successes(),
            self._names,
            checks.Counters(self._world),
            checks.Times(),
            self._ledger,
            self._growth,
            checks.Maps(),
            checks.Durations(),
        ]
        self._look()

    def _make_churners(self, directory: Path, mount: Path) -> list[Churner]:
        world, seed = self._world, self._seed
        overflows = 1 + max(0.0, self._seconds - OVERFLOWS[0]) // OVERFLOWS[1]
        in_overflows = overflows * troubles.cgroups_of_an_overflow(world)
        rate = max(CGROUPS_A_SECOND * self._share - in_overflows / self._seconds, 2.0)
        self._disks = Disks(world, seed, directory, self._hidden)
        return [
            Jobs(world, seed, self._disk, rate),
            Services(world, seed, self._disk),
            Writers(world, seed, mount),
            Dying(world, seed, directory),
            PressureFiles(world, seed),
            self._disks,
            Clients(world, seed, self._exporter.url),
        ]

    def _hidden(self, disk: Disk) -> int:
        return self._witness.hidden(disk) if self._witness else 0

    def _follow_log(self) -> threading.Thread:
        """Reads what the exporter logs, which would else stop once the pipe is full."""
        stderr = self._exporter.process.stderr
        assert stderr is not None
        thread = threading.Thread(target=lambda: self._exporter.log.extend(stderr))
        thread.start()
        return thread

    # While it lives -------------------------------------------------------------------------------

    def _live(self) -> None:
        for churner in self._churners:
            churner.start()
        now = time.monotonic()
        overflow = Alarm(now + OVERFLOWS[0], OVERFLOWS[1])
        exhaustion = Alarm(now + EXHAUSTIONS[0], EXHAUSTIONS[1])
        clock, page, tell = Alarm(now, CLOCK_SECONDS), Alarm(now, 60), Alarm(now, 60)
        end = now + self._seconds
        while (now := time.monotonic()) < end:
            self._scrape_at(now + SCRAPE_SECONDS)
            if overflow.rings(now):
                self._overflow()
            if exhaustion.rings(now):
                self._exhaust()
            if self._step_clock and clock.rings(now):
                self._steps += 1
                troubles.step_clock(self._random.uniform(-9, 9))
            if page.rings(now):
                assert b"Throttled" in self._exporter.get("/")
            if tell.rings(now):
                self._tell()
        self._growth.until = time.monotonic()
        self._stop_churners()
        print("all is quiet; waiting for what has gone to be forgotten", flush=True)
        end = time.monotonic() + RETENTION_SECONDS + checks.Names.SLACK
        while (now := time.monotonic()) < end:
            self._scrape_at(now + SCRAPE_SECONDS)
        self._tell()

    def _look(self, exhausted: bool = False) -> Moment:
        self._last = self._scrape(exhausted)
        for check in self._checks:
            check.see(self._last)
        return self._last

    def _scrape_at(self, due: float, exhausted: bool = False) -> None:
        time.sleep(max(0.0, due - time.monotonic()))
        self._look(exhausted)

    def _tell(self) -> None:
        samples = self._last.samples
        print(
            f"{time.monotonic() - self._begin:5.0f} s: {self._world.made:,} cgroups made, "
            f"{samples.sum('exporter_cgroups', state='live'):g} known, "
            f"{samples.sum('exporter_cgroups', state='exited'):g} exited; "
            f"{len(samples.values):,} series in {self._last.seconds:.3f} s; "
            f"{self._last.rss / 1e6:.1f} MB",
            flush=True,
        )

    def _overflow(self) -> None:
        self._world.quiet.set()
        for churner in self._churners:
            churner.wait_for_quiet()
        dropped = self._look().samples.sum("exporter_map_dropped_total", map=troubles.RING)
        happened = troubles.overflow(
            self._exporter, self._world, self._doer, self._disk, self._overflows
        )
        self._overflows += 1
        self._names.expect_no_name(troubles.LOST)
        after = self._look().samples
        lost = after.sum("exporter_map_dropped_total", map=troubles.RING) - dropped
        known = after.by("cgroup", "pressure_waiting_seconds_total").keys()
        unnamed = set(happened.survivors) - known
        self._world.quiet.clear()
        print(f"overflow: {lost:g} events lost", flush=True)
        if not lost or unnamed:
            self._rows.append(
                Row("overflow", "", f"{lost:g} lost", BAD, f"not known after it: {unnamed}")
            )
        troubles.remove_survivors(self._world, happened)

    def _exhaust(self) -> None:
        self._exhaustions += 1
        with troubles.exhaustion(self._exporter):
            for _ in range(round(EXHAUSTED_SECONDS / SCRAPE_SECONDS) + 1):
                self._scrape_at(time.monotonic() + SCRAPE_SECONDS, exhausted=True)
        self._look()

    # At its end -----------------------------------------------------------------------------------

    def _stop_churners(self) -> None:
        for churner in self._churners:
            churner.stop()
        for churner in self._churners:
            if churner.is_alive():
                churner.join(180)

    def _check_disks(self, below: Disk, mount: Path) -> None:
        lab.sh("sync", "-f", mount)
        truths = dict(self._disks.truth)
        for disk in (self._disk, below):
            truths[disk.name] = Truth()
            truths[disk.name].add(disk.settled())
            truths[disk.name].hidden = self._hidden(disk)
        last = self._look()
        for disk in (self._disk, below):
            now = Truth()
            now.add(disk.settled())
            assert now.requests == truths[disk.name].requests, f"{disk.name} is not quiet"
        self._rows += checks.block_io(self._ledger, truths, self._disk, below)
        if self._witness:
            true = sum(count for count, _ in self._witness.pauses(below.dev).values())
            self._rows.append(checks.pauses(self._ledger.pauses(below.dev), true))
        lost = 2 * troubles.LOST * troubles.LOST_WRITES * self._overflows
        self._rows.append(checks.other(self._ledger.other(self._disk.name), lost))
        self._rows.append(checks.disks_gone(last, self._disks))

    def _end(self, log: threading.Thread) -> None:
        self._exporter.process.terminate()
        status = self._exporter.process.wait(30)
        log.join(30)
        expected = ("Too many open files", "collector bdi failed")
        self._rows.append(checks.log_lines(self._exporter.log, expected))
        self._rows.append(Row("exit status", "", str(status), BAD if status else checks.GOOD))

    def _report(self) -> list[Row]:
        churn = Row(
            "cgroups made and removed",
            "",
            f"{self._world.made:,}",
            checks.GOOD,
            ", ".join(f"{c.name} {c.turns:,}" for c in self._churners),
        )
        suffered = Row(
            "troubles",
            "",
            f"{self._overflows} + {self._exhaustions}",
            checks.TOLD,
            f"overflows, and times without descriptors; clock stepped {self._steps} times",
        )
        failures = [
            Row(f"churner {c.name}", "", "", BAD, repr(c.failure) if c.failure else "does not end")
            for c in self._churners
            if c.failure or c.is_alive()
        ]
        checked = [row for check in self._checks for row in check.rows()]
        return [churn, suffered, *failures, *checked, *self._rows]


def table(rows: list[Row]) -> str:
    cells = [("what", "begin", "end", "verdict", "")]
    cells += [(row.what, row.begin, row.end, row.verdict, row.note) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    return "\n".join(
        "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4]]).rstrip() for row in cells
    )


def in_guest(minutes: float) -> int:
    """Runs this in a guest; its exit status."""
    soak = f"{sys.executable} -m tests.soak --minutes={minutes:g} --share={GUEST_SHARE}"
    with tempfile.TemporaryDirectory(prefix="wbx-soak-") as out:
        result = vm.run(
            kernels.fetch(GUEST_KERNEL),
            f"modprobe loop && {soak} --step-clock",
            out=Path(out),
            timeout=minutes * 60 + 900,
        )
    print(result.output)
    return result.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--guest", action="store_true", help="in a guest")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual rate of churn")
    parser.add_argument("--step-clock", action="store_true", help="this machine's, by hours")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    arguments = parser.parse_args()
    if arguments.guest:
        return in_guest(min(arguments.minutes, GUEST_MINUTES))
    assert os.geteuid() == 0, "a soak makes cgroups and loop devices: run it as root"
    print(f"soak of {arguments.minutes:g} minutes, --seed={arguments.seed}", flush=True)
    soak = Soak(arguments.minutes * 60, arguments.share, arguments.step_clock, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="wbx-soak-") as directory:
        rows = soak.run(Path(directory))
    print(table(rows))
    failed = [row.what for row in rows if row.verdict == BAD]
    print(f"FAILED: {', '.join(failed)}" if failed else "all is well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
