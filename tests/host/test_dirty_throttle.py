# SPDX-License-Identifier: Apache-2.0
"""Throttling against a second hook (a raw tracepoint program that bpftool loads and reads)."""
