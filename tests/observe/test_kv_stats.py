"""`return_kv_stats`: which tokens each compression kept, against the keys in the cache."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.workload import greedy, make_llm, prompt_ids, tokens_of
from tests.observe.kept_reference import KeptReference
from zipage import CompressionRecord, RequestError, SamplingParams
from zipage.compression.job import CompressionJob
from zipage.compression.retention import count_keepers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_compression": True, "async_scheduling": True},
        {"compaction": "stable", "attention_backend": "torch"},
        {"compression": "streaming", "num_sinks": 4},
        {"bounded_prefill": True, "kv_budget": 32},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_kept_positions_equal_those_of_the_keys(options: dict[str, Any]) -> None:
    with make_llm(**options) as llm:
        reference = KeptReference(llm)
        todo = [prompt_ids(llm, 2 + 3 * i, seed=i) for i in range(3)]
        plain = llm.generate(todo, greedy(90))
        params = greedy(90, return_kv_stats=True, kv_stats_layers=True)
        outputs = llm.generate(todo, params)
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in plain]
    assert all(o.outputs[0].kv_stats is None for o in plain)
    of_request = {name.split("#")[0]: name for name in reference.kept}
    for output in outputs:
        records = output.outputs[0].kv_stats
        assert records and len(records) == output.metrics.compressions
        sequence = of_request[output.request_id]
        assert [r.keepers for r in records] == reference.keepers(sequence)
        assert [r.layer_positions for r in records] == reference.layer_positions(sequence)
        for record in records:
            layers = np.frombuffer(record.layer_keepers or b"", np.uint8)
            layers = layers.reshape(len(record.layer_positions), record.num_tokens)
            assert layers.sum(0).tolist() == record.keepers
            assert np.count_nonzero(layers, axis=1).tolist() == record.layer_positions
            assert len(record.keepers) == record.num_tokens
            assert sum(record.keepers) == record.kept * record.lists
            assert max(record.keepers) == record.lists, "the window is in every list"
            assert record.kept < record.length and record.seconds > 0
        evicted = sum(r.length - r.kept for r in records)
        assert evicted == output.metrics.evicted_tokens
        took = sum(r.seconds for r in records)
        assert took == pytest.approx(output.metrics.compression_time)
        if options.get("compression") == "streaming":
            last = records[-1]
            assert last.keepers[:4] == [last.lists] * 4 and last.keepers[4] == 0


def test_streams_show_every_compression_as_it_happens() -> None:
    with make_llm() as llm:
        prompt = prompt_ids(llm, 3, seed=1)
        seen = []
        for output in llm.stream(prompt, greedy(120, n=2, return_kv_stats=True)):
            seen.append([list(c.kv_stats or ()) for c in output.outputs])
            for completion in output.outputs:
                assert len(completion.kv_stats or ()) == completion.metrics.compressions
    numbers = [[len(records) for records in completions] for completions in seen]
    assert numbers[0] == [0, 0] and min(numbers[-1]) >= 3
    one, other = ([r.keepers for r in records] for records in seen[-1])
    assert one == other, "greedy answers are the same"
    as_json = json.loads(json.dumps(dataclasses.asdict(seen[-1][0][0])))
    assert CompressionRecord(**as_json) == seen[-1][0][0]


def test_no_compression_no_records() -> None:
    with make_llm() as llm:
        (output,) = llm.generate([prompt_ids(llm, 1, seed=1)], greedy(3, return_kv_stats=True))
        full = greedy(90, return_kv_stats=True, compression="off")
        (other,) = llm.generate([prompt_ids(llm, 1, seed=1)], full)
    assert output.outputs[0].kv_stats == other.outputs[0].kv_stats == []


def test_the_flag_must_be_a_boolean() -> None:
    with pytest.raises(RequestError, match="return_kv_stats='yes' is not legal"):
        SamplingParams(return_kv_stats="yes")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="False without return_kv_stats"):
        SamplingParams(kv_stats_layers=True)


def test_counting_by_position() -> None:
    job = CompressionJob("r", (0, 1, 2), (0, 1), 7, 4, 0, 0, 9, 2, 0, report_kept=True)
    positions = torch.tensor([[[2, 3, 7, 8], [3, 6, 7, 8]], [[2, 3, 7, 8], [2, 3, 7, 8]]])
    record = count_keepers(positions.to(torch.int32), job, 0.5, by_layer=True)
    assert record == CompressionRecord(
        num_tokens=9,
        length=7,
        kept=4,
        lists=4,
        keepers=[0, 0, 3, 4, 0, 0, 1, 4, 4],
        layer_positions=[5, 4],
        seconds=0.5,
        layer_keepers=bytes([0, 0, 1, 2, 0, 0, 1, 2, 2, 0, 0, 2, 2, 0, 0, 0, 2, 2]),
    )
