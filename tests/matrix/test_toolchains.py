# SPDX-License-Identifier: Apache-2.0
"""The other Debian release's compiler, libbpf and Python: all builds and works there, and objects
that the one release built work with the other and on all kernels."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guest import kernels, offer, vm
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.loader import OBJECTS

from .conftest import Run

NAMES = sorted(path.name for path in OBJECTS.glob("*.bpf.o"))


def test_versions_differ(there: Run) -> None:
    """Else the others prove nothing."""
    versions = "clang --version; python3 --version; dpkg-query -W -f '${Version}\n' libbpf1"
    here = subprocess.run(["sh", "-c", versions], capture_output=True, text=True, check=True)
    other = there(versions)
    assert other.returncode == 0, other.stderr
    print(here.stdout, other.stdout)

    def numbers(said: str) -> tuple[str, str, str]:
        lines = said.splitlines()
        return lines[0], lines[-2], lines[-1]

    for mine, its in zip(numbers(here.stdout), numbers(other.stdout), strict=True):
        assert mine != its


def test_unit_tests(there: Run) -> None:
    said = there(
        ".venv/bin/pip install --quiet -e '.[test]' && .venv/bin/python -m pytest -q tests/unit"
    )
    assert said.returncode == 0, said.stdout[-6000:] + said.stderr
    assert " passed" in said.stdout


DOCTOR = ".venv/bin/writeback-exporter doctor"


def test_all_there(there: Run) -> None:
    said = there(DOCTOR)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("name", NAMES)
def test_layouts_are_the_same(other_objects: Path, name: str) -> None:
    mine, its = (ObjectFile(str(place / name)) for place in (OBJECTS, other_objects))
    assert (OBJECTS / name).read_bytes() != (other_objects / name).read_bytes()
    assert mine.maps == its.maps
    assert mine.version == its.version


def test_these_objects_there(there: Run, other_objects: Path) -> None:
    kept = other_objects.with_name("objects.its")
    shutil.move(other_objects, kept)
    try:
        shutil.copytree(OBJECTS, other_objects)
        said = there(DOCTOR)
    finally:
        shutil.rmtree(other_objects)
        shutil.move(kept, other_objects)
    assert said.returncode == 0, said.stdout + said.stderr


def test_its_objects_here(other_objects: Path) -> None:
    """Throttling and IO are counted exactly by them on this host."""
    tests = ["tests/host/test_block_io.py", "tests/host/test_dirty_throttle.py"]
    command = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    mount = f"mount --bind {shlex.quote(str(other_objects))} {shlex.quote(str(OBJECTS))}"
    said = subprocess.run(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", f"{mount} && exec {command}"],
        cwd=vm.CHECKOUT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout[-6000:] + said.stderr


@pytest.mark.parametrize("name", offer.KERNELS)
def test_its_objects_on_each_kernel(other_objects: Path, name: str, tmp_path: Path) -> None:
    """The verifiers of all kernels accept what the other compiler made."""
    try:
        kernel = kernels.fetch(name)
    except kernels.KernelUnavailable as error:
        pytest.fail(str(error), pytrace=False)
    made = offer.gather(kernel, tmp_path, other_objects)
    assert made.column == offer.documented(name)
    assert sum(runs for runs, _ in made.loaded.values()) > 1000
