"""The whole engine with keys and values in fp8 (CPU, torch kernels)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.engine.small_model import make_small_llm
from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, run_alone, tokens_of
from tests.models.fallback_checkpoints import CASES, save
from zipage import LLM
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.errors import ConfigError
from zipage.execution.swap import HostSwap
from zipage.models.loader import resolve_model_path

FP8 = {"kv_cache_dtype": "fp8"}
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "ahead, async": {"async_scheduling": True, "async_compression": True},
    "small steps": {"max_num_batched_tokens": 19, "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with make_llm() as llm:
        return [prompt_ids(llm, 2 + 3 * i, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[list[int]]:
    return run_alone(prompts, [greedy(60)] * 4, **FP8)


@pytest.mark.parametrize("name", VARIANTS)
def test_schedule_does_not_change_text(
    name: str, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    with make_llm(**FP8, **VARIANTS[name]) as llm:
        outputs = llm.generate(prompts, greedy(60))
        assert [tokens_of(o) for o in outputs] == alone
        assert sum(o.metrics.compressions for o in outputs) > 4
        if name == "batched":
            again = llm.generate(prompts, greedy(60))
            assert [tokens_of(o) for o in again] == alone
            assert any(o.metrics.cached_prompt_tokens for o in again)
        assert_empty(llm)


def test_preemption_does_not_change_text(prompts: list[list[int]]) -> None:
    short = [prompt[:30] for prompt in prompts]
    expected = run_alone(short, [greedy(60)] * 4, **FP8)
    with make_llm(**FP8, num_kv_blocks=12, admission="optimistic") as llm:
        outputs = llm.generate(short, greedy(60))
        assert llm.stats().preemptions > 0 and llm.stats().compressions > 2
        assert_empty(llm)
    assert [tokens_of(o) for o in outputs] == expected


def test_scales_are_found_once_and_fit(prompts: list[list[int]]) -> None:
    found = []
    for name in ("fp8", "fp8_e4m3"):
        with make_llm(kv_cache_dtype=name) as llm:
            cache = llm.engine.core.runner.cache
            found.append(cache.kv_scales.clone())
            assert llm.engine.core.runner.backend.name == "torch"
            llm.generate(prompts, greedy(30))
            assert torch.equal(cache.kv_scales, found[-1])
            codes = cache.kv_bits & 0x7F
            assert (codes.amax(dim=(1, 4, 5)) < 0x7E).all(), "something was cut off"
            # Of normal numbers, not of the last bits of a range that is too large.
            assert (codes.float().mean(dim=(4, 5)).amax(1) > 24).all()
    assert torch.equal(*found)
    assert len(found[0].unique()) > 1
    with make_llm() as llm:
        assert (llm.engine.core.runner.cache.kv_scales == 1).all()


def test_calibration_without_a_tokenizer() -> None:
    sizes = {"model_shape": "qwen3-0.6b", "load_format": "dummy", "num_kv_blocks": 4}
    options = {"max_model_len": 21, "kv_budget": 16, "window": 8, "block_size": 16}
    with LLM(**FP8, **sizes, **options, device="cpu", dtype="bfloat16") as llm:
        scales = llm.engine.core.runner.cache.kv_scales
        assert scales.shape == (28, 2, 8) and (torch.frexp(scales).mantissa == 0.5).all()
        llm.generate([[1, 2, 3]], greedy(2, detokenize=False))


def test_a_pool_holds_more(small_model: Path) -> None:
    blocks = {}
    for name in ("auto", "fp8"):
        options = {"kv_cache_dtype": name, "num_kv_blocks": None, "kv_cache_memory": "1MiB"}
        with make_small_llm(small_model, **options) as llm:
            spec = llm.engine.core.runner.cache.spec
            blocks[name] = spec.num_blocks
            assert spec.bytes_per_token == 2 * 2 * 16 * (4 if name == "auto" else 1)
            slots = spec.num_query_slots * spec.query_slot_bytes
            assert slots == 8 * 2 * 8 * 2 * 16 * 4, "queries stay as they are"
    per_token = {"auto": 256 + 16, "fp8": 64 + 16}  # with scores and positions
    for name, count in blocks.items():
        assert count == ((1 << 20) - 8 * 2 * 8 * 2 * 16 * 4) // (16 * per_token[name])


def test_a_key_that_is_nan_ends_its_request(small_model: Path) -> None:
    with make_small_llm(small_model, **FP8) as llm:
        (before,) = llm.generate([[5, 6, 7]], greedy(4))
        llm.engine.core.runner.cache.kv_scales[1, 0, 0] = torch.nan
        (output,) = llm.generate([[7, 6, 5]], greedy(4))
        assert before.error is None and output.outputs[0].finish_reason == "error"
        assert_empty(llm)


def test_swap_is_exact() -> None:
    spec = KVCacheSpec(
        2, 8, 16, 2, 1, 16, torch.float32, torch.device("cpu"), 4, 2, torch.float8_e4m3fn
    )
    cache = KVCache(spec)
    cache.kv_bits.random_(0, 256)
    before = cache.kv_bits.clone()
    swap = HostSwap(cache)
    swap.swap_out("a", (1, 4, 2), 0)
    cache.kv_bits[:, [1, 4, 2]] = 0
    swap.swap_in("a", (6, 0, 7), 1)
    assert torch.equal(cache.kv_bits[:, [6, 0, 7]], before[:, [1, 4, 2]])
    assert torch.equal(cache.kv_bits[:, [3, 5]], before[:, [3, 5]])


def test_native_kernels_are_refused(small_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8'.*'auto' or 'torch'"):
        make_small_llm(small_model, **FP8, attention_backend="native")
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8': legal are auto, fp8, fp8_e4m3"):
        make_small_llm(small_model, kv_cache_dtype="int8")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="in older transformers the architecture lacks the attention interface",
)
def test_in_transformers_code(tmp_path: Path) -> None:
    """Nothing of it is special: the scales come from the same pass through its layers."""
    save(tmp_path, *CASES["gpt2"])
    options = {"model": str(tmp_path), "tokenizer": str(resolve_model_path(None)), **FP8}
    prompts = [[5, 9, 11, 40], [7, 8, 33, 60, 61, 62]]
    expected = run_alone(prompts, [greedy(90)] * 2, **options, max_model_len=512)
    with make_llm(**options, max_model_len=512) as llm:
        assert len(llm.engine.core.runner.cache.kv_scales.unique()) > 1
        outputs = llm.generate(prompts, greedy(90))
        assert all(o.metrics.compressions >= 1 for o in outputs)
        assert [tokens_of(o) for o in outputs] == expected
        assert_empty(llm)
