"""Without parameters, sampling is what the model's generation_config.json asks for."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from zipage import LLM, AsyncLLM, SamplingParams
from zipage.engine.engine import LLMEngine
from zipage.models.loader import resolve_model_path

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture
def sampling_model(tmp_path: Path) -> Path:
    """zipage-tiny with sampling defaults."""
    shutil.copytree(resolve_model_path(None), tmp_path / "model")
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 7,
        "eos_token_id": [2, 0],
    }
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path / "model"


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SamplingParams]]:
    """The parameters of every request that reaches an engine."""
    seen: list[SamplingParams] = []
    add_request = LLMEngine.add_request

    def record(self, prompt, params, *more, **options):  # type: ignore[no-untyped-def]
        seen.append(params)
        return add_request(self, prompt, replace(params, max_tokens=2), *more, **options)

    monkeypatch.setattr(LLMEngine, "add_request", record)
    return seen  # type: ignore[return-value]


def test_defaults_and_overrides(sampling_model: Path, submitted: list[SamplingParams]) -> None:
    with LLM(str(sampling_model), kv_cache_memory="32MiB", max_num_seqs=2) as llm:
        defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
        assert llm.get_default_sampling_params() == defaults
        llm.chat(MESSAGES)
        llm.chat([MESSAGES, MESSAGES])
        assert submitted == [defaults] * 3
        own = SamplingParams(temperature=0.3)
        llm.chat(MESSAGES, own)
        llm.chat(MESSAGES, replace(llm.get_default_sampling_params(), top_k=5))
        llm.generate([1, 2, 3])
        list(llm.stream([1, 2, 3]))
        assert submitted[3:] == [
            own,
            replace(defaults, top_k=5),
            defaults,
            defaults,
        ]


def test_asyncio_has_the_same_defaults(
    sampling_model: Path, submitted: list[SamplingParams]
) -> None:
    async def answer() -> None:
        engine = AsyncLLM(str(sampling_model), kv_cache_memory="32MiB", max_num_seqs=2)
        try:
            async for _ in engine.generate([1, 2, 3]):
                pass
        finally:
            engine.shutdown()

    asyncio.run(answer())
    assert submitted == [SamplingParams(temperature=0.6, top_p=0.95, top_k=20)]


def test_a_model_without_them_is_greedy(submitted: list[SamplingParams]) -> None:
    with LLM(kv_cache_memory="32MiB", max_num_seqs=2) as llm:
        llm.chat(MESSAGES)
        llm.generate([1, 2, 3])
        assert submitted == [SamplingParams(temperature=0.0)] * 2


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    """The list of generation_config.json counts, not the tokenizer's single one."""
    source = resolve_model_path(None)
    params = SamplingParams(temperature=0.0, max_tokens=14)
    with LLM(kv_cache_memory="32MiB", max_num_seqs=2) as llm:
        plain = llm.chat(MESSAGES, params)[0].outputs[0].token_ids
    end = next(token for i, token in enumerate(plain) if i > 4 and token not in plain[:i])
    for name, ends in (("list", [2, end]), ("int", end)):
        path = tmp_path / name
        shutil.copytree(source, path)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        with LLM(str(path), kv_cache_memory="32MiB", max_num_seqs=2) as llm:
            answer = llm.chat(MESSAGES, params)[0].outputs[0]
        assert answer.finish_reason == "stop"
        assert answer.token_ids == plain[: plain.index(end) + 1]
