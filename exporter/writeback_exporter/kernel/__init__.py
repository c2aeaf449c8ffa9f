# SPDX-License-Identifier: Apache-2.0
"""libbpf, BTF, and the loading of BPF objects with a reason for each refusal."""
