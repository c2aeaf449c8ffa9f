# SPDX-License-Identifier: Apache-2.0
"""PSI triggers with and without CAP_SYS_RESOURCE, each beside one of the test's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests import lab
from tests.lab import DIRECT_WRITER
from tests.psi import CONTENTION, WITHOUT_SYS_RESOURCE, totals, witness
from tests.waiting import wait_for

from .test_main_signals import MIB, SLOW

FLAGS = lab.only("pressure_triggers")
IO = Path("/proc/pressure/io")


def armed(exporter: lab.Exporter) -> float:
    return exporter.scrape().sum("pressure_triggers", state="armed")


def count(exporter: lab.Exporter, cgroup: str) -> float:
    (value,) = exporter.scrape().select("pressure_events_total", cgroup=cgroup).values()
    return value


def reasons(exporter: lab.Exporter) -> dict[str, str]:
    features = exporter.scrape().select("exporter_feature_available")
    found = {dict(labels)["feature"]: dict(labels)["reason"] for labels in features}
    return {
        feature.removeprefix("pressure_trigger "): reason
        for feature, reason in found.items()
        if feature.startswith("pressure_trigger ")
    }


def kernel_takes(trigger: bytes) -> bool:
    """Whether the kernel takes a trigger, of io, from us, who may all."""
    descriptor = os.open(IO, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(descriptor, trigger + b"\0")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def is_quiet() -> bool:
    """Whether no task waits for IO for a while that is longer than a window of a second."""
    before = totals(IO)
    time.sleep(1.5)
    return totals(IO) == before


def test_a_slow_disk() -> None:
    """The host's trigger fires while a task waits for it, as often as another one."""
    with (
        lab.Exporter(*FLAGS, "--pressure.trigger=io some 50ms/1s") as exporter,
        witness(IO, "some 50000 1000000") as seen,
    ):
        # The kernel then stops looking, and begins both their windows anew with what comes.
        wait_for(is_quiet, what="an end of the IO")
        assert count(exporter, "/") == 0
        with lab.cgroup(lab.hierarchies().io, "waits") as cgroup:
            lab.run_in([cgroup], DIRECT_WRITER, SLOW.path, MIB, 14, 0)
        time.sleep(1.5)
        counted = count(exporter, "/")
    assert counted == seen.events
    assert counted >= 2


def test_a_cgroup_that_came_later() -> None:
    """It is armed without a scrape, survives its end, and goes on under its name."""
    hierarchy = lab.hierarchies().task

    def is_open() -> bool:
        links = Path(f"/proc/{exporter.process.pid}/fd").iterdir()
        return any(os.path.realpath(link).endswith("/later/cpu.pressure") for link in links)

    with lab.Exporter(
        *FLAGS,
        "--pressure.trigger=cpu some 50ms/1s",
        "--pressure.trigger.cgroups=/later",
    ) as exporter:
        assert armed(exporter) == 1
        counts = []
        for _ in range(2):
            with lab.cgroup(hierarchy, "later") as later:
                wait_for(is_open, what="another trigger")
                with witness(later.directory / "cpu.pressure", "some 50000 1000000") as seen:
                    lab.run_in([later], CONTENTION, 1.5)
                    time.sleep(2.5)  # an event may wait for its window's end
                counts.append(count(exporter, later.label))
                # Of the first cgroup's kernel threads the second one knows nothing.
                assert counts[-1] - sum(counts[-2:-1]) == seen.events > 0
            wait_for(lambda: armed(exporter) == 1)
            assert count(exporter, "/later") == counts[-1]
        assert exporter.stop() == 0
    assert not [line for line in exporter.log if "level=ERROR" in line or "Traceback" in line]


def test_windows() -> None:
    """What this kernel takes is armed; what it does not is refused with what to do."""
    with lab.Exporter(
        *FLAGS,
        "--pressure.trigger=io some 20ms/100ms",
        "--pressure.trigger=io some 100ms/500ms",
        "--pressure.trigger=io full 1s/10s",
    ) as exporter:
        found = reasons(exporter)
    short = kernel_takes(b"some 20000 100000")
    assert found == {
        "io some 20ms/100ms": "" if short else "window too short",
        "io some 100ms/500ms": "",
        "io full 1s/10s": "",
    }
    assert short == (os.uname().release.split(".")[:2] not in (["5", "10"], ["6", "1"]))
    lines = [line for line in exporter.log if "20ms/100ms" in line]
    assert len(lines) == (not short)
    assert all("take a window of 500ms or more" in line for line in lines)


def test_without_privilege() -> None:
    """Multiples of two seconds are armed, and fire; where the kernel wants those alone (6.4, and
    6.1 as Debian has it), another is refused with what to do."""
    with lab.Exporter(
        *FLAGS,
        "--pressure.trigger=io some 50ms/2s",
        "--pressure.trigger=io some 50ms/1s",
        prefix=WITHOUT_SYS_RESOURCE,
    ) as exporter:
        found = reasons(exporter)
        strict = bool(IO.stat().st_mode & 0o002)
        with witness(IO, "some 50000 2000000", WITHOUT_SYS_RESOURCE) as seen:
            with lab.cgroup(lab.hierarchies().io, "waits") as cgroup:
                lab.run_in([cgroup], DIRECT_WRITER, SLOW.path, MIB, 16, 0)
            time.sleep(2.5)
            scrape = exporter.scrape()
    assert found == {"io some 50ms/2s": "", "io some 50ms/1s": "no right" if strict else ""}
    lines = [line for line in exporter.log if "50ms/1s" in line]
    assert len(lines) == strict
    assert all("lacks CAP_SYS_RESOURCE" in x for x in lines)
    assert all(", or take a window that is a multiple of 2s" in x for x in lines)
    assert scrape.sum("pressure_events_total", threshold="50ms/2s") >= 1
    assert seen.events >= 1


def test_a_file_system_that_is_read_only() -> None:
    """As in a hardened unit or a container: the cgroups' are refused, the host's goes on."""
    read_only = 'mount -o remount,bind,ro /sys/fs/cgroup && exec "$@"'
    with (
        lab.cgroup(lab.hierarchies().task, "ro") as cgroup,
        lab.Exporter(
            *FLAGS,
            "--pressure.trigger=io some 50ms/1s",
            f"--pressure.trigger.cgroups={cgroup.label}",
            prefix=("unshare", "--mount", "sh", "-c", read_only, "sh"),
        ) as exporter,
    ):
        assert reasons(exporter) == {"io some 50ms/1s": ""}
        scrape = exporter.scrape()
        assert scrape.sum("pressure_triggers", state="refused") == 1
        assert armed(exporter) == 1
    (line,) = (line for line in exporter.log if "is refused" in line)
    assert "/ro/io.pressure: Read-only file system; let the exporter write there" in line


def test_cpu_full_of_cgroups_alone() -> None:
    with (
        lab.cgroup(lab.hierarchies().task, "full") as cgroup,
        lab.Exporter(
            *FLAGS,
            "--pressure.trigger=cpu full 50ms/1s",
            "--pressure.trigger.cgroups=/full",
        ) as exporter,
    ):
        assert reasons(exporter) == {"cpu full 50ms/1s": "undefined"}
        # There is none in 5.10.
        known = "full" in (cgroup.directory / "cpu.pressure").read_text()
        assert armed(exporter) == known
    lines = [line for line in exporter.log if "/full/cpu.pressure has no full" in line]
    assert len(lines) == (not known)
