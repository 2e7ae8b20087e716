"""Tables of an accuracy evaluation, as rows of text and as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zipage.evals.runner import CellResult

Rows = list[list[str]]


def accuracy_rows(results: Sequence[CellResult]) -> Rows:
    """Correct answers by policy (rows) and budget (columns); the first row is the heading."""
    budgets = sorted({r.cell.budget for r in results if r.cell.budget is not None}, reverse=True)
    columns: list[int | None] = [*budgets]
    if any(r.cell.budget is None for r in results):
        columns.insert(0, None)
    found = {(r.cell.label, r.cell.budget): r for r in results}
    rows = [["policy", *("no limit" if c is None else str(c) for c in columns)]]
    for label in dict.fromkeys(r.cell.label for r in results):
        cells = [found.get((label, column)) for column in columns]
        rows.append([label, *("" if cell is None else _share(cell) for cell in cells)])
    return rows


def detail_rows(results: Sequence[CellResult]) -> Rows:
    """Everything else, a row per cell; the first row is the heading."""
    families = list(dict.fromkeys(name for r in results for name in r.families))
    shown = families if len(families) > 1 else []
    rows = [
        [
            "policy",
            "budget",
            "right",
            *shown,
            "truncated",
            "errors",
            "tokens/s",
            "compressions",
            "evicted",
            "peak blocks",
            "preemptions",
            "seconds",
        ]
    ]
    for r in results:
        counts = r.families
        rows.append(
            [
                r.cell.label,
                "" if r.cell.budget is None else str(r.cell.budget),
                _share(r),
                *("{}/{}".format(*counts[name]) if name in counts else "" for name in shown),
                str(r.truncated),
                str(r.errors),
                f"{r.tokens_per_second:,.0f}",
                f"{r.mean('compressions'):.1f}",
                f"{r.mean('evicted_tokens'):,.0f}",
                str(r.peak_blocks),
                str(r.preemptions),
                f"{r.wall_seconds:.1f}",
            ]
        )
    return rows


def markdown(
    results: Sequence[CellResult],
    description: Sequence[str],
    long_ids: Collection[str] = (),
    long_tokens: int = 0,
) -> str:
    """The tables as Markdown, after the lines of `description`.

    The problems `long_ids`, those with reference chains of `long_tokens` or more, get an accuracy
    table of their own if there are any.
    """
    long = []
    if long_ids:
        long = [
            f"Of these, the {len(long_ids)} problems with reference chains of thought of "
            f"{long_tokens:,} tokens or more:",
            "",
            *_markdown_table(accuracy_rows([result.only(long_ids) for result in results])),
            "",
        ]
    return "\n".join(
        [
            *(f"- {line}" for line in description),
            "",
            "Right answers by policy and budget (tokens kept per request):",
            "",
            *_markdown_table(accuracy_rows(results)),
            "",
            *long,
            "Each cell; compressions and evicted tokens are means per request:",
            "",
            *_markdown_table(detail_rows(results)),
            "",
        ]
    )


def _share(result: CellResult) -> str:
    return f"{result.right}/{result.total} ({100 * result.right / result.total:.1f} %)"


def _markdown_table(rows: Rows) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * (len(rows[0]) - 1))
    return lines
