# SPDX-License-Identifier: Apache-2.0
"""bcc's biolatency against ours, in a guest whose kernel has kprobes and headers.

python -m tests.bench.bench_guest [--rounds N]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.tables import Goal, print_text
from tests.guest import kernels, vm

KERNEL = "5.10"
"""The last one where Debian 12's bcc finds the functions that it wants: 6.1 forbids a kprobe in one
of them, later ones have it inlined."""
ROUNDS = 2

TEXT = """bcc's tools hang on kprobes of functions and compile C against the headers of the running
kernel. So this is Debian's kernel {release}, the last one where the biolatency of Debian 12's bcc
attaches, in a guest without hardware virtualisation whose clock goes on by a nanosecond an
instruction: what is measured is instructions an IO, without the time that memory takes. The
kernel's statistics leave out how a kprobe is reached, which is in bcc's favour. This kernel has no
atomic instructions that return a value: "ours" is the variant for kernels before 5.12. Where it
has a ratio above 1 it keeps three histograms with sums by cgroup, disk and op against one by
disk."""


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; there is no goal. Raises GuestError and KernelUnavailable."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args(arguments).rounds
    kernel = kernels.fetch(KERNEL)
    headers = kernels.headers(kernel)
    modules = f"/lib/modules/{kernel.release}"
    command = [sys.executable, "-m", "tests.bench.bench_bpf", "--bcc", f"--rounds={rounds}"]
    # Over the modules, which are read-only: those that are needed are loaded.
    links = [f"mount -t tmpfs tmpfs {modules}"]
    links += [f"ln -s {headers}/{name} {modules}/{name}" for name in ("build", "source")]
    print_text(TEXT.format(release=kernel.release))
    with tempfile.TemporaryDirectory(prefix="writeback-out.") as out:
        result = vm.run(
            kernel,
            " && ".join([*links, shlex.join(command)]),
            out=Path(out),
            shares=[headers],
            memory=2 << 30,
            cpus=1,
            count_instructions=True,
            timeout=900,
        )
    if result.exit_code:
        raise vm.GuestError(f"the bench ended with {result.exit_code}: {result.output}")
    print(result.output)
    return []


if __name__ == "__main__":
    main()
