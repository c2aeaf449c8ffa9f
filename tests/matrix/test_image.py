# SPDX-License-Identifier: Apache-2.0
"""The image of packaging/Containerfile: built on Debian 13, run as the DaemonSet runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest
import yaml

from tests import lab
from tests.guest.vm import CHECKOUT

from . import releases

BASE = "debian:trixie-slim"
NETWORK = ("/etc/pip.conf", "/etc/ssl/certs")
(CONTAINER,) = yaml.safe_load((CHECKOUT / "packaging/kubernetes/daemonset.yml").read_text())[
    "spec"
]["template"]["spec"]["containers"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root directory of a container of it, which only has to be run."""
    try:
        # No registry is asked: the base is what debootstrap makes. It has ca-certificates, whose
        # files this system's, for its pip, are mounted over.
        base = releases.clean_release("trixie", "image", ["ca-certificates"])
    except releases.ReleaseUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    storage = tmp_path_factory.mktemp("image")
    buildah = ("buildah", f"--root={storage}/root", f"--runroot={storage}/run")
    try:
        lab.sh(*buildah, "from", "--name=base", "scratch")
        lab.sh(*buildah, "add", "-q", "base", base.root, "/")
        lab.sh(*buildah, "commit", "-q", "--rm", "base", BASE)
        build = ["build", "--isolation=chroot", "--network=host", "--pull-never", "--tag=made"]
        build += [f"--volume={path}:{path}:ro" for path in NETWORK if os.path.exists(path)]
        file = CHECKOUT / "packaging/Containerfile"
        lab.sh(*buildah, *build, f"--file={file}", CHECKOUT)
        lab.sh(*buildah, "from", "--pull-never", "--name=made", "made")
        yield Path(lab.sh(*buildah, "mount", "made"))
    finally:
        lab.sh(*buildah, "rm", "--all")
        if os.path.ismount(storage / "root/overlay"):
            lab.sh("umount", storage / "root/overlay")
        shutil.rmtree(storage)


def running(image: Path, capabilities: list[str]) -> tuple[str, ...]:
    """Runs its program as the container's user, with no capability but these, which it has not
    yet, in a read-only root with the container's mounts."""
    root = quote(str(image))
    program = quote(f"{image}{lab.PROGRAM}")
    mounts = [
        f"mount --bind {root} {root}",
        f"mkdir -p $(dirname {program}) {root}/host/sys {root}/host/root",
        f"ln -sf /usr/bin/writeback-exporter {program}",
        *(f"mount --rbind /{name} {root}/{name}" for name in ("dev", "proc", "sys")),
        f"mount --rbind /sys {root}/host/sys",
        f"mount -o remount,bind,ro {root}",
    ]
    context = CONTAINER["securityContext"]
    bounding = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities)])
    return (
        *(*lab.with_mounts(*mounts), "chroot", str(image), "env", "-i", "--chdir=/"),
        *("setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"),
        *("--clear-groups", f"--bounding-set={bounding}", "--inh-caps=-all"),
    )


def test_doctor_says_what_it_says_here(image: Path) -> None:
    capabilities = CONTAINER["securityContext"]["capabilities"]
    assert capabilities["drop"] == ["ALL"]
    report = lab.doctor(*CONTAINER["args"], prefix=running(image, capabilities["add"]))
    assert "The main signals work here." in report.text
    assert report.reasons == lab.doctor(prefix=lab.TWO_CAPABILITIES).reasons


def test_it_has_what_the_package_recommends(image: Path) -> None:
    lab.sh("chroot", image, "python3", "-Ic", "from isal import isal_zlib")


def test_it_counts_block_io(image: Path, tmp_path: Path) -> None:
    prefix = running(image, CONTAINER["securityContext"]["capabilities"]["add"])
    with (
        lab.Exporter(*CONTAINER["args"], "--log.format=logfmt", prefix=prefix) as exporter,
        lab.loop_disk(tmp_path) as disk,
        lab.cgroup(lab.hierarchies().io, f"wbx-image-{os.getpid()}") as group,
    ):
        lab.run_in([group], lab.DIRECT_WRITER, disk.path, 12288, 7, 0)
        labels = {"device": disk.name, "op": "write", "cgroup": group.label}
        assert exporter.scrape().sum("block_io_device_seconds_count", **labels) == 7
        assert exporter.stop() == 0


def test_it_does_not_start_without_the_capabilities(image: Path) -> None:
    command = [*running(image, []), "/usr/bin/writeback-exporter", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 126 or done.returncode == 127
    assert "Operation not permitted" in done.stderr
