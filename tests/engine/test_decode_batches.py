"""Decode steps as captured graphs get them: replayed here by the decoder on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # zipage.execution.cuda_graphs imports the Triton backend

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, tokens_of
from zipage import LLM, SamplingParams
from zipage.attention.backend import StepInputs
from zipage.engine.request import PENDING_TOKEN
from zipage.execution.cuda_graphs import DecodeBatch, DecodeOutput

pytestmark = pytest.mark.usefixtures("no_retries")


class HostGraphs:
    """`DecodeGraphs` without a device: the same inputs and tables, a plain forward pass."""

    def __init__(self, llm: LLM) -> None:
        self.runner = llm.engine.core.runner
        self.tables = torch.zeros(self.runner._tables.shape, dtype=torch.int32)
        self.runs = 0

    def update_tables(self, cells: Mapping[int, int]) -> None:
        for cell, block in cells.items():
            self.tables.view(-1)[cell] = block

    def run(self, batch: DecodeBatch) -> DecodeOutput:
        self.runs += 1
        count = len(batch.input_ids)
        size = -(-count // 4) * 4

        def padded(values: Any, fill: int) -> torch.Tensor:
            tensor = torch.full((size,), fill, dtype=torch.int64)
            tensor[:count] = torch.from_numpy(values)
            return tensor

        rows = torch.from_numpy(batch.rows)
        # What a row's blocks should be is known on the host.
        for row, cache_len in zip(batch.rows, batch.cache_lens, strict=True):
            used = -(-cache_len // self.runner.config.block_size)
            assert self.tables[row, :used].tolist() == self.runner._tables[row, :used].tolist()
        ids = padded(batch.input_ids, 0)
        last = self.runner._last_tokens[padded(batch.rows, 0)]
        capture = padded(batch.capture, -1)
        step = StepInputs(
            input_ids=torch.where(ids == PENDING_TOKEN, last, ids),
            positions=padded(batch.positions, 0),
            slot_mapping=padded(batch.slot_mapping, -1),
            capture=capture,
            query_start=torch.arange(count + 1, dtype=torch.int32),
            cache_lens=torch.from_numpy(batch.cache_lens).int(),
            block_tables=self.tables[rows].contiguous(),
            num_tokens=count,
            max_query_len=1,
            max_cache_len=int(batch.cache_lens.max()),
            any_capture=bool((capture >= 0).any()),
        )
        model = self.runner.model
        logits = model.compute_logits(model(step, self.runner.backend)[:count])
        peaks, token_ids = logits.max(dim=-1)
        return DecodeOutput(logits, peaks, token_ids)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with make_llm() as llm:
        return [prompt_ids(llm, steps, seed) for seed, steps in enumerate([1, 2, 4, 6, 9] * 3)]


PARAMS = [
    greedy(90),
    greedy(40, compression="off"),
    SamplingParams(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=60, ignore_eos=True, logprobs=1),
    greedy(70, frequency_penalty=0.5),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 26, "admission": "optimistic", "max_num_seqs": 4},
        {"max_num_batched_tokens": 19, "max_num_seqs": 5, "async_compression": True},
    ],
    ids=["ample", "tight", "mixed"],
)
def test_texts_are_those_of_plain_steps(
    prompts: list[list[int]], options: dict[str, Any], ahead: bool
) -> None:
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    with make_llm() as llm:
        expected = [tokens_of(output) for output in llm.generate(prompts, params)]
    with make_llm(async_scheduling=ahead, **options) as llm:
        graphs = llm.engine.core.runner.graphs = HostGraphs(llm)  # type: ignore[assignment]
        outputs = llm.generate(prompts, params)
        assert_empty(llm)
    assert [tokens_of(output) for output in outputs] == expected
    assert graphs.runs > 50
