# SPDX-License-Identifier: Apache-2.0
"""Hosts made of directories: hierarchies with the files of their controllers, and a sysfs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from tests.lab import Scrape
from writeback_exporter.collector import Host
from writeback_exporter.features import Feature
from writeback_exporter.files.base import Reader
from writeback_exporter.files.cgroup_files import CgroupFiles
from writeback_exporter.metrics.exposition import Snapshot, negotiate, render
from writeback_exporter.names.cgroups import Cgroups, find_hierarchies
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

Files = Mapping[str, Mapping[str, str]]
"""Text by name of the file, by path of the cgroup."""

V2 = "0::/\n"
HYBRID = "7:blkio:/\n4:memory:/\n0::/\n"
V1 = "7:blkio:/\n4:memory:/\n"


class Place:
    """A host below a directory, with these disks by their numbers."""

    def __init__(self, top: Path, proc_self_cgroup: str, disks: Mapping[str, str]) -> None:
        self.top = top
        (top / "proc/self").mkdir(parents=True)
        (top / "proc/self/cgroup").write_text(proc_self_cgroup)
        for directory in ("block", "class/bdi", "dev/block"):
            (top / "sys" / directory).mkdir(parents=True)
        for number, name in disks.items():
            self.plug(number, name)

    def plug(self, number: str, name: str) -> None:
        (self.top / "sys/dev/block" / number).symlink_to(f"../../devices/virtual/block/{name}")

    def unplug(self, number: str) -> None:
        (self.top / "sys/dev/block" / number).unlink()

    def hierarchy(self, name: str, files: Files) -> None:
        """A mounted hierarchy: "" for v2 alone, unified, blkio, memory; its root is there too."""
        for path in ("/", *files):
            directory = self.top / "cgroup" / name / path.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.procs").touch()
            if name in ("", "unified"):
                controllers = "cpu io memory" if name == "" else ""
                (directory / "cgroup.controllers").write_text(controllers)
            for file, text in files.get(path, {}).items():
                (directory / file).write_text(text)

    def settings(self) -> Settings:
        proc, sys, cgroup = (str(self.top / name) for name in ("proc", "sys", "cgroup"))
        return Settings((), "/metrics", frozenset(), proc, sys, cgroup)

    def host(self) -> Host:
        """What the exporter knows after it has walked the hierarchies."""
        settings = self.settings()
        cgroups = Cgroups(find_hierarchies(settings.cgroupfs, settings.procfs))
        cgroups.walk(0.0)
        return Host(cgroups, Devices(settings.sysfs))


class Opened:
    """A reader that has been opened on a host."""

    def __init__(self, reader: Reader, place: Place) -> None:
        self.reader, self.host = reader, place.host()
        self.now = 0.0
        self.host.files = CgroupFiles(lambda: self.now)
        weakref.finalize(self, self.host.files.close)
        self.features: list[Feature] = reader.open(place.settings(), self.host, threading.Lock())

    def scrape(self) -> Scrape:
        """What it exports now; fails where two series have the same labels."""
        snapshot = Snapshot()
        self.host.files.settle(self.host.cgroups)
        self.reader.fill(snapshot, self.host)
        return Scrape(b"".join(render(snapshot, negotiate(""))).decode())


def by(scrape: Scrape, metric: str, *names: str) -> dict[tuple[str, ...], float]:
    """The series of a metric by the values of these labels, which must be all that it has."""
    series = scrape.select(metric)
    assert all(set(dict(labels)) == set(names) for labels in series), (names, series)
    return {tuple(dict(labels)[n] for n in names): value for labels, value in series.items()}


def change_unseen(place: Place, hierarchy: str, path: str, files: Mapping[str, str]) -> None:
    """As the kernel changes files by itself, which inotify does not tell."""
    for name, text in files.items():
        (place.top / "new").write_text(text)
        (place.top / "new").replace(place.top / "cgroup" / hierarchy / path.lstrip("/") / name)


def remove(place: Place, hierarchy: str, path: str) -> None:
    """As rmdir of a cgroup does, whose files go with it."""
    directory = place.top / "cgroup" / hierarchy / path.lstrip("/")
    for file in os.listdir(directory):
        (directory / file).unlink()
    directory.rmdir()
