"""`zipage bench plot`: pictures of results that were written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zipage.errors import ConfigError


def plot(
    results: Annotated[Path, typer.Argument(help="What `bench ablation --json` wrote.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture (.svg, .png).")
    ] = Path("ablation.svg"),
) -> None:
    """Draw the results of `bench ablation` again. Needs matplotlib (the extra `plots`)."""
    from zipage.bench.ablation import read_results
    from zipage.bench.plots import check_plotting, plot_ablation
    from zipage.cli.bench_ablation import describe

    check_plotting(output)
    try:
        setting, rows = read_results(results)
    except OSError as error:
        raise ConfigError(f"results={str(results)!r} can't be read: {error}") from None
    plot_ablation(rows, output, describe(setting, rows))
    typer.echo(f"wrote {output}")
