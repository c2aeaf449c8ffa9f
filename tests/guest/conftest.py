# SPDX-License-Identifier: Apache-2.0
"""Fixtures `kernel` and `guest`: every test that uses one of them runs once for each kernel.

The environment variable GUEST_KERNELS names the kernels, "6.1 7.3" for example.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import kernels, suite, vm

# They run in a guest: test_guest.py reports them.
collect_ignore = ["inside"]

DEFAULT_KERNELS = ["5.10", "6.1", "7.3"]

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


def _names(item: pytest.Item) -> Sequence[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else ()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what needs no certain kernel, as it tests the machinery and so may not run beside it;
    then what has guests of its own, while the suites run in the background; these last."""
    items.sort(key=lambda item: ("kernel" in _names(item), "guests" in _names(item)))


class Suites:
    """The tests in inside/, begun on all kernels at once; vm.run() keeps them waiting."""

    def __init__(self, config: pytest.Config, factory: pytest.TempPathFactory) -> None:
        self._config = config
        self._factory = factory
        self._stop = threading.Event()
        self._runs: dict[str, list[Future[Attempt]]] = {}
        self._pool = ThreadPoolExecutor(vm.AT_ONCE)

    def begin(self, kernel: kernels.Kernel, tests: Sequence[str]) -> None:
        """In two guests, and others for a short while."""
        self._runs[kernel.name] = [
            self._pool.submit(
                self._run, kernel, part, self._factory.mktemp(f"guest-{kernel.name}-")
            )
            for part in suite.parts(tests)
        ]

    def _run(self, kernel: kernels.Kernel, tests: Sequence[str], out: Path) -> Attempt:
        # A test that waits for a slot has its turn first, or it would wait until all is done.
        self._stop.wait(1)
        try:
            return Attempt(suite.run(kernel, tests, out, self._stop))
        except (suite.SuiteError, vm.GuestError) as error:
            return Attempt(failure=str(error))

    def attempts(self, kernel: kernels.Kernel) -> list[Attempt]:
        """What came of them on this kernel; waits for that."""
        made = [run.result() for run in self._runs[kernel.name]]
        self._config.stash[_REPORTS] += [attempt.report for attempt in made if attempt.report]
        return made

    def close(self) -> None:
        """Stops what still runs: nobody wants its results any more."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def suites(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Suites]:
    """The tests in inside/ that are selected, with -k, on their way."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "guests" in item.fixturenames:
            parameters = item.callspec.params
            tests = selected.setdefault(str(parameters["kernel"]), [])
            tests += [str(parameters["inner"])] if "inner" in parameters else []
    suites = Suites(request.config, tmp_path_factory)
    try:
        for name, tests in selected.items():
            with suppress(kernels.KernelUnavailable):  # its tests' fixture `kernel` fails
                suites.begin(kernels.fetch(name), tests or suite.declared())
        yield suites
    finally:
        suites.close()


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest, suites: Suites) -> kernels.Kernel:
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
def guests(attempts: list[Attempt]) -> list[suite.Report]:
    """What came of the tests in inside/ on this kernel. Fails where they did not run to the end."""
    for attempt in attempts:
        if attempt.report is None:
            failure = attempt.failure
            # Each test that wants these guests fails; the logs' ends are in the first one's report.
            attempt.failure = failure.partition("\n")[0]
            pytest.fail(failure, pytrace=False)
    return [attempt.report for attempt in attempts if attempt.report]


@pytest.fixture(scope="session")
def attempts(kernel: kernels.Kernel, suites: Suites) -> list[Attempt]:
    return suites.attempts(kernel)


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
