"""Row independence, the output head, and tensor parallelism of the decoder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs
from zipage.errors import ConfigError
from zipage.models.config import MoEConfig, load_model_config
from zipage.models.decoder import Decoder
from zipage.models.loader import load_model, resolve_model_path
from zipage.models.moe import MixtureOfExperts
from zipage.models.registry import ARCHITECTURES

from .paged_run import BACKENDS, PagedRun

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_tokens(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend_name", sorted(set(BACKENDS) - {"torch"}))
def test_a_sequence_does_not_depend_on_the_batch(
    backend_name: str, threads: int, set_threads: Callable[[int], None]
) -> None:
    """fp32: bit-equal hidden states whatever the other sequences, and however many.

    The torch backend is left out: it computes the decodes of a step together.
    """
    set_threads(threads)
    backend = BACKENDS[backend_name]
    path = resolve_model_path(None)
    decoder = load_model(load_model_config(path), path, dtype=torch.float32)
    vocab = decoder.config.vocab_size
    tokens = random_tokens(8, vocab, 0)
    alone = PagedRun(decoder, backend, max_len=16)
    first, second = alone.step({0: tokens[:7]})[0], alone.step({0: tokens[7:]})[0]
    for others, count, padding in ((1, 3, 0), (20, 1, 8), (7, 24, 0)):
        crowd = PagedRun(decoder, backend, num_sequences=others + 1, max_len=32)
        batch = {s: random_tokens(count, vocab, s) for s in range(others)}
        together = crowd.step({**batch, others: tokens[:7]}, padding)
        assert torch.equal(together[others], first)
        batch = {s: random_tokens(1, vocab, s) for s in range(0, others, 2)}
        assert torch.equal(crowd.step({others: tokens[7:], **batch})[others], second)


class EchoBackend(AttentionBackend):
    """Attention replaced by the queries: each row of the decoder is then a function of itself."""

    name = "echo"

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        return qkv[:, : self.cache.spec.num_heads * self.cache.spec.head_dim].contiguous()


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("intermediate_size", [768, 1003])
def test_rows_do_not_depend_on_each_other(
    intermediate_size: int, threads: int, set_threads: Callable[[int], None]
) -> None:
    """fp32: every row bit-equal in steps of 4 rows and of many, at any number of threads."""
    set_threads(threads)
    path = resolve_model_path(None)
    config = load_model_config(path)
    config = replace(config, intermediate_size=intermediate_size, num_layers=2)
    decoder = load_model(config, path, dtype=torch.float32, load_format="dummy", seed=3)
    run = PagedRun(decoder, lambda cache, scale: EchoBackend(cache, scale), max_len=2600)
    tokens = random_tokens(700, config.vocab_size, 2)
    whole = run.step({0: tokens})[0]
    for begin in range(0, 700, 4):
        part = run.step({0: tokens[begin : begin + 4]})[0]
        assert torch.equal(part, whole[begin : begin + 4])
    for rows in (4, 172, 180, 256, 516):
        assert torch.equal(run.step({0: tokens[:rows]})[0], whole[:rows])


@pytest.mark.parametrize(("backend_name", "threads"), [("plain", 1), ("native", 1), ("native", 2)])
@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_experts_do_not_depend_on_the_batch(
    case: str,
    backend_name: str,
    threads: int,
    checkpoint: Checkpoint,
    set_threads: Callable[[int], None],
) -> None:
    """fp32: bit-equal hidden states however many rows an expert gets, alone and in a crowd."""
    if backend_name not in BACKENDS:
        pytest.skip("no native kernels here")
    set_threads(threads)
    path, _ = checkpoint(case)
    decoder = load_model(load_model_config(path), path)
    tokens = random_tokens(9, 97, 0)
    alone = PagedRun(decoder, BACKENDS[backend_name], max_len=16)
    first, second = alone.step({0: tokens[:8]})[0], alone.step({0: tokens[8:]})[0]
    for others, count in ((1, 3), (20, 1), (7, 24)):
        crowd = PagedRun(decoder, BACKENDS[backend_name], num_sequences=others + 1, max_len=32)
        batch = {s: random_tokens(count, 97, s) for s in range(others)}
        assert torch.equal(crowd.step({**batch, others: tokens[:8]})[others], first)
        batch = {s: random_tokens(1, 97, s) for s in range(0, others, 2)}
        assert torch.equal(crowd.step({others: tokens[8:], **batch})[others], second)


def test_experts_of_many_rows(set_threads: Callable[[int], None]) -> None:
    """fp32, torch: bit-equal rows where threads split the elementwise operations of an expert."""
    set_threads(2)
    names = ARCHITECTURES["Qwen3MoeForCausalLM"].moe
    assert names is not None
    config = MoEConfig(names, 4, 2, 1003, True, frozenset({0}))
    moe = MixtureOfExperts(config, 64, 1003, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for weight in moe.parameters():
        weight.data.normal_(0.0, 0.1, generator=generator)
    x = torch.randn(400, 64, generator=generator)
    with torch.inference_mode():
        whole = moe(x)
        for begin in range(0, 400, 40):
            assert torch.equal(moe(x[begin : begin + 4]), whole[begin : begin + 4])


@pytest.mark.parametrize("case", ["llama", "qwen3-tied-biases"])
def test_logits_of_a_row_do_not_depend_on_the_others(case: str, checkpoint: Checkpoint) -> None:
    path, _ = checkpoint(case)
    decoder = load_model(load_model_config(path), path)
    hidden = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = decoder.compute_logits(hidden)
        assert whole.shape == (70, 97)
        for rows in (0, 1, 2, 3, 4, 5, 7, 9, 33):
            part = decoder.compute_logits(hidden[5 : 5 + rows])
            assert part.shape == (rows, 97)
            assert torch.equal(part, whole[5 : 5 + rows])


def test_logits_are_fp32(checkpoint: Checkpoint) -> None:
    path, _ = checkpoint("llama")
    decoder = load_model(load_model_config(path), path, dtype=torch.bfloat16)
    assert decoder.compute_logits(torch.ones(3, 64, dtype=torch.bfloat16)).dtype == torch.float32


class Ranks:
    """All-reduce between threads, each of which is one rank."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.partials: list[torch.Tensor | None] = [None] * size

    def all_reduce(self, rank: int, partial: torch.Tensor) -> torch.Tensor:
        self.partials[rank] = partial
        self.barrier.wait()
        total = torch.stack([p for p in self.partials if p is not None]).sum(0)
        self.barrier.wait()
        return total


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("llama", 2),
        ("llama-biases", 2),
        ("llama-multi-query", 2),
        ("llama", 4),
        ("qwen2", 2),
        ("qwen3-tied-biases", 2),
        ("qwen3-moe-mixed", 2),
        ("mixtral", 2),
        ("phi3-partial-tied", 2),
    ],
)
def test_tensor_parallel_shards(case: str, size: int, checkpoint: Checkpoint) -> None:
    path, _ = checkpoint(case)
    config = load_model_config(path)
    tokens = random_tokens(21, config.vocab_size, 1)
    chunks = [9, 8, 1, 1, 1, 1]
    whole = load_model(config, path)
    expected = PagedRun(whole).logits(tokens, chunks)
    ranks = Ranks(size)

    def run(rank: int) -> tuple[Decoder, torch.Tensor]:
        decoder = load_model(
            config,
            path,
            tp_rank=rank,
            tp_size=size,
            all_reduce=lambda partial: ranks.all_reduce(rank, partial),
        )
        return decoder, PagedRun(decoder).logits(tokens, chunks)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    for decoder, logits in results:
        assert decoder.num_heads == config.num_heads // size
        assert decoder.num_kv_heads == max(1, config.num_kv_heads // size)
        for layer, full in zip(decoder.decoder_layers, whole.decoder_layers, strict=True):
            mine, theirs = layer.moe or layer, full.moe or full
            assert mine.down_weight.shape[-1] == theirs.down_weight.shape[-1] // size
        assert (logits - expected).abs().max().item() <= 1e-4
    assert torch.equal(results[0][1], results[-1][1])


@pytest.mark.parametrize(("case", "size"), [("llama", 3), ("llama-9-3-heads", 9), ("qwen3-moe", 8)])
def test_impossible_split(case: str, size: int, checkpoint: Checkpoint) -> None:
    path, _ = checkpoint(case)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {size}"):
        load_model(load_model_config(path), path, tp_size=size)


def test_ranks_need_an_all_reduce(checkpoint: Checkpoint) -> None:
    path, _ = checkpoint("llama")
    with pytest.raises(ValueError, match="all_reduce"):
        load_model(load_model_config(path), path, tp_size=2)
