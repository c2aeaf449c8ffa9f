# SPDX-License-Identifier: Apache-2.0
"""Tests that run in a guest, as root, on a kernel of their own: never on the host."""
