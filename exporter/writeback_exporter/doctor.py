# SPDX-License-Identifier: Apache-2.0
"""`writeback-exporter doctor`: what works on this host, what does not, why, and what to do."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable

from writeback_exporter import __version__
from writeback_exporter.exporter import COLLECTORS, Exporter
from writeback_exporter.features import Feature
from writeback_exporter.kernel.pins import examine as examine_pins
from writeback_exporter.settings import Settings


def main_signals(settings: Settings, features: Iterable[Feature]) -> bool:
    """Whether all that the exporter is run for works: each main collector that is switched on, or
    where none of them is each of the others."""
    available = {feature.name for feature in features if feature.available}
    main = {name for name in settings.collectors if COLLECTORS[name].main}
    return bool(settings.collectors) and (main or settings.collectors) <= available


def examine(settings: Settings) -> int:
    """Loads and attaches all for a moment and reports; 0 where the main signals work, else 1."""
    # The report says it all, and in order.
    logging.getLogger("writeback_exporter").setLevel(logging.CRITICAL)
    exporter = Exporter(settings)
    try:
        exporter.start()
        features = exporter.features
        if settings.bpf_pin:
            features.append(examine_pins(settings.bpf_pin))
        healthy = main_signals(settings, features)
        print(f"writeback-exporter {__version__} on Linux {platform.release()}")
        print(f"block IO is charged in {exporter.hierarchies.io.mount}")
        print(f"throttled tasks are named by {exporter.hierarchies.task.mount}\n")
        for feature in features:
            _print(feature)
        if not settings.collectors:
            verdict = "No collector is switched on."
        else:
            verdict = "The main signals work here." if healthy else "Main signals are missing."
            if any(not f.available for f in features if f.name.endswith("_attribution")):
                verdict += " Not all IO is charged to its cgroup: see above."
        print(f"\n{verdict}")
    finally:
        exporter.close()
    return 0 if healthy else 1


def _print(feature: Feature) -> None:
    print(f"{'ok ' if feature.available else 'NO '} {feature.name}")
    if not feature.available:
        print(f"      why:    {feature.detail} [{feature.reason}]")
        print(f"      remedy: {feature.remedy}")
