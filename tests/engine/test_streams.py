"""Streams of the engine when a model writes texts whose characters are easily broken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.engine.workload import assert_empty, make_llm
from tests.sampling.stream_texts import TEXTS
from zipage import LLM, AsyncLLM, SamplingParams
from zipage.execution.sampler import SamplerOutput, SamplingState

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE that fits the 320 token ids of zipage-tiny."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=315,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(path)
    return path


class Script:
    """A sampler that makes the model write texts: the one whose number is the request's seed."""

    def __init__(self, llm: LLM) -> None:
        encode = llm.get_tokenizer().encode
        self.tokens = [encode(text, add_special_tokens=False) for text in TEXTS]

    def sample(self, logits: torch.Tensor, states: list[SamplingState]) -> SamplerOutput:
        token_ids = []
        for state in states:
            assert state.params.seed is not None
            token_ids.append(self.tokens[state.params.seed][state.num_sampled])
            state.num_sampled += 1
        return SamplerOutput(token_ids, [None] * len(states), {})

    def params(self, index: int, **options: Any) -> SamplingParams:
        return SamplingParams(
            seed=index, max_tokens=len(self.tokens[index]), ignore_eos=True, **options
        )


@pytest.fixture(scope="module")
def scripted(tokenizer: Path) -> Iterator[tuple[LLM, Script]]:
    with make_llm(tokenizer=str(tokenizer), max_num_seqs=64, num_kv_blocks=120) as llm:
        script = Script(llm)
        llm.engine.core.runner.sampler = script  # type: ignore[assignment]
        yield llm, script


def test_streams_add_up_to_the_texts(scripted: tuple[LLM, Script]) -> None:
    llm, script = scripted
    params = [script.params(index) for index in range(len(TEXTS))]
    texts: dict[str, str] = {}
    last: dict[str, Any] = {}
    for output in llm.stream([PROMPT] * len(TEXTS), params):
        now = output.outputs[0].text
        before = texts.get(output.request_id, "")
        assert now.startswith(before), "what was sent is never taken back"
        now[len(before) :].encode()
        assert "\ufffd" not in now
        texts[output.request_id] = now
        last[output.request_id] = output
    assert list(texts.values()) and sorted(texts.values()) == sorted(TEXTS)
    assert all(o.outputs[0].finish_reason == "length" for o in last.values())
    # Without a stream they are decoded at once, to the same.
    assert [o.outputs[0].text for o in llm.generate([PROMPT] * len(TEXTS), params)] == TEXTS
    assert_empty(llm)


@pytest.mark.parametrize("include", [False, True])
def test_nothing_of_a_stop_string_is_sent(scripted: tuple[LLM, Script], include: bool) -> None:
    llm, script = scripted
    params, expected = [], {}
    for index, text in enumerate(TEXTS):
        # From the middle of the text, across at least two tokens.
        middle = len(text) // 2
        stop = text[middle : middle + 4]
        begin = text.find(stop)
        expected[f"stop-{index}"] = (text[: begin + 4 if include else begin], stop)
        params.append(script.params(index, stop=[stop], include_stop_str_in_output=include))
    for index, one in enumerate(params):
        llm.engine.add_request(PROMPT, one, f"stop-{index}", stream=True)
    finished = set()
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            text, stop = expected[output.request_id]
            answer = output.outputs[0]
            assert text.startswith(answer.text)
            if not output.finished and include:
                assert stop not in answer.text
            if output.finished:
                finished.add(output.request_id)
                assert (answer.text, answer.finish_reason, answer.stop_reason) == (
                    text,
                    "stop",
                    stop,
                )
    assert finished == set(expected)
    assert_empty(llm)


@pytest.mark.parametrize("stop", [None, "\ufffd", "b\ufffd"])
def test_a_character_that_is_never_completed(
    scripted: tuple[LLM, Script], stop: str | None
) -> None:
    """Its place is marked at the end, where a stop string may take it away again."""
    llm, script = scripted
    script.tokens.append(llm.get_tokenizer().encode("ab🙂", add_special_tokens=False)[:-1])
    params = script.params(len(script.tokens) - 1, stop=stop)
    *before, last = llm.stream([PROMPT], params)
    assert all("\ufffd" not in output.outputs[0].text for output in before)
    answer = last.outputs[0]
    if stop is None:
        assert (answer.text, answer.finish_reason) == ("ab\ufffd", "length")
    else:
        expected = "ab" if stop == "\ufffd" else "a"
        assert (answer.text, answer.finish_reason) == (expected, "stop")
        assert answer.stop_reason == stop
    assert_empty(llm)


def test_asyncio_streams_add_up_to_the_texts(tokenizer: Path) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(
            device="cpu", block_size=16, kv_budget=64, num_kv_blocks=200, tokenizer=str(tokenizer)
        )
        script = Script(llm)  # type: ignore[arg-type]
        llm.engine.core.runner.sampler = script  # type: ignore[assignment]

        async def read(index: int) -> str:
            text = ""
            async for output in llm.generate(PROMPT, script.params(index)):
                assert output.outputs[0].text.startswith(text)
                text = output.outputs[0].text
                assert "\ufffd" not in text
            return text

        assert await asyncio.gather(*(read(index) for index in range(24))) == TEXTS[:24]
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(asyncio.wait_for(scenario(), 60))
