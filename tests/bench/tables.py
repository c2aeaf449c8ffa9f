# SPDX-License-Identifier: Apache-2.0
"""How the benches print: Markdown, so that what they print is a document (`make performance`)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and what it should be at most, or at least."""

    what: str
    value: float
    bound: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def cells(self) -> list[str]:
        unit = self.unit and f" {self.unit}"
        bound = f"at {'least' if self.at_least else 'most'} {self.bound:g}{unit}"
        return [self.what, f"{self.value:.3g}{unit}", bound, "PASS" if self.met else "**FAIL**"]


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right. No title, no line for it."""
    if title:
        print_text(f"**{title}**")
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    print()
    for row in (rows[0], rule, *rows[1:]):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print(f"| {' | '.join((first, *others))} |", flush=True)


def print_text(text: str) -> None:
    """A paragraph."""
    print(f"\n{filled(text)}", flush=True)


def filled(text: str) -> str:
    """Whatever its lines were."""
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and, in brackets, the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
