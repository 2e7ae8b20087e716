"""Requests to a server and their send times: arrival processes, traces, files of prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zipage.bench.workloads import make_workload
from zipage.config import is_real
from zipage.errors import ConfigError
from zipage.json_lines import read_json_lines

#: Words for endpoints that do not take token ids; each is about one token.
_WORDS = ("time", "year", "people", "way", "day", "world", "life", "hand", "part", "eye", "work")

ArrivalProcess = Literal["poisson", "constant", "gamma"]


@dataclass(frozen=True)
class ServingRequest:
    """One request to a server.

    Attributes:
        prompt: token ids, text, or chat messages.
        output_len: ``max_tokens``; None to leave the end to the model.
        arrival: seconds after the start at which it is sent; None to send it as soon as an earlier
            request has ended.
    """

    prompt: list[int] | str | list[dict[str, Any]]
    output_len: int | None
    arrival: float | None = 0.0


def workload_requests(
    name: str,
    vocab_size: int,
    num_requests: int | None = None,
    output_len: int | None = None,
    scale: float = 1.0,
) -> list[ServingRequest]:
    """The requests of a preset, see `make_workload`, all at once."""
    work = make_workload(name, vocab_size, num_requests, output_len, scale)
    return [ServingRequest(r.prompt_token_ids, r.output_len) for r in work]


def read_trace(
    path: Path, vocab_size: int, num_requests: int | None = None, scale: float = 1.0, seed: int = 0
) -> list[ServingRequest]:
    """Requests of a JSONL trace with ``arrival_s``, ``input_tokens`` and ``output_tokens``.

    Prompts are random token ids of the lengths given. Times count from the first request.

    Args:
        path: the trace; other fields of its records are ignored.
        vocab_size: ids are below it.
        num_requests: use only this many first records.
        scale: factor for all lengths, at most 1.
        seed: seed of the ids.

    Raises:
        ConfigError: the file can't be read, or a record is malformed or out of order.
    """
    _check_scale(scale)
    draw = random.Random(seed)
    low = 10 if vocab_size > 20 else 0
    requests: list[ServingRequest] = []
    start = last = 0.0
    for where, record in read_json_lines("trace", path):
        arrival: Any = record.get("arrival_s")
        lengths: list[Any] = [record.get("input_tokens"), record.get("output_tokens")]
        is_time = is_real(arrival) and math.isfinite(arrival)
        if not is_time or not all(_is_count(length) for length in lengths):
            raise ConfigError(
                f"{where} needs arrival_s in seconds, and input_tokens and output_tokens of at "
                "least 1"
            )
        if not requests:
            start = last = arrival
        if arrival < last:
            raise ConfigError(f"{where} has arrival_s={arrival}, before the record above it")
        last = arrival
        prompt_len, output_len = (max(1, int(length * scale)) for length in lengths)
        ids = [draw.randrange(low, vocab_size) for _ in range(prompt_len)]
        requests.append(ServingRequest(ids, output_len, arrival - start))
        if len(requests) == num_requests:
            break
    return _some(requests, "trace", path)


def read_prompts(
    path: Path, num_requests: int | None = None, output_len: int | None = None
) -> list[ServingRequest]:
    """Requests of a JSONL file, all at once; if fewer than `num_requests`, they are repeated.

    A record has one of ``prompt`` (text), ``prompt_token_ids`` and ``messages``, and may have
    ``max_tokens``.

    Raises:
        ConfigError: the file can't be read, or a record is malformed.
    """
    requests = []
    for where, record in read_json_lines("prompts", path):
        prompt = record.get("prompt", record.get("prompt_token_ids", record.get("messages")))
        if not prompt or not isinstance(prompt, (str, list)):
            raise ConfigError(f"{where} needs prompt, prompt_token_ids or messages")
        limit = record.get("max_tokens", output_len)
        if limit is not None and not _is_count(limit):
            raise ConfigError(f"{where} has max_tokens={limit!r}: must be an integer >= 1")
        requests.append(ServingRequest(prompt, limit))
    _some(requests, "prompts", path)
    count = len(requests) if num_requests is None else num_requests
    return [requests[i % len(requests)] for i in range(count)]


def arrival_times(
    process: ArrivalProcess, rate: float, count: int, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """When requests arrive, in seconds, from 0.

    Args:
        process: ``poisson`` (exponential gaps), ``constant`` (equal ones) or ``gamma``.
        rate: requests per second, on average; infinite for all at once.
        count: how many.
        burstiness: shape of the gamma distribution: 1 is Poisson, less is burstier, more is more
            regular. The gaps' coefficient of variation is 1 / sqrt(burstiness).
        seed: seed of the gaps.

    Raises:
        ConfigError: an argument is illegal.
    """
    if process not in ("poisson", "constant", "gamma"):
        raise ConfigError(f"arrivals={process!r}: legal are poisson, constant, gamma")
    if not rate > 0:
        raise ConfigError(f"rate={rate} must be positive, or inf")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness={burstiness} must be positive")
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if rate < math.inf:
            if process == "constant":
                now = len(times) / rate
            else:
                shape = burstiness if process == "gamma" else 1.0
                now += draw.gammavariate(shape, 1 / (rate * shape))
    return times


def at(requests: Sequence[ServingRequest], times: Sequence[float | None]) -> list[ServingRequest]:
    """The same requests at other times."""
    return [replace(r, arrival=t) for r, t in zip(requests, times, strict=True)]


def as_messages(request: ServingRequest, seed: int) -> ServingRequest:
    """The same request for a chat endpoint; words of about as many tokens replace ids."""
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        draw = random.Random(f"{seed} {len(prompt)} {prompt[:8]}")
        prompt = " ".join(draw.choice(_WORDS) for _ in prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return replace(request, prompt=prompt)


def _some(requests: list[ServingRequest], option: str, path: Path) -> list[ServingRequest]:
    if not requests:
        raise ConfigError(f"{option}={str(path)!r} has no requests")
    return requests


def _check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise ConfigError(f"scale={scale} must lie in (0, 1]")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
