# SPDX-License-Identifier: Apache-2.0
"""Per-cgroup dirty throttling and block IO latency from eBPF, for Prometheus."""

from importlib.metadata import version

__version__ = version("writeback-exporter")
