"""The whole engine on models in transformers' own code: paging, prefix cache and compression."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, run_alone, tokens_of
from tests.models.fallback_checkpoints import CASES, save
from zipage import LLM, SamplingParams
from zipage.compression.job import CompressionJob
from zipage.errors import ConfigError
from zipage.models.loader import resolve_model_path

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="in older transformers some of these architectures lack the attention interface",
)

Checkpoint = Callable[[str], tuple[dict[str, Any], transformers.PreTrainedModel]]

QUICK = ["gpt2", "gpt-neox", "cohere", "granite"]
FAMILIES = [
    *QUICK,
    *(pytest.param(case, marks=pytest.mark.slow) for case in sorted({*CASES} - {*QUICK, "olmoe"})),
]

VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "preempted, small steps": {
        "num_kv_blocks": 9,
        "admission": "optimistic",
        "max_num_batched_tokens": 19,
    },
    "no prefix cache, async": {"enable_prefix_caching": False, "async_compression": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Make, once, a random checkpoint; return engine options for it and its model."""
    made: dict[str, tuple[dict[str, Any], transformers.PreTrainedModel]] = {}

    def make(case: str) -> tuple[dict[str, Any], transformers.PreTrainedModel]:
        if case not in made:
            path = tmp_path_factory.mktemp(case)
            model = save(path, *CASES[case])
            # Random models have no tokenizer; any one whose text nobody reads will do.
            tokenizer = str(resolve_model_path(None))
            options = {
                "model": str(path),
                "tokenizer": tokenizer,
                "max_model_len": 512,
                # torch gives larger elementwise operations to several threads, and what a thread
                # computes last may differ in the last bit.
                "max_num_batched_tokens": 96,
            }
            made[case] = options, model
        return made[case]

    return make


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [random_ids(5 + 21 * i, seed=i) for i in range(4)]
GREEDY = [greedy(90 + 10 * i) for i in range(4)]
# Random models repeat themselves when greedy. A seeded stream does not depend on the batch.
PARAMS = [
    SamplingParams(temperature=1.0, seed=i, max_tokens=90 + 10 * i, ignore_eos=True)
    for i in range(4)
]


@pytest.mark.parametrize("family", FAMILIES)
def test_schedule_does_not_change_text(family: str, checkpoint: Checkpoint) -> None:
    options, _ = checkpoint(family)
    alone = run_alone(PROMPTS, PARAMS, **options)
    assert len({token for text in alone for token in text}) > 40, "texts too dull to compare"
    for name, variant in VARIANTS.items():
        with make_llm(**{**options, **variant}) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            assert_empty(llm)
            if name == "batched":
                again = llm.generate(PROMPTS, PARAMS)  # now with prefix hits
                assert [tokens_of(o) for o in again] == alone
                assert any(o.metrics.cached_prompt_tokens for o in again)
            preemptions = llm.stats().preemptions
        assert [tokens_of(o) for o in outputs] == alone, name
        assert all(o.metrics.compressions >= 1 for o in outputs)
        assert (preemptions > 0) == ("preempted" in name)


def test_a_mixture_of_experts_is_compressed(checkpoint: Checkpoint) -> None:
    """Its experts are computed in groups of rows: equal to rounding, so texts may differ."""
    options, model = checkpoint("olmoe")
    with make_llm(**options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert_empty(llm)
    assert all(o.metrics.compressions >= 1 for o in outputs)
    text = tokens_of(outputs[0])[:50]  # within the budget
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[0] + text])).logits[0, len(PROMPTS[0]) - 1 : -1]
    chosen = logits[torch.arange(len(text)), text]
    assert (logits.max(dim=-1).values - chosen).max().item() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_within_budget_equals_transformers(family: str, checkpoint: Checkpoint) -> None:
    options, model = checkpoint(family)
    with make_llm(**options, compression="full", kv_budget=None) as full:
        expected = [tokens_of(o) for o in full.generate(PROMPTS, GREEDY)]
    with make_llm(**options, kv_budget=256) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert llm.stats().compressions == 0
    assert [tokens_of(o) for o in outputs] == expected
    for prompt, text in zip(PROMPTS[:2], expected, strict=False):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(text)), text]
        assert (logits.max(dim=-1).values - chosen).max().item() <= 1e-4


def test_prompt_logprobs(checkpoint: Checkpoint) -> None:
    options, model = checkpoint("granite")
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    with make_llm(**options) as llm:
        (output,) = llm.generate([prompt], params)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for i, token in enumerate(prompt[1:], 1):
        found = output.prompt_logprobs[i]
        assert found is not None
        assert found[token].logprob == pytest.approx(logprobs[i - 1, token].item(), abs=1e-4)


def kept_positions(llm: LLM) -> list[torch.Tensor]:
    """From now on, collect the positions of the tokens that each compression keeps."""
    runner, found = llm.engine.core.runner, []
    assert runner.compressor is not None
    run = runner.compressor.run

    def record(job: CompressionJob) -> None:
        run(job)
        blocks = torch.tensor(job.target_blocks)
        kept = runner.cache.positions[:, blocks].transpose(1, 2).flatten(2)
        found.append(kept.sort(dim=-1).values)

    runner.compressor.run = record  # type: ignore[method-assign]
    return found


def test_zipage_tiny_equals_the_decoder() -> None:
    """End to end: the same text, and in every layer and head the same tokens evicted."""
    with make_llm() as llm:
        prompts = [prompt_ids(llm, 2 + 6 * i, seed=i) for i in range(3)]
    texts, kept = {}, {}
    for implementation in ("zipage", "transformers"):
        with make_llm(model_impl=implementation) as llm:
            assert llm.engine.core.runner.model_config.model_impl == implementation
            kept[implementation] = kept_positions(llm)
            texts[implementation] = [tokens_of(o) for o in llm.generate(prompts, greedy(70))]
            assert_empty(llm)
    assert texts["zipage"] == texts["transformers"]
    assert len(kept["zipage"]) == len(kept["transformers"]) >= 8
    for one, other in zip(kept["zipage"], kept["transformers"], strict=True):
        assert torch.equal(one, other)


def test_engines_take_turns(checkpoint: Checkpoint) -> None:
    """Engines of one process share transformers' attention registry and nothing else."""
    families = ("granite", "gpt2")
    expected = [run_alone(PROMPTS[:3], PARAMS[:3], **checkpoint(f)[0]) for f in families]
    found: list[dict[str, list[int]]] = [{}, {}]
    with (
        make_llm(**checkpoint(families[0])[0]) as first,
        make_llm(**checkpoint(families[1])[0]) as second,
    ):
        engines = (first, second)
        for llm in engines:
            for i in range(3):
                llm.engine.add_request(PROMPTS[i], PARAMS[i], str(i))
        while any(llm.engine.has_unfinished for llm in engines):
            for llm, texts in zip(engines, found, strict=True):
                for output in llm.engine.step():
                    if output.finished:
                        texts[output.request_id] = tokens_of(output)
                llm.engine.core.check_integrity()
    assert [[texts[str(i)] for i in range(3)] for texts in found] == expected


def test_engines_in_threads(checkpoint: Checkpoint) -> None:
    families = ("cohere", "phi")
    expected = {f: run_alone(PROMPTS[:3], PARAMS[:3], **checkpoint(f)[0]) for f in families}
    found: dict[str, list[list[int]]] = {}

    def work(family: str) -> None:
        with make_llm(**checkpoint(family)[0]) as llm:
            found[family] = [tokens_of(o) for o in llm.generate(PROMPTS[:3], PARAMS[:3])]

    threads = [threading.Thread(target=work, args=(family,)) for family in families]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_an_error_in_the_model_code_ends_its_requests_alone(checkpoint: Checkpoint) -> None:
    with make_llm(**checkpoint("phi")[0]) as llm:
        (before,) = llm.generate([PROMPTS[1]], greedy(20))
        module = next(
            m for m in llm.engine.core.runner.model.modules() if "MLP" in type(m).__name__
        )
        handle = module.register_forward_hook(lambda *_: 1 / 0)
        (failed,) = llm.generate([PROMPTS[1]], greedy(20))
        assert failed.error is not None and "division" in failed.error
        handle.remove()
        assert_empty(llm)
        (after,) = llm.generate([PROMPTS[1]], greedy(20))
        assert tokens_of(after) == tokens_of(before)


def test_dummy_weights_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = checkpoint("gpt2")[0]
    source = Path(options["model"], "config.json").read_text()
    (tmp_path / "config.json").write_text(source)
    with make_llm(**{**options, "model": str(tmp_path)}, load_format="dummy") as llm:
        assert len(tokens_of(llm.generate([PROMPTS[0]], greedy(100))[0])) == 100


def test_limits_and_options(checkpoint: Checkpoint) -> None:
    options = checkpoint("gpt2")[0]
    with pytest.raises(ConfigError, match=r"max_model_len=513 exceeds the 512 positions"):
        make_llm(**{**options, "max_model_len": 513})
    with pytest.raises(ConfigError, match="model_impl='vllm': legal are auto, zipage"):
        make_llm(**options, model_impl="vllm")
