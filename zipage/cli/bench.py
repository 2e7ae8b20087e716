"""`zipage bench`: how fast the engine is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from zipage.bench.workloads import PRESETS, BenchRequest, check_lengths, make_workload
from zipage.cli.bench_ablation import ablation
from zipage.cli.bench_plot import plot
from zipage.cli.bench_serve import serve
from zipage.cli.interrupt import die_on_interrupt, stop_on_signal
from zipage.cli.logs import with_logging
from zipage.cli.options import check_budget_is_used, engine_options, with_options
from zipage.cli.progress import EngineProgress
from zipage.cli.threads import use_idle_cores
from zipage.cli.writing import check_writable, write_json

if TYPE_CHECKING:
    from zipage.bench.offline import RunResult
    from zipage.engine.stats import EngineStats

app = typer.Typer(no_args_is_help=True, help="Measure speed.")


@app.callback()
def _bench() -> None:
    """Measure speed."""


@app.command("offline")
@with_logging
@with_options("engine", engine_options())
def offline(
    ctx: typer.Context,
    workload: Annotated[
        str, typer.Option("--workload", "-w", help=f"Workload to run: {', '.join(PRESETS)}.")
    ] = "tiny",
    num_requests: Annotated[
        int | None, typer.Option(help="Number of requests; default: the workload's.")
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(help="Tokens to generate for every request; default: the workload's."),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(
            help="Factor for the workload's lengths, at most 1, for models with a short context."
        ),
    ] = 1.0,
    compare_full: Annotated[
        bool,
        typer.Option(
            "--compare-full", help="After each run, run full KV in the same pool; print ratios."
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option(help="Runs (pairs of runs with --compare-full); the median is shown.")
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers of all runs to this file.")
    ] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Time a batch of requests, all submitted at once.

    Prompts are random token ids (modulo the vocabulary size if it is below 32,000), output lengths
    are fixed, end-of-sequence tokens are ignored and decoding is greedy: every engine has the same
    work. The roofline is the least time that memory bandwidth allows: reading the weights and the
    live KV cache once per step, at the speed of a copy measured in the same run.
    Progress goes to stderr, as a line every ten seconds if that is not a terminal.
    """
    use_idle_cores()
    check_budget_is_used(ctx, engine)
    check_writable("--json", json_file)
    options = dict(engine)
    with contextlib.ExitStack() as stack:
        with die_on_interrupt():
            from zipage.bench.offline import describe_setting, run_offline, speed_ratio
            from zipage.llm import LLM

            llm = stack.enter_context(LLM(options.pop("model"), **options))
        requests = make_workload(workload, llm.engine.vocab_size, num_requests, output_len, scale)
        check_lengths(requests, llm.engine.max_model_len, scale)
        progress = stack.enter_context(EngineProgress(len(requests), "requests", lines=True))
        stop = stack.enter_context(stop_on_signal())

        def watch(stats: EngineStats, finished: int) -> None:
            if stop.signal is not None:
                raise typer.Exit(stop.exit_code)
            if progress.due:
                progress.update(stats, finished)

        results = run_offline(llm, requests, repeats, compare_full, watch)
        machine = describe_setting(llm)
    about = _about(workload, requests, scale)
    record = {
        "workload": about,
        "engine": engine,
        "machine": machine,
        "runs": [result.as_dict() for result in results],
        "speed_ratio": speed_ratio(results),
    }
    try:
        _print(about, machine, results)
    finally:  # also after `| head`
        write_json(json_file, record)


def _about(name: str, requests: list[BenchRequest], scale: float) -> dict[str, Any]:
    return {
        "workload": name,
        "scale": scale,
        "num_requests": len(requests),
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in requests),
        "output_tokens": sum(r.output_len for r in requests),
        "longest": max(len(r.prompt_token_ids) + r.output_len for r in requests),
    }


def _print(about: dict[str, Any], machine: dict[str, Any], results: list[RunResult]) -> None:
    from zipage.bench.offline import median_result, speed_ratio

    console = Console()
    scale = about["scale"]
    shrunk = f", lengths scaled by {scale:g}" if scale != 1 else ""
    console.print(
        f"{about['workload']}{shrunk}: {about['num_requests']} requests, "
        f"{about['prompt_tokens']:,} prompt and {about['output_tokens']:,} output tokens, "
        f"the longest {about['longest']:,}",
        highlight=False,
    )
    console.print(
        f"{machine['device']}, {machine['threads']} threads, {machine['dtype']}, "
        f"attention {machine['attention_backend']}, torch {machine['torch']}",
        highlight=False,
    )
    columns = {
        mode: result
        for mode in ("zipage", "full")
        if (result := median_result(results, mode)) is not None
    }
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for mode in columns:
        table.add_column("full KV" if mode == "full" else mode, justify="right")
    if len(columns) == 2:
        table.add_column("ratio", justify="right")
    for label, values, ratio in _rows(list(columns.values())):
        cells = [*values, ratio] if len(columns) == 2 else values
        table.add_row(label, *cells)
    console.print(table)
    pairs = len(results) // len(columns)
    if pairs > 1:
        console.print(f"Each column is the median run of {pairs}.", highlight=False)
    overall = speed_ratio(results)
    if overall is not None and not any(run.compressions for run in results):
        console.print(
            "Nothing was compressed: no request exceeded its budget. Both did the same work; "
            "lower --kv-budget or raise --output-len.",
            highlight=False,
        )
    elif overall is not None:
        of = f"median of {pairs} pairs" if pairs > 1 else "one pair"
        console.print(
            f"Speed with compression over full KV: {overall:.2f}x ({of})", highlight=False
        )


def _rows(runs: list[RunResult]) -> list[tuple[str, list[str], str]]:
    """Label, a text per run, and the ratio of the first run to the last where it is meaningful."""
    from zipage.cli.info import format_bytes

    def row(label: str, numbers: list[float], form: str, ratio: bool = False) -> Any:
        first, last = numbers[0], numbers[-1]
        told = f"{first / last:.2f}" if ratio and last else ""
        return label, [format(number, form) for number in numbers], told

    return [
        row("wall time (s)", [r.wall_seconds for r in runs], ",.2f", ratio=True),
        row("tokens/s", [r.tokens_per_second for r in runs], ",.0f", ratio=True),
        row("steps", [r.steps for r in runs], ",d", ratio=True),
        row("ms per step, mean", [r.step_ms.mean for r in runs], ",.2f", ratio=True),
        row("ms per step, p50", [r.step_ms.p50 for r in runs], ",.2f", ratio=True),
        row("ms per step, p99", [r.step_ms.p99 for r in runs], ",.2f", ratio=True),
        row("running, mean", [r.mean_running for r in runs], ",.1f", ratio=True),
        row("preemptions, recomputed", [r.preemptions_recompute for r in runs], ",d"),
        row("preemptions, swapped", [r.preemptions_swap for r in runs], ",d"),
        row("compressions", [r.compressions for r in runs], ",d"),
        row("time in compressions", [r.compression_share for r in runs], ".1%"),
        row("pool (blocks)", [r.pool_blocks for r in runs], ",d"),
        row("pool in use, mean", [r.pool_blocks_mean / r.pool_blocks for r in runs], ".1%"),
        row("pool in use, peak", [r.pool_blocks_peak / r.pool_blocks for r in runs], ".1%"),
        ("peak memory", [format_bytes(r.peak_memory_bytes) for r in runs], ""),
        (
            "roofline: weights read",
            [format_bytes(r.roofline.weight_bytes) for r in runs],
            "",
        ),
        ("roofline: KV read", [format_bytes(r.roofline.kv_read_bytes) for r in runs], ""),
        ("roofline: KV moved", [format_bytes(r.roofline.kv_moved_bytes) for r in runs], ""),
        row("copy bandwidth (GB/s)", [r.roofline.bandwidth / 1e9 for r in runs], ",.1f"),
        row("roofline (s)", [r.roofline.seconds for r in runs], ",.2f", ratio=True),
        row("achieved share of roofline", [r.roofline_share for r in runs], ".1%"),
    ]


app.command("ablation")(ablation)
app.command("serve")(serve)
app.command("plot")(plot)
