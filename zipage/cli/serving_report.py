"""What `zipage bench serve` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from zipage.bench.serving import PERCENTILES
from zipage.cli.tables import print_table


def print_report(setting: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Print what was run and how it went.

    Args:
        setting: what `zipage bench serve --json` writes as ``serving``.
        summary: result of `zipage.bench.serving.summarize`.
    """
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    left_out = f" ({setting['left_out']} longer ones left out)" if setting["left_out"] else ""
    say(f"{setting['model']} at {setting['url']}{setting['endpoint']}")
    say(f"{setting['requests']}{left_out}, {setting['load']}")
    say(
        f"{summary['completed']} of {summary['requests']} completed in {summary['seconds']:.2f} s, "
        f"{summary['prompt_tokens']:,} prompt and {summary['output_tokens']:,} output tokens; "
        f"in flight {summary['mean_in_flight']:.1f} on average, {summary['peak_in_flight']} at most"
    )
    say(
        f"{summary['requests_per_second']:.2f} requests/s, "
        f"{summary['output_tokens_per_second']:,.1f} output tokens/s, "
        f"{summary['total_tokens_per_second']:,.1f} tokens/s with prompts"
    )
    if "goodput" in summary:
        goal = ", ".join(f"{n} {v:g} ms" for n, v in summary["goodput"]["objectives_ms"].items())
        say(
            f"goodput ({goal}): {summary['goodput']['requests_per_second']:.2f} requests/s, "
            f"{summary['goodput']['share']:.1%} of the requests"
        )
    print_table(_latency_rows(summary))
    for kind, count in summary["failures"].items():
        say(f"failed, {kind}: {count}. For example: {summary['failure_details'][kind]}")
    if summary["without_usage"]:
        say(
            f"{summary['without_usage']} answers had no usage: each of their chunks counts as one "
            "token"
        )
    if summary["shorter_than_asked"]:
        say(f"{summary['shorter_than_asked']} answers were shorter than asked for")


def _latency_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    columns = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    rows = [["ms", *columns]]
    for label, key in (
        ("time to first token", "ttft_ms"),
        ("time per output token", "tpot_ms"),
        ("inter-token latency", "itl_ms"),
        ("end to end", "e2el_ms"),
        ("client: sent late by", "sent_late_ms"),
        ("client: held up for", "client_delay_ms"),
    ):
        values = summary[key]
        if values is not None:
            rows.append([label, *(_milliseconds(values[name]) for name in columns)])
    return rows


def _milliseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
