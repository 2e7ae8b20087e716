"""The state of the engine on stderr: a live view in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from zipage.engine.stats import EngineStats

_REFRESH_SECONDS = 0.1
_LINE_SECONDS = 10.0
#: Tokens per second are averaged over this many seconds.
_RATE_SECONDS = 5.0


class EngineProgress:
    """Two bars, answers and KV blocks, with the engine's gauges beside them.

    If stderr is not a terminal it does nothing, or writes lines.

    Args:
        total: requests to be answered.
        label: what the first bar counts.
        lines: write a line every ten seconds if stderr is not a terminal.
    """

    def __init__(self, total: int, label: str = "answers", lines: bool = False) -> None:
        self._progress: Progress | None = None
        self._heading = f"{label} of {total}"
        self._first_tokens = 0
        # Not rich's own check, which an environment variable can override. A closed stderr is None.
        if sys.stderr is not None and sys.stderr.isatty() and total > 0:
            console = Console(stderr=True)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[gauges]}"),
                console=console,
                transient=True,
                redirect_stdout=False,
            )
            self._answers = self._progress.add_task(label, total=total, gauges="")
            self._blocks = self._progress.add_task("KV blocks", total=None, gauges="")
        self._lines = lines and sys.stderr is not None and self._progress is None
        self._next_refresh = 0.0
        self._rates: deque[tuple[float, int]] = deque()

    def __enter__(self) -> EngineProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def due(self) -> bool:
        """Whether it is time for an `update`: gathering the numbers also costs time."""
        wanted = self._progress is not None or self._lines
        return wanted and time.monotonic() >= self._next_refresh

    def update(self, stats: EngineStats, finished: int) -> None:
        """Show the engine's state and how many requests have ended."""
        now = time.monotonic()
        if self._lines:
            self._write_line(stats, finished, now)
        if self._progress is None:
            return
        self._next_refresh = now + _REFRESH_SECONDS
        self._progress.update(
            self._answers,
            completed=finished,
            gauges=(
                f"running {stats.running}, waiting {stats.waiting}, "
                f"{self._rate(now, stats.generated_tokens):,.0f} tokens/s"
            ),
        )
        self._progress.update(
            self._blocks,
            total=stats.blocks_total,
            completed=stats.blocks_owned,
            gauges=f"compressions {stats.compressions}, preemptions {stats.preemptions}",
        )

    def _write_line(self, stats: EngineStats, finished: int, now: float) -> None:
        self._next_refresh = now + _LINE_SECONDS
        if not self._rates:
            self._first_tokens = stats.generated_tokens
            self._rate(now, stats.generated_tokens)
            return  # tokens from before say nothing about the speed
        rate = self._rate(now, stats.generated_tokens)
        print(
            f"{finished} {self._heading}, {stats.generated_tokens - self._first_tokens:,} tokens, "
            f"{rate:,.0f} tokens/s, running {stats.running}, waiting {stats.waiting}",
            file=sys.stderr,
            flush=True,
        )

    def pause(self) -> None:
        """Clear the view, so that something can be printed on the same terminal."""
        if self._progress is not None:
            self._progress.stop()

    def resume(self) -> None:
        """Show the view again."""
        if self._progress is not None:
            self._progress.start()

    def _rate(self, now: float, tokens: int) -> float:
        self._rates.append((now, tokens))
        while now - self._rates[0][0] > _RATE_SECONDS and len(self._rates) > 2:
            self._rates.popleft()
        then, before = self._rates[0]
        return (tokens - before) / (now - then) if now > then else 0.0
