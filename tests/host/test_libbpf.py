# SPDX-License-Identifier: Apache-2.0
"""The libbpf binding on a real kernel."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests import lab
from writeback_exporter.features import Refused
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import BpfError, KernelBtf, Map, Object, RingBuffer
from writeback_exporter.kernel.loader import Kernel, load, open_file

LIFECYCLE = ["cgroup_mkdir", "cgroup_rename", "cgroup_rmdir", "cgroup_release"]


@pytest.fixture
def throttle() -> Iterator[Object]:
    """A loaded object with hash maps, nothing attached."""
    with load(open_file("dirty_throttle"), [], {}) as loaded:
        yield loaded


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "bpffs"
    directory.mkdir()
    lab.sh("mount", "-t", "bpf", "bpf", directory)
    try:
        yield directory
    finally:
        lab.sh("umount", directory)


def test_map_operations(throttle: Object) -> None:
    bpf_map = throttle.maps["dirty_throttle"]
    size = bpf_map.value_size
    assert bpf_map.dump() == (b"", b"")
    wanted = {}
    for i in range(3000):  # more than a chunk
        key, value = struct.pack("=QQ", i, i * i), struct.pack("=Q", i).ljust(size, b"\7")
        bpf_map.update(key, value)
        wanted[key] = value

    def entries(dump: tuple[bytes, bytes]) -> dict[bytes, bytes]:
        keys, values = dump
        return {
            keys[i * 16 : i * 16 + 16]: values[i * size : (i + 1) * size]
            for i in range(len(keys) // 16)
        }

    assert entries(bpf_map.dump()) == wanted
    key = struct.pack("=QQ", 7, 49)
    assert bpf_map.lookup(key) == wanted[key]
    assert bpf_map.lookup_and_delete(key) == wanted.pop(key)
    assert bpf_map.lookup(key) is None
    assert bpf_map.lookup_and_delete(key) is None
    assert bpf_map.delete(key) is False
    key = struct.pack("=QQ", 8, 64)
    assert bpf_map.delete(key) is True
    del wanted[key]
    assert entries(bpf_map.drain()) == wanted
    assert bpf_map.dump() == (b"", b"")


def test_full_map(throttle: Object) -> None:
    bpf_map = throttle.maps["bdis"]
    for i in range(bpf_map.max_entries):
        bpf_map.update(struct.pack("=Q", i), bytes(bpf_map.value_size))
    with pytest.raises(BpfError, match="write map bdis: Argument list too long"):
        bpf_map.update(struct.pack("=Q", 1 << 40), bytes(bpf_map.value_size))
    assert len(bpf_map.dump()[0]) == 8 * bpf_map.max_entries


def test_constants_reach_the_program() -> None:
    with Object(open_file("dirty_throttle")) as opened:
        opened.set_constants(hz=1234, measured=True)
        for program in opened.programs.values():
            program.autoload = False
        opened.load()
        (rodata,) = (m for name, m in opened.maps.items() if name.endswith(".rodata"))
        value = rodata.lookup(bytes(4))
        assert value is not None
        offset, size = opened.file.constant("hz")
        assert int.from_bytes(value[offset : offset + size], "little") == 1234
        offset, size = opened.file.constant("measured")
        assert value[offset : offset + size] == b"\1"


def test_verifier_log_is_in_the_error() -> None:
    arity = libbpf.KernelBtf().tracepoint_arity("balance_dirty_pages")
    wrong = "throttled_values" if arity == 8 else "throttled_control"
    with Object(open_file("dirty_throttle")) as opened:
        for program in opened.programs.values():
            program.autoload = program.name == wrong
        with pytest.raises(BpfError) as caught:
            opened.load()
    assert "invalid bpf_context access" in caught.value.reason
    assert "BEGIN PROG LOAD LOG" in "".join(caught.value.log)


def test_pins_outlive_the_object(bpffs: Path) -> None:
    with load(open_file("cgroup_lifecycle"), LIFECYCLE, {}) as loaded:
        libbpf.pin(loaded.maps["drops"].fd, str(bpffs / "drops"))
        link = loaded.attach("cgroup_mkdir")
        link.pin(str(bpffs / "link"))
        program = loaded.programs["cgroup_mkdir"].id
        with pytest.raises(BpfError, match=r"pin .*no-bpffs: Operation not permitted"):
            libbpf.pin(loaded.maps["scratch"].fd, str(bpffs.parent / "no-bpffs"))
    # A new bpffs has iterators of the kernel's in it.
    builtin = {"maps.debug", "progs.debug"}
    assert {path.name for path in bpffs.iterdir()} - builtin == {"drops", "link"}
    assert "value 8B" in lab.sh("bpftool", "map", "show", "pinned", bpffs / "drops")
    # Debian 13's bpftool shows the link and exits with 1 all the same.
    command = ["bpftool", "link", "show", "pinned", str(bpffs / "link")]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "cgroup_mkdir" in shown
    drops = Map.of_descriptor(libbpf.pinned(str(bpffs / "drops")))
    assert (drops.name, drops.key_size, drops.value_size, drops.max_entries) == ("drops", 4, 8, 1)
    assert drops.lookup(bytes(4)) == bytes(8)
    assert libbpf.program_of_link(libbpf.pinned(str(bpffs / "link"))) == program
    with pytest.raises(BpfError, match=r"open .*/nothing: No such file or directory"):
        libbpf.pinned(str(bpffs / "nothing"))


def test_custom_btf(tmp_path: Path) -> None:
    btf = tmp_path / "vmlinux"
    shutil.copyfile("/sys/kernel/btf/vmlinux", btf)
    with Object(open_file("cgroup_lifecycle"), btf=str(btf)) as opened:
        opened.load()
    with (
        Object(open_file("cgroup_lifecycle"), btf=str(tmp_path / "absent")) as opened,
        pytest.raises(BpfError, match=r"load cgroup_lifecycle\.bpf\.o"),
    ):
        opened.load()


def test_programs_are_not_preempted() -> None:
    """As the kernel has them: between its own functions for that, if it has such (6.10)."""
    there = "bpf_preempt_disable" in Path("/proc/kallsyms").read_text()
    with closing(Kernel()) as kernel:
        control = kernel.arity("balance_dirty_pages", known=(8, 12)) == 8
    name = "throttled_control" if control else "throttled_values"
    with load(open_file("dirty_throttle"), [name], {}) as loaded:
        number = loaded.programs[name].id
        code = lab.sh("bpftool", "prog", "dump", "xlated", "id", str(number))
    for what in ("disable", "enable"):
        assert code.count(f"bpf_preempt_{what}#") == int(there)


def test_ring_buffer() -> None:
    task = lab.hierarchies().task
    records: list[bytes] = []
    with load(open_file("cgroup_lifecycle"), LIFECYCLE, {"task_hierarchy": task.id}) as loaded:
        ring = RingBuffer(loaded.maps["cgroup_events"], records.append)
        assert ring.consume() == len(records)  # of others' cgroups, if any
        name = f"wbx-ring-{os.getpid()}"
        with lab.cgroup(task, name) as group:
            wanted = group.id
        ring.consume()
        ring.close()
    own = [record for record in records if f"/{name}".encode() in record]
    assert len(own) >= 2
    assert all(struct.unpack_from("=Q", record)[0] == wanted for record in own)


def test_kernel_btf() -> None:
    btf = KernelBtf()
    assert btf.tracepoint_arity("cgroup_mkdir") == 2
    assert btf.tracepoint_arity("no_such_tracepoint") is None
    # (file, start, end, datasync)
    assert btf.function_arity("vfs_fsync_range") == 4
    assert btf.function_arity("no_such_function") is None
    assert btf.enum_value("pid_type", "PIDTYPE_PID") == 0  # include/linux/pid_types.h
    assert btf.enum_value("pid_type", "no_such_member") is None
    assert btf.enum_value("no_such_enum", "PIDTYPE_PID") is None
    assert btf.has_field("list_head", "next")
    assert btf.has_field("list_head", "prev")
    assert not btf.has_field("list_head", "no_such_field")
    assert not btf.has_field("no_such_struct", "next")
    btf.close()
    with pytest.raises(BpfError, match="read BTF of /dev/null"):
        KernelBtf("/dev/null")


def test_a_kernel_without_the_tracepoint(tmp_path: Path) -> None:
    kernel = Kernel()
    with pytest.raises(Refused, match="the kernel has no tracepoint no_such_thing; use a kernel"):
        kernel.arity("no_such_thing", known=(1,))
    kernel.close()
    file = compiled(tmp_path, 'SEC("tp_btf/no_such_thing") int absent(void *ctx) { return 0; }')
    with pytest.raises(Refused) as caught:
        load(file, ["absent"], {})
    assert caught.value.reason == "not in this kernel"


def test_a_tracepoint_of_unknown_arguments() -> None:
    kernel = Kernel()
    with pytest.raises(Refused, match=r"has 2 arguments on this kernel.*; upgrade") as caught:
        kernel.arity("cgroup_mkdir", known=(7,))
    assert caught.value.reason == "unknown tracepoint"
    kernel.close()


def test_a_program_that_the_verifier_refuses(tmp_path: Path) -> None:
    """Its own words are in the message."""
    bad = 'SEC("tp_btf/cgroup_mkdir") int bad(unsigned long long *ctx) { return ctx[11]; }'
    with pytest.raises(Refused) as caught:
        load(compiled(tmp_path, bad), ["bad"], {})
    assert caught.value.reason == "refused by the verifier"
    assert "invalid bpf_context access" in caught.value.detail
    assert "report this" in caught.value.remedy


def compiled(directory: Path, program: str) -> ObjectFile:
    source, built = directory / "program.bpf.c", directory / "program.bpf.o"
    source.write_text(
        "#include <linux/bpf.h>\n#include <bpf/bpf_helpers.h>\n"
        'const char built_for[] SEC("exporter_version") = "x";\n'
        'char LICENSE[] SEC("license") = "GPL";\n' + program
    )
    include = f"/usr/include/{platform.machine()}-linux-gnu"
    lab.sh("clang", "-target", "bpf", "-O2", "-g", "-idirafter", include, "-c", source, "-o", built)
    return ObjectFile(str(built))


def test_statistics(throttle: Object) -> None:
    with load(open_file("cgroup_lifecycle"), LIFECYCLE, {}) as loaded:
        descriptor = libbpf.enable_stats()
        try:
            with lab.cgroup(lab.hierarchies().task, f"wbx-stats-{os.getpid()}"):
                pass
        finally:
            os.close(descriptor)
        runs = loaded.programs["cgroup_mkdir"].runs()
    assert runs.count >= 1
    assert runs.nanoseconds > 0
