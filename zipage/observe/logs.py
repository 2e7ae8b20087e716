"""Log output: as text, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error", "critical")

#: Attributes of every record; all others are fields of the message.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, the fields
    given as `extra` (such as `request_id`), and `exception` with the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of JSON."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in entry:
                entry[name] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """One line per message: characters from clients that would break or colour lines are escaped.
    Tracebacks follow on lines of their own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = super().formatMessage(record)
        if line.isprintable():
            return line
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which progress bars and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


def configure_logging(log_level: str = "warning", log_format: LogFormat = "text") -> None:
    """Write the package's log to stderr. For programs: importing the package configures nothing.

    Args:
        log_level: least severe level written, one of `LEVELS`.
        log_format: ``text``, or ``json`` for a JSON object per line.

    Raises:
        ValueError: one of them is unknown.
    """
    if log_level not in LEVELS:
        raise ValueError(f"log_level={log_level!r}: legal are {', '.join(LEVELS)}")
    if log_format not in ("text", "json"):
        raise ValueError(f"log_format={log_format!r}: legal are text and json")
    logger = logging.getLogger("zipage")
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(log_level.upper())


def logging_in_use() -> tuple[str, LogFormat] | None:
    """Level and format set by `configure_logging`, so that another process can use the same."""
    logger = logging.getLogger("zipage")
    for handler in logger.handlers:
        if isinstance(handler, _StderrHandler):
            json_lines = isinstance(handler.formatter, JsonFormatter)
            return logging.getLevelName(logger.level).lower(), "json" if json_lines else "text"
    return None
