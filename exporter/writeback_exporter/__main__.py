# SPDX-License-Identifier: Apache-2.0
"""python -m writeback_exporter"""

import sys

from writeback_exporter.cli import main

sys.exit(main())
