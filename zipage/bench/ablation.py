"""Ablations: the same work with one thing changed at a time, one row each.

A plan is a list of `Cell`s. They run one after another in a worker process
(`zipage.bench.ablation_worker`), which is replaced after a failure.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zipage.bench.ablation_work import PROBLEMS, Work
from zipage.config import FULL, EngineConfig
from zipage.errors import ConfigError

GROUPS = ("async", "slots", "prefix", "redundancy", "overlap", "ample", "budget", "graphs")

BASE, BASE_AGAIN = "base", "base, again"
_AMPLE = "ample memory, full KV"
_SHARED = "shared prefix, prefix cache on"

#: Seconds a worker may take beyond a cell's limit to answer.
_GRACE = 15.0
#: A cell is not started with less time left: loading the model alone takes some seconds.
_LEAST_SECONDS = 8.0


@dataclass(frozen=True)
class Cell:
    """A row of the table.

    Attributes:
        group: one of `GROUPS`, or ``base``.
        label: what is changed.
        options: engine options that replace the base's.
        shared: requests share prefixes.
        against: label of the row that its ratio refers to.
    """

    group: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    against: str = BASE


def plan_ablation(
    config: EngineConfig,
    work: Work,
    device_type: str,
    groups: Sequence[str] = GROUPS,
    budgets: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of an ablation: the base, every change of every group, and the base again.

    Args:
        config: the base.
        work: sizes the pool of the group ``ample``.
        device_type: ``cpu`` or ``cuda``; resolves options that are None.
        groups: which of `GROUPS`, in the order they run.
        budgets: budgets of the group ``budget``; None for a quarter, a half and twice the base's.

    Raises:
        ConfigError: a group is unknown, a budget is illegal, or the base never compresses.
    """
    for group in groups:
        if group not in GROUPS:
            raise ConfigError(f"only={group!r}: legal are {', '.join(GROUPS)}")
    if not config.compresses or config.kv_budget is None:
        raise ConfigError("the base must compress: give a kv_budget, and a policy but 'full'")
    if "graphs" in groups and device_type != "cuda" and len(groups) == 1:
        raise ConfigError("only=graphs needs a CUDA device: there are no CUDA graphs elsewhere")
    makers: dict[str, Callable[[], list[Cell]]] = {
        "async": lambda: [_toggle(config, "async", "async_compression", device_type)],
        "overlap": lambda: [_toggle(config, "overlap", "async_scheduling", device_type)],
        "slots": lambda: _slots(config),
        "prefix": lambda: _prefix(config, work),
        "redundancy": lambda: _redundancy(config),
        "ample": lambda: _ample(config, work),
        "budget": lambda: _budgets(config, budgets),
        "graphs": lambda: _graphs(config) if device_type == "cuda" else [],
    }
    cells = [Cell(BASE, BASE)]
    for group in groups:
        cells += makers[group]()
    return [*cells, Cell(BASE, BASE_AGAIN)]


def _toggle(config: EngineConfig, group: str, option: str, device_type: str) -> Cell:
    on = {
        "async_compression": config.compresses_beside,
        "async_scheduling": config.schedules_ahead,
    }[option](device_type)
    what = {
        "async_compression": "asynchronous compression",
        "async_scheduling": "overlapped scheduling",
    }[option]
    return Cell(group, f"{what} {'off' if on else 'on'}", {option: not on})


def _slots(config: EngineConfig) -> list[Cell]:
    slots = config.resolved_query_slots
    few = max(1, slots // 6)
    cells = [Cell("slots", f"{few} query slots instead of {slots}", {"num_query_slots": few})]
    if slots < config.max_num_seqs:
        everyone = {"num_query_slots": config.max_num_seqs}
        cells.append(Cell("slots", f"a slot for each of {config.max_num_seqs}", everyone))
        # Without hybrid scheduling a request runs only while it holds a query slot.
        constrained = {"num_query_slots": slots, "max_num_seqs": slots}
        cells.append(Cell("slots", f"hybrid scheduling off, {slots} run at most", constrained))
    other = "optimistic" if config.admission == "bounded" else "bounded"
    return [*cells, Cell("slots", f"{other} admission", {"admission": other})]


def _prefix(config: EngineConfig, work: Work) -> list[Cell]:
    # With little memory, blocks without an owner do not stay in the cache for long.
    pool = _ample_pool(config, replace(work, shared=True))
    return [
        Cell(
            "prefix",
            label,
            {**pool, "enable_prefix_caching": label == _SHARED},
            shared=True,
            against=_SHARED,
        )
        for label in (_SHARED, "shared prefix, prefix cache off")
    ]


def _redundancy(config: EngineConfig) -> list[Cell]:
    from zipage.compression.policies import make_policy

    policy = make_policy(config.compression, config.policy_options)
    now = getattr(policy, "redundancy", None)
    if now is None:
        return []
    given = dict(config.policy_options)
    variants = {
        "lightning": {**given, "redundancy": "lightning"},
        "raw": {**given, "redundancy": "raw"},
        "no": {**given, "lam": 1.0},
    }
    base = now if getattr(policy, "lam", 0.0) < 1 else "no"
    return [
        Cell("redundancy", f"{name} redundancy", {"policy_options": options})
        for name, options in variants.items()
        if name != base
    ]


def _budgets(config: EngineConfig, budgets: Sequence[int] | None) -> list[Cell]:
    assert config.kv_budget is not None
    wanted = list(budgets or ())
    if budgets is None:
        for budget in (config.kv_budget // 4, config.kv_budget // 2, 2 * config.kv_budget):
            try:
                config.check_budget(budget)
            except ConfigError:
                continue
            wanted.append(budget)
    for budget in wanted:
        config.check_budget(budget)
    cells = [
        Cell("budget", f"budget {budget:,}", {"kv_budget": budget})
        for budget in wanted
        if budget != config.kv_budget
    ]
    return [*cells, Cell("budget", "full KV", {"compression": FULL, "policy_options": {}})]


def _ample(config: EngineConfig, work: Work) -> list[Cell]:
    pool = _ample_pool(config, work)
    full = {**pool, "compression": FULL, "policy_options": {}}
    return [
        Cell("ample", _AMPLE, full, against=_AMPLE),
        Cell("ample", "ample memory, compression on", pool, against=_AMPLE),
    ]


def _ample_pool(config: EngineConfig, work: Work) -> dict[str, Any]:
    """Options of a pool that holds all requests with full KV."""
    # An answer to a problem may be longer than the reference.
    each = [work.longest() if work.workload == PROBLEMS else n for n in work.lengths()]
    blocks = sum(-(-length // config.block_size) + 1 for length in each)
    blocks = max(blocks, config.max_blocks_of(config.kv_budget) or 0)
    return {"num_kv_blocks": blocks, "kv_cache_memory": None, "memory_utilization": None}


def _graphs(config: EngineConfig) -> list[Cell]:
    eager = not config.enforce_eager
    return [Cell("graphs", f"CUDA graphs {'off' if eager else 'on'}", {"enforce_eager": eager})]


# ---------------------------------------------------------------------- running


def run_ablation(
    cells: Sequence[Cell],
    options: Mapping[str, Any],
    work: Work,
    file: Path | None = None,
    seconds: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Run cells in order and yield a row for each, see `ablation_worker.measure`.

    A cell may take an equal share of the time left, the first one two shares, so that later cells
    gain the time that fast ones leave. A cell that takes longer is cut off, and counts with the
    work it has done. All cells get as many bytes of KV memory as the first, unless they set it.

    Args:
        cells: the first is the base.
        options: engine options of the base.
        work: what is run.
        file: receives a JSON object per line: the setting, then each row as soon as it is known.
            Rows already in it are not run again.
        seconds: time limit for all cells together; None for no limit.

    Raises:
        ConfigError: `file` belongs to another setting, or can't be used.
    """
    setting = {"options": dict(options), "work": asdict(work)}
    known = {} if file is None else _open_results(file, setting)
    ends = None if seconds is None else time.monotonic() + seconds
    worker = _Worker()
    kv_bytes: int | None = None
    try:
        for i, cell in enumerate(cells):
            row = known.get(cell.label)
            if row is None:
                pool: dict[str, Any] = {}
                if kv_bytes is not None:
                    pool = {"num_kv_blocks": None, "kv_cache_memory": kv_bytes}
                share = None
                if ends is not None:
                    # The first one also imports everything, and all others are compared with it.
                    shares = len(cells) - i if i else max(1, len(cells) / 2)
                    share = (ends - time.monotonic()) / shares
                task = ({**options, **pool, **cell.options}, replace(work, shared=cell.shared))
                row = {"cell": asdict(cell), **worker.run(task, share)}
                if file is not None:
                    with file.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(row) + "\n")
            kv_bytes = kv_bytes or row.get("kv_bytes")
            yield row
    finally:
        worker.stop()


def _open_results(file: Path, setting: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    wanted = json.loads(json.dumps(setting))
    try:
        if not file.exists() or not file.stat().st_size:
            file.write_text(json.dumps({"setting": wanted}) + "\n", encoding="utf-8")
            return {}
        found, rows = read_results(file)
    except OSError as error:
        raise ConfigError(f"json={str(file)!r} can't be used: {error}") from None
    if found != wanted:
        raise ConfigError(
            f"json={str(file)!r} has the results of other settings: choose another file"
        )
    if not file.read_bytes().endswith(b"\n"):  # cut off: the next row needs a line of its own
        with file.open("a", encoding="utf-8") as lines:
            lines.write("\n")
    return {row["cell"]["label"]: row for row in rows if row["status"] != "failed"}


def read_results(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The setting and the rows of a file that `run_ablation` wrote; of equal labels the last.

    Truncated lines are left out.

    Raises:
        ConfigError: `file` is not such a file.
        OSError: it can't be read.
    """
    rows: dict[str, dict[str, Any]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        setting = json.loads(lines[0])["setting"]
        for line in lines[1:]:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows[row["cell"]["label"]] = row
    except (IndexError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(file)!r} has no results of an ablation") from None
    return setting, list(rows.values())


class _Worker:
    """A process that runs cells one after another."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, task: tuple[Any, ...], seconds: float | None) -> dict[str, Any]:
        """The row of a task; a failed row if the task can't be done."""
        if seconds is not None and seconds < _LEAST_SECONDS:
            return {"status": "failed", "error": f"only {max(0.0, seconds):.0f} s were left"}
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((*task, seconds))
            if self._pipe.poll(None if seconds is None else seconds + _GRACE):
                row: dict[str, Any] = self._pipe.recv()
                if row["status"] != "failed":
                    return row
            else:
                row = {"status": "failed", "error": f"no answer {_GRACE:.0f} s after its limit"}
        except (EOFError, OSError):
            self._process.join(_GRACE)
            row = {"status": "failed", "error": f"died, exit code {self._process.exitcode}"}
        self.stop()
        return row

    def _start(self) -> None:
        from zipage.bench.ablation_worker import serve

        # Not a fork: CUDA and torch's threads do not survive one.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


# ---------------------------------------------------------------------- comparing


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with ``ratio``: their speed over that of the row they refer to, None if unknown.

    The base's speed is the mean of its runs; their own ratios are to the first of them. If a row or
    the row it refers to was cut off, they are compared over the work that both have done.
    """
    by_label = {row["cell"]["label"]: row for row in rows if row["status"] != "failed"}
    told = []
    for row in rows:
        label, against = row["cell"]["label"], row["cell"]["against"]
        ratio = None
        if label in by_label and against in by_label:
            bases = [by_label[against]]
            if against == BASE and row["cell"]["group"] != BASE and BASE_AGAIN in by_label:
                bases.append(by_label[BASE_AGAIN])
            ratios = [_speed_ratio(row, base) for base in bases]
            ratio = statistics.harmonic_mean(ratios) if all(ratios) else None
        told.append({**row, "ratio": ratio})
    return told


def _speed_ratio(row: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    if row["status"] == base["status"] == "ok":
        return float(row["tokens_per_second"] / base["tokens_per_second"])
    tokens = min(row["generated_tokens"], base["generated_tokens"])
    mine = _seconds_until(row["curve"], tokens)
    return _seconds_until(base["curve"], tokens) / mine if mine else 0.0


def _seconds_until(curve: Sequence[Sequence[float]], tokens: float) -> float:
    """When this many tokens were generated, interpolated on a curve of (seconds, tokens)."""
    last_seconds, last_tokens = 0.0, 0.0
    for seconds, count in curve:
        if count >= tokens:
            share = (tokens - last_tokens) / (count - last_tokens) if count > last_tokens else 0.0
            return last_seconds + share * (seconds - last_seconds)
        last_seconds, last_tokens = seconds, count
    return last_seconds
