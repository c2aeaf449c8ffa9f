# SPDX-License-Identifier: Apache-2.0
"""One module a BPF object: its programs, its maps, and how a row becomes samples."""
