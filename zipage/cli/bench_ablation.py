"""`zipage bench ablation`: what each part of the engine is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zipage.bench.workloads import PRESETS
from zipage.cli.logs import with_logging
from zipage.cli.options import engine_options, with_options
from zipage.cli.tables import print_table
from zipage.cli.threads import use_idle_cores
from zipage.cli.writing import check_writable
from zipage.errors import ConfigError

#: Ratio of the two base rows up to which the others mean something.
_STEADY = 1.1
#: The default workload's answers have up to 1,800 tokens.
_DEFAULT_BUDGET = 512
_GROUPS = "async,slots,prefix,redundancy,overlap,ample,budget,graphs"


@with_logging
@with_options(
    "engine",
    [replace(o, default=_DEFAULT_BUDGET) if o.name == "kv_budget" else o for o in engine_options()],
)
def ablation(
    *,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            help="Workload to run: problems (generated for the embedded model, answers are "
            f"scored), {', '.join(PRESETS)}.",
        ),
    ] = "problems",
    num_requests: Annotated[
        int | None, typer.Option(help="Number of requests; default: the workload's, 16 problems.")
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(help="Tokens to generate for every request; default: the workload's."),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Factor for the workload's lengths, at most 1.")
    ] = 1.0,
    only: Annotated[
        str, typer.Option(help="Groups to run, in this order, separated by commas.")
    ] = _GROUPS,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Values of kv_budget for the group budget, separated by commas; full KV is always "
            "included. Default: a quarter, a half and twice --kv-budget."
        ),
    ] = None,
    pool_share: Annotated[
        float,
        typer.Option(
            help="Size of the KV pool, as a share of what all requests need in full KV, unless "
            "--kv-cache-memory, --num-kv-blocks or --memory-utilization sets it."
        ),
    ] = 0.3,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Time limit for everything. A cell that takes more than its share is cut off and "
            "compared over the work it has done. Default: no limit."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="File for the results, one JSON object per line, written as they come. Results it "
            "already has are not run again.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the results to this .svg or .png; needs matplotlib.")
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Run the same work repeatedly, with one thing changed at a time.

    Groups: async (asynchronous compression), slots (query slots; hybrid scheduling; admission),
    prefix (prefix cache, on requests that share prefixes), redundancy (lightning, raw, none),
    overlap (steps scheduled ahead), ample (compression with ample memory), budget,
    graphs (CUDA graphs). The base runs first and last. Exit code 1 if a cell failed.
    """
    use_idle_cores()
    from zipage.bench.ablation import run_ablation, with_ratios

    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"seconds={seconds} must be a positive number")
    if plot is not None:
        from zipage.bench.plots import check_plotting

        check_plotting(plot)
    check_writable("--json", json_file)
    check_writable("--plot", plot, {"--json": json_file})
    console = Console(soft_wrap=True)
    cells, options, work = _plan(
        engine, workload, num_requests, output_len, scale, only, budgets, pool_share
    )
    console.print(
        f"{len(cells)} cells of {len(work.lengths())} requests, {sum(work.lengths()):,} tokens of "
        "prompts and answers",
        highlight=False,
    )
    rows = []
    for row in run_ablation(cells, options, work, json_file, seconds):
        rows.append(row)
        console.print(_one_line(row), highlight=False, markup=False)
    compared = with_ratios(rows)
    print_table(ablation_rows(compared))
    for note in notes(compared):
        console.print(note, highlight=False)
    if plot is not None:
        from zipage.bench.plots import plot_ablation

        plot_ablation(rows, plot, describe({"options": options, "work": vars(work)}, rows))
    if any(row["status"] == "failed" for row in rows):
        raise typer.Exit(1)


def _plan(
    engine: Mapping[str, Any],
    workload: str,
    num_requests: int | None,
    output_len: int | None,
    scale: float,
    only: str,
    budgets: str | None,
    pool_share: float,
) -> Any:
    """The cells, the engine options of the base, and the work."""
    import torch

    from zipage.bench.ablation import plan_ablation
    from zipage.bench.ablation_work import PROBLEMS, Work
    from zipage.config import EngineConfig

    if workload == PROBLEMS and (engine["model"] or engine["model_shape"]):
        raise ConfigError(
            "workload='problems' is for the embedded model: choose another workload with --workload"
        )
    if not 0 < pool_share <= 1:
        raise ConfigError(f"pool_share={pool_share} must lie in (0, 1]")
    work = Work(workload, num_requests, output_len, scale, seed=engine["seed"])
    lengths = work.lengths()
    # More never run at once, and the default number of query slots is half of this.
    options = {**engine, "max_num_seqs": min(engine["max_num_seqs"], len(lengths))}
    config = EngineConfig.from_options(options)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    groups = [name.strip() for name in only.split(",") if name.strip()]
    wanted = None if budgets is None else _integers(budgets)
    cells = plan_ablation(config, work, device.partition(":")[0], groups, wanted)
    sizes = ("kv_cache_memory", "num_kv_blocks", "memory_utilization")
    if all(options[name] is None for name in sizes):
        options["num_kv_blocks"] = max(
            math.ceil(pool_share * sum(lengths) / config.block_size),
            # Every cell needs room for one request in full KV, and for one with its budget.
            -(-work.longest() // config.block_size) + 1,
            *(
                config.max_blocks_of(cell.options.get("kv_budget", config.kv_budget)) or 0
                for cell in cells
            ),
        )
    return cells, options, work


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"budgets={text!r} must be integers separated by commas") from None


def _one_line(row: Mapping[str, Any]) -> str:
    label = row["cell"]["label"]
    if row["status"] == "failed":
        return f"{label}: failed: {row['error']}"
    cut = ", cut" if row["status"] == "cut" else ""
    return (
        f"{label}: {row['tokens_per_second']:,.0f} tokens/s in {row['wall_seconds']:.1f} s{cut}, "
        f"start {row['start_seconds']:.1f} s"
    )


def ablation_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of `with_ratios` as text; the first row is the heading."""
    scored = any("right" in row for row in rows)
    heading = [
        "",
        "tokens/s",
        "ratio",
        "ms/step",
        "running",
        "compressions",
        "their time",
        "preempted",
        "swapped",
        "prefix hits",
        "CPU s",
        *(["right"] if scored else []),
    ]
    return [heading, *([row["cell"]["label"], *_cells(row)] for row in rows)]


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know about the rows of `with_ratios`."""
    from zipage.bench.ablation import BASE_AGAIN

    lines = []
    noise = {row["cell"]["label"]: row["ratio"] for row in rows}.get(BASE_AGAIN)
    if noise is not None:
        lines.append(
            "ratio: to the mean of the two base rows (theirs to the first of them); where memory "
            "is ample, to the first row of the group"
        )
        if not 1 / _STEADY < noise < _STEADY:
            lines.append(
                f"the two base rows did the same work and differ by a factor of {noise:.2f}: "
                "something else used the machine, and the ratios say little"
            )
    threads = {row["machine"]["threads"] for row in rows if "machine" in row}
    if len(threads) > 1:  # of a file whose rows were measured at different times
        numbers = " and ".join(map(str, sorted(threads)))
        lines.append(f"rows ran with {numbers} threads: their ratios say little")
    if any(row["status"] == "cut" for row in rows):
        lines.append("* cut off: compared over the work it has done")
    return lines


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["status"] == "failed":
        return ["failed"]
    return [
        f"{row['tokens_per_second']:,.0f}" + ("*" if row["status"] == "cut" else ""),
        "" if row["ratio"] is None else f"{row['ratio']:.3f}",
        f"{row['ms_per_step']:.2f}",
        f"{row['mean_running']:.1f}",
        f"{row['compressions']:,}",
        f"{row['compression_share']:.1%}",
        f"{row['preemptions_recompute']:,}",
        f"{row['preemptions_swap']:,}",
        f"{row['prefix_hit_rate']:.1%}",
        f"{row['cpu_seconds']:.1f}",
        *([f"{row['right']}/{row['total']}"] if "right" in row else []),
    ]


def describe(setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What was run on what, in a line."""
    options, work = setting["options"], setting["work"]
    model = options["model_shape"] or options["model"] or "zipage-tiny"
    machine = next((row["machine"] for row in rows if "machine" in row), None)
    device = "" if machine is None else f"{machine['device']}, {machine['dtype']}; "
    scale = "" if work["scale"] == 1 else f" at scale {work['scale']:g}"
    return (
        f"{device}{model}, {work['workload']}{scale}, at most {options['max_num_seqs']} at once, "
        f"base: budget {options['kv_budget']:,}, block {options['block_size']}"
    )
