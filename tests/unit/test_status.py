# SPDX-License-Identifier: Apache-2.0
"""The status page, from figures to HTML and SVG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.features import Feature
from writeback_exporter.metrics.catalogue import BLOCK_IO_DEVICE_SECONDS
from writeback_exporter.metrics.exposition import Labels
from writeback_exporter.metrics.history import Recent
from writeback_exporter.web.status import HEATMAP_ROWS, THROTTLED_ROWS, page

BUCKETS = len(BLOCK_IO_DEVICE_SECONDS.edges) + 1
QUIET = Recent(
    seconds=60,
    observed_seconds=60,
    throttled={},
    asleep={},
    disks={},
    io={},
    waiting={"io": 0},
)


@dataclass(eq=False)
class Element:
    tag: str
    attributes: dict[str, str | None]
    parent: Element | None
    text: str = ""
    """With that of the elements in it."""


class Seen(HTMLParser):
    """What a browser makes of a page."""

    VOID = ("meta", "br")

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.innermost: Element | None = None
        self.feed(html.decode())
        self.close()
        assert self.innermost is None, "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), self.innermost)
        self.elements.append(element)
        if tag not in self.VOID:
            self.innermost = element

    def handle_endtag(self, tag: str) -> None:
        assert self.innermost is not None
        assert self.innermost.tag == tag
        self.innermost = self.innermost.parent

    def handle_data(self, data: str) -> None:
        element = self.innermost
        while element is not None:
            element.text += data
            element = element.parent

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return [
            element.text
            for element in self.elements
            if element.tag == tag and attributes.items() <= element.attributes.items()
        ]

    def values(self, attribute: str) -> list[str]:
        return [element.attributes.get(attribute) or "" for element in self.elements]

    @property
    def rows(self) -> list[list[str]]:
        """The cells of all rows of tables."""
        return [
            [cell.text for cell in self.elements if cell.parent is row]
            for row in self.elements
            if row.tag == "tr"
        ]

    @property
    def paragraphs(self) -> list[str]:
        return self.texts("p")

    @property
    def titles(self) -> list[str]:
        """Tooltips."""
        return self.texts("title")[1:]

    @property
    def opacities(self) -> list[float]:
        return [float(opacity) for opacity in self.values("fill-opacity") if opacity]


def seen(recent: Recent = QUIET, features: Sequence[Feature] = ()) -> Seen:
    return Seen(page(recent, features, "/metrics"))


def seen_io(io: Mapping[Labels, Sequence[int]]) -> Seen:
    return seen(replace(QUIET, io=io))


def counts(**by_column: int) -> list[int]:
    """Requests by bucket, c0 being the first."""
    return [by_column.get(f"c{i}", 0) for i in range(BUCKETS)]


# Throttled cgroups --------------------------------------------------------------------------------


def test_throttled_cgroups() -> None:
    recent = replace(
        QUIET,
        throttled={("/a", "8:16"): 30_000_000_000, ("/b", "0:42"): 1_234_567_890_000},
        asleep={("/a", "8:16"): 2, ("/b", "0:42"): 0},
        disks={"8:16": "sdb"},
    )
    assert seen(recent).rows[1:-1] == [
        ["/b", "0:42", "1,234.57", "", "20.58", "0"],
        ["/a", "8:16 sdb", "30.00", "", "0.50", "2"],
    ]
    bars = [e for e in seen(recent).elements if e.tag == "rect"]
    assert [bar.attributes["width"] for bar in bars[:2]] == ["100.0", "2.4"]


def test_who_sleeps_for_the_first_time_is_there() -> None:
    for tasks, rows in ((1, [["/a", "8:0", "0.00", "", "0.00", "1"]]), (0, [])):
        found = seen(replace(QUIET, asleep={("/a", "8:0"): tasks}))
        assert found.rows[1:-1] == rows


def test_the_longest_are_shown_and_the_others_counted() -> None:
    slept: dict[Labels, int] = {(f"/{i}", "8:0"): 10**9 * (i + 1) for i in range(1234)}
    found = seen(replace(QUIET, throttled=slept))
    assert [row[0] for row in found.rows[1:-1]] == [f"/{1233 - i}" for i in range(THROTTLED_ROWS)]
    assert f"{1234 - THROTTLED_ROWS:,} more with less are left out." in found.paragraphs


def test_nothing_is_told_from_not_observed() -> None:
    quiet = seen()
    assert "No task was throttled." in quiet.paragraphs
    assert "No request was completed." in quiet.paragraphs
    blind = seen(replace(QUIET, throttled=None, io=None, waiting={}))
    assert sum(text.startswith("Not observed: ") for text in blind.paragraphs) == 3
    assert "No task was throttled." not in blind.paragraphs


# Latency ------------------------------------------------------------------------------------------


def test_heatmap() -> None:
    found = seen_io(
        {
            ("sda", "read"): counts(c0=1, c5=2500, c16=3),
            ("dm-0", "flush"): counts(c4=9_999_999),
        }
    )
    assert found.texts("text", **{"class": "edge"}) == [
        *("16 µs", "66 µs", "131 µs", "262 µs", "524 µs", "1 ms", "2.1 ms", "4.2 ms", "8.4 ms"),
        *("17 ms", "34 ms", "67 ms", "134 ms", "268 ms", "1.1 s", "8.6 s"),
    ]
    assert found.titles == [
        "dm-0 flush, requests: 9,999,999",
        "dm-0 flush, 262 µs to 524 µs: 9,999,999 of 9,999,999 requests (100.00%)",
        "sda read, requests: 2,504",
        "sda read, up to 16 µs: 1 of 2,504 requests (0.04%)",
        "sda read, 524 µs to 1 ms: 2,500 of 2,504 requests (99.84%)",
        "sda read, over 8.6 s: 3 of 2,504 requests (0.12%)",
    ]
    (image,) = (e.attributes for e in found.elements if e.attributes.get("role") == "img")
    assert image["aria-label"] == (
        "Heatmap of 2 rows, one a device and operation, and 17 columns, from up to 16 µs to over "
        "8.6 s"
    )


def test_colour_is_the_share_of_the_row() -> None:
    many, few = counts(c0=100_000, c1=900_000), counts(c0=1, c1=99)
    found = seen_io({("sda", "read"): few, ("sdb", "read"): many})
    assert found.opacities == [0.38, 0.95, 0.19, 1.0]
    assert seen_io({("sda", "read"): counts(c0=1, c1=10**9)}).opacities == [0.1, 1.0]


def test_the_busiest_rows_are_shown_and_the_others_counted() -> None:
    found = seen_io({(f"sd{i}", "read"): counts(c3=i + 1) for i in range(HEATMAP_ROWS + 5)})
    rows = [title for title in found.titles if "requests:" in title]
    assert len(rows) == HEATMAP_ROWS
    assert rows[0] == f"sd{HEATMAP_ROWS + 4} read, requests: {HEATMAP_ROWS + 5}"
    assert "5 more with less are left out." in found.paragraphs


def test_a_long_name_of_a_device_is_cut_where_it_would_run_into_the_cells() -> None:
    found = seen_io({("x" * 31, "discard"): counts(c0=1)})
    assert f"{'x' * 31} discard, requests: 1" in found.titles
    assert f"{'x' * 14}… discard" in found.texts("text")


# Pressure, features, window -----------------------------------------------------------------------


def test_pressure_is_a_share_of_the_time() -> None:
    waiting = {"memory": 0, "io": 30_000_000, "cpu": 61_000_000}
    found = seen(replace(QUIET, waiting=waiting))
    assert found.texts("dt") == ["cpu", "io", "memory"]
    assert found.texts("dd") == ["100.0%", "50.0%", "0.0%"]  # the kernel's clock is not ours


def test_features_that_are_missing_come_first() -> None:
    features = [
        Feature("block_io", True),
        Feature("sync", False, "no fentry", "the kernel has none", "use another"),
    ]
    found = seen(features=features)
    assert found.rows[1:] == [
        ["sync", "no", "no fentrythe kernel has none", "use another"],
        ["block_io", "yes", "", ""],
    ]
    assert "1 of 2 are not available." in found.paragraphs


@pytest.mark.parametrize(
    ("seconds", "observed", "text"),
    [
        (0, 0, r"Since the exporter started, 0 s ago, until .*"),
        (59.6, 59.6, r"Since the exporter started, 1 min ago, until .*"),
        (299, 7384, r"In the last 4 min 59 s, until .* UTC\. Observing for 2 h 3 min\."),
        (3600, 90061, r"In the last 1 h, until .* UTC\. Observing for 1 d 1 h\."),
    ],
)
def test_what_time_the_figures_are_of(seconds: float, observed: float, text: str) -> None:
    recent = replace(QUIET, seconds=seconds, observed_seconds=observed, waiting={})
    assert re.fullmatch(text, seen(recent).paragraphs[0])


# Any name -----------------------------------------------------------------------------------------

HOSTILE = "</title></svg><script>alert(\"1\")</script>&<b onclick='x'>{style}"


def test_names_are_escaped_and_nothing_is_fetched() -> None:
    recent = Recent(
        seconds=1,
        observed_seconds=1,
        throttled={(HOSTILE, HOSTILE): 1},
        asleep={(HOSTILE, HOSTILE): 1},
        disks={HOSTILE: HOSTILE},
        io={(HOSTILE, HOSTILE): counts(c0=1)},
        waiting={HOSTILE: 1},
    )
    html = page(recent, [Feature(HOSTILE, False, HOSTILE, HOSTILE, HOSTILE)], '/m&"m')
    found = Seen(html)
    assert found.rows[1][:2] == [HOSTILE, f"{HOSTILE} {HOSTILE}"]
    assert found.rows[3] == [HOSTILE, "no", HOSTILE + HOSTILE, HOSTILE]
    assert found.titles[0] == f"{HOSTILE} {HOSTILE}, requests: 1"
    assert '/m&"m' in found.values("href")
    assert {element.tag for element in found.elements}.isdisjoint(
        {"script", "img", "link", "iframe", "object"}
    )
    names = {name for element in found.elements for name in element.attributes}
    assert not any(name.startswith("on") or name in ("src", "style") for name in names)
    assert b"://" not in html
    assert b"url(" not in html


@given(st.text())
def test_any_name_is_shown(name: str) -> None:
    recent = replace(QUIET, throttled={(name, name): 1}, io={(name, name): counts(c2=5)})
    page(recent, [Feature(name, False, name, name, name)], "/metrics").decode()


def test_a_path_that_is_no_utf_8_is_spelled_out() -> None:
    feature = Feature("x", False, "unreadable", "cannot read /\udcff", "mount it")
    assert rb"cannot read /\udcff" in page(QUIET, [feature], "/metrics")


def test_size_is_bounded() -> None:
    """By names of 1023 bytes, the longest that a cgroup has, and of 32 of a disk."""
    io: dict[Labels, list[int]] = {(f"{i:032}", "discard"): [10**12] * BUCKETS for i in range(1000)}
    slept: dict[Labels, int] = {(f"/{i:01022}", "259:1048575"): 10**15 + i for i in range(10_000)}
    assert len(page(replace(QUIET, throttled=slept, io=io), [], "/metrics")) < 150_000
