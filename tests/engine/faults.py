"""Faults thrown at the seams of the engine: where one part of it calls another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import zipage.engine.input_processor as input_module
import zipage.engine.output_processor as output_module
import zipage.execution.model_runner as runner_module
from zipage.engine.detokenizer import IncrementalDetokenizer
from zipage.engine.engine import LLMEngine
from zipage.execution.sampler import LaunchedSample

Owner = Callable[[LLMEngine], Any]


@dataclass(frozen=True)
class Seam:
    """A call that may fail.

    Attributes:
        name: for messages.
        owner: the object or module that holds the function.
        function: its attribute.
        contained: whether such a failure must leave the engine running. Otherwise it may stop,
            but then everybody must be told.
        weight: how often it is chosen, compared with the others.
        after: whether it fails when it has done its work, instead of before.
    """

    name: str
    owner: Owner
    function: str
    contained: bool = True
    weight: int = 1
    after: bool = False


#: Every internal seam. A new one is a line here; the test then demands that it is reached.
SEAMS = (
    Seam("step inputs", lambda e: e.core.runner, "_build"),
    Seam("model forward", lambda e: e.core.runner.model, "forward", weight=3),
    Seam("attention", lambda e: e.core.runner.backend, "attend"),
    Seam("logits", lambda e: e.core.runner.model, "compute_logits"),
    Seam("launch", lambda e: e.core.runner, "launch", weight=6),
    Seam("launch's end", lambda e: e.core.runner, "launch", weight=6, after=True),
    Seam("prompt logprobs", lambda e: runner_module, "prompt_logprobs"),
    Seam("sampler", lambda e: e.core.runner.sampler, "sample", weight=3),
    Seam("sampler's end", lambda e: e.core.runner.sampler, "sample", weight=3, after=True),
    Seam("sampler ahead", lambda e: e.core.runner.sampler, "launch", weight=6),
    Seam("ahead, at its end", lambda e: e.core.runner.sampler, "launch", weight=6, after=True),
    Seam("reading tokens", lambda e: LaunchedSample, "wait", contained=False, weight=4),
    Seam("compression", lambda e: e.core.runner, "compress", weight=6),
    Seam("compression kernel", lambda e: e.core.runner.compressor, "run", weight=2),
    Seam("kernel's end", lambda e: e.core.runner.compressor, "run", weight=4, after=True),
    Seam("executor submit", lambda e: e.core._executor, "submit", weight=2),
    Seam("executor poll", lambda e: e.core._executor, "poll", contained=False),
    Seam("executor wait", lambda e: e.core._executor, "wait", contained=False, weight=12),
    Seam("swap out", lambda e: e.core.runner.swap, "swap_out", weight=9),
    Seam("swap in", lambda e: e.core.runner.swap, "swap_in", weight=9),
    Seam("swap out's end", lambda e: e.core.runner.swap, "swap_out", weight=9, after=True),
    Seam("swap in's end", lambda e: e.core.runner.swap, "swap_in", weight=9, after=True),
    Seam("prompt encoding", lambda e: input_module, "encode_prompt", weight=4),
    Seam("detokeniser start", lambda e: output_module, "IncrementalDetokenizer"),
    Seam("detokeniser push", lambda e: IncrementalDetokenizer, "push", weight=3),
    Seam("detokeniser finish", lambda e: IncrementalDetokenizer, "finish", weight=3),
    Seam("final text", lambda e: output_module, "decode_final", weight=3),
    Seam("token text", lambda e: output_module, "token_text"),
    Seam("queueing", lambda e: e.core.scheduler, "add"),
    Seam("compression plans", lambda e: e.core.scheduler, "plan_compressions", contained=False),
    Seam("schedule", lambda e: e.core.scheduler, "schedule", contained=False),
    Seam("prefix match", lambda e: e.core.scheduler.prefix_cache, "match", contained=False),
    Seam("prefix registration", lambda e: e.core.scheduler.prefix_cache, "register", False),
    Seam("block allocation", lambda e: e.core.scheduler.pool, "allocate", contained=False),
    Seam("block release", lambda e: e.core.scheduler.pool, "release", contained=False, weight=2),
    Seam("after the step", lambda e: e.core.scheduler, "update", contained=False),
    Seam(
        "compression end",
        lambda e: e.core.scheduler,
        "finish_compression",
        contained=False,
        weight=2,
    ),
    Seam("request end", lambda e: e.core.scheduler, "finish", contained=False),
    Seam("report", lambda e: e.outputs, "_report", contained=False),
)
#: Seams in the code of a caller, which the drivers call through `Injector.at`.
CALLER_SEAMS = ("on_step callback", "stream consumer", "async consumer")

FAULTS: tuple[type[Exception], ...] = (RuntimeError, MemoryError, torch.OutOfMemoryError)


class InjectedFault(Exception):
    """What a caller's own code raises."""


@dataclass
class Injector:
    """Throws faults at calls chosen in advance.

    Attributes:
        plan: seam to call number to what is thrown there.
        calls: seam to the number of calls so far.
        hit: seams that threw.
    """

    plan: dict[str, dict[int, type[Exception]]]
    calls: Counter[str] = field(default_factory=Counter)
    hit: set[str] = field(default_factory=set)

    def at(self, name: str) -> None:
        """Called whenever the seam is passed."""
        self.calls[name] += 1
        fault = self.plan.get(name, {}).get(self.calls[name])
        if fault is not None:
            self.hit.add(name)
            raise fault(f"injected at {name}")

    @contextmanager
    def installed(self, engine: LLMEngine) -> Iterator[None]:
        """While active, the seams of the plan throw."""
        restored = []
        for seam in SEAMS:
            if seam.name not in self.plan:
                continue
            owner = seam.owner(engine)
            inner = getattr(owner, seam.function)
            own = seam.function in vars(owner)
            restored.append((owner, seam.function, inner, own))
            setattr(owner, seam.function, self._throwing(seam, inner))
        try:
            yield
        finally:
            for owner, function, inner, own in reversed(restored):
                if own:
                    setattr(owner, function, inner)
                else:
                    delattr(owner, function)

    def _throwing(self, seam: Seam, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not seam.after:
                self.at(seam.name)
            result = inner(*args, **options)
            if seam.after:
                self.at(seam.name)
            return result

        return call


def random_injector(seed: int, rng: random.Random, caller_seams: tuple[str, ...]) -> Injector:
    """Faults at up to three seams, alone or in bursts; every seam has its turn among the seeds."""
    names = [SEAMS[seed % len(SEAMS)].name]
    others = [seam.name for seam in SEAMS] + list(caller_seams)
    weights = [seam.weight for seam in SEAMS] + [12] * len(caller_seams)
    names += rng.choices(others, weights, k=rng.choice((0, 1, 2)))
    plan: dict[str, dict[int, type[Exception]]] = {}
    for name in names:
        start, length = rng.choice((1, 1, 1, 2, 3, 5, 13, 30)), rng.choice((1, 1, 1, 2, 5, 12))
        fault = InjectedFault if name in caller_seams else rng.choice(FAULTS)
        plan[name] = dict.fromkeys(range(start, start + length), fault)
    return Injector(plan)
