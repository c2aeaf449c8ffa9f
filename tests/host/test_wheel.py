# SPDX-License-Identifier: Apache-2.0
"""The wheel carries the compiled objects: installed elsewhere, it runs without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests import lab

ROOT = Path(__file__).parents[2]


def test_wheel_runs_where_there_is_no_compiler(tmp_path: Path) -> None:
    here = ("-q", "--no-deps", "--no-build-isolation")  # what builds it is installed for tests
    lab.sh(sys.executable, "-m", "pip", "wheel", *here, "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("writeback_exporter-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.name.removesuffix(".c") for path in (ROOT / "bpf").glob("*.bpf.c")}
    assert {f"writeback_exporter/objects/{source}.o" for source in sources} <= set(names)
    assert "writeback_exporter/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "bpf"))]

    lab.sh(sys.executable, "-m", "venv", tmp_path / "venv")
    lab.sh(tmp_path / "venv/bin/pip", "install", "-q", wheel)
    done = subprocess.run(
        [tmp_path / "venv/bin/writeback-exporter", "doctor"],
        env={"PATH": os.fspath(tmp_path)},  # no clang, no make
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The main signals work here." in done.stdout
