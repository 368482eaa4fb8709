"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False).encode


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry)


def set_up(level: str) -> None:
    """Log as JSON from `level` (a name of the logging module, lower case) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    # No line has any of these, and there is a line for every turn (Python's logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    sys.unraisablehook = _ignored


def _ignored(what: sys.UnraisableHookArgs) -> None:
    """An exception that Python has nobody to give to, such as one in a callback of OpenSSL's."""
    error = what.exc_value or what.exc_type()
    logging.getLogger(__name__).error("ignored an exception that nobody can catch", exc_info=error)


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log `message` with fields beside it; those that are None are left out."""
    if logger.isEnabledFor(level):
        present = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, message, extra={"fields": present})
