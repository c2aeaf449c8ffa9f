# SPDX-License-Identifier: Apache-2.0
"""Measurements: what the exporter costs, against the usual design. `make bench` runs them all."""
