"""Plots of benchmark results, with matplotlib (the extra ``plots``)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zipage.bench.ablation import BASE, BASE_AGAIN, with_ratios
from zipage.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREY, _ORANGE = "#2f6f9f", "#9a9a9a", "#d9822b"


def check_plotting(path: Path) -> None:
    """Check, before anything is measured, that a plot can be drawn and has a known format.

    Raises:
        ConfigError: matplotlib is missing, or it cannot write files with this suffix.
    """
    formats = _new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise ConfigError(
            f"plot={str(path)!r}: the name's ending sets the format, such as .svg or .png"
        )


def plot_ablation(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw every row's speed as a ratio to its base, and speed by budget if that was varied.

    Args:
        rows: rows from `run_ablation` or `read_results`.
        path: the file; its suffix sets the format.
        title: what was run, on what.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or `path` can't be written.
    """
    told = with_ratios(rows)
    compared = [r for r in told if r["ratio"] is not None and r["cell"]["label"] != BASE]
    if not compared:
        raise ConfigError("there is nothing to plot: no cell could be compared with its base")
    budgets = _budget_points(told)
    figure = _new_figure(13 if budgets else 8, 1.6 + 0.34 * len(compared))
    axes = figure.subplots(1, 2 if budgets else 1, squeeze=False, width_ratios=_widths(budgets))[0]
    _draw_ratios(axes[0], compared)
    if budgets:
        _draw_budgets(axes[1], budgets)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _widths(budgets: Sequence[Any]) -> list[int]:
    return [3, 2] if budgets else [1]


def _draw_ratios(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    noise = next((abs(r["ratio"] - 1) for r in rows if r["cell"]["label"] == BASE_AGAIN), 0.0)
    if noise:
        axes.axvspan(1 - noise, 1 + noise, color=_GREY, alpha=0.3, lw=0)
    axes.axvline(1, color=_GREY, lw=1)
    labels = [r["cell"]["label"] + (" (cut)" if r["status"] == "cut" else "") for r in rows]
    ratios = [r["ratio"] for r in rows]
    colors = [_GREY if r["cell"]["label"] == r["cell"]["against"] else _BLUE for r in rows]
    bars = axes.barh(range(len(rows)), ratios, color=colors, height=0.65)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(ratios))
    axes.set_xlabel("tokens/s over its base's; shaded: difference of two runs of the base")


def _budget_points(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Budgets and rows, by budget, full KV last; empty if the budget was not varied."""
    varied = [r for r in rows if r["cell"]["group"] == "budget" and r["status"] == "ok"]
    base = next((r for r in rows if r["cell"]["label"] == BASE and r["status"] == "ok"), None)
    if not varied or base is None:
        return []
    points = [(base["budget"], base)]
    points += [(r["cell"]["options"].get("kv_budget"), r) for r in varied]
    points.sort(key=lambda point: float("inf") if point[0] is None else point[0])
    return [("full" if budget is None else f"{budget:,}", row) for budget, row in points]


def _draw_budgets(axes: Axes, points: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    names = [name for name, _ in points]
    bars = axes.bar(names, [row["tokens_per_second"] for _, row in points], color=_BLUE)
    axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=8)
    axes.set_xlabel("tokens kept per request")
    axes.set_ylabel("tokens/s")
    if all("right" in row for _, row in points):
        right = axes.twinx()
        shares = [100 * row["right"] / row["total"] for _, row in points]
        right.plot(names, shares, color=_ORANGE, marker="o")
        right.set_ylim(0, 105)
        right.set_ylabel("right answers, %", color=_ORANGE)


def plot_serving(report: Mapping[str, Any], path: Path) -> None:
    """Draw the distribution of latencies, and the run over time.

    Args:
        report: what `zipage bench serve --json` writes.
        path: the file; its suffix sets the format.

    Raises:
        ConfigError: matplotlib is missing, nothing was completed, or `path` can't be written.
    """
    setting, requests = report["serving"], report["requests"]
    done = [r for r in requests if r["failure"] is None]
    if not done:
        raise ConfigError("there is nothing to plot: no request was completed")
    figure = _new_figure(11, 4)
    shares, times = figure.subplots(1, 2)
    for label, key, color in (
        ("first token", "first_token", _BLUE),
        ("end to end", "last_token", _ORANGE),
    ):
        ordered = sorted(r[key] - r["intended"] for r in done)
        height = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        shares.step(ordered, height, where="post", label=label, color=color)
        times.scatter(
            [r["intended"] for r in done], [r[key] - r["intended"] for r in done], s=6, color=color
        )
    shares.set_xscale("log")
    shares.set_xlabel("seconds from when it was to be sent")
    shares.set_ylabel("requests, %")
    shares.legend()
    times.set_xlabel("to be sent at, s")
    times.set_ylabel("latency, s")
    times.set_yscale("log")
    in_flight = times.twinx()
    changes = sorted([(r["intended"], 1) for r in requests] + [(r["ended"], -1) for r in requests])
    in_flight.step(
        [when for when, _ in changes],
        list(itertools.accumulate(change for _, change in changes)),
        where="post",
        color=_GREY,
        lw=0.8,
    )
    in_flight.set_ylabel("requests in flight", color=_GREY)
    title = f"{setting['model']}: {setting['requests']}, {setting['load']}"
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _new_figure(width: float, height: float) -> Figure:
    """A figure in inches, without a window or any global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'zipage[plots]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same file.

    Raises:
        ConfigError: it can't be written.
    """
    import matplotlib

    # Without these an SVG contains a date and random ids.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        with matplotlib.rc_context({"svg.hashsalt": "zipage"}):
            figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} can't be written: {error}") from None
