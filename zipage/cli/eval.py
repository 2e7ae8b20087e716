"""`zipage eval`: accuracy by policy and budget."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console

from zipage.cli.logs import with_logging
from zipage.cli.options import engine_options, with_options
from zipage.cli.progress import EngineProgress
from zipage.cli.tables import print_table
from zipage.cli.threads import use_idle_cores
from zipage.cli.writing import check_writable, write_json, write_text
from zipage.errors import ConfigError

if TYPE_CHECKING:
    from zipage.engine.stats import EngineStats
    from zipage.evals.problems import Problem
    from zipage.evals.runner import Cell, CellResult

#: Engine options that the table's cells, or this command's own options, set.
_OWN = {"kv_budget", "compression", "policy_options", "seed"}
#: Shortest chain of thought of generated problems; below the budget there is nothing to evict.
_GENERATED_MIN_TOKENS = 1000


@with_logging
@with_options("engine", [option for option in engine_options() if option.name not in _OWN])
def evaluate(
    *,
    problems: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file with prompt (or problem) and answer, and optionally id, family and "
            "cot_tokens. Without it, problems are generated."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Number of generated problems.")] = 48,
    families: Annotated[
        str,
        typer.Option(help="Families of the generated problems, separated by commas."),
    ] = "ledger,addition,lookup",
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Shortest reference chain of thought, in tokens. "
            f"Default: {_GENERATED_MIN_TOKENS} for generated problems, 0 for a file."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the generated problems and of the random policy.")
    ] = 0,
    budgets: Annotated[
        str, typer.Option(help="Values of kv_budget, in tokens, separated by commas.")
    ] = "1024,512,384,256",
    policies: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas; options as in name:option=value:option=value."
        ),
    ] = "full,zipage,rkv,streaming,random",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.")] = 4096,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of finished cells; a cell found there with the same settings is not run "
            "again."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every cell and answer to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables to this file, as Markdown.")
    ] = None,
    long_tokens: Annotated[
        int,
        typer.Option(
            help="Add a table to the Markdown file for the problems whose reference chains of "
            "thought have at least this many tokens."
        ),
    ] = 1000,
    engine: dict[str, Any],
) -> None:
    """Count correct answers by eviction policy and KV budget.

    Problems go through the model's chat template and are answered greedily, in one batch for each
    policy and budget. An answer is correct if the last \\boxed{...} of the reply is exactly the
    reference. Exit code 1 if a request failed.
    """
    use_idle_cores()
    from zipage.evals.machine import describe_machine
    from zipage.evals.report import accuracy_rows, detail_rows
    from zipage.evals.report import markdown as markdown_report
    from zipage.evals.runner import plan_cells, run_cells

    check_writable("--json", json_file, {"--problems": problems})
    check_writable("--markdown", markdown, {"--problems": problems, "--json": json_file})
    console = Console(soft_wrap=True)
    chosen, source = _choose_problems(problems, count, _split(families), min_tokens, seed)
    cells = plan_cells(_split(policies), _budgets(budgets))
    options = {**engine, "seed": seed}
    console.print(f"{source}; {len(cells)} cells", highlight=False)
    with _CellProgress(len(chosen)) as progress:
        results: list[CellResult] = []
        for result, found in run_cells(cells, chosen, options, max_tokens, out, progress):
            results.append(result)
            progress.clear()
            console.print(_one_line(result, found), highlight=False, markup=False)
    machine = describe_machine(engine["device"])
    cell_records = [result.to_dict() for result in results]
    # Each of the three is written even if another can't be.
    with contextlib.ExitStack() as after:
        record = {"problems": source, "machine": machine, "cells": cell_records}
        after.callback(write_json, json_file, record)
        if markdown is not None:
            description = _description(source, engine, max_tokens, machine)
            long_ids = {p.problem_id for p in chosen if (p.cot_tokens or 0) >= long_tokens}
            if len(long_ids) == len(chosen):
                long_ids = set()
            report = markdown_report(results, description, long_ids, long_tokens)
            after.callback(write_text, markdown, report)
        print_table(accuracy_rows(results), title="Right answers", frame=box.HEAVY_HEAD)
        print_table(detail_rows(results), keys=2, title="Cells", frame=box.HEAVY_HEAD)
    failed = sum(result.errors for result in results)
    if failed:
        console.print(f"[red]{failed} requests failed")
        raise typer.Exit(1)


class _CellProgress:
    """A progress bar for the running cell."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._cell: Cell | None = None
        self._bar: EngineProgress | None = None

    def __enter__(self) -> _CellProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, cell: Cell, stats: EngineStats) -> None:
        if cell is not self._cell or self._bar is None:
            self.clear()
            budget = "" if cell.budget is None else f" {cell.budget}"
            self._cell = cell
            self._bar = EngineProgress(self._total, f"{cell.label}{budget}")
            self._bar.__enter__()
        if self._bar.due:
            self._bar.update(stats, self._total - stats.running - stats.waiting)

    def clear(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


def _choose_problems(
    file: Path | None, count: int, families: list[str], min_tokens: int | None, seed: int
) -> tuple[list[Problem], str]:
    from zipage.evals.problems import generate_problems, load_problems

    if file is not None:
        least = min_tokens or 0
        chosen = load_problems(file, least)
        source = f"{len(chosen)} problems of {file.name}"
    else:
        least = _GENERATED_MIN_TOKENS if min_tokens is None else min_tokens
        chosen = generate_problems(count, seed, min_tokens=least, families=families)
        source = f"{count} generated problems ({', '.join(families)}), seed {seed}"
    lengths = [p.cot_tokens for p in chosen if p.cot_tokens]
    if lengths:
        source += (
            f", reference chains of thought of {min(lengths)} to {max(lengths)} tokens "
            f"(mean {sum(lengths) / len(lengths):.0f})"
        )
    return chosen, source


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _budgets(text: str) -> list[int]:
    try:
        return [int(part) for part in _split(text)]
    except ValueError:
        raise ConfigError(
            f"budgets={text!r} must be integers separated by commas, such as 1024,512"
        ) from None


def _one_line(result: CellResult, found: bool) -> str:
    budget = "" if result.cell.budget is None else f" {result.cell.budget}"
    line = (
        f"{result.cell.label}{budget}: {result.right}/{result.total} right, "
        f"{result.truncated} truncated, {result.errors} failed, "
        f"{result.tokens_per_second:,.0f} tokens/s, {result.wall_seconds:.1f} s"
    )
    return line + (" (finished earlier)" if found else "")


def _description(
    source: str, engine: dict[str, Any], max_tokens: int, machine: dict[str, str | int]
) -> list[str]:
    model = engine["model"] or "zipage-tiny (embedded)"
    return [
        f"Model {model}, dtype {engine['dtype']}, greedy, at most {max_tokens} tokens per reply.",
        f"{source}.",
        f"Block size {engine['block_size']}, window {engine['window']}, "
        f"{engine['num_sinks']} sinks, prompt protection {engine['protect_prompt']:g}.",
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"zipage {machine['zipage']}.",
    ]
