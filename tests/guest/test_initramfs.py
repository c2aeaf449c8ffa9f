# SPDX-License-Identifier: Apache-2.0
"""The initramfs as another program reads it."""

import lzma
import subprocess
from pathlib import Path

import pytest

from . import initramfs
from .kernels import Kernel

MODULES_DEP = """\
kernel/drivers/virtio/virtio.ko:
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio-pci.ko.xz: kernel/drivers/virtio/virtio_ring.ko \
kernel/drivers/virtio/virtio.ko
kernel/drivers/block/other.ko:
"""


@pytest.fixture
def small_kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel("6.1", "6.1.9-1", "6.1.0-1-cloud-amd64", tmp_path)
    for line in MODULES_DEP.splitlines():
        file = kernel.modules / line.partition(":")[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        content = file.name.encode()
        file.write_bytes(lzma.compress(content) if file.suffix == ".xz" else content)
    (kernel.modules / "modules.dep").write_text(MODULES_DEP)
    return kernel


def test_dependencies_come_first(small_kernel: Kernel) -> None:
    order = initramfs.load_order(small_kernel, ["virtio_pci", "virtio_ring", "built_in"])
    assert [Path(path).name for path in order] == [
        "virtio.ko",
        "virtio_ring.ko",
        "virtio-pci.ko.xz",
    ]


def test_archive(small_kernel: Kernel, tmp_path: Path) -> None:
    archive = tmp_path / "initrd"
    initramfs.build(small_kernel, ["virtio_pci"], archive)
    root = tmp_path / "root"
    root.mkdir()
    with open(archive, "rb") as data:
        subprocess.run(["busybox", "cpio", "-idm"], stdin=data, cwd=root, check=True)
    assert (root / "init").read_bytes() == initramfs.INIT.read_bytes()
    assert (root / "init").stat().st_mode & 0o777 == 0o755
    assert (root / "bin/sh").readlink() == Path("busybox")
    assert (root / "modules/02-virtio_pci.ko").read_bytes() == b"virtio-pci.ko.xz"
