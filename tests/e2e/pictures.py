# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the documents from one run of the story, as Prometheus has it.

python -m tests.e2e.pictures
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from alerts.settings import Settings
from tests.e2e.stack import WINDOW
from tests.e2e.story import Story, story
from tests.host.chromium import chromium
from tests.monitoring import Series

PICTURES = Path(__file__).parents[2] / "docs/pictures"
ORANGE, BLUE, GREY, RED = "#e8590c", "#1971c2", "#868e96", "#c92a2a"
WIDTH = 9
"""Inches."""


class Time:
    """Seconds since the story began, for what Prometheus answers."""

    def __init__(self, told: Story) -> None:
        self.story = told

    def __call__(self, time: float) -> float:
        return time - self.story.began

    def ask(self, expr: str) -> list[Series]:
        told = self.story
        return told.stack.prometheus.query_range(expr, told.began, told.resolved + 3, 0.5)

    def line(self, axes: Axes, expr: str, name: str, color: str, scale: float = 1) -> None:
        """The one series that the expression returns."""
        ((_, samples),) = self.ask(expr)
        axes.plot(
            [self(time) for time, _ in samples],
            [value * scale for _, value in samples],
            color=color,
            label=name,
            linewidth=1.8,
        )

    def mark(self, axes: Sequence[Axes]) -> None:
        """What happened, and when."""
        told = self.story
        for each in axes:
            each.axvspan(self(told.stuck), self(told.relieved), color=RED, alpha=0.08, linewidth=0)
        for text, time in (
            ("writer\nstarts", told.well),
            ("storage\nstops", told.stuck),
            ("page", told.paged),
            ("storage\nis back", told.relieved),
        ):
            for each in axes:
                each.axvline(self(time), color=GREY, linewidth=0.8, linestyle=":")
            axes[0].annotate(
                text,
                (self(time), 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=9,
                color=RED if text == "page" else "black",
            )


def congestion(told: Story) -> Figure:
    """Why WritebackCongestion fires, and that it does not before."""
    figure, (asleep, memory, written, alerts) = plt.subplots(
        4, 1, sharex=True, figsize=(WIDTH, 7), height_ratios=(3, 3, 3, 1.2)
    )
    time = Time(told)
    bdi = f'bdi="{told.disk.dev}"'
    time.line(asleep, f"cgroup:dirty_throttled_seconds_rate{{{bdi}}}", told.cgroup.label, ORANGE)
    asleep.axhline(Settings().throttled_tasks, color=RED, linestyle="--", label="too many")
    asleep.set_ylabel("tasks asleep in\nbalance_dirty_pages")
    asleep.set_ylim(0, 1.1)
    time.line(memory, f"writeback_bdi_dirty_bytes{{{bdi}}}", "dirty", BLUE, 1e-6)
    time.line(memory, f"writeback_bdi_dirty_threshold_bytes{{{bdi}}}", "limit", GREY, 1e-6)
    memory.set_ylabel("dirty memory\nof the BDI, MB")
    memory.set_ylim(0, 3)
    time.line(written, f"bdi:written_bytes_rate{{{bdi}}}", "written", BLUE, 1e-6)
    written.set_ylabel("written\nby the flusher, MB/s")
    written.set_ylim(0, None)
    for row, (name, color) in enumerate(
        (("CgroupDirtyThrottled", ORANGE), ("WritebackCongestion", RED))
    ):
        for _, samples in time.ask(f'ALERTS{{alertname="{name}",alertstate="firing",{bdi}}}'):
            for begin, end in _spans([time(at) for at, _ in samples]):
                alerts.barh(row, end - begin, left=begin, height=0.6, color=color)
    alerts.set_yticks([0, 1], ["CgroupDirtyThrottled", "WritebackCongestion"])
    alerts.set_ylim(-0.6, 1.6)
    alerts.set_xlabel("seconds")
    for axes in (asleep, memory):
        axes.legend(loc="upper left", frameon=False, ncols=2)
    figure.align_ylabels()
    time.mark((asleep, memory, written, alerts))
    return figure


def _spans(times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """From when to when there was a sample at least every 1.5 seconds."""
    begin = times[0]
    for last, this in pairwise([*times, float("inf")]):
        if this - last > 1.5:
            yield begin, last
            begin = this


def heatmap(metric: str, matchers: str, unit: str) -> Callable[[Story], Figure]:
    """A histogram over time, as a dashboard shows it."""

    def draw(told: Story) -> Figure:
        time = Time(told)
        expr = f"sum by (le) (increase(writeback_{metric}_bucket{{{matchers}}}[{WINDOW}]))"
        found = sorted(
            ((float(labels["le"]), samples) for labels, samples in time.ask(expr)),
            key=lambda bucket: bucket[0],
        )
        edges = [edge for edge, _ in found]
        times = [time(at) for at, _ in found[0][1]]
        table = {edge: dict(samples) for edge, samples in found}
        counts = np.array(
            [[table[edge].get(at, 0) for at, _ in found[0][1]] for edge in edges], dtype=float
        )
        # Below 0 where Prometheus estimates one edge's increase otherwise than the next one's.
        cells = np.clip(np.diff(counts, axis=0, prepend=0), 0, None)
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        colors = matplotlib.colormaps["Oranges"].copy()
        colors.set_bad("white")
        shown = np.ma.masked_less(cells, 1e-9)
        mesh = axes.pcolormesh(
            times,
            np.arange(len(edges)),
            np.sqrt(shown),
            cmap=colors,
            shading="nearest",
            rasterized=True,
        )
        axes.set_yticks(
            np.arange(len(edges))[::2] + 0.5, [_words(edge) for edge in edges[::2]], fontsize=8
        )
        axes.set_xlabel("seconds")
        axes.set_ylabel(unit)
        bar = figure.colorbar(mesh, ax=axes, pad=0.01)
        bar.set_label(f"in {WINDOW}, by square root", fontsize=8)
        time.mark([axes])
        return figure

    return draw


def _words(seconds: float) -> str:
    """An edge as people say it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return "more" if seconds == float("inf") else f"{seconds / size:.3g} {unit}"
    return f"{seconds:g} s"


def _directory() -> tempfile.TemporaryDirectory[str]:
    # Chromium's helpers write to its profile for a moment after its end.
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def main() -> None:
    plt.rcParams.update(
        {
            "svg.fonttype": "none",  # letters, not their outlines
            "svg.hashsalt": "writeback-exporter",
            "font.family": "sans-serif",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    PICTURES.mkdir(exist_ok=True)
    with _directory() as directory, story(Path(directory)) as told:
        drawn = {
            "congestion": congestion(told),
            "pauses": heatmap(
                "dirty_throttle_seconds", f'bdi="{told.disk.dev}"', "pause in balance_dirty_pages"
            )(told),
            "latency": heatmap(
                "block_io_device_seconds", f'device="{told.lower.name}"', "time in the device"
            )(told),
        }
        profile = Path(directory, "chromium")
        with chromium(profile) as browser:
            page = browser.open(told.stack.exporter.url, width=1000, height=700)
        head = plt.imread(io.BytesIO(page.png))[:790]  # the features that work follow
        plt.imsave(PICTURES / "status.png", head)
    for name, figure in drawn.items():
        figure.savefig(
            PICTURES / f"{name}.svg",
            bbox_inches="tight",
            facecolor="white",
            dpi=100,
            metadata={"Date": None, "Creator": None},
        )


if __name__ == "__main__":
    main()
