"""The work of an ablation's cells: generated problems, or the requests of a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zipage.bench.workloads import PRESETS, BenchRequest, make_workload
from zipage.errors import ConfigError
from zipage.evals.problems import Problem, count_tokens, generate_problems

#: The workload of generated problems, whose answers are scored.
PROBLEMS = "problems"

#: Random prompts get a common prefix of this many tokens if prefixes are to be shared.
SHARED_PREFIX = 1024
#: If prefixes are to be shared, a quarter of the problems get this many answers each, as in pass@k.
_SAMPLES = 4
#: Shortest and longest reference chain of thought of the problems, in tokens.
_CHAINS = (800, 1400)
#: Tokens of a chat template around a problem, and of the sentence after its chain of thought.
_TEMPLATE_TOKENS, _CLOSING_TOKENS = 10, 16


@dataclass(frozen=True)
class Work:
    """The work of every cell, unless the cell changes it.

    Attributes:
        workload: a preset's name, or ``problems``.
        num_requests, output_len, scale: see `make_workload`; ``problems`` uses only the first.
        seed: seed of the generated problems.
        shared: requests share prefixes.
    """

    workload: str = PROBLEMS
    num_requests: int | None = None
    output_len: int | None = None
    scale: float = 1.0
    seed: int = 0
    shared: bool = False

    def __post_init__(self) -> None:
        if self.workload not in PRESETS and self.workload != PROBLEMS:
            raise ConfigError(
                f"workload={self.workload!r}: legal are {', '.join([PROBLEMS, *PRESETS])}"
            )
        if self.workload == PROBLEMS and (self.output_len is not None or self.scale != 1):
            raise ConfigError("output_len and scale have no meaning with workload='problems'")

    def problems(self) -> list[Problem]:
        """The problems to be answered, in order."""
        low, high = _CHAINS
        problems = generate_problems(
            16 if self.num_requests is None else self.num_requests,
            self.seed,
            min_tokens=low,
            max_tokens=high,
            families=("addition", "lookup"),
            check=True,
        )
        return problems[: -(-len(problems) // self.samples)]

    @property
    def samples(self) -> int:
        """Number of answers to each problem, which share its prompt."""
        return _SAMPLES if self.shared and self.workload == PROBLEMS else 1

    def requests(self, vocab_size: int) -> list[BenchRequest]:
        """The requests of a preset."""
        requests = make_workload(
            self.workload, vocab_size, self.num_requests, self.output_len, self.scale
        )
        if not self.shared:
            return requests
        # An order of ids that no preset has, below any vocabulary size.
        prefix = [(7 * i + 3) % min(vocab_size, 251) for i in range(SHARED_PREFIX)]
        return [replace(r, prompt_token_ids=[*prefix, *r.prompt_token_ids]) for r in requests]

    def lengths(self) -> list[int]:
        """Tokens of prompt and answer of every request; for problems, of the reference answer."""
        if self.workload != PROBLEMS:
            return [len(r.prompt_token_ids) + r.output_len for r in self.requests(32000)]
        around = _TEMPLATE_TOKENS + _CLOSING_TOKENS
        problems = self.problems() * self.samples
        return [count_tokens(p.prompt) + p.cot_tokens + around for p in problems]

    def longest(self) -> int:
        """Most tokens that a request can have."""
        if self.workload != PROBLEMS:
            return max(self.lengths())
        prompt = max(count_tokens(p.prompt) for p in self.problems()) + _TEMPLATE_TOKENS
        return prompt + self.reply_limit()

    def reply_limit(self) -> int:
        """Most tokens of a reply to a problem: a longer reply has gone astray."""
        return _CHAINS[1] * 5 // 4
