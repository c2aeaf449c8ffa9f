# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not booted: the programs that the exporter would choose for them are the right
ones, and all fields that they can come to are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import lab, variants
from tests.guest import kernels
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.features import Refused
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import KernelBtf, Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.probes.base import Probe

from .relocated import instructions, reachable_poison, relocate
from .vmlinux import btf_of

# Where the guests have proven with the verifier what is said of these here.
BOOTED = ("6.12", "6.18", "7.3")
PROBES = [probe for probe in COLLECTORS.values() if issubclass(probe, Probe)]


@pytest.fixture(scope="module", params=[*kernels.UNBOOTED, *BOOTED])
def btf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        kernel = kernels.fetch(request.param)
    except kernels.KernelUnavailable as error:
        failure = str(error)
    else:
        path = tmp_path_factory.mktemp("btf") / kernel.name
        path.write_bytes(btf_of(kernel.vmlinuz))
        return path
    pytest.fail(failure, pytrace=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a probe would have loaded."""

    file: ObjectFile
    programs: tuple[str, ...]
    constants: Mapping[str, int]


class Chosen(Exception):
    """Raised instead of loading."""


def choice(probe: type[Probe], btf: Path, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> Choice:
    """What the probe's load() chooses by these types; Refused if that is nothing."""
    found: list[Choice] = []

    def load(
        file: ObjectFile,
        programs: Sequence[str],
        constants: Mapping[str, int],
        also: Sequence[str] = (),
        targets: Mapping[str, str] | None = None,
    ) -> Object:
        names = (*programs, *also)
        with Object(file) as opened:
            sections = [opened.programs[name].section for name in names]
        if not fentry and any(s.startswith(("fentry", "fexit")) for s in sections):
            raise Refused("not permitted", "as on a host without fentry", "do without")
        found.append(Choice(file, names, constants))
        raise Chosen

    monkeypatch.setattr(sys.modules[probe.__module__], "load", load)
    with closing(Kernel()) as kernel:
        kernel.close()
        kernel.btf = KernelBtf(str(btf))
        with suppress(Chosen):
            probe().load(kernel, lab.hierarchies())
    return found[-1]


def choices(btf: Path, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Choice]:
    for probe in PROBES:
        with suppress(Refused):
            yield choice(probe, btf, fentry, monkeypatch)


@pytest.mark.parametrize("fentry", [True, False], ids=["fentry", "tracepoints"])
def test_variants(btf: Path, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name for made in choices(btf, fentry, monkeypatch) for name in made.programs}
    expected = variants.expected(btf, fentry=fentry, cmpxchg=True)
    assert {name: name in chosen for name in expected} == expected


def poisoned(made: Choice, btf: Path) -> set[str]:
    """The programs that can come to a field which these types do not have."""
    with Object(made.file, btf=str(btf)) as bpf:
        for program in bpf.programs.values():
            program.autoload = program.name in made.programs
        bpf.set_constants(**made.constants)
        if not relocate(bpf):
            return set(made.programs)
        return {n for n in made.programs if reachable_poison(instructions(bpf, n))}


@pytest.mark.parametrize("fentry", [True, False], ids=["fentry", "tracepoints"])
def test_fields_are_there(btf: Path, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list(choices(btf, fentry, monkeypatch))
    assert len(made) > 5
    assert {m.file.path: poisoned(m, btf) for m in made} == {m.file.path: set() for m in made}


@pytest.mark.parametrize(
    ("field", "probe"),
    [("bi_blkg", "block_io"), ("avg_write_bandwidth", "dirty_throttle"), ("nr_pages", "work")],
)
def test_a_field_that_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, probe: str
) -> None:
    types = btf_of(kernels.fetch("7.2").vmlinuz)
    name = b"\0" + field.encode() + b"\0"
    assert types.count(name) == 1
    (tmp_path / "btf").write_bytes(types.replace(name, name.upper()))
    made = choice(COLLECTORS[probe], tmp_path / "btf", True, monkeypatch)  # type: ignore[arg-type]
    assert poisoned(made, tmp_path / "btf")
