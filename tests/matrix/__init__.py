# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not booted, and other compilers, libbpfs and Pythons."""
