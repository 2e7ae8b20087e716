"""Small reasoning prompts and engines for the tests of the whole engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from zipage import LLM, RequestOutput, SamplingParams

NAMES = ("Anna", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana")


def ledger(steps: int, seed: int) -> str:
    """A ledger problem in the form zipage-tiny was trained on."""
    rng = random.Random(seed)
    people = rng.sample(NAMES, 4)
    balance = {name: rng.randint(20, 99) for name in people}
    lines = ["Start: " + " ".join(f"{name} has {balance[name]}." for name in people)]
    for i in range(1, steps + 1):
        giver, taker = rng.sample(people, 2)
        amount = rng.randint(1, max(1, balance[giver]))
        balance[giver] -= amount
        balance[taker] += amount
        lines.append(f"#{i} {giver} gives {taker} {amount}.")
    lines.append(f"How much does {people[0]} have at the end (#1-#{steps})? No checks.")
    return "\n".join(lines)


def prompt_ids(llm: LLM, steps: int, seed: int) -> list[int]:
    """Token ids of a ledger problem, ready to answer. About 70 + 8 per step."""
    (ids,) = llm.chat_prompts([{"role": "user", "content": ledger(steps, seed)}])
    assert isinstance(ids, list)
    return ids


def make_llm(**options: Any) -> LLM:
    """An engine on zipage-tiny with small blocks and budget."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "block_size": 16,
        "kv_budget": 64,
        "num_kv_blocks": 400,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "max_model_len": 4096,
    }
    return LLM(**{**defaults, **options})


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters of a fixed length."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens_of(output: RequestOutput) -> list[int]:
    """Generated tokens of a finished request, which must have ended well."""
    assert output.finished and output.error is None, output.error
    return output.outputs[0].token_ids


def run_alone(
    prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any
) -> list[list[int]]:
    """Each request by itself in an ample pool, without prefix cache."""
    with make_llm(enable_prefix_caching=False, num_kv_blocks=1000, **options) as llm:
        return [
            tokens_of(llm.generate([prompt], one)[0])
            for prompt, one in zip(prompts, params, strict=True)
        ]


def assert_empty(llm: LLM) -> None:
    """Nothing is owned, leased or swapped any more."""
    core = llm.engine.core
    core.check_integrity()
    assert core.scheduler.pool.num_available == core.scheduler.pool.num_blocks
    assert core.scheduler.num_query_slots_in_use == 0
    assert len(core.runner.swap) == 0
    assert not core.has_unfinished and not llm.engine.has_unfinished
