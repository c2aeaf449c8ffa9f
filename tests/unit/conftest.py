# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis runs here."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes tells of the machine: one stall of a busy one is longer than any limit.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
