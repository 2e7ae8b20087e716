"""Benchmark requests: random prompt ids and fixed output lengths, the same for every engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from zipage.errors import ConfigError

#: Prompt ids are drawn from this range, and taken modulo the vocabulary of a smaller model.
_FIRST_ID, _VOCAB_SIZE = 10, 32000


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and how many tokens to generate, ignoring end-of-sequence tokens."""

    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class WorkloadPreset:
    """How the requests of a workload are drawn.

    Prompt lengths are uniform. Output lengths are log-normal, clipped, or `fixed_output_len`.

    Attributes:
        num_requests: number of requests.
        prompt_len: fewest and most prompt tokens.
        mean, sigma: mean of the output length, and standard deviation of its logarithm.
        output_len: bounds of the output length.
        fixed_output_len: output length of all requests; None to draw it.
    """

    num_requests: int
    prompt_len: tuple[int, int] = (64, 256)
    mean: float = 0.0
    sigma: float = 0.0
    output_len: tuple[int, int] = (512, 32768)
    fixed_output_len: int | None = None


PRESETS: dict[str, WorkloadPreset] = {
    # Decoding a single batch: prompts of 309 tokens on average.
    "tiny": WorkloadPreset(32, prompt_len=(180, 438), fixed_output_len=256),
    # Shaped like the answers of reasoning models to AMC and AIME problems, and short ones.
    "amc": WorkloadPreset(96, mean=8192, sigma=0.7, output_len=(512, 16384)),
    "aime": WorkloadPreset(64, mean=14000, sigma=0.5, output_len=(512, 32768)),
    "short": WorkloadPreset(256, mean=1024, sigma=0.4, output_len=(512, 2048)),
}


def make_workload(
    name: str,
    vocab_size: int,
    num_requests: int | None = None,
    output_len: int | None = None,
    scale: float = 1.0,
) -> list[BenchRequest]:
    """The requests of a preset.

    They depend only on the name: fewer requests are the first of the same sequence, more continue
    it, and a scale or an output length only changes lengths.

    Args:
        name: one of `PRESETS`.
        vocab_size: vocabulary size of the model.
        num_requests: number of requests; None for the preset's.
        output_len: tokens to generate for each request, instead of the preset's lengths.
        scale: factor for the preset's lengths, at most 1, for models with a short context.

    Raises:
        ConfigError: an argument is illegal.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"workload={name!r}: legal are {', '.join(PRESETS)}")
    for option, value in (("num_requests", num_requests), ("output_len", output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}={value} must be at least 1")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale={scale} must lie in (0, 1]")
    draw = random.Random(0)
    requests = []
    for _ in range(preset.num_requests if num_requests is None else num_requests):
        prompt_len = draw.randint(*preset.prompt_len)
        if preset.fixed_output_len is None:
            drawn = draw.lognormvariate(_log_mean(preset), preset.sigma)
            low, high = preset.output_len
            generated = int(min(high, max(low, drawn)))
        else:
            generated = preset.fixed_output_len
        ids = [draw.randrange(_FIRST_ID, _VOCAB_SIZE) for _ in range(prompt_len)]
        kept = ids[: _scaled(prompt_len, scale)]
        requests.append(
            BenchRequest(
                [token % vocab_size for token in kept] if vocab_size < _VOCAB_SIZE else kept,
                output_len or _scaled(generated, scale),
            )
        )
    return requests


def check_lengths(requests: Sequence[BenchRequest], max_model_len: int, scale: float = 1.0) -> None:
    """Check that a workload made with `scale` fits the model's length.

    Raises:
        ConfigError: it does not; the message suggests a scale that does.
    """
    longest = max(len(r.prompt_token_ids) + r.output_len for r in requests)
    if longest > max_model_len:
        fitting = scale * max_model_len / longest
        digits = 10 ** (2 - math.ceil(math.log10(fitting)))
        raise ConfigError(
            f"the longest request has {longest:,} tokens, more than "
            f"max_model_len={max_model_len:,}: use scale={math.floor(fitting * digits) / digits:g}"
            " or smaller, an output_len, or a larger max_model_len"
        )


def _scaled(length: int, scale: float) -> int:
    return max(1, int(length * scale))


def _log_mean(preset: WorkloadPreset) -> float:
    """The mean of the logarithm of a log-normal variable, from its own mean."""
    return math.log(preset.mean) - preset.sigma * preset.sigma / 2
