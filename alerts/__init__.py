# SPDX-License-Identifier: Apache-2.0
"""Recording and alerting rules for Prometheus, from the exporter's own catalogue of metrics.

catalogue -> promql (names that exist) -> records -> alerts -> __main__ (YAML)
"""
