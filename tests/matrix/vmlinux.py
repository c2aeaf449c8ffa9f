# SPDX-License-Identifier: Apache-2.0
"""The types of a kernel that is not running: BTF out of its bzImage."""

import io
import struct
import subprocess
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tests.guest.kernels import Kernel

# By the first bytes of what they packed. lz4's is its old format, in which the kernel wants it.
_UNPACKERS = {bytes.fromhex("28b52ffd"): "zstd", bytes.fromhex("02214c18"): "lz4"}


def btf_of(kernel: Kernel) -> Path:
    """A file with the kernel's BTF, in the cache beside the image. Making it takes a second."""
    path = kernel.directory / "btf"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=kernel.directory, delete=False) as made:
            made.write(_btf_in(kernel.vmlinuz))
        Path(made.name).rename(path)
    return path


def _btf_in(vmlinuz: Path) -> bytes:
    """Section .BTF of the kernel that is packed in an x86-64 image
    (Documentation/arch/x86/boot.rst)."""
    image = vmlinuz.read_bytes()
    assert image[0x202:0x206] == b"HdrS", f"{vmlinuz} is no bzImage"
    setup_sectors = image[0x1F1]
    offset, size = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    # The last four bytes are the size of what is packed.
    payload = image[start : start + size - 4]
    assert payload[:4] in _UNPACKERS, f"{vmlinuz} is packed by something else: {payload[:4].hex()}"
    command = [_UNPACKERS[payload[:4]], "-dc"]
    unpacked = subprocess.run(command, input=payload, capture_output=True, check=True)
    section = ELFFile(io.BytesIO(unpacked.stdout)).get_section_by_name(".BTF")
    assert section is not None, f"the kernel in {vmlinuz} has no BTF"
    data: bytes = section.data()
    return data
