# SPDX-License-Identifier: Apache-2.0
"""Fixtures `kernel` and `guest`: every test that uses one of them runs once for each kernel.

The environment variable GUEST_KERNELS names the kernels, "6.1 7.3" for example.
"""

import os
from dataclasses import dataclass

import pytest

from . import kernels, suite, vm

# They run in a guest: test_guest.py reports them.
collect_ignore = ["inside"]

DEFAULT_KERNELS = ["6.1"]

_REPORTS = pytest.StashKey[list[suite.Report]]()
_NOTES = pytest.StashKey[set[str]]()


@dataclass
class Attempt:
    """A report or, without one, the reason."""

    report: suite.Report | None = None
    failure: str = ""


def kernel_names() -> list[str]:
    return os.environ.get("GUEST_KERNELS", "").split() or DEFAULT_KERNELS


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORTS] = []
    config.stash[_NOTES] = set()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", kernel_names(), indirect=True, scope="session")
    if "inner" in metafunc.fixturenames:
        tests = suite.declared()
        if not tests:  # parametrized with nothing, a test would be skipped
            raise pytest.UsageError(f"no tests in {suite.INSIDE}")
        metafunc.parametrize("inner", tests)


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest) -> kernels.Kernel:
    """The kernel of this test's guest. Fails where it cannot be had."""
    return _fetch(request.param, request.config)


@pytest.fixture(scope="session")
def any_kernel(request: pytest.FixtureRequest) -> kernels.Kernel:
    """The first of the kernels, for what does not depend on the kernel."""
    return _fetch(kernel_names()[0], request.config)


def _fetch(name: str, config: pytest.Config) -> kernels.Kernel:
    try:
        kernel = kernels.fetch(name)
    except kernels.KernelUnavailable as error:
        failure = str(error)
    else:
        if kernel.note:
            config.stash[_NOTES].add(f"kernel {kernel.release} is {kernel.note}")
        return kernel
    # Not as a consequence of the exception, whose traceback would be shown as well.
    pytest.fail(failure, pytrace=False)


@pytest.fixture
def guest(attempt: Attempt) -> suite.Report:
    """What came of the tests in inside/ on this kernel. Fails where they did not run to the end."""
    if attempt.report is None:
        failure = attempt.failure
        # Each test that wants this guest fails; the logs' ends are in the report of the first.
        attempt.failure = failure.partition("\n")[0]
        pytest.fail(failure, pytrace=False)
    return attempt.report


@pytest.fixture(scope="session")
def attempt(
    kernel: kernels.Kernel,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Attempt:
    """Runs the tests in inside/, all in one guest; only those that are selected, with -k."""
    selected = [
        str(item.callspec.params["inner"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "inner" in item.fixturenames
        and item.callspec.params["kernel"] == kernel.name
    ]
    if set(selected) == set(suite.declared()):
        selected = []
    try:
        report = suite.run(kernel, selected, tmp_path_factory.mktemp(f"guest-{kernel.name}-"))
    except (suite.SuiteError, vm.GuestError) as error:
        return Attempt(failure=str(error))
    request.config.stash[_REPORTS].append(report)
    return Attempt(report)


def pytest_terminal_summary(
    # Quoted, for pytest 8.3 does not export that name.
    terminalreporter: "pytest.TerminalReporter",
    config: pytest.Config,
) -> None:
    reports, notes = config.stash[_REPORTS], config.stash[_NOTES]
    if reports or notes:
        terminalreporter.section("guests")
    for report in reports:
        terminalreporter.line(
            f"{report.kernel.release}: {len(report.cases)} test cases, "
            f"{report.result.seconds:.1f} s, see {report.result.out}"
        )
        # A test of which some cases passed counts as passed.
        for case in report.cases:
            if case.outcome == "skipped":
                terminalreporter.line(f"    skipped {case.name}: {case.text}")
    for note in sorted(notes):
        terminalreporter.line(note)
