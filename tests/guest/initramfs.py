# SPDX-License-Identifier: Apache-2.0
"""The guest's initramfs: busybox, the modules that reach the host's userland, and init.sh.

Written here rather than with cpio(1) and update-initramfs: it needs no root, no device nodes on
the host, and takes 0.1 s. The format is "newc", Documentation/driver-api/early-userspace.
"""

import gzip
import lzma
import re
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from .kernels import Kernel

INIT = Path(__file__).with_name("init.sh")
# The static one: at this point the guest has no libraries.
BUSYBOX = Path("/bin/busybox")

DIRECTORIES = ("bin", "dev", "host", "modules", "newroot", "proc", "run", "sys")


def build(kernel: Kernel, modules: Iterable[str], path: Path) -> None:
    """Write to `path` an initramfs for `kernel` that loads `modules` and what they depend on.

    A module that `kernel` does not have is built in, or missing, which shows when it is used.
    """
    archive = _Archive()
    for name in DIRECTORIES:
        archive.add(name, stat.S_IFDIR | 0o755)
    # The kernel opens it for init's output before init can mount devtmpfs.
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive.add("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    archive.add("bin/sh", stat.S_IFLNK | 0o777, b"busybox")
    archive.add("init", stat.S_IFREG | 0o755, INIT.read_bytes())
    for index, module in enumerate(load_order(kernel, modules)):
        # init.sh loads modules/* in the order of their names.
        name = f"modules/{index:02}-{_module_name(module)}.ko"
        archive.add(name, stat.S_IFREG | 0o644, _unpacked(kernel.modules / module))
    path.write_bytes(archive.finished())


def load_order(kernel: Kernel, modules: Iterable[str]) -> list[str]:
    """Files, relative to the kernel's directory of modules, with dependencies before dependents."""
    files: dict[str, str] = {}
    dependencies: dict[str, list[str]] = {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        file, _, needed = line.partition(":")
        files[_module_name(file)] = file
        dependencies[_module_name(file)] = [_module_name(path) for path in needed.split()]
    order: list[str] = []
    for module in map(_module_name, modules):
        # modules.dep lists all that a module needs, transitively: the last one has to come first.
        for needed in [*reversed(dependencies.get(module, [])), module]:
            if needed in files and files[needed] not in order:
                order.append(files[needed])
    return order


def _module_name(path: str) -> str:
    """`virtio_pci` of kernel/drivers/virtio/virtio-pci.ko.xz: the kernel's names have no dash."""
    return re.sub(r"\.ko.*", "", path.rpartition("/")[2]).replace("-", "_")


def _unpacked(path: Path) -> bytes:
    """The module itself: Debian compresses them from 6.12 on, which busybox' insmod cannot undo."""
    unpack = _DECOMPRESSORS.get(path.suffix)
    data = path.read_bytes()
    return unpack(data) if unpack else data


def _unzstd(data: bytes) -> bytes:
    # No zstd in the standard library before Python 3.14.
    return subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True).stdout


_DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".zst": _unzstd,
}


class _Archive:
    """A cpio archive in the newc format: hexadecimal headers, everything padded to 4 bytes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inode = 0

    def add(
        self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        fields = (self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
        header = "070701" + "".join(f"{field:08X}" for field in fields)
        self._append(header.encode() + name.encode() + b"\0")
        self._append(content)

    def finished(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return bytes(self._data)

    def _append(self, data: bytes) -> None:
        self._data += data + b"\0" * (-len(data) % 4)
