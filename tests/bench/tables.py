# SPDX-License-Identifier: Apache-2.0
"""How the benches print: tables, and figures with their reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """A figure and what it should be at most."""

    what: str
    value: float
    at_most: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.at_most

    def __str__(self) -> str:
        verdict = "met" if self.met else "not met"
        unit = self.unit and f" {self.unit}"
        return f"{self.what}: {self.value:.3g}{unit}, at most {self.at_most:g}{unit}: {verdict}"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *others)), flush=True)
