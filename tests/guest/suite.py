# SPDX-License-Identifier: Apache-2.0
"""The tests in inside/: what there is, running them in a guest, and what came of each.

A test is named by its module, class and function: "test_x::test_y" or "test_x::TestZ::test_y". Its
parametrized cases, which only pytest in the guest knows, count as one.
"""

import ast
import shlex
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import vm
from .kernels import Kernel

INSIDE = Path(__file__).with_name("inside").resolve()
# Below the time limits that CI systems have for a job, and many times what the tests take.
TIMEOUT_SECONDS = 1800

# pytest's exit codes for "all passed" and "some failed"; others mean that it did not get so far.
RAN = (0, 1)


class SuiteError(Exception):
    """The tests in the guest did not run to their end; with the end of what they printed."""


@dataclass(frozen=True)
class Case:
    """One test case in the guest: `test` with its parameters is `name`."""

    test: str
    name: str
    outcome: str  # "passed", "failed", "skipped" or "xfailed"
    text: str  # the reason or, for a failure, all that pytest has to say


@dataclass(frozen=True)
class Report:
    """What came of the tests on one kernel."""

    kernel: Kernel
    result: vm.Result
    cases: tuple[Case, ...]

    def of(self, test: str) -> list[Case]:
        """The cases of `test`; or the one of its module, where that was skipped or failed."""
        module = test.partition("::")[0]
        return [case for case in self.cases if case.test in {test, module}]


def declared() -> list[str]:
    """The tests in inside/, found without an import: that may need the guest's kernel."""
    found = []
    for path in sorted(INSIDE.glob("test_*.py")):
        module = ast.parse(path.read_text(), str(path))
        found += [f"{path.stem}::{name}" for name in _functions(module.body)]
    return found


def _functions(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test"):
            yield statement.name
        elif isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            yield from (f"{statement.name}::{name}" for name in _functions(statement.body))


# Its guest boots with cgroup v1 (init.sh), where the others' tests find no v2.
ALONE = "test_cgroup_v1"
CGROUP_V1 = "writeback_guest.cgroup=v1"


def parts(tests: Sequence[str]) -> list[list[str]]:
    """What to `run` for these tests, in parts: modules, where all of a module's are among them, and
    tests. One or two of about as many tests, and one for the module that must be alone."""
    modules = _by_module(tests)
    alone = modules.pop(ALONE, [])
    all_of = _by_module(declared())
    dealt: list[tuple[int, list[str]]] = [(0, []), (0, [])]
    for module in sorted(modules, key=lambda module: len(modules[module]), reverse=True):
        found = modules[module]
        dealt.sort(key=lambda part: part[0])
        count, part = dealt[0]
        whole = set(found) == set(all_of.get(module, ()))
        dealt[0] = count + len(found), [*part, *([module] if whole else found)]
    return [part for part in (*(part for _, part in dealt), alone) if part]


def _by_module(tests: Iterable[str]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for test in tests:
        modules.setdefault(test.partition("::")[0], []).append(test)
    return modules


def run(
    kernel: Kernel, selected: Sequence[str], out: Path, stop: threading.Event | None = None
) -> Report:
    """Run the `selected` tests and modules, or all if there are none, in one guest.

    `out` gets what the guest leaves, junit.xml among it; `stop` ends it. Raises SuiteError and
    vm.GuestError.
    """
    arguments = [_argument(test) for test in selected] or [str(INSIDE)]
    command = shlex.join(
        [
            # The import of hypothesis alone, by its plugin, takes 10 s of emulated time.
            *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"),
            *(sys.executable, "-m", "pytest", "--verbose", "-p", "no:cacheprovider"),
            # Not the conftest.py beside this file, which would start a guest in the guest.
            *(f"--rootdir={vm.CHECKOUT}", f"--confcutdir={INSIDE}"),
            *("--continue-on-collection-errors", "-o", "junit_logging=out-err"),
            *("-o", "junit_family=xunit2", "--junitxml=/out/junit.xml"),
            *arguments,
        ]
    )
    (out / "junit.xml").unlink(missing_ok=True)
    alone = {test.partition("::")[0] for test in selected} == {ALONE}
    append = CGROUP_V1 if alone else ""
    result = vm.run(kernel, command, out=out, timeout=TIMEOUT_SECONDS, append=append, stop=stop)
    if result.exit_code not in RAN:
        tail = "\n".join(result.output.splitlines()[-60:])
        raise SuiteError(
            f"pytest on kernel {kernel.release} ended with {result.exit_code}; it printed:\n{tail}"
        )
    return Report(kernel, result, tuple(cases(out / "junit.xml")))


def _argument(test: str) -> str:
    module, colons, function = test.partition("::")
    return f"{INSIDE / module}.py{colons}{function}"


def cases(junit: Path) -> Iterator[Case]:
    """The test cases of a junit.xml, and what failed or was skipped as a whole module."""
    prefix = ".".join(INSIDE.relative_to(vm.CHECKOUT).parts) + "."
    for element in ElementTree.parse(junit).iter("testcase"):
        # "tests.guest.inside.test_x.TestZ" and "test_y[1]"; a module has no class name.
        parts = (element.get("classname", ""), element.get("name", ""))
        name = ".".join(filter(None, parts)).removeprefix(prefix)
        function, bracket, parameters = name.partition("[")
        test = function.replace(".", "::")
        yield Case(test, test + bracket + parameters, *_outcome(element))


def _outcome(element: ElementTree.Element) -> tuple[str, str]:
    skipped = element.find("skipped")
    if skipped is not None:
        xfailed = skipped.get("type") == "pytest.xfail"
        # The text has the place as well; for a module, the message is just "collection skipped".
        return "xfailed" if xfailed else "skipped", skipped.text or skipped.get("message") or ""
    failures = [*element.findall("failure"), *element.findall("error")]
    if not failures:
        return "passed", ""
    texts = [failure.text or failure.get("message") or "" for failure in failures]
    for captured in [*element.findall("system-out"), *element.findall("system-err")]:
        heading, _, text = (captured.text or "").partition("\n")
        if text.strip():
            texts.append(f"{heading}\n{text.rstrip()}")
    return "failed", "\n".join(texts)
