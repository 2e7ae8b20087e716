"""Errors a user can act on."""

from __future__ import annotations


class ZipageError(Exception):
    """Base of every error caused by what the user asked for."""


class ConfigError(ZipageError, ValueError):
    """An engine option is unknown, out of range or does not fit the others."""


class ModelError(ZipageError, ValueError):
    """A model directory cannot be loaded: missing, broken or unsupported."""


class RequestError(ZipageError, ValueError):
    """A request is refused at submission."""


class EngineDeadError(ZipageError, RuntimeError):
    """The engine stopped after a failure it could not contain; the cause is chained."""


class EngineOverloadedError(ZipageError, RuntimeError):
    """A request is refused because too many others are waiting; it may be retried later."""


class RequestTimeoutError(ZipageError, TimeoutError):
    """A request took longer than its `timeout`, and was aborted."""


_LONGEST_SHOWN = 200


def shown(value: object) -> str:
    """`value` for a message: its repr, cut if too long."""
    try:
        text = repr(value)
    except Exception:  # an integer with more digits than Python prints, or a failing __repr__
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
