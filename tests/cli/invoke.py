"""Runs commands in this process, whatever version of typer and click there is."""

import inspect
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from zipage.cli import app


@dataclass
class Invocation:
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*args: str, stdin: str | bytes | None = None, command: Any = app) -> Invocation:
    """Run `zipage` with arguments; anything but an exit is raised."""
    options: dict[str, Any] = {}
    # Older versions mix the two streams unless told not to; newer ones can't.
    if "mix_stderr" in inspect.signature(CliRunner.__init__).parameters:
        options["mix_stderr"] = False
    result = CliRunner(**options).invoke(
        command, list(args), input=stdin, catch_exceptions=False, env={"COLUMNS": "120"}
    )
    return Invocation(result.exit_code, result.stdout, result.stderr)
