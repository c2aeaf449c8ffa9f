# SPDX-License-Identifier: Apache-2.0
"""What each kernel offers to the exporter, as docs/kernels.md has it.

    python -m tests.guest.offer    # boots the kernels and writes docs/kernels.md

test_offer.py keeps that file true. Of its figures it does not: they differ from run to run.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from writeback_exporter.kernel.loader import OBJECTS

from . import kernels, vm

DOCUMENT = vm.CHECKOUT / "docs/kernels.md"
KERNELS = ("5.10", "6.1", "6.12", "6.18", "7.3")
COMMAND = shlex.join([sys.executable, "-m", "tests.guest.inside.offer"])
# Below, an average is that of the emulator's translation of the program, not of its runs.
ENOUGH_RUNS = 100

INTRODUCTION = """\
# What each kernel offers

Written by `python -m tests.guest.offer`, which boots Debian's cloud kernels (x86-64) and runs the
exporter with all collectors, as root with cgroup v2, io and memory on. `make test` holds it to what
the kernels say on the day. Between 6.12 and 7.3 the objects are checked against the BTF of 6.16,
6.17, 6.19, 7.0, 7.1 and 7.2 as well, without booting them.
"""
FEATURES = """\
## Features

"yes", or the `reason` of `writeback_exporter_feature_available`, which
[troubleshooting.md](troubleshooting.md) explains.
"""
PROGRAMS = """\
## Programs

The programs that the exporter chose, by the kernel's BTF and by asking it, and where they are
attached. A figure is the nanoseconds of a run by the kernel's own statistics
(`kernel.bpf_stats_enabled`), here **in an emulated machine**, 10 to 20 times slower than a real
one: compare within a column. `make bench` measures on real CPUs. "x": it had too few runs for one.
"""
METHODS = """\
## Measured and requested sleep

What `writeback_dirty_throttle_seconds` is made of. With `method="fexit"` it is the sleep as
measured. Where only tracepoints are to be had, the requested pause stands for it
(`method="requested"`) and is too little: the kernel's timer rounds each pause up by a tick, 4 ms in
Debian's kernels, and the task runs a little later still. The shorter the pauses, the more that is;
here they were those of one writer to a slow disk.
"""


@dataclass(frozen=True)
class Offer:
    """What the exporter found on a kernel, and what that kernel said of it."""

    name: str
    release: str
    features: Mapping[str, str]
    """Reasons, empty where the feature works."""
    programs: Sequence[str]
    """OBJECT/PROGRAM of those that are attached, as the exporter says."""
    loaded: Mapping[str, tuple[int, int]]
    """Runs and nanoseconds of the programs that the kernel has, by their names there."""
    linked: frozenset[str]
    """Names of those that the kernel has a link for."""
    tracepoints: Mapping[str, str]
    """Where the kernel says that a program is attached, by its name."""
    functions: frozenset[str]
    """Those that ftrace says call a BPF trampoline."""
    pauses: int
    """That were slept."""
    requested_seconds: float
    measured_seconds: float
    btf: Path

    def cost(self, program: str) -> str:
        runs, nanoseconds = self.loaded[program.partition("/")[2]]
        return f"{nanoseconds / runs:,.0f}" if runs >= ENOUGH_RUNS else "x"

    @cached_property
    def column(self) -> dict[str, str]:
        """What the document's tables have of this kernel, by their rows' first cells; a program's
        figure is "x"."""
        return {
            **{name: reason or "yes" for name, reason in self.features.items()},
            **dict.fromkeys(self.programs, "x"),
        }


def gather(kernel: kernels.Kernel, out: Path, objects: Path | None = None) -> Offer:
    """Boots the kernel; `out` gets what the guest leaves. `objects` are another compiler's. Raises
    vm.GuestError."""
    # One CPU: with two, now and then the emulator turns to the other one in the middle of a program
    # (58,344 ns a run, where with one it is 4,714).
    result = vm.run(kernel, COMMAND, out=out, objects=objects, cpus=1)
    if result.exit_code:
        raise vm.GuestError(f"{COMMAND} on {kernel.release} failed:\n{result.output}")
    told = json.loads((out / "offer.json").read_text())
    names = {int(number): program["name"] for number, program in told["kernel_programs"].items()}
    return Offer(
        name=kernel.name,
        release=told["release"],
        features=told["features"],
        programs=told["programs"],
        loaded={p["name"]: (p["runs"], p["nanoseconds"]) for p in told["kernel_programs"].values()},
        linked=frozenset(names[number] for number in told["links"]),
        tracepoints={names[int(n)]: tracepoint for n, tracepoint in told["tracepoints"].items()},
        functions=frozenset(told["functions"]),
        pauses=told["pauses"],
        requested_seconds=told["requested_seconds"],
        measured_seconds=told["measured_seconds"],
        btf=out / "btf",
    )


def hooks() -> dict[str, str]:
    """The section of each program of all objects, by OBJECT/PROGRAM, which says what it is for:
    "tp_btf/block_rq_issue". Without a name behind the slash the exporter chooses the function."""
    found = {}
    for path in sorted(OBJECTS.glob("*.bpf.o")):
        with open(path, "rb") as stream:
            elf = ELFFile(stream)
            symbols = elf.get_section_by_name(".symtab")
            assert isinstance(symbols, SymbolTableSection)
            for symbol in symbols.iter_symbols():
                if symbol["st_info"]["type"] == "STT_FUNC":
                    section = elf.get_section(symbol["st_shndx"]).name
                    if section != ".text":  # of functions that programs call
                        found[f"{path.name.removesuffix('.bpf.o')}/{symbol.name}"] = section
    return found


def document(offers: Sequence[Offer]) -> str:
    """docs/kernels.md."""
    names = [offer.name for offer in offers]
    features = dict.fromkeys(name for offer in offers for name in offer.features)
    sections = hooks()
    programs = sorted({program for offer in offers for program in offer.programs})
    parts = [
        INTRODUCTION,
        _table(["kernel", *names], [["release", *(offer.release for offer in offers)]]),
        FEATURES,
        _table(
            ["feature", *names],
            [[name, *(offer.column.get(name, "") for offer in offers)] for name in features],
        ),
        PROGRAMS,
        _table(
            ["program", "attached to", *names],
            [
                [
                    program,
                    f"`{sections[program]}`",
                    *(o.cost(program) if program in o.programs else "" for o in offers),
                ]
                for program in programs
            ],
        ),
        METHODS,
        _table(
            ["", *names],
            [
                ["pauses", *(f"{o.pauses}" for o in offers)],
                ["mean requested", *(_ms(o.requested_seconds / o.pauses) for o in offers)],
                ["mean measured", *(_ms(o.measured_seconds / o.pauses) for o in offers)],
                [
                    "requested / measured",
                    *(f"{100 * o.requested_seconds / o.measured_seconds:.0f} %" for o in offers),
                ],
            ],
        ),
    ]
    return "\n".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def documented(name: str) -> dict[str, str]:
    """The column of a kernel in the document, as Offer.column has it."""
    column: dict[str, str] = {}
    for head, *rows in _tables(DOCUMENT.read_text()):
        if head[0] not in {"feature", "program"}:
            continue
        at = head.index(name)
        for row in rows:
            if row[at]:
                column[row[0]] = "x" if head[0] == "program" else row[at]
    return column


def _tables(text: str) -> Iterator[list[list[str]]]:
    table: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            yield [table[0], *table[2:]]
            table = []


def main() -> None:
    with TemporaryDirectory() as top, ThreadPoolExecutor(vm.AT_ONCE) as pool:

        def offer(name: str) -> Offer:
            out = Path(top, name)
            out.mkdir()
            return gather(kernels.fetch(name), out)

        DOCUMENT.write_text(document(list(pool.map(offer, KERNELS))))


if __name__ == "__main__":
    main()
