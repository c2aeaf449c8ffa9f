# SPDX-License-Identifier: Apache-2.0
"""Runs the tests in inside/ on each kernel, and reports each of them here."""

import re

import pytest

from . import suite

# Also what comes from a test that did its work, such as a warning in a BPF helper.
COMPLAINTS = re.compile(r"WARNING: |BUG: |Oops|rcu: INFO: .* stall|blocked for more than")


def test_suite(guests: list[suite.Report]) -> None:
    """Something ran, and no more than is reported below."""
    known = suite.declared()
    modules = {test.partition("::")[0] for test in known}
    for guest in guests:
        assert guest.cases, f"no tests ran:\n{guest.result.output}"
        unknown = [case.name for case in guest.cases if case.test not in {*known, *modules}]
        assert not unknown, (
            f"reported by no test here, for suite.declared() does not see them: {unknown}"
        )


def test_inside(guests: list[suite.Report], inner: str) -> None:
    cases = [case for guest in guests for case in guest.of(inner)]
    outcomes = {case.outcome for case in cases}
    release = guests[0].kernel.release
    text = "\n\n".join(
        f"{case.name} on {release}: {case.text}"
        for case in cases
        if case.outcome == "failed" or outcomes <= {"skipped", "xfailed"}
    )
    if not cases:
        outs = " or ".join(f"{guest.result.out}/output" for guest in guests)
        pytest.fail(f"{inner} did not run, see {outs}", pytrace=False)
    if "failed" in outcomes:
        pytest.fail(text, pytrace=False)
    if outcomes == {"skipped"}:
        pytest.skip(text)
    if outcomes <= {"skipped", "xfailed"}:
        pytest.xfail(text)


def test_kernel_log(guests: list[suite.Report]) -> None:
    """The kernel had nothing to complain about, from boot to the last test."""
    for guest in guests:
        lines = guest.result.kernel_log.splitlines()
        assert len(lines) > 50, "the guest left no kernel log"
        complaints = [line for line in lines if COMPLAINTS.search(line)]
        assert not complaints, "\n".join([*complaints, f"see {guest.result.out}/dmesg"])
