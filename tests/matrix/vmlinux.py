# SPDX-License-Identifier: Apache-2.0
"""The types of a kernel that is not running: BTF out of its bzImage."""

import io
import struct
import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile

_ZSTD = bytes.fromhex("28b52ffd")


def btf_of(vmlinuz: Path) -> bytes:
    """Section .BTF of the kernel that an x86-64 image of the last years has in it, packed by zstd
    (Documentation/arch/x86/boot.rst)."""
    image = vmlinuz.read_bytes()
    assert image[0x202:0x206] == b"HdrS", f"{vmlinuz} is no bzImage"
    setup_sectors = image[0x1F1]
    offset, size = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    # The last four bytes are the size of what is packed.
    payload = image[start : start + size - 4]
    assert payload.startswith(_ZSTD), f"{vmlinuz} is not packed by zstd: {payload[:4].hex()}"
    unpacked = subprocess.run(["zstd", "-dc"], input=payload, capture_output=True, check=True)
    section = ELFFile(io.BytesIO(unpacked.stdout)).get_section_by_name(".BTF")
    assert section is not None, f"the kernel in {vmlinuz} has no BTF"
    data: bytes = section.data()
    return data
