# SPDX-License-Identifier: Apache-2.0
"""Build hook: no wheel, and no editable install, without the compiled BPF objects."""

import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BpfObjectsHook(BuildHookInterface[Any]):
    """Runs `make bpf`, which does nothing where the objects are newer than their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            subprocess.run(["make", "--no-print-directory", "bpf"], cwd=self.root, check=True)
