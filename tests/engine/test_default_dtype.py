"""torch's default dtype is the process's: loading another model may change it at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.workload import greedy, make_llm, prompt_ids
from zipage import SamplingParams

pytestmark = pytest.mark.usefixtures("no_retries")


@pytest.fixture
def other_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


PARAMS = [
    greedy(60),
    SamplingParams(temperature=0.8, seed=1, top_p=0.9, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0.8, seed=2, max_tokens=30, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=30, min_tokens=5, prompt_logprobs=1),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"attention_backend": "torch", "async_scheduling": True},
    {"compression": "rkv", "async_compression": True},
    {"compression": "snapkv", "attention_backend": "torch", "compaction": "stable"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_do_not_depend_on_it(options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    results = []
    for changed in (False, True):
        if changed:
            request.getfixturevalue("other_default")
        with make_llm(**options) as llm:
            prompts = [prompt_ids(llm, steps, steps) for steps in (1, 3, 5, 7)]
            outputs = llm.generate(prompts, PARAMS)
        assert all(output.error is None for output in outputs)
        assert sum(output.metrics.compressions for output in outputs) > 0
        results.append(
            [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]
        )
    assert results[0] == results[1]
