# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not booted: the programs that the exporter would choose for them are the right
ones; all of the kernel that they can come to is there, of the type that they take it for, and where
they look for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import lab, variants
from tests.guest import kernels
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import BpfError, KernelBtf, Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.names.cgroups import Cgroups
from writeback_exporter.probes import block_io_limit
from writeback_exporter.probes.base import Probe
from writeback_exporter.probes.cgroup_lifecycle import CgroupLifecycle
from writeback_exporter.probes.io_uring import IoUring

from .relocated import Reached, Relocated, Relocation, relocate
from .vmlinux import btf_of

# What needs no more than tracepoints and is in all kernels.
MAIN = ("block_io", "cgroup_lifecycle", "dirty_throttle", "page_wait", "work")
PROBES: dict[str, Callable[[], Probe]] = {
    **{name: probe for name, probe in COLLECTORS.items() if issubclass(probe, Probe)},
    "cgroup_lifecycle": lambda: CgroupLifecycle(Cgroups(lab.hierarchies()), threading.Lock()),
}


@dataclass(frozen=True, slots=True)
class Types:
    """A kernel's types: in a file for libbpf, and as bpftool reads them."""

    path: Path
    shown: variants.Btf
    cmpxchg: bool
    """What no type tells: whether BPF has the instruction, which came with 5.12."""


# Of those that are booted the guests have proven with the verifier what is said of all here.
@pytest.fixture(scope="module", params=kernels.SUITES)
def types(request: pytest.FixtureRequest) -> Types:
    try:
        kernel = kernels.fetch(request.param)
    except kernels.KernelUnavailable as error:
        failure = str(error)
    else:
        path = btf_of(kernel)
        return Types(path, variants.Btf(path), cmpxchg=kernel.name != "5.10")
    pytest.fail(failure, pytrace=False)


@pytest.fixture(params=["ours", "other"])
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this compiler, and of the other release's."""
    if request.param == "other":
        monkeypatch.setattr(loader, "OBJECTS", request.getfixturevalue("other_objects"))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a probe would have loaded."""

    file: ObjectFile
    programs: tuple[str, ...]
    constants: Mapping[str, int]
    hooks: Mapping[str, str]
    """Of each program, as sections are named."""


class Chosen(Exception):
    """Raised instead of loading."""


def choice(name: str, types: Types, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> Choice:
    """What the probe's load() chooses by these types; Refused if that is nothing."""
    probe = PROBES[name]()
    found: list[Choice] = []

    def load(
        file: ObjectFile,
        programs: Sequence[str],
        constants: Mapping[str, int],
        also: Sequence[str] = (),
        targets: Mapping[str, str] | None = None,
    ) -> Object:
        with Object(file) as opened:
            ours = (p.name for p in opened.programs.values() if p.section == "raw_tp")
            names = (*programs, *also, *ours)
            hooks = {name: opened.programs[name].section for name in names}
        if not fentry and any(hook.startswith(("fentry", "fexit")) for hook in hooks.values()):
            raise Refused("not permitted", "as on a host without fentry", "do without")
        hooks |= {name: f"{hooks[name]}/{function}" for name, function in (targets or {}).items()}
        found.append(Choice(file, names, constants, hooks))
        raise Chosen

    for user in (loader, block_io_limit):
        monkeypatch.setattr(user, "load", load)
    monkeypatch.setattr(Kernel, "has_cmpxchg", lambda _: types.cmpxchg)
    with closing(Kernel()) as kernel:
        kernel.close()
        kernel.btf = KernelBtf(str(types.path))
        with suppress(Chosen):
            probe.load(kernel, lab.hierarchies())
    return found[-1]


def choices(types: Types, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Choice]:
    for name in PROBES:
        with suppress(Refused):
            yield choice(name, types, fentry, monkeypatch)


@pytest.mark.parametrize("fentry", [True, False], ids=["fentry", "tracepoints"])
def test_variants(types: Types, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name for made in choices(types, fentry, monkeypatch) for name in made.programs}
    expected = variants.expected(types.shown, fentry=fentry, cmpxchg=types.cmpxchg)
    assert {name: name in chosen for name in expected} == expected


def faults(made: Choice, types: Types) -> list[str]:
    """What the programs can come to that these types do not have, or have otherwise."""
    with Object(made.file, btf=str(types.path)) as bpf:
        for any_program in bpf.programs.values():
            any_program.autoload = any_program.name in made.programs
        bpf.set_constants(**made.constants)
        try:
            relocated = relocate(bpf, made.programs)
        except BpfError as error:
            return [str(error)]
        found = []
        for name, program in relocated.items():
            reached = Reached(program)
            found += [f"{name}: no field for instruction {at}" for at in reached.poison]
            relocations = [r for r in program.relocations if r.instruction in reached.reached]
            found += [f"{name}: {fault}" for fault in misplaced(relocations, program, types.shown)]
            arguments = hook_arguments(made.hooks[name], types.shown)
            if arguments is not None:
                found += [f"{name}: {fault}" for fault in misread(reached, relocations, arguments)]
    return found


def misplaced(
    relocations: list[Relocation], program: Relocated, btf: variants.Btf
) -> Iterator[str]:
    """Relocations for which the kernel has several types, or that it has at another place."""
    bit_fields = {(r.type, *r.path) for r in relocations if r.kind.endswith("shift_u64")}
    for relocation in relocations:
        if len(relocation.candidates) > 1:
            yield f"several types for {relocation}"
        now = program.instructions[relocation.instruction]
        value = now.immediate if now.code & 7 in {0, 4, 7} else now.offset
        match relocation.kind:
            case "byte_off" if (relocation.type, *relocation.path) not in bit_fields:
                expected = {bits // 8 for bits in btf.offsets(relocation.type, relocation.path)}
            case "field_exists":
                expected = {bool(btf.offsets(relocation.type, relocation.path))}
            case "enumval_value":
                expected = btf.numbers(relocation.type, *relocation.path)
            case "enumval_exists":
                expected = {bool(btf.numbers(relocation.type, *relocation.path))}
            case _:
                continue
        if expected != {value}:
            yield f"{value} for {relocation}, which bpftool shows at {expected}"


def hook_arguments(hook: str, btf: variants.Btf) -> list[str] | None:
    """Of each argument of the hook the struct that it points to; None where it has no types."""
    kind, _, name = hook.partition("/")
    match kind:
        case "tp_btf":
            return btf.arguments(name)
        case "fentry":
            return btf.parameters(name)
        case "fexit":
            return [*btf.parameters(name), ""]  # what it returned
    return None


def misread(reached: Reached, relocations: list[Relocation], arguments: list[str]) -> Iterator[str]:
    """Arguments that the hook does not have, or that point to another struct."""
    if beyond := {index for index in reached.arguments if index >= len(arguments)}:
        yield f"arguments {beyond} of {len(arguments)}"
    of_types = {r.instruction: r.type for r in relocations if r.kind == "byte_off"}
    for at, index in reached.accesses:
        if [of_types.get(at)] != arguments[index : index + 1]:
            yield f"instruction {at}: argument {index} of {arguments} as {of_types.get(at)}"


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize("fentry", [True, False], ids=["fentry", "tracepoints"])
def test_all_is_there(types: Types, fentry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list(choices(types, fentry, monkeypatch))
    assert {f"{name}.bpf.o" for name in MAIN} <= {choice.file.name for choice in made}
    assert [fault for choice in made for fault in faults(choice, types)] == []


@pytest.mark.parametrize(
    ("field", "probe"),
    [("bi_blkg", "block_io"), ("avg_write_bandwidth", "dirty_throttle"), ("nr_pages", "work")],
)
def test_a_field_that_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, probe: str
) -> None:
    content = btf_of(kernels.fetch("7.2")).read_bytes()
    name = b"\0" + field.encode() + b"\0"
    assert content.count(name) == 1
    (tmp_path / "btf").write_bytes(content.replace(name, name.upper()))
    types = Types(tmp_path / "btf", variants.Btf(tmp_path / "btf"), cmpxchg=True)
    made = choice(probe, types, True, monkeypatch)
    assert faults(made, types)


@pytest.mark.parametrize(
    ("programs", "fault"),
    [
        # It had more arguments, and another second one.
        (("throttled_values",), "arguments"),
        (("throttled_control",), "argument 1 of"),
    ],
)
def test_another_kernels_program_is_found(
    monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...], fault: str
) -> None:
    name = "7.2" if programs == ("throttled_values",) else "6.12"
    path = btf_of(kernels.fetch(name))
    types = Types(path, variants.Btf(path), cmpxchg=True)
    made = choice("dirty_throttle", types, False, monkeypatch)
    assert not faults(made, types)
    wrong = replace(made, programs=programs, hooks={programs[0]: "tp_btf/balance_dirty_pages"})
    assert any(fault in found for found in faults(wrong, types))


@pytest.mark.parametrize(("name", "reason"), [("6.16", "time of the process"), ("6.17", "")])
def test_whose_time_an_io_uring_thread_is_given(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.16 was given up before the fix of 6.18, which 6.17 and 6.12 have got."""
    monkeypatch.setattr(loader, "load", lambda *_: None)
    with closing(Kernel()) as kernel:
        kernel.close()
        kernel.btf = KernelBtf(str(btf_of(kernels.fetch(name))))
        (feature,) = IoUring().load(kernel, lab.hierarchies())
    assert (feature.name, feature.reason) == ("io_uring_thread_time", reason)
    assert ("6.18" in feature.remedy) == bool(reason)
