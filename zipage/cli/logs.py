"""Log options of the commands that run an engine."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from zipage.cli.options import CommandOption, with_options
from zipage.observe.logs import LEVELS, configure_logging

_Level = enum.Enum("_Level", {name: name for name in LEVELS}, type=str)  # type: ignore[misc]


class _Format(str, enum.Enum):
    text = "text"
    json = "json"


def _options(level: str) -> list[CommandOption]:
    return [
        CommandOption(
            "log_level",
            Annotated[
                _Level,
                typer.Option(
                    envvar="ZIPAGE_LOG_LEVEL",
                    case_sensitive=False,
                    help="Least severe messages written to stderr.",
                    rich_help_panel="Logging",
                ),
            ],
            _Level(level),
            lambda level: level.value,
        ),
        CommandOption(
            "log_format",
            Annotated[
                _Format,
                typer.Option(
                    envvar="ZIPAGE_LOG_FORMAT",
                    case_sensitive=False,
                    help="Log lines as text or as JSON objects.",
                    rich_help_panel="Logging",
                ),
            ],
            _Format.text,
            lambda log_format: log_format.value,
        ),
    ]


def with_logging(command: Callable[..., Any], level: str = "warning") -> Callable[..., Any]:
    """Give a command `--log-level` and `--log-format`, and set up the log before it runs.

    Args:
        command: the command.
        level: its default level.
    """

    @functools.wraps(command)
    def configured(*, logs: dict[str, Any], **arguments: Any) -> Any:
        configure_logging(**logs)
        return command(**arguments)

    return with_options("logs", _options(level))(configured)
