# SPDX-License-Identifier: Apache-2.0
"""Logging to stderr in the formats that Prometheus' programs have: logfmt and JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warn", "error")
FORMATS = ("logfmt", "json")


def set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Logfmt())
    logging.basicConfig(
        level=level.replace("warn", "warning").upper(), handlers=[handler], force=True
    )


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    fields = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.replace("WARNING", "WARN"),
        "msg": record.getMessage(),
    }
    if record.exc_info:
        fields["error"] = formatter.formatException(record.exc_info)
    return fields


class _Logfmt(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in _fields(self, record).items())


def _quoted(value: str) -> str:
    # JSON's quoting is logfmt's.
    plain = value and value.isprintable() and not set(value) & set(' ="')
    return value if plain else json.dumps(value, ensure_ascii=False)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(self, record), ensure_ascii=False)
