# SPDX-License-Identifier: Apache-2.0
"""Writes docs/metrics.md from the catalogue: python -m writeback_exporter.metrics.reference"""

from __future__ import annotations

from writeback_exporter.metrics.catalogue import ALL, Kind, Metric

_HEADER = """# Metrics

Generated from `exporter/writeback_exporter/metrics/catalogue.py` by `make docs`; do not edit.

- **cgroup** is the path below its hierarchy's root (`/` is the root); `unattributed` is what has no
  owner, `other` what found no room or no name.
- **device** is the disk's kernel name; **op** one of read, write, discard, flush, other; **bdi**
  the name in `/sys/class/bdi`, for disks `MAJOR:MINOR`.
"""


def reference() -> str:
    """The reference as Markdown."""
    return "\n".join([_HEADER, *map(_section, ALL)])


def _section(metric: Metric) -> str:
    suffix = "_total" if metric.kind is Kind.COUNTER else ""
    labels = f" {{{', '.join(metric.labels)}}}" if metric.labels else ""
    edges = ", ".join(f"{edge:g}" for edge in metric.edges)
    buckets = f"\nBuckets (powers of two in the kernel's unit, hence exact): {edges}.\n"
    return f"## `{metric.name}{suffix}`{labels}\n\n{metric.kind.value}. {metric.help}\n" + (
        buckets if edges else ""
    )


if __name__ == "__main__":
    print(reference(), end="")
