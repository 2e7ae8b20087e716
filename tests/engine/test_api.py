"""The public API: generate, chat, stream, asyncio, refusals, metrics."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import zipage
from tests.engine.workload import assert_empty, greedy, ledger, make_llm, prompt_ids, tokens_of
from zipage import LLM, AsyncLLM, ConfigError, EngineConfig, RequestError, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Any:
    with make_llm(kv_budget=256) as engine:
        yield engine


def test_chat_answers_a_problem(llm: LLM) -> None:
    prompt = "Add these numbers.\n#1 74\n#2 79\nWhat is the sum (#1-#2)? No checks."
    (output,) = llm.chat([{"role": "user", "content": prompt}])
    answer = output.outputs[0]
    assert answer.text.endswith("The answer is \\boxed{153}.")
    assert answer.finish_reason == "stop" and answer.stop_reason is None
    assert output.usage.completion_tokens == len(answer.token_ids)
    assert output.usage.total_tokens == output.usage.prompt_tokens + len(answer.token_ids)
    assert output.metrics.time_to_first_token is not None
    assert output.metrics.tokens_per_second > 0


def test_stream_adds_up_to_the_final_text(llm: LLM) -> None:
    prompts = [prompt_ids(llm, 3, seed=1), prompt_ids(llm, 5, seed=2)]
    final = {o.request_id[-1]: o for o in llm.generate(prompts, greedy(40))}
    seen: dict[str, list[str]] = {}
    for output in llm.stream(prompts, greedy(40)):
        seen.setdefault(output.request_id, []).append(output.outputs[0].text)
    assert len(seen) == 2
    for texts, expected in zip(seen.values(), final.values(), strict=True):
        assert len(texts) == 40
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))  # noqa: B905, RUF007
        assert texts[-1] == expected.outputs[0].text


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream([prompt_ids(llm, 3, seed=1)], greedy(200))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_streams_read_in_turn_lose_nothing(llm: LLM) -> None:
    one = llm.stream([prompt_ids(llm, 3, seed=1)], greedy(10))
    two = llm.stream([prompt_ids(llm, 4, seed=2)], greedy(30))
    pairs = list(zip(one, two, strict=False))
    assert len(pairs) == 10 and pairs[-1][0].finished
    (other,) = llm.generate([prompt_ids(llm, 5, seed=3)], greedy(60))
    assert len(tokens_of(other)) == 60
    assert len(list(two)) in (19, 20), "its outputs of meanwhile were kept"
    unread = llm.stream([prompt_ids(llm, 3, seed=1)], greedy(50))
    unread.close()
    assert_empty(llm)


def test_request_aborted_from_elsewhere_ends_its_stream(llm: LLM) -> None:
    stream = llm.stream([prompt_ids(llm, 3, seed=1)], greedy(500))
    name = next(stream).request_id
    llm.engine.abort(name)
    assert len(list(stream)) <= 1
    assert_empty(llm)


def test_streamed_logprobs_do_not_grow_afterwards(llm: LLM) -> None:
    stream = llm.stream([prompt_ids(llm, 2, seed=1)], greedy(6, logprobs=1))
    answers = [output.outputs[0] for output in stream]
    assert [len(a.token_ids) for a in answers] == [1, 2, 3, 4, 5, 6]
    assert [len(a.logprobs or ()) for a in answers] == [1, 2, 3, 4, 5, 6]


def test_stop_string_ends_the_request(llm: LLM) -> None:
    prompt = prompt_ids(llm, 4, seed=3)
    (free,) = llm.generate([prompt], greedy(60))
    (output,) = llm.generate([prompt], greedy(60, stop=["#2"]))
    answer = output.outputs[0]
    assert answer.finish_reason == "stop" and answer.stop_reason == "#2"
    assert answer.text == free.outputs[0].text.split("#2")[0]
    assert len(answer.token_ids) < 60
    assert_empty(llm)


def test_logprobs_are_returned(llm: LLM) -> None:
    (output,) = llm.generate([prompt_ids(llm, 2, seed=1)], greedy(5, logprobs=2))
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
    total = sum(
        entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert answer.cumulative_logprob == pytest.approx(total)


def test_seeded_samples_do_not_depend_on_the_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=20.0, seed=11, max_tokens=40, n=2, ignore_eos=True)
    prompt = prompt_ids(llm, 3, seed=1)
    (alone,) = llm.generate([prompt], params)
    others = [SamplingParams(temperature=1.0, max_tokens=30) for _ in range(5)]
    outputs = llm.generate(
        [prompt_ids(llm, 4, seed=i) for i in range(5)] + [prompt], [*others, params]
    )
    assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in alone.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_priorities_run_first() -> None:
    with make_llm(max_num_seqs=1) as llm:
        prompts = [prompt_ids(llm, 1, seed=i) for i in range(3)]
        order: list[str] = []
        for name, priority in (("low", 5), ("middle", 1), ("high", -1)):
            llm.engine.add_request(prompts[0], greedy(4), name, priority=priority)
        while llm.engine.has_unfinished:
            order += [o.request_id for o in llm.engine.step()]
        assert order == ["high", "middle", "low"]


def test_budget_per_request(llm: LLM) -> None:
    prompt = prompt_ids(llm, 10, seed=4)
    outputs = llm.generate(
        [prompt] * 3,
        [greedy(300, kv_budget=64), greedy(300), greedy(300, compression="off")],
    )
    peaks = [o.metrics.peak_blocks for o in outputs]
    assert outputs[0].metrics.compressions > outputs[1].metrics.compressions > 0
    assert outputs[2].metrics.compressions == 0 and outputs[2].metrics.evicted_tokens == 0
    assert peaks[1] == 17 and peaks[2] == -(-(len(prompt) + 299) // 16)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([5, 320], {}, "320.*0 to 319"),
        ([5, -1], {}, "-1"),
        ([5, True], {}, "not an integer"),
        ({"text": "x"}, {}, "legal are 'prompt'"),
        (7, {}, "prompt"),
        ([5] * 5000, {}, "5000 tokens.*max_model_len=4096"),
        ([5], {"max_tokens": 4096}, "max_tokens=4096.*at most 4095"),
        ([5] * 3, None, "sampling_params must be SamplingParams"),
        ([5], {"kv_budget": 100}, "kv_budget=100.*multiple of block_size=16"),
        ([5], {"kv_budget": 0}, "kv_budget"),
        ([5], {"kv_budget": 64, "compression": "off"}, "must be None"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nobody(
    llm: LLM, prompt: Any, params: dict[str, Any] | None, message: str
) -> None:
    good = prompt_ids(llm, 2, seed=1)
    with pytest.raises(RequestError, match=message):
        bad: Any = "greedy" if params is None else SamplingParams(**params)
        llm.generate([good, prompt], [greedy(5), bad])
    assert_empty(llm)
    assert len(tokens_of(llm.generate([good], greedy(5))[0])) == 5


def test_empty_batch_and_single_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []
    (text,) = llm.generate(ledger(2, 1), greedy(3))
    (ids,) = llm.generate(text.prompt_token_ids, greedy(3))
    assert tokens_of(text) == tokens_of(ids) and text.prompt == ledger(2, 1) and ids.prompt is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 16}, "unknown engine option 'block_sise'; did you mean block_size"),
        ({"block_size": 20}, "multiple of 16"),
        ({"kv_budget": 100}, "multiple of block_size=64, at least 64"),
        ({"kv_budget": 16, "block_size": 16, "num_sinks": 8}, "at least 32"),
        ({"window": 0}, "window"),
        ({"window": 65}, "window=65"),
        ({"dtype": "float8"}, "legal are auto"),
        ({"kv_cache_memory": "2 parsecs"}, "is not a size"),
        ({"kv_cache_memory": "1MiB"}, "at least 33 are needed"),
        ({"num_kv_blocks": 5}, "num_kv_blocks=5 is too few: one request needs at least 33 blocks"),
        ({"kv_cache_memory": "1GiB", "num_kv_blocks": 5}, "both"),
        ({"compression": "magic"}, "'magic' is an unknown policy: legal are .*full"),
        ({"policy_options": {"lambda": 1}}, "no option 'lambda'"),
        ({"policy_options": {"lam": 2}}, "from 0 to 1"),
        ({"compression": "full", "policy_options": {"lam": 1}}, "no meaning"),
        ({"compression": "full", "kv_budget": -5}, "kv_budget=-5 must be an integer >= 1"),
        ({"max_model_len": 10**6}, "8192 positions"),
        ({"max_model_len": 1}, "max_model_len=1 must be an integer >= 2"),
        ({"memory_utilization": 0.0}, r"\(0, 1\]"),
        ({"max_num_seqs": True}, "must be an integer"),
        ({"enable_prefix_caching": "false"}, "must be True or False"),
        ({"memory_utilization": "0.5"}, "memory_utilization='0.5'"),
        ({"device": 0}, "device=0"),
        ({"policy_options": None}, "must be a mapping"),
        ({"attention_backend": "native", "dtype": "bfloat16"}, "attention_backend='native' needs"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"device": "cpu", **options})


def test_config_is_hashed_by_nothing_but_its_values() -> None:
    assert EngineConfig(kv_budget=512) == EngineConfig.from_options({"kv_budget": 512})


def test_async_llm_streams_aborts_and_stops() -> None:
    async def scenario() -> None:
        llm = AsyncLLM(device="cpu", block_size=16, kv_budget=64, num_kv_blocks=200)
        prompt = [1, 258, 259, 270, 271]

        async def collect(**options: Any) -> list[Any]:
            return [o async for o in llm.generate(prompt, greedy(30), **options)]

        results = await asyncio.gather(*(collect() for _ in range(5)))
        assert all(len(r) == 30 and r[-1].finished for r in results)
        assert all(
            r[-1].outputs[0].token_ids == results[0][-1].outputs[0].token_ids for r in results
        )

        with pytest.raises(RequestError, match="empty"):
            async for _ in llm.generate([], greedy(3)):
                pass

        # Leaving the iteration aborts the request; so does `abort`, which ends the iteration.
        async for _ in llm.generate(prompt, greedy(4000)):
            break
        task = asyncio.create_task(_last(llm, prompt, "named"))
        await asyncio.sleep(0.2)
        await llm.abort("named")
        assert (await task).outputs[0].finish_reason == "abort"
        for _ in range(100):
            if llm.stats().running == 0 and llm.stats().blocks_owned == 0:
                break
            await asyncio.sleep(0.05)
        assert llm.stats().running == 0 and llm.stats().blocks_owned == 0

        task = asyncio.create_task(_last(llm, prompt, "late"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(llm.shutdown)
        assert (await task).outputs[0].finish_reason == "abort"

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert threading.active_count() == before


async def _last(llm: AsyncLLM, prompt: list[int], name: str) -> Any:
    last = None
    async for output in llm.generate(prompt, greedy(4000), name):
        last = output
    return last


def test_dir_lists_what_is_loaded_on_first_use() -> None:
    assert set(zipage.__all__) <= set(dir(zipage))
    assert all(hasattr(zipage, name) for name in zipage.__all__)
