# SPDX-License-Identifier: Apache-2.0
"""Grafana dashboards, from the exporter's own catalogue of metrics.

catalogue -> alerts.promql -> grafana (panels) -> fleet, node, ... -> __main__ (JSON)
"""
