# SPDX-License-Identifier: Apache-2.0
"""Tests on real kernels in QEMU: see README.md beside this file."""
