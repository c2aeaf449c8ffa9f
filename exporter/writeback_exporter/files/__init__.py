# SPDX-License-Identifier: Apache-2.0
"""Readers of procfs, sysfs and cgroupfs, each below a root path; one module a signal. No BPF."""
