# SPDX-License-Identifier: Apache-2.0
"""HTTP: the server, its limits, TLS and passwords, the status page."""
