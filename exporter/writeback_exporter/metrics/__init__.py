# SPDX-License-Identifier: Apache-2.0
"""What is exported (catalogue) and how it is written (exposition)."""
