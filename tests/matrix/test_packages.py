# SPDX-License-Identifier: Apache-2.0
"""The Debian package, installed in clean roots of the releases that it is for, on this kernel."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import pytest

from tests import lab
from tests.guest.vm import CHECKOUT
from writeback_exporter.privileges import Capability

from . import confined, releases

UNIT = CHECKOUT / "packaging/systemd/writeback-exporter.service"
EXAMPLES = sorted((CHECKOUT / "packaging/systemd").glob("*.conf"))


def test_lintian_finds_nothing(package: Path) -> None:
    found = lab.sh("lintian", "--allow-root", "--fail-on=error,warning", package)
    assert found == ""


def test_the_same_tree_gives_the_same_package(package: Path) -> None:
    made = package.read_bytes()
    lab.sh("make", "-sC", CHECKOUT, "deb")
    assert package.read_bytes() == made


@dataclass(frozen=True)
class Root:
    """A release's root in which the package is installed, anew for each command."""

    release: releases.Release
    package: Path
    stage: Path

    def prefix(self, *mounts: str, confining: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Runs a command there, or the package's program in place of this checkout's; before it
        these mount, below `root`, and `confining` runs it otherwise."""
        program = quote(f"root{lab.PROGRAM}")
        commands = (
            *self.release.mounting(self.stage, {}),
            f"cp {quote(str(self.package))} root/tmp/package.deb",
            "{ chroot root dpkg --install /tmp/package.deb >log 2>&1 || { cat log >&2; false; }; }",
            f"mkdir -p $(dirname {program})",
            f"ln -sf /usr/bin/writeback-exporter {program}",
            *mounts,
        )
        prefix = (*lab.with_mounts(*commands), "chroot", "root", "env", "-i", "--chdir=/")
        return (*prefix, *releases.ENVIRONMENT, *confining)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        command = [*self.prefix(), "sh", "-euc", script]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def confined(self, *drop_ins: Path) -> tuple[str, ...]:
        """As `prefix`, as the package's unit has it, with these besides."""
        unit = confined.read(UNIT, *drop_ins)
        groups = self.run("systemd-analyze syscall-filter").stdout
        confining = confined.prefix(unit, groups)
        # The program lies where ProtectHome has nothing.
        return self.prefix(*confined.mounting(unit, "root"), confining=confining)


@pytest.fixture(scope="module")
def root(clean: releases.Release, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(clean, package, tmp_path_factory.mktemp(clean.name))


def test_doctor_says_what_it_says_here(root: Root) -> None:
    """With the release's own Python and libraries."""
    assert root.run("! command -v clang && ! command -v pip").returncode == 0
    reference = lab.doctor()
    assert "The main signals work here." in reference.text
    assert lab.doctor(prefix=root.prefix()) == reference


def test_it_is_removed_without_a_trace(root: Root) -> None:
    """Also after it was installed over itself, as in an upgrade."""
    done = root.run(f"""
        rm {quote(str(lab.PROGRAM))}
        ours() {{ find / -xdev -path /tmp -prune -o -path '*writeback?exporter*' -print; }}
        test -L /etc/systemd/system/multi-user.target.wants/writeback-exporter.service
        grep -q ^ARGS= /etc/default/writeback-exporter
        dpkg --install /tmp/package.deb >&2
        ours | grep -q /usr/lib/writeback-exporter/.*[.]pyc
        dpkg --purge writeback-exporter >&2
        ours
    """)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_systemd_accepts_the_unit(root: Root) -> None:
    done = root.run("systemd-analyze verify --man=no writeback-exporter.service")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_systemd_accepts_the_examples(root: Root, example: Path) -> None:
    directory = "/etc/systemd/system/writeback-exporter.service.d"
    done = root.run(
        f"mkdir -p {directory}; cp /usr/share/doc/writeback-exporter/examples/{example.name} "
        f"{directory}; systemd-analyze verify --man=no writeback-exporter.service"
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_score_is_the_documented_one(root: Root) -> None:
    done = root.run("systemd-analyze security --offline=true writeback-exporter.service")
    (score,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    text = (CHECKOUT / "docs/installation.md").read_text()
    (documented,) = re.findall(r"`systemd-analyze security` gives\s+it ([0-9.]+)", text)
    assert score == documented


FORBIDDEN = {
    "mmap.mmap(-1, 4096, prot=7)": "PermissionError",
    "socket.socket(socket.AF_UNIX)": "OSError",
    "os.setuid(0)": "PermissionError",
    "os.mkdir('/usr/made')": "OSError",
    "open('/sys/block/loop0/queue/read_ahead_kb', 'w')": "OSError",
    "open('/proc/kallsyms')": "PermissionError",
    "os.listdir('/home')": "PermissionError",
    "open('/dev/loop0')": "FileNotFoundError",
}


def test_confinement_confines(root: Root) -> None:
    """Else what follows says nothing."""
    script = ["import mmap, os, socket", "print(open('/proc/self/status').read())"]
    for call in FORBIDDEN:
        script.append(f"try:\n {call}\nexcept OSError as error:\n print(type(error).__name__)")
    done = lab.sh(*root.confined(), "python3", "-Ic", "\n".join(script))
    status, _, names = done.rpartition("\n\n")
    assert names.split() == list(FORBIDDEN.values())
    assert set(re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb):\t(\w+)$", status, re.MULTILINE)) == {
        f"{1 << 39 | 1 << 38:016x}"  # CAP_BPF, CAP_PERFMON
    }
    assert re.search(r"^Seccomp:\t2$", status, re.MULTILINE)


def test_confined_doctor_loses_nothing(root: Root) -> None:
    """But what a user with two capabilities loses, with or without the rest."""
    user = lab.as_user("CAP_BPF", "CAP_PERFMON")
    assert lab.doctor(prefix=root.confined()) == lab.doctor(prefix=user)


def test_a_drop_in_gives_back_what_was_lost(root: Root) -> None:
    drop_in = UNIT.with_name("files-of-others.conf")
    assert lab.doctor(prefix=root.confined(drop_in)) == lab.doctor()


@pytest.fixture
def serving(root: Root) -> Iterator[lab.Exporter]:
    with lab.Exporter(prefix=root.confined()) as exporter:
        yield exporter
        assert exporter.stop() == 0


def test_confined_exporter_compresses_with_isal_where_debian_has_it(
    root: Root, serving: lab.Exporter
) -> None:
    zipped = serving.get("/metrics", {"Accept-Encoding": "gzip"})
    assert b"writeback_exporter_build_info" in zipped
    loaded = Path(f"/proc/{serving.process.pid}/maps").read_text()
    assert ("isal_zlib" in loaded) is (root.release.name != "bookworm")


def test_confined_exporter_counts_block_io(serving: lab.Exporter, tmp_path: Path) -> None:
    hierarchy = lab.hierarchies().io
    with (
        lab.loop_disk(tmp_path) as disk,
        lab.cgroup(hierarchy, f"wbx-packages-{os.getpid()}") as group,
    ):
        before = disk.stats()
        lab.run_in([group], lab.DIRECT_WRITER, disk.path, 12288, 7, 0)
        scrape = serving.scrape()
        counted = disk.stats() - before
    labels = {"device": disk.name, "op": "write", "cgroup": group.label}
    assert counted.writes == 7
    assert scrape.sum("block_io_device_seconds_count", **labels) == counted.writes
    assert scrape.sum("block_io_size_bytes_sum", **labels) == counted.written_bytes
    # And it has given up what it was granted, as the filter lets it: before 5.19 all but BPF.
    for rights in lab.rights(serving.process.pid).values():
        assert rights.permitted | rights.effective | rights.ambient <= {Capability.BPF}


def test_confined_exporter_sees_throttling(serving: lab.Exporter, tmp_path: Path) -> None:
    hierarchy = lab.hierarchies().task
    with (
        lab.loop_disk(tmp_path) as disk,
        lab.ext4(disk, tmp_path) as mount,
        lab.strict_limit(disk, 65536),
        lab.cgroup(hierarchy, f"wbx-packages-{os.getpid()}") as group,
    ):
        start = time.monotonic()
        lab.run_in([group], lab.BUFFERED_WRITER, mount / "file", 16 << 20)
        elapsed = time.monotonic() - start
        scrape = serving.scrape()
        labels = {"cgroup": group.label, "bdi": disk.dev}
        assert scrape.sum("dirty_throttle_seconds_count", **labels) > 0
        assert 0 < scrape.sum("dirty_throttle_seconds_sum", **labels) < elapsed
        assert scrape.select("bdi_info", bdi=disk.dev, fstype="ext4")
