# SPDX-License-Identifier: Apache-2.0
"""Ids to names: cgroups and disks."""
