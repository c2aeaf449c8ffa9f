# SPDX-License-Identifier: Apache-2.0
"""The other Debian release's compiler, libbpf and Python: all builds and works there, and objects
that the one release built work with the other and on all kernels."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.guest import kernels, offer, vm
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import OBJECTS

from .releases import Checkout

NAMES = sorted(
    path.name.removesuffix(".c") + ".o" for path in (vm.CHECKOUT / "bpf").glob("*.bpf.c")
)
_ENUM = 6
_libbpf = ctypes.CDLL("libbpf.so.1")


@pytest.mark.parametrize(
    "command",
    [
        ("clang", "--version"),
        ("llvm-strip", "--version"),
        (sys.executable, "--version"),
        (
            *(sys.executable, "-c"),
            "import writeback_exporter.kernel.libbpf as libbpf; print(libbpf.version())",
        ),
    ],
    ids=["clang", "llvm", "python", "libbpf"],
)
def test_the_other_release_has_another(command: tuple[str, ...], other: Checkout) -> None:
    """Else all that follows says nothing."""
    assert lab.sh(*other.prefix(), *command) != lab.sh(*command)


def test_unit_tests_pass(other: Checkout) -> None:
    # What packages.test installs is for guests; the release has what unit tests call.
    lab.sh(*other.prefix(), "make", "unit", "--old-file=build/packages.test")


def definitions(path: Path) -> dict[str, Any]:
    """What the exporter relies on in an object."""
    file = ObjectFile(str(path))
    with Object(file) as bpf:
        return {
            "programs": [(program.name, program.section) for program in bpf.programs.values()],
            "maps": {
                name: (
                    *(_libbpf.bpf_map__type(pointer), bpf.maps[name].max_entries),
                    *(_libbpf.bpf_map__map_flags(pointer), bpf.maps[name].key_size),
                    bpf.maps[name].value_size,
                )
                for name, pointer in (
                    (name, ctypes.c_void_p(pointer)) for name, pointer in bpf._map_pointers.items()
                )
            },
            "layouts": file.maps,
            "constants": {name: size for name, (_, size) in file._constants.items()},
            # Of the kernel's own ones each release's headers know other members.
            "enums": {
                kind.name: kind.members
                for kind in file._types
                if kind.kind == _ENUM and kind.name != "bpf_func_id"
            },
        }


@pytest.mark.parametrize("name", NAMES)
def test_compilers_make_the_same_definitions(name: str, other: Checkout) -> None:
    ours = definitions(OBJECTS / name)
    assert ours["programs"]
    assert ours["layouts"]
    assert definitions(other.objects / name) == ours


@pytest.fixture(params=["our-objects-there", "their-objects-there", "their-objects-here"])
def prefix(request: pytest.FixtureRequest, other: Checkout) -> tuple[str, ...]:
    """Runs a command with one release's Python and libbpf and one's objects."""
    objects = OBJECTS if request.param.startswith("our") else other.objects
    if request.param.endswith("here"):
        prefix = lab.with_mounts(f"mount --bind {objects} {OBJECTS}")
    else:
        prefix = other.prefix(objects)
    for name in NAMES:
        seen = subprocess.run([*prefix, "cat", OBJECTS / name], capture_output=True, check=True)
        assert seen.stdout == (objects / name).read_bytes()
    assert (OBJECTS / NAMES[0]).read_bytes() != (other.objects / NAMES[0]).read_bytes()
    return prefix


def test_doctor_says_the_same(prefix: tuple[str, ...]) -> None:
    reference = lab.doctor()
    assert "The main signals work here." in reference.text
    assert lab.doctor(prefix=prefix) == reference


def test_requests_are_counted(prefix: tuple[str, ...], tmp_path: Path) -> None:
    """As the kernel counts them: programs load, are attached, and their maps read aright."""
    hierarchy = lab.hierarchies().io
    with (
        lab.Exporter(prefix=prefix) as exporter,
        lab.loop_disk(tmp_path) as disk,
        lab.cgroup(hierarchy, f"wbx-toolchains-{os.getpid()}") as group,
    ):
        before = disk.stats()
        lab.run_in([group], lab.DIRECT_WRITER, disk.path, 12288, 7, 0)
        scrape = exporter.scrape()
        counted = disk.stats() - before
        labels = {"device": disk.name, "op": "write", "cgroup": group.label}
        assert counted.writes == 7
        for histogram in ("size_bytes", "device_seconds", "queue_seconds"):
            assert scrape.sum(f"block_io_{histogram}_count", **labels) == counted.writes
        assert scrape.sum("block_io_size_bytes_sum", **labels) == counted.written_bytes


def test_no_mount_is_left(other: Checkout) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    script = f"grep -c {other.directory} /proc/self/mountinfo; touch /usr/written && exit 3"
    done = subprocess.run(
        [*other.prefix(), "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert int(done.stdout) > 0
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not (other.release.root / "usr/written").exists()


def test_host_tests_pass_with_its_objects(other_objects: Path) -> None:
    """Throttling and IO are counted exactly by them on this host."""
    tests = ["tests/host/test_block_io.py", "tests/host/test_dirty_throttle.py"]
    prefix = lab.with_mounts(f"mount --bind {other_objects} {OBJECTS}")
    lab.sh(*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


@pytest.mark.parametrize("name", offer.KERNELS)
def test_each_kernel_loads_its_objects(other_objects: Path, name: str, tmp_path: Path) -> None:
    """The verifiers of all kernels accept what the other compiler made."""
    try:
        kernel = kernels.fetch(name)
    except kernels.KernelUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    made = offer.gather(kernel, tmp_path, other_objects)
    assert made.column == offer.documented(name)
    assert sum(runs for runs, _ in made.loaded.values()) > 1000
