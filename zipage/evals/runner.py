"""Accuracy by policy and budget: one engine and one batch per cell, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zipage.config import FULL, EngineConfig
from zipage.engine.stats import EngineStats
from zipage.errors import ConfigError
from zipage.evals.problems import Problem, extract_answer, is_correct
from zipage.llm import LLM
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams

#: Called after every step of a cell with the cell and the engine's counters and gauges.
CellProgress = Callable[["Cell", EngineStats], None]


@dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes:
        policy: a policy's name, or ``full``.
        budget: tokens kept per request; None for full KV.
        policy_options: the policy's own options.
    """

    policy: str
    budget: int | None
    policy_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The policy with its options, as `parse_policy` reads it."""
        knobs = (f"{name}={_as_text(value)}" for name, value in self.policy_options.items())
        return ":".join([self.policy, *knobs])


@dataclass(frozen=True)
class Answer:
    """How one problem went.

    Attributes:
        problem_id, family, expected: id, family and answer of the problem.
        given: the reply's boxed answer; None if there is none.
        right: whether it is correct.
        finish_reason: why the reply ended; ``length`` if it was truncated.
        tokens: tokens generated.
        compressions, evicted_tokens, peak_blocks, preemptions: as in `RequestMetrics`.
        error: why the request failed, if it did.
    """

    problem_id: str
    family: str
    expected: str
    given: str | None
    right: bool
    finish_reason: str
    tokens: int
    compressions: int
    evicted_tokens: int
    peak_blocks: int
    preemptions: int
    error: str | None = None

    @classmethod
    def of(cls, problem: Problem, output: RequestOutput) -> Answer:
        """Score what a request returned."""
        reply, metrics = output.outputs[0], output.metrics
        return cls(
            problem_id=problem.problem_id,
            family=problem.family,
            expected=problem.answer,
            given=extract_answer(reply.text),
            right=is_correct(reply.text, problem.answer),
            finish_reason=str(reply.finish_reason),
            tokens=len(reply.token_ids),
            compressions=metrics.compressions,
            evicted_tokens=metrics.evicted_tokens,
            peak_blocks=metrics.peak_blocks,
            preemptions=metrics.preemptions,
            error=output.error,
        )


@dataclass(frozen=True)
class CellResult:
    """A finished cell; `wall_seconds` is from the submission of the batch to its end."""

    cell: Cell
    settings: Mapping[str, Any]
    wall_seconds: float
    answers: tuple[Answer, ...]

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.answers)

    @property
    def right(self) -> int:
        """Number of correct answers."""
        return sum(a.right for a in self.answers)

    @property
    def families(self) -> dict[str, tuple[int, int]]:
        """Numbers of correct answers and of problems, by family."""
        counts: dict[str, tuple[int, int]] = {}
        for answer in self.answers:
            right, total = counts.get(answer.family, (0, 0))
            counts[answer.family] = (right + answer.right, total + 1)
        return counts

    @property
    def generated_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(a.tokens for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of the batch."""
        return self.generated_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def truncated(self) -> int:
        """Replies cut off at `max_tokens` or the model's length."""
        return sum(a.finish_reason == "length" for a in self.answers)

    @property
    def errors(self) -> int:
        """Requests that failed."""
        return sum(a.finish_reason in ("error", "abort") for a in self.answers)

    @property
    def preemptions(self) -> int:
        """Preemptions of both kinds."""
        return sum(a.preemptions for a in self.answers)

    @property
    def peak_blocks(self) -> int:
        """Most blocks one request owned."""
        return max(a.peak_blocks for a in self.answers)

    def mean(self, name: str) -> float:
        """Mean of a numeric field of the answers."""
        return float(sum(getattr(a, name) for a in self.answers)) / self.total

    def only(self, problem_ids: Collection[str]) -> CellResult:
        """The same cell, restricted to these problems."""
        answers = tuple(a for a in self.answers if a.problem_id in problem_ids)
        return replace(self, answers=answers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the settings, the summary and every answer."""
        return {
            "policy": self.cell.policy,
            "budget": self.cell.budget,
            "policy_options": dict(self.cell.policy_options),
            "settings": dict(self.settings),
            "right": self.right,
            "total": self.total,
            "accuracy": self.right / self.total,
            "families": {name: list(counts) for name, counts in self.families.items()},
            "truncated": self.truncated,
            "errors": self.errors,
            "generated_tokens": self.generated_tokens,
            "wall_seconds": round(self.wall_seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "mean_compressions": round(self.mean("compressions"), 2),
            "mean_evicted_tokens": round(self.mean("evicted_tokens"), 1),
            "peak_blocks": self.peak_blocks,
            "preemptions": self.preemptions,
            "answers": [asdict(answer) for answer in self.answers],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CellResult:
        """Inverse of `to_dict`."""
        return cls(
            cell=Cell(record["policy"], record["budget"], record["policy_options"]),
            settings=record["settings"],
            wall_seconds=record["wall_seconds"],
            answers=tuple(Answer(**answer) for answer in record["answers"]),
        )


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:option=value:option=value``; values are JSON or plain text.

    Raises:
        ConfigError: `text` is not of that form. The engine's configuration checks whether the name
            and the options exist.
    """
    name, *knobs = text.strip().split(":")
    options: dict[str, Any] = {}
    for knob in knobs:
        option, equals, value = knob.partition("=")
        if not equals or not option:
            raise ConfigError(f"policy {text!r} must be a name or name:option=value:option=value")
        try:
            options[option] = json.loads(value)
        except json.JSONDecodeError:
            options[option] = value
    return name, options


def plan_cells(policies: Sequence[str], budgets: Sequence[int]) -> list[Cell]:
    """The cells of a table: every policy at every budget, ``full`` once.

    Args:
        policies: as `parse_policy` reads them.
        budgets: in tokens.

    Raises:
        ConfigError: a policy is malformed or has no budget, or there is nothing to run.
    """
    cells: list[Cell] = []
    for text in policies:
        name, options = parse_policy(text)
        if name != FULL and not budgets:
            raise ConfigError(f"policy {text!r} needs budgets: give at least one, or only 'full'")
        for budget in [None] if name == FULL else budgets:
            cell = Cell(name, budget, options)
            if cell not in cells:
                cells.append(cell)
    if not cells:
        raise ConfigError("nothing to run: give at least one policy")
    return cells


def engine_config(cell: Cell, options: Mapping[str, Any]) -> EngineConfig:
    """The engine configuration of a cell.

    Args:
        cell: sets `compression`, `policy_options` and `kv_budget`.
        options: every other engine option.

    Raises:
        ConfigError: an option is unknown or illegal.
    """
    own: dict[str, Any] = {"compression": cell.policy, "policy_options": dict(cell.policy_options)}
    if cell.policy != FULL:
        own["kv_budget"] = cell.budget
    taken = sorted(set(options) & {"compression", "policy_options", "kv_budget"})
    if taken:
        raise ConfigError(f"{', '.join(taken)}: a cell of the table sets this itself")
    return EngineConfig.from_options({**options, **own})


def cell_settings(
    cell: Cell, problems: Sequence[Problem], options: Mapping[str, Any], max_tokens: int
) -> dict[str, Any]:
    """What a cell's result depends on, except for the machine."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.problem_id}\0{problem.prompt}\0{problem.answer}\0".encode())
    config = asdict(engine_config(cell, options))
    return {
        "problems": digest.hexdigest()[:16],
        "max_tokens": max_tokens,
        **{name: value for name, value in config.items() if value is not None},
    }


def run_cell(
    cell: Cell,
    problems: Sequence[Problem],
    options: Mapping[str, Any],
    max_tokens: int,
    progress: CellProgress | None = None,
) -> CellResult:
    """Answer all problems greedily in one batch, through the model's chat template.

    Args:
        cell: policy and budget.
        problems: what to answer.
        options: engine options other than those the cell sets.
        max_tokens: most tokens of a reply; fewer if the model's length leaves less room.
        progress: called after every step.

    Raises:
        ConfigError: an option is illegal.
    """
    settings = cell_settings(cell, problems, options, max_tokens)
    config = engine_config(cell, options)
    with LLM(**{name: getattr(config, name) for name in asdict(config)}) as llm:
        prompts: list[Any] = llm.chat_prompts(
            [[{"role": "user", "content": problem.prompt}] for problem in problems]
        )
        room = llm.engine.max_model_len
        params = [
            SamplingParams(temperature=0.0, max_tokens=max(1, min(max_tokens, room - len(ids))))
            for ids in prompts
        ]
        on_step = None if progress is None else (lambda stats: progress(cell, stats))
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, on_step=on_step)
        wall = time.perf_counter() - started
    answers = tuple(map(Answer.of, problems, outputs))
    return CellResult(cell, settings, wall, answers)


def cell_path(folder: Path, cell: Cell, settings: Mapping[str, Any]) -> Path:
    """Path of a cell's result; different settings give different names."""
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    size = "full" if cell.budget is None else str(cell.budget)
    return folder / f"{cell.policy}-{size}-{digest}.json"


def run_cells(
    cells: Sequence[Cell],
    problems: Sequence[Problem],
    options: Mapping[str, Any],
    max_tokens: int,
    folder: Path | None = None,
    progress: CellProgress | None = None,
) -> Iterator[tuple[CellResult, bool]]:
    """Run cells in order; yields each result and whether it was already in `folder`.

    Every cell's options are checked before the first one runs. A result is written to `folder`
    the moment its cell ends, and read back instead of running the cell again.

    Raises:
        ConfigError: an option is illegal, `folder` can't be used, or a file in it is not a result.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} must be at least 1")
    settings = [cell_settings(cell, problems, options, max_tokens) for cell in cells]
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={str(folder)!r} can't be used: {error}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"out={str(folder)!r} can't be used: writing to it is not permitted")
    for cell, wanted in zip(cells, settings, strict=True):
        path = None if folder is None else cell_path(folder, cell, wanted)
        if path is not None and path.exists():
            yield _read_result(path), True
            continue
        result = run_cell(cell, problems, options, max_tokens, progress)
        if path is not None:
            _write_result(path, result)
        yield result, False


def _read_result(path: Path) -> CellResult:
    try:
        return CellResult.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the result of a cell ({type(error).__name__}: {error}): "
            "delete it or choose another folder"
        ) from error


def _write_result(path: Path, result: CellResult) -> None:
    # Written under another name and renamed, so that an interrupted run leaves no partial file.
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
