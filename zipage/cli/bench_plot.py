"""`zipage bench plot`: plots of results that were written to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zipage.errors import ConfigError


def plot(
    results: Annotated[
        Path, typer.Argument(help="What `bench ablation --json` or `bench serve --json` wrote.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Image to write. Default: RESULTS with suffix .svg."),
    ] = None,
) -> None:
    """Draw the results of `bench ablation` or `bench serve`. Needs matplotlib (extra `plots`)."""
    from zipage.bench.plots import check_plotting, plot_ablation, plot_serving

    picture = results.with_suffix(".svg") if output is None else output
    check_plotting(picture)
    try:
        text = results.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"results={str(results)!r} can't be read: {error}") from None
    try:
        report = json.loads(text)
    except ValueError:
        report = {}
    if isinstance(report, dict) and "serving" in report:
        plot_serving(report, picture)
    else:
        from zipage.bench.ablation import read_results
        from zipage.cli.bench_ablation import describe

        setting, rows = read_results(results)
        plot_ablation(rows, picture, describe(setting, rows))
    typer.echo(f"wrote {picture}")
