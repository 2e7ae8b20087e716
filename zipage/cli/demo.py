"""`zipage demo`: full KV and Zipage on the same problems in the same KV memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zipage.cli.logs import with_logging
from zipage.cli.options import engine_options, with_options
from zipage.cli.threads import use_idle_cores
from zipage.cli.writing import check_writable, write_json
from zipage.errors import ConfigError

#: Engine options of the demo; the memory and the policy are what it is about.
_ENGINE = ("dtype", "device", "window", "num_sinks", "protect_prompt", "async_compression")


@with_logging
@with_options("engine", engine_options(only=_ENGINE))
def demo(
    *,
    count: Annotated[int, typer.Option(help="Number of problems.")] = 32,
    families: Annotated[
        str,
        typer.Option(
            help="Any of ledger, addition and lookup, separated by commas; ledger problems lose "
            "the most accuracy at a small budget."
        ),
    ] = "addition,lookup",
    min_tokens: Annotated[
        int, typer.Option(help="Shortest reference chain of thought, in tokens.")
    ] = 1600,
    max_tokens: Annotated[
        int, typer.Option(help="Longest reference chain of thought, in tokens.")
    ] = 2400,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    kv_budget: Annotated[int, typer.Option(help="Tokens Zipage keeps per request.")] = 448,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 64,
    pool_tokens: Annotated[
        int, typer.Option(help="Size of the KV pool, in tokens of full KV.")
    ] = 4096,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads. Default: OMP_NUM_THREADS, else as many as cores are idle."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write both results to this file.")
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Answer a batch of reasoning problems with full KV, then with Zipage, in the same memory.

    The problems ask for every step to be checked. Together, their reasoning is longer than the KV
    pool can hold in full. Shows both runs live, or as a line every few seconds if the output is
    not a terminal, then a table. Exit code 1 if a request failed.
    """
    check_writable("--json", json_file)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads} must be at least 1")
    if threads is None:
        use_idle_cores()
    console = Console()
    with console.status("loading the model"):
        import torch

        from zipage.demo.contest import (
            full_side,
            reply_limit,
            run_side,
            same_answers,
            warm_up,
            zipage_side,
        )
        from zipage.demo.view import View, introduction, result_table, verdict
        from zipage.evals.machine import describe_machine
        from zipage.evals.problems import generate_problems

        if threads is not None:
            torch.set_num_threads(threads)
        chosen = generate_problems(
            count,
            seed,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            families=[name.strip() for name in families.split(",")],
            check=True,
        )
        reply_tokens = reply_limit(chosen, pool_tokens)
        sides = (
            full_side(engine, block_size),
            zipage_side(engine, kv_budget, block_size, pool_tokens),
        )
        warm_up(sides)
    for line in introduction(chosen, pool_tokens, block_size, kv_budget):
        console.print(line, highlight=False, soft_wrap=True)
    pool = {"num_kv_blocks": pool_tokens // block_size}
    results = []
    for side in sides:
        with View(console) as view:
            result = run_side(side, chosen, pool=pool, max_tokens=reply_tokens, watcher=view)
        console.print(result.summary, highlight=False, soft_wrap=True)
        results.append(result)
        # The second side gets the same bytes; its scores and query slots come out of them.
        pool = {"kv_cache_memory": result.kv_bytes}
    full, zipage = results
    record = {
        "settings": {
            "count": count,
            "families": families,
            "min_tokens": min_tokens,
            "max_tokens": max_tokens,
            "seed": seed,
            "kv_budget": kv_budget,
            "block_size": block_size,
            "pool_tokens": pool_tokens,
            **engine,
        },
        "machine": describe_machine(engine["device"]),
        "full": full.to_dict(),
        "zipage": zipage.to_dict(),
        "speedup": round(full.wall_seconds / zipage.wall_seconds, 3),
        "accuracy_difference_points": round(zipage.accuracy - full.accuracy, 2),
        "same_answers": same_answers(full, zipage),
    }
    try:
        console.print(result_table(full, zipage))
        console.print(verdict(full, zipage), highlight=False, soft_wrap=True)
    finally:  # also after `| head`
        write_json(json_file, record)
    failed = full.failed + zipage.failed
    if failed:
        console.print(f"[red]{failed} requests failed")
        raise typer.Exit(1)
