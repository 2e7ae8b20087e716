"""The demo's display: a live screen in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zipage.demo.contest import Owner, SideResult, Snapshot, same_answers
from zipage.evals.problems import Problem, count_tokens

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_LIVE_SECONDS, _PLAIN_SECONDS = 0.25, 5.0
_RATE_SECONDS = 3.0
_REASONING_LINES = 6


class View:
    """Watches both sides; a context manager.

    Args:
        console: where to write; live if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._interval = _LIVE_SECONDS if console.is_terminal else _PLAIN_SECONDS
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self._next = 0.0
        self._name = ""
        self._history: collections.deque[tuple[float, int]] = collections.deque()

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def due(self, now: float) -> bool:
        """Whether it is time for the next frame."""
        if now < self._next:
            return False
        self._next = now + self._interval
        return True

    def show(self, snapshot: Snapshot) -> None:
        """Draw a frame or write a line."""
        rate = self._rate(snapshot)
        if self._live is not None:
            self._live.update(_screen(snapshot, rate, self._console.width), refresh=True)
        else:
            self._console.print(
                _line(snapshot, rate), markup=False, highlight=False, soft_wrap=True
            )

    def _rate(self, snapshot: Snapshot) -> float:
        if snapshot.name != self._name:
            self._name = snapshot.name
            self._history.clear()
            self._history.append((0.0, 0))
        self._history.append((snapshot.seconds, snapshot.stats.generated_tokens))
        horizon = max(_RATE_SECONDS, self._interval)
        while len(self._history) > 2 and self._history[1][0] <= snapshot.seconds - horizon:
            self._history.popleft()
        (then, before), (now, after) = self._history[0], self._history[-1]
        return (after - before) / (now - then) if now > then else 0.0


def _line(s: Snapshot, rate: float) -> str:
    stats = s.stats
    return (
        f"[{s.name} {s.seconds:5.1f} s] finished {s.finished}/{s.total} ({s.right} right)"
        f" | running {stats.running}, waiting {stats.waiting}"
        f" | blocks {stats.blocks_owned}/{stats.blocks_total}"
        f" | {rate:,.0f} tokens/s | compressions {stats.compressions}"
        f" | preemptions {stats.preemptions}"
    )


def _screen(s: Snapshot, rate: float, width: int) -> Panel:
    stats = s.stats
    bar = min(60, max(20, width - 44))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_column(justify="left")
    grid.add_row(
        "answers",
        ProgressBar(total=s.total, completed=s.finished, width=bar),
        f"{s.finished}/{s.total} finished, {s.right} right",
    )
    grid.add_row(
        "requests",
        Text.assemble(
            ("●" * min(stats.running, bar), "green"),
            ("○" * max(0, min(stats.waiting, bar - stats.running)), "dim"),
        ),
        f"{stats.running} running, {stats.waiting} waiting",
    )
    grid.add_row(
        "KV pool",
        pool_map(s.owners, stats.blocks_total, bar),
        f"{stats.blocks_owned}/{stats.blocks_total} blocks in use",
    )
    grid.add_row("tokens/s", f"{rate:,.0f}", f"{s.seconds:.1f} s")
    grid.add_row("compressions", f"{stats.compressions:,}", f"{stats.evicted_tokens:,} evicted")
    grid.add_row(
        "preemptions",
        f"{stats.preemptions:,}",
        f"{stats.preemptions_recompute} recomputed, {stats.preemptions_swap} swapped",
    )
    lines = s.reasoning.rstrip("\n").splitlines()[-_REASONING_LINES:]
    lines = [""] * (_REASONING_LINES - len(lines)) + lines
    reasoning = Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")
    return Panel(
        Group(grid, Panel(reasoning, title="oldest request", title_align="left", style="dim")),
        title=f"[bold]{s.name}",
        title_align="left",
    )


def pool_map(owners: Sequence[Owner], blocks_total: int, width: int) -> Text:
    """The pool as a bar: for each request a coloured segment in proportion to its blocks.

    Args:
        owners: requests in order; compressing ones are drawn with another texture.
        blocks_total: blocks of the pool.
        width: columns of the bar.
    """
    text, drawn, used = Text(), 0, 0
    for i, owner in enumerate(owners):
        used += owner.blocks
        end = min(width, round(used * width / blocks_total))
        texture = "▒" if owner.compressing else "█"
        text.append(texture * max(0, end - drawn), style=_COLOURS[i % len(_COLOURS)])
        drawn = max(drawn, end)
    text.append("·" * (width - drawn), style="dim")
    return text


def introduction(
    problems: Sequence[Problem], pool_tokens: int, block_size: int, kv_budget: int
) -> list[str]:
    """What the demo is about to do, in numbers."""
    chains = [p.cot_tokens for p in problems]
    whole = [p.cot_tokens + count_tokens(p.prompt) for p in problems]
    mean = sum(whole) / len(whole)
    capped = kv_budget + block_size
    families = " and ".join(dict.fromkeys(p.family for p in problems))
    return [
        f"{len(problems)} {families} problems for zipage-tiny, with {min(chains):,} to "
        f"{max(chains):,} tokens of reasoning each; prompts and reasoning are {sum(whole):,} "
        "tokens together.",
        f"The KV pool has room for {pool_tokens:,} tokens: {pool_tokens / mean:.1f} of these "
        f"requests in full.",
        f"Zipage keeps {kv_budget:,} tokens of a request and lets it own at most {capped:,}: "
        f"{pool_tokens / capped:.1f} requests in the same memory.",
    ]


def verdict(full: SideResult, zipage: SideResult) -> str:
    """The comparison in one sentence."""
    ratio = full.wall_seconds / zipage.wall_seconds
    return (
        f"In the same {full.kv_bytes / (1 << 20):.1f} MiB, Zipage took "
        f"{100 / ratio:.0f} % of full KV's time ({ratio:.2f}x as fast), running "
        f"{zipage.stats.mean_running:.1f} requests at once instead of "
        f"{full.stats.mean_running:.1f} and prefilling {zipage.stats.prefill_tokens:,} tokens "
        f"instead of {full.stats.prefill_tokens:,}."
    )


def result_table(full: SideResult, zipage: SideResult) -> Table:
    """Both sides, and how they compare."""
    table = Table(title="The same problems in the same KV memory", title_justify="left")
    table.add_column("")
    for side in (full, zipage):
        table.add_column(side.name, justify="right")
    table.add_column("", justify="right")

    def row(label: str, one: str, other: str, compared: str = "") -> None:
        table.add_row(label, one, other, compared)

    def times(one: float, other: float) -> str:
        return f"{other / one:.2f}x" if one else ""

    total = len(full.answers)
    row(
        "right answers",
        f"{full.right}/{total} ({full.accuracy:.1f} %)",
        f"{zipage.right}/{total} ({zipage.accuracy:.1f} %)",
        f"{zipage.accuracy - full.accuracy:+.1f} points",
    )
    row(
        "wall time",
        f"{full.wall_seconds:.1f} s",
        f"{zipage.wall_seconds:.1f} s",
        f"{full.wall_seconds / zipage.wall_seconds:.2f}x faster",
    )
    row(
        "tokens/s",
        f"{full.tokens_per_second:,.0f}",
        f"{zipage.tokens_per_second:,.0f}",
        times(full.tokens_per_second, zipage.tokens_per_second),
    )
    one, other = full.stats, zipage.stats
    row(
        "requests per step",
        f"{one.mean_running:.1f}",
        f"{other.mean_running:.1f}",
        times(one.mean_running, other.mean_running),
    )
    row(
        "peak blocks per request",
        str(full.peak_blocks),
        str(zipage.peak_blocks),
        times(full.peak_blocks, zipage.peak_blocks),
    )
    row(
        "preemptions (recomputed + swapped)",
        f"{one.preemptions_recompute} + {one.preemptions_swap}",
        f"{other.preemptions_recompute} + {other.preemptions_swap}",
    )
    row("prefilled tokens", f"{one.prefill_tokens:,}", f"{other.prefill_tokens:,}")
    row("compressions", f"{one.compressions:,}", f"{other.compressions:,}")
    row("tokens evicted", f"{one.evicted_tokens:,}", f"{other.evicted_tokens:,}")
    row("same answer on both sides", "", "", f"{same_answers(full, zipage)}/{total}")
    return table
