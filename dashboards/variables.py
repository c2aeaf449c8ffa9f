# SPDX-License-Identifier: Apache-2.0
"""What one chooses at the top of a dashboard."""

from __future__ import annotations

from alerts.promql import HOST, Series, counter, counts, gauge, sums
from alerts.settings import Settings
from dashboards.grafana import Datasource, TextBox, Variable, here, variable
from writeback_exporter.metrics import catalogue as c

_BUILD = gauge(c.EXPORTER_BUILD_INFO)

TARGETS = [
    Datasource(name="datasource", label="Data source", query="prometheus"),
    variable("job", "Job", _BUILD, "job"),
    variable("instance", "Host", _BUILD.where('job=~"$job"'), "instance"),
]

DEVICE = variable("device", "Device", here(counts(c.BLOCK_IO_DEPTH)), "device")


def _seen(series: Series, *matchers: str) -> str:
    """Also what is gone by now: a job that was killed is what one looks for."""
    return f"last_over_time({here(series, *matchers)}[$__range])"


# A cgroup of which nothing is known has empty labels, which must match where nothing is chosen.
_IDENTITY = [
    variable(label, name, here(gauge(c.CGROUP_INFO), f'{label}!=""'), label, all=".*")
    for label, name in (("unit", "Unit"), ("pod", "Pod"), ("slurm_job", "Slurm job"))
]
_CHOSEN = _seen(gauge(c.CGROUP_INFO), 'unit=~"$unit"', 'pod=~"$pod"', 'slurm_job=~"$slurm_job"')
_ALL = " or ".join(
    f"sum by ({HOST}, cgroup) ({_seen(series)})"
    for series in (
        sums(c.DIRTY_THROTTLE_SECONDS),
        counts(c.BLOCK_IO_DEVICE_SECONDS),
        counter(c.PRESSURE_WAITING_SECONDS),
    )
)
# Those without a name join where each choice would match nothing at all: PromQL cannot compare
# strings, but label_replace tells whether an expression matches the empty one.
_NOTHING_CHOSEN = " and on () ".join(
    f'(label_replace(vector(1), "free", "yes", "nothing", "{choice}") == 1 and on (free) '
    'label_replace(vector(1), "free", "yes", "", ""))'
    for choice in ("$unit", "$pod", "$slurm_job")
)

CGROUP = [
    *_IDENTITY,
    # All is all of these, one by one: an expression for it would not heed what was chosen before.
    Variable(
        name="cgroup",
        label="Cgroup",
        query=f"query_result(sum by (cgroup) ({_CHOSEN}) or sum by (cgroup) ({_ALL}) "
        f"and on () ({_NOTHING_CHOSEN}))",
        regex='/cgroup="([^"]+)"/',
    ),
]

_TIMEOUT = f"{Settings().collective_timeout:.0f}"
TIMEOUT = TextBox(name="timeout", label="Collective timeout (s)", query=_TIMEOUT, default=_TIMEOUT)

TREE = 'cgroup=~"($cgroup)(/.*)?"'
"""The chosen cgroups and all below, for what is counted where it happens: throttling, sync calls,
block IO. Memory, pressure and io.stat of a cgroup include what is below it."""
ITSELF = 'cgroup=~"$cgroup"'
OTHERS = 'cgroup!~"($cgroup)(/.*)?"'
ROOT = 'cgroup="/"'
"""The whole host."""
ON_DEVICE = 'device=~"$device"'
