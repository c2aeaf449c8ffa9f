# SPDX-License-Identifier: Apache-2.0
"""grafanalib's panels as Grafana of today takes them.

grafanalib 0.7.1 writes schema 12: data sources by name, Angular heatmaps, nulls. At schema 42
Grafana migrates none of that any more, so each class here says itself what its JSON is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attr
from grafanalib import core

from alerts.promql import HOST, TARGET, Series

SCHEMA = 42
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "$__rate_interval"
WIDTH = 24
"""Columns of Grafana's grid."""

GREEN, YELLOW, RED = "green", "yellow", "red"


def here(series: Series, *matchers: str) -> Series:
    """Of the hosts that the dashboard shows."""
    return series.where('job=~"$job"', 'instance=~"$instance"', *matchers)


def rate(series: Series, *matchers: str) -> str:
    """Of a counter, a second, on the hosts that the dashboard shows."""
    return f"rate({here(series, *matchers)}[{RATE}])"


def of(*labels: str) -> str:
    """Labels to group by: always by exporter too, for one that two jobs scrape is there twice, and
    two hosts have disks and jobs of one name."""
    return ", ".join((HOST, *labels))


def sum_by(labels: Sequence[str], expr: str | Series) -> str:
    return f"sum by ({of(*labels)}) ({expr})"


def max_by(labels: Sequence[str], expr: str | Series) -> str:
    return f"max by ({of(*labels)}) ({expr})"


def top(expr: str | Series) -> str:
    """The ten largest, as many as a legend can show."""
    return f"topk(10, {expr})"


def quantile(q: float, buckets: Series, by: Sequence[str], *matchers: str) -> str:
    """Of a histogram, by labels."""
    return f"histogram_quantile({q}, {sum_by(['le', *by], rate(buckets, *matchers))})"


def link(dashboard: str, *labels: str, data: str = "field.labels") -> str:
    """To a dashboard, with the host and other labels of what was clicked on, for the same time."""
    chosen = "".join(f"&var-{label}=${{__{data}.{label}}}" for label in (*TARGET, *labels))
    return f"/d/{dashboard}?${{datasource:queryparam}}{chosen}&${{__url_time_range}}"


TO_NODE = link("writeback-node")
TO_CGROUP = link("writeback-cgroup", "cgroup")


# Queries ------------------------------------------------------------------------------------------


@attr.s
class Query(core.Target):
    """An expression, and how its series are called in the legend."""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expr,
            "format": self.format,
            "instant": self.instant,
            "legendFormat": self.legendFormat or "__auto",
            "range": not self.instant,
            "refId": self.refId,
        }


def now(expr: str) -> list[Query]:
    """One value, of now: of a range an old one is shown where nothing answers any more."""
    return queries([(expr, "")], instant=True)


def queries(wanted: Iterable[Query | tuple[str, str]], **options: Any) -> list[Query]:
    """From (expression, legend); what is a query already stays one."""
    return [
        each
        if isinstance(each, Query)
        else Query(expr=each[0], legendFormat=each[1], refId=chr(ord("A") + n), **options)
        for n, each in enumerate(wanted)
    ]


# Panels -------------------------------------------------------------------------------------------


@attr.s
class Panel(core.Panel):
    """What all have: place, title, a description that says what to do, unit."""

    targets: list[Query] = attr.ib(factory=list, converter=queries)
    """Queries, or (expression, legend) of each."""
    kind: str = attr.ib(default="")
    unit: str = attr.ib(default="short")
    columns: int = attr.ib(default=12)
    """Of its width."""
    lines: int = attr.ib(default=8)
    """Of its height."""
    steps: Sequence[tuple[str, float | None]] = attr.ib(default=((GREEN, None),))
    """Colours, each from which value on."""
    see: str = attr.ib(default="")
    """Where a click on a series leads: a dashboard with variables."""
    overrides: Sequence[Mapping[str, Any]] = attr.ib(default=())

    def options(self) -> dict[str, Any]:
        return {}

    def defaults(self) -> dict[str, Any]:
        """Beside unit, thresholds and links."""
        return {}

    def to_json_data(self) -> dict[str, Any]:
        links = [{"title": "Look closer", "url": self.see}] if self.see else []
        steps = [
            {"color": color, **({} if value is None else {"value": value})}
            for color, value in self.steps
        ]
        return {
            "id": self.id,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": self.gridPos,
            "targets": self.targets,
            "transformations": self.transformations,
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "links": links,
                    "mappings": [],
                    "thresholds": {"mode": "absolute", "steps": steps},
                    **self.defaults(),
                },
                "overrides": self.overrides,
            },
            "options": self.options(),
        }


@attr.s
class Graph(Panel):
    """Series over time."""

    kind: str = attr.ib(default="timeseries")
    stacked: bool = attr.ib(default=False)
    lines_at_steps: bool = attr.ib(default=False)
    """Draws a line where the colours change: a limit."""
    log: bool = attr.ib(default=False)

    def defaults(self) -> dict[str, Any]:
        scale: dict[str, Any] = {"type": "log", "log": 10} if self.log else {"type": "linear"}
        return {
            "color": {"mode": "palette-classic"},
            "min": 0,
            "custom": {
                "drawStyle": "line",
                "fillOpacity": 30 if self.stacked else 8,
                "lineWidth": 1,
                "scaleDistribution": scale,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if self.lines_at_steps else "off"},
            },
        }

    def options(self) -> dict[str, Any]:
        return {
            "legend": {
                "showLegend": True,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull", "max"],
                "sortBy": "Max",
                "sortDesc": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }


@attr.s
class Heatmap(Panel):
    """A histogram over time, of one query by `le`."""

    kind: str = attr.ib(default="heatmap")

    def defaults(self) -> dict[str, Any]:
        return {
            "custom": {
                "scaleDistribution": {"type": "linear"},
                "hideFrom": {"legend": False, "tooltip": False, "viz": False},
            }
        }

    def options(self) -> dict[str, Any]:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {
                "mode": "scheme",
                "scheme": "Oranges",
                "fill": "dark-orange",
                "exponent": 0.5,
                "steps": 64,
                "reverse": False,
            },
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            # Cells without any event stay empty.
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": self.unit},
        }


@attr.s
class Number(Panel):
    """One value, as large as it is important."""

    kind: str = attr.ib(default="stat")
    columns: int = attr.ib(default=6)
    lines: int = attr.ib(default=4)
    words: Mapping[float, tuple[str, str]] = attr.ib(factory=dict)
    """In place of values: text and colour."""

    def defaults(self) -> dict[str, Any]:
        values = {
            f"{value:g}": {"text": text, "color": color, "index": n}
            for n, (value, (text, color)) in enumerate(self.words.items())
        }
        return {
            "color": {"mode": "thresholds"},
            "mappings": [{"type": "value", "options": values}] if values else [],
        }

    def options(self) -> dict[str, Any]:
        return {
            "colorMode": "background" if self.words else "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "auto",
            "wideLayout": True,
        }


@attr.s
class Table(Panel):
    """Instant values, a row for each series; several queries are joined by their labels."""

    kind: str = attr.ib(default="table")
    columns: int = attr.ib(default=WIDTH)

    def defaults(self) -> dict[str, Any]:
        return {
            "color": {"mode": "thresholds"},
            "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True},
        }

    def options(self) -> dict[str, Any]:
        return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}}


def table(
    wanted: Sequence[tuple[str, str, str]],
    sort: str = "",
    ascending: bool = False,
    hide: Sequence[str] = (),
    **options: Any,
) -> Table:
    """From (expression, name of the column, unit)."""
    found = queries([(expr, "") for expr, _, _ in wanted], instant=True, format="table")
    columns = {f"Value #{q.refId}": name for q, (_, name, _) in zip(found, wanted, strict=True)}
    # So it is called where no more than one query has an answer.
    columns["Value"] = wanted[0][1]
    hidden = dict.fromkeys(["Time", "__name__", *hide], True)
    steps: list[dict[str, Any]] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden, "renameByName": columns}},
    ]
    if sort:
        order = [{"field": sort, "desc": not ascending}]
        steps.append({"id": "sortBy", "options": {"sort": order}})
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "unit", "value": unit}],
        }
        for _, name, unit in wanted
    ]
    return Table(targets=found, transformations=steps, overrides=overrides, **options)


@attr.s
class Row(core.RowPanel):
    """A headline; what follows answers the question that it is."""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "row",
            "title": self.title,
            "collapsed": False,
            "gridPos": self.gridPos,
            "panels": [],
        }


# Variables ----------------------------------------------------------------------------------------


@attr.s
class Variable(core.Template):
    """Values to choose from; none chosen is all."""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": self.query,
            "query": {"query": self.query, "refId": f"variable-{self.name}"},
            "regex": self.regex or "",
            "refresh": 2,
            "sort": 1,
            "hide": 0,
            "multi": True,
            "includeAll": True,
            **({"allValue": self.allValue} if self.allValue else {}),
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "options": [],
        }


def variable(name: str, label: str, series: Series, of: str, all: str = ".+") -> Variable:
    """Of a label's values."""
    return Variable(name=name, label=label, query=f"label_values({series}, {of})", allValue=all)


@attr.s
class Datasource(core.Template):
    """Which Prometheus."""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "type": "datasource",
            "query": "prometheus",
            "regex": "",
            "refresh": 1,
            "hide": 0,
            "multi": False,
            "includeAll": False,
            "current": {},
            "options": [],
        }


@attr.s
class TextBox(core.Template):
    """A number to type in."""

    def to_json_data(self) -> dict[str, Any]:
        option = {"selected": True, "text": self.default, "value": self.default}
        return {
            "name": self.name,
            "label": self.label,
            "type": "textbox",
            "query": self.default,
            "hide": 0,
            "current": option,
            "options": [option],
        }


# Dashboards ---------------------------------------------------------------------------------------


_ALERTS = {
    "name": "Alerts",
    "datasource": DATASOURCE,
    "enable": True,
    "hide": False,
    "iconColor": RED,
    "expr": str(here(Series("ALERTS", ("alertstate",)), 'alertstate="firing"')),
    "titleFormat": "{{alertname}}",
    "textFormat": "{{instance}} {{cgroup}} {{bdi}} {{device}}",
    "step": "60s",
}


@attr.s
class Dashboard(core.Dashboard):
    """`panels` in reading order; they are placed from left to right and top to bottom."""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["writeback-exporter"],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "timezone": "browser",
            "fiscalYearStartMonth": 0,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "links": [
                {
                    "type": "dashboards",
                    "title": "Writeback",
                    "tags": ["writeback-exporter"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                    "icon": "external link",
                    "tooltip": "",
                    "url": "",
                }
            ],
            "annotations": {"list": [_ALERTS]},
            "templating": {"list": self.templating.list},
            "panels": _placed(self.panels),
        }


def _placed(panels: Iterable[Panel | Row]) -> list[Panel | Row]:
    """With their ids, which a title keeps wherever it stands, and places."""
    x = y = height = 0
    found: list[Panel | Row] = []
    for panel in panels:
        columns, lines = (WIDTH, 1) if isinstance(panel, Row) else (panel.columns, panel.lines)
        if x + columns > WIDTH:
            x, y, height = 0, y + height, 0
        place = {"x": x, "y": y, "w": columns, "h": lines}
        number = zlib.crc32(panel.title.encode()) & 0x7FFFFF
        found.append(attr.evolve(panel, id=number, gridPos=place))
        x, height = x + columns, max(height, lines)
    return found
