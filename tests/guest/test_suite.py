# SPDX-License-Identifier: Apache-2.0
"""What a test in a guest came to is what is reported here; run without a guest, for speed."""

import subprocess
from pathlib import Path

import pytest

from . import suite, vm
from .kernels import Kernel
from .test_guest import test_inside as report_inside
from .test_guest import test_suite as report_suite

KERNEL = Kernel("6.1", "6.1.9-1", "6.1.0-1-cloud-amd64", Path("/nowhere"))

SAMPLE = """
import pytest

@pytest.mark.parametrize("number", [1, 2.5])
def test_passes(number): pass

@pytest.mark.parametrize("number", [1, 2])
def test_one_case_fails(number):
    print("heard", "of")
    assert number == 1

def test_skips(): pytest.skip("no such device")

@pytest.mark.parametrize("number", [1, 2])
def test_one_case_skips(number):
    if number == 1: pytest.skip("odd")

@pytest.mark.xfail
def test_known_failure(): raise OSError

class TestClass:
    def test_method(self): pass

@pytest.fixture
def broken(): raise OSError("no fixture")

def test_setup_fails(broken): pass

@pytest.fixture
def leaves_something():
    yield
    raise OSError("still there")

def test_teardown_fails(leaves_something): pass
"""
SKIPPED_MODULE = """
import pytest
pytest.skip("not on this kernel", allow_module_level=True)
def test_a(): pass
"""
BROKEN_MODULE = """
import no_such_module
def test_a(): pass
"""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in the place of inside/, whose tests run on this host."""

    def run(
        kernel: Kernel, command: str, *, out: Path, timeout: float, append: str, stop: None
    ) -> vm.Result:
        command = command.replace("/out/", f"{out}/")
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return vm.Result(done.returncode, done.stdout, "", "", out, 0.0)

    directory = tmp_path / "tests/inside"
    directory.mkdir(parents=True)
    monkeypatch.setattr(vm, "CHECKOUT", tmp_path)
    monkeypatch.setattr(vm, "run", run)
    monkeypatch.setattr(suite, "INSIDE", directory)
    return directory


def test_outcomes(inside: Path, tmp_path: Path) -> None:
    (inside / "test_sample.py").write_text(SAMPLE)
    (inside / "test_skipped.py").write_text(SKIPPED_MODULE)
    (inside / "test_broken.py").write_text(BROKEN_MODULE)
    report = suite.run(KERNEL, [], tmp_path)
    outcomes = {test: sorted(case.outcome for case in report.of(test)) for test in suite.declared()}
    assert outcomes == {
        "test_broken::test_a": ["failed"],
        "test_sample::test_passes": ["passed", "passed"],
        "test_sample::test_one_case_fails": ["failed", "passed"],
        "test_sample::test_skips": ["skipped"],
        "test_sample::test_one_case_skips": ["passed", "skipped"],
        "test_sample::test_known_failure": ["xfailed"],
        "test_sample::TestClass::test_method": ["passed"],
        "test_sample::test_setup_fails": ["failed"],
        "test_sample::test_teardown_fails": ["failed"],
        "test_skipped::test_a": ["skipped"],
    }
    report_suite([report])
    report_inside([report], "test_sample::test_passes")
    report_inside([report], "test_sample::test_one_case_skips")
    report_inside([report], "test_sample::TestClass::test_method")
    failures = {
        "test_broken::test_a": "no_such_module",
        "test_sample::test_one_case_fails": r"test_one_case_fails\[2\](?s:.)*assert 2 == 1"
        r"(?s:.)*heard of",
        "test_sample::test_setup_fails": "no fixture",
        "test_sample::test_teardown_fails": "still there",
        "test_sample::test_of_which_nothing_is_known": "did not run",
    }
    for test, text in failures.items():
        with pytest.raises(pytest.fail.Exception, match=text):
            report_inside([report], test)
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        report_inside([report], "test_sample::test_skips")
    with pytest.raises(pytest.skip.Exception, match="not on this kernel"):
        report_inside([report], "test_skipped::test_a")
    with pytest.raises(pytest.xfail.Exception):
        report_inside([report], "test_sample::test_known_failure")


def test_selected(inside: Path, tmp_path: Path) -> None:
    (inside / "test_sample.py").write_text(SAMPLE)
    report = suite.run(KERNEL, ["test_sample::TestClass::test_method"], tmp_path)
    assert [case.name for case in report.cases] == ["test_sample::TestClass::test_method"]


def test_parts_have_every_test_once(inside: Path) -> None:
    (inside / "test_sample.py").write_text(SAMPLE)
    (inside / "test_skipped.py").write_text(SKIPPED_MODULE)
    (inside / "test_broken.py").write_text(BROKEN_MODULE)
    parts = suite.parts(suite.declared())
    assert sorted(map(sorted, parts)) == [["test_broken", "test_skipped"], ["test_sample"]]
    some = suite.parts(["test_sample::test_passes", "test_skipped::test_a"])
    assert sorted(some) == [["test_sample::test_passes"], ["test_skipped"]]
    assert suite.parts(["test_broken::test_a"]) == [["test_broken"]]
    alone = f"{suite.ALONE}::test_x"
    assert sorted(suite.parts([*some[0], alone, *some[1]])) == sorted([*some, [alone]])


def test_unseen_test(inside: Path, tmp_path: Path) -> None:
    (inside / "test_made.py").write_text("globals()['test_made'] = lambda: None")
    report = suite.run(KERNEL, [], tmp_path)
    with pytest.raises(AssertionError, match="test_made::test_made"):
        report_suite([report])


@pytest.mark.usefixtures("inside")
def test_nothing_to_run(tmp_path: Path) -> None:
    """pytest's exit code 5, "no tests collected", is a failure."""
    with pytest.raises(suite.SuiteError, match="ended with 5"):
        suite.run(KERNEL, [], tmp_path)
