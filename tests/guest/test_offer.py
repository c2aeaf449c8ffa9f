# SPDX-License-Identifier: Apache-2.0
"""On each kernel the exporter chooses the programs that are right for it, they are attached where
they belong, and docs/kernels.md says so."""

import pytest

from tests import variants

from . import offer as offers
from .kernels import Kernel
from .offer import Offer


@pytest.fixture(scope="module")
def offer(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Offer:
    return offers.gather(kernel, tmp_path_factory.mktemp(f"offer-{kernel.name}-"))


def test_programs_are_attached_where_they_belong(offer: Offer) -> None:
    """As the kernel has it: each program of ours has a link, to the tracepoint of its section;
    ftrace knows the functions."""
    sections = offers.hooks()
    names = {program.partition("/")[2]: sections[program] for program in offer.programs}
    assert len(names) == len(offer.programs), "two objects have programs of one name"
    assert offer.linked == set(names)
    tracepoints = {
        name: section.removeprefix("tp_btf/")
        for name, section in names.items()
        if section.startswith("tp_btf/")
    }
    assert offer.tracepoints == tracepoints
    functions = {
        function
        for kind, _, function in (section.partition("/") for section in names.values())
        if kind in {"fentry", "fexit"} and function
    }
    # Those of system calls have sections without a name, for it differs by architecture.
    calls = {function for function in offer.functions if "_sys_" in function}
    assert offer.functions - calls == functions
    assert len(calls) == list(names.values()).count("fentry")


def test_variants(offer: Offer) -> None:
    chosen = {program.partition("/")[2] for program in offer.programs}
    expected = variants.expected(variants.Btf(offer.btf), fentry=True, cmpxchg=offer.name != "5.10")
    assert {name: name in chosen for name in expected} == expected


def test_document(offer: Offer) -> None:
    assert offers.documented(offer.name) == offer.column, "run `python -m tests.guest.offer`"
