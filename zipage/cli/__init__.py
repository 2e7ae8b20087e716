"""The command line, `zipage`: a file per command.

Commands import torch and the engine when they run, so that `zipage --help` is instant.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from zipage import __version__
from zipage.cli import bench, demo, eval, generate, info, serve, top
from zipage.cli.threads import spin_briefly
from zipage.cli.writing import writing
from zipage.errors import ZipageError


class ZipageGroup(TyperGroup):
    """Commands whose user errors end in one line, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit code 2 on a `ZipageError`, 1 on a full disk, 130 on Ctrl-C."""
        spin_briefly()
        try:
            return super().invoke(ctx)
        except ZipageError as error:
            message = " ".join(str(error).split())
            Console(stderr=True, soft_wrap=True).print(
                Text.assemble(("Error: ", "bold red"), (message, "red"))
            )
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with writing("the output", sys.stdout):
                raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    name="zipage",
    cls=ZipageGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="LLM inference for reasoning models with constant KV memory per request.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zipage {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("generate")(generate.generate)
# Every option of the server is also an environment variable: --port is ZIPAGE_PORT.
app.command("serve", cls=serve.ServeCommand, context_settings={"auto_envvar_prefix": "ZIPAGE"})(
    serve.serve
)
app.command("top")(top.top)
app.command("info")(info.info)
app.command("demo")(demo.demo)
app.command("eval")(eval.evaluate)
app.add_typer(bench.app, name="bench")

__all__ = ["app"]
