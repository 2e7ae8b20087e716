"""Layers in fp8: the arithmetic, the kernels, loading, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from tests.engine.small_model import make_small_llm, save_small_model
from tests.engine.workload import assert_empty, greedy, make_llm, prompt_ids, tokens_of
from zipage import SamplingParams
from zipage.bench.roofline import weight_bytes_per_step
from zipage.cli.info import describe
from zipage.config import EngineConfig
from zipage.errors import ConfigError
from zipage.models.config import load_model_config, shape_model_config
from zipage.models.decoder import Decoder
from zipage.models.fp8 import (
    FP8,
    Elementwise,
    Fp8Matrix,
    Fp8Rows,
    TorchElementwise,
    check_fp8_shape,
    quantise,
    scaled_product,
)
from zipage.models.loader import load_model, resolve_model_path

from .paged_run import PagedRun

Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    return save_small_model(tmp_path)


def wide(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales


def test_values_are_the_nearest_of_e4m3() -> None:
    """Within half a spacing: 2^-4 of a value, or 2^-10 of the row's 448th part."""
    x = torch.randn(50, 96) * torch.logspace(-6, 3, 50).unsqueeze(1)
    x[7] = 0.0
    x[8, 1:] = 0.0
    rows = quantise(x)
    assert rows.values.dtype == FP8 and rows.scales.shape == (50, 1)
    error = (wide(rows) - x).abs()
    assert (error <= torch.maximum(x.abs() * 2**-4, rows.scales * 2**-10) * (1 + 1e-5)).all()
    peaks = x.abs().amax(1)
    torch.testing.assert_close(wide(rows).abs().amax(1), peaks, rtol=1e-6, atol=0.0)
    # Equal relative errors in each row: the scale is the row's own.
    nonzero = peaks > 0
    relative = (error.norm(dim=1) / x.norm(dim=1).clamp(min=1e-30))[nonzero]
    assert relative.max() < 0.04


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unusable_numbers_stay_unusable(bad: float) -> None:
    x = torch.randn(4, 32)
    x[2, 5] = bad
    weight = quantise(torch.randn(16, 32))
    out = scaled_product(quantise(x), weight.values, weight.scales[:, 0], None, torch.float32)
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = quantise(torch.randn(12, 64)), quantise(torch.randn(48, 64))
    bias = torch.randn(48).to(dtype) if with_bias else None
    out = scaled_product(x, weight.values, weight.scales[:, 0], bias, dtype)
    assert out.dtype == dtype
    exact = wide(x).double() @ wide(weight).double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)
    assert F.cosine_similarity(out.double().flatten(), exact.flatten(), 0) > 0.99999


def triton_elementwise() -> Elementwise:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles, and for CUDA only")
    from zipage.kernels.triton.quantise import TritonElementwise

    return TritonElementwise()


def assert_same(mine: Fp8Rows, reference: Fp8Rows) -> None:
    """Equal but for roundings of ties that another order of sums decides."""
    torch.testing.assert_close(mine.scales, reference.scales, rtol=1e-5, atol=0.0)
    unequal = mine.values.float() != reference.values.float()
    assert unequal.float().mean() < 0.002
    difference = (wide(mine) - wide(reference)).abs()
    assert (difference <= wide(reference).abs() * 0.126 + reference.scales * 2**-8).all()


# Not bfloat16, which Triton's interpreter rounds otherwise.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 80, 4112])
def test_kernels_against_the_reference(width: int, dtype: torch.dtype) -> None:
    mine, reference = triton_elementwise(), TorchElementwise()
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, delta, gate_up, weight = randn(5, width), randn(5, width), randn(5, 2 * width), randn(width)
    x[3], delta[3], gate_up[3] = 0.0, 0.0, 0.0
    assert_same(mine.quantise(x), reference.quantise(x))
    assert_same(mine.quantise_silu_mul(gate_up), reference.quantise_silu_mul(gate_up.clone()))
    for add in (None, delta):
        one, other = x.clone(), x.clone()
        assert_same(
            mine.quantise_rms_norm(one, add, weight, 1e-6),
            reference.quantise_rms_norm(other, add, weight, 1e-6),
        )
        assert torch.equal(one, other)
        normed = mine.add_rms_norm(one, add, weight, 1e-6)
        expected = reference.add_rms_norm(other, add, weight, 1e-6)
        assert torch.equal(one, other)
        torch.testing.assert_close(normed, expected, rtol=2e-3, atol=1e-6)


def test_kernels_keep_nan() -> None:
    mine = triton_elementwise()
    x = torch.randn(2, 64)
    x[1, 9] = float("nan")
    gate_up = torch.randn(2, 128)
    gate_up[1, 70] = float("nan")
    for rows in (
        mine.quantise(x),
        mine.quantise_silu_mul(gate_up),
        mine.quantise_rms_norm(x, None, torch.ones(64), 1e-6),
    ):
        assert wide(rows)[0].isfinite().all() and wide(rows)[1].isnan().any()


def unquantised(decoder: Decoder) -> Decoder:
    """The same decoder, its weights widened."""
    plain = Decoder(decoder.config, decoder.dtype, decoder.device)
    for name, weight in plain.named_parameters():
        source = decoder.get_parameter(name).data
        if source.dtype == FP8:
            scale = decoder.get_parameter(name.replace("_weight", "_scale"))
            source = source.float() * scale.unsqueeze(1)
        weight.data.copy_(source)
    return plain


@pytest.mark.parametrize(
    "case", ["llama", "llama-biases", "qwen2", "qwen3-tied-biases", "phi3-partial-tied"]
)
def test_weights_of_every_layout(
    case: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is within half a spacing of the checkpoint's, and nothing is left unfilled."""
    # These models' intermediate size is no multiple of 16, which the CPU does not mind.
    monkeypatch.setattr("zipage.models.decoder.check_fp8_shape", lambda *shape: None)
    path, _ = checkpoint(case)
    config = load_model_config(path)
    plain = load_model(config, path, dtype=torch.float32)
    decoder = load_model(config, path, dtype=torch.float32, quantization="fp8")
    assert decoder.num_parameters == plain.num_parameters
    widened = unquantised(decoder)
    for name, weight in plain.named_parameters():
        mine = widened.get_parameter(name)
        if not name.startswith("layers") or not name.endswith("_weight"):
            assert torch.equal(mine, weight)
            continue
        peak = weight.abs().amax(1, keepdim=True)
        bound = torch.maximum(weight.abs() * 2**-4, peak * 2**-10 / 448) * (1 + 1e-5)
        assert ((mine - weight).abs() <= bound).all()
    tokens = list(range(20))
    logits = PagedRun(decoder).logits(tokens, [9, 8, 1, 1, 1])
    expected = PagedRun(plain).logits(tokens, [9, 8, 1, 1, 1])
    error = ((logits - expected).norm() / expected.norm()).item()
    # About 4 % for each product, in models whose layers all matter; unrelated logits give 1.4.
    assert 0.001 < error < 0.3


def test_loading_holds_no_wide_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are loaded, no more than one tensor of the checkpoint exists beside fp8."""
    path = resolve_model_path(None)
    config = load_model_config(path)
    decoder = Decoder(config, torch.bfloat16, torch.device("cpu"), quantization="fp8")
    dense = sum(w.numel() for n, w in decoder.named_parameters() if n.startswith("layers"))
    assert decoder.weight_bytes < 2 * decoder.num_parameters - 0.9 * dense
    for weight in decoder.parameters():
        assert weight.dtype == FP8 or weight.numel() < dense / 50
    sources: list[int] = []
    copy = Fp8Matrix.copy_
    monkeypatch.setattr(
        Fp8Matrix, "copy_", lambda self, x: (sources.append(x.numel()), copy(self, x))[1]
    )
    load_model(config, path, dtype=torch.bfloat16, quantization="fp8")
    assert sum(sources) > 0.99 * (dense - 8 * 10000) and max(sources) < dense / 20


def test_bytes_are_counted_as_they_are_stored() -> None:
    """Half of bf16's for the layers: in the roofline, and in what `zipage info` says."""
    config = shape_model_config("qwen3-8b")
    device = torch.device("meta")
    plain = Decoder(config, torch.bfloat16, device, max_positions=1)
    fp8 = Decoder(config, torch.bfloat16, device, max_positions=1, quantization="fp8")
    head = config.vocab_size * config.hidden_size * 2
    layers = weight_bytes_per_step(plain) - head
    assert weight_bytes_per_step(fp8) - head == pytest.approx(layers / 2, rel=0.002)
    options = {"load_format": "dummy", "model_shape": "qwen3-8b", "dtype": "bfloat16"}
    told = describe(EngineConfig(**options, device="cpu", quantization="fp8"), config)
    assert told["weight_bytes"] == fp8.weight_bytes
    assert told["parameters"] == plain.num_parameters


def test_random_weights() -> None:
    config = replace(shape_model_config("qwen3-0.6b"), num_layers=1, vocab_size=320)
    decoder = load_model(config, None, torch.bfloat16, load_format="dummy", quantization="fp8")
    (layer,) = decoder.decoder_layers
    for name in ("qkv", "o", "gate_up", "down"):
        matrix = layer.matrix(name)
        assert isinstance(matrix, Fp8Matrix)
        values = matrix.weight.float() * matrix.scale.unsqueeze(1)
        assert abs(values.std().item() - 0.02) < 0.001


def test_what_cannot_be_fp8(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16; down_weight is \[64, 100\]"):
        check_fp8_shape("down_weight", (64, 100))
    path, _ = checkpoint("qwen3-moe")
    with pytest.raises(ConfigError, match=r"quantization='fp8'.*Qwen3MoeForCausalLM.*experts"):
        load_model(load_model_config(path), path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization='fp16'.*fp8"):
        make_llm(quantization="fp16")
    with pytest.raises(ConfigError, match=r"quantization='fp8'.*transformers"):
        make_llm(quantization="fp8", model_impl="transformers")


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zipage.models.fp8 import check_fp8

    device = torch.device("cuda", 0)
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    with pytest.raises(ConfigError, match=r"8\.9.*RTX 3090 has 8\.6"):
        check_fp8(device, torch.bfloat16)
    capability = (9, 0)
    with pytest.raises(ConfigError, match=r"bfloat16.*got float16"):
        check_fp8(device, torch.float16)
    tried = []
    monkeypatch.setattr("zipage.models.fp8._try_product", tried.append)
    check_fp8(device, torch.bfloat16)
    assert tried == [device]


def test_gpus_whose_torch_cannot_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 on compute capability 8.9, or cuBLAS on 12.0."""
    from zipage.models import fp8

    def product(*given: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 5090")
    monkeypatch.setattr(fp8, "scaled_product", product)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `f(a, b)`\nmore")
    with pytest.raises(ConfigError, match=r"fp8.*RTX 5090.*NOT_SUPPORTED.*leave") as caught:
        fp8._try_product(torch.device("cpu"))
    assert "more" not in str(caught.value)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError):
        fp8._try_product(torch.device("cpu"))


def test_texts_with_triton_kernels(small_model: Path) -> None:
    """The engine with these kernels, interpreted, gives nearly the logits of the reference."""
    triton_elementwise()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
    found = []
    for backend in ("torch", "triton"):
        options = {"attention_backend": backend, "quantization": "fp8", "kv_budget": None}
        with make_small_llm(small_model, **options) as llm:
            outputs = llm.generate([[5, 6, 7] * 7 + [9], [8] * 3], params)
        found.append([next(iter(o.outputs[0].logprobs[0].values())).logprob for o in outputs])
        assert all(output.error is None for output in outputs)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=0.05, rtol=0.0)


def test_requests_are_answered_alone_as_in_a_batch() -> None:
    """zipage-tiny in fp8 on the CPU: texts do not depend on the batch; most stay the same."""
    with make_llm(quantization="fp8") as llm:
        prompts = [prompt_ids(llm, 1 + i, seed=i) for i in range(4)]
        together = llm.generate(prompts, greedy(24))
        assert sum(output.metrics.compressions for output in together) > 0
        assert_empty(llm)
    with make_llm(quantization="fp8", max_num_batched_tokens=39) as llm:
        alone = [llm.generate([prompt], greedy(24))[0] for prompt in prompts[1:3]]
    assert [tokens_of(output) for output in alone] == [tokens_of(o) for o in together[1:3]]
    with make_llm() as llm:
        plain = llm.generate(prompts, greedy(24))
    starts = [tokens_of(a)[:8] == tokens_of(b)[:8] for a, b in zip(together, plain, strict=True)]
    assert sum(starts) >= 3


on_gpu = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        )
    ],
)


@on_gpu
@pytest.mark.parametrize("rows", [1, 4, 7, 96, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_on_cuda(device: str, rows: int, with_bias: bool) -> None:
    """torch's scaled product takes any number of rows, and gives the reference's result."""
    x, weight = quantise(torch.randn(rows, 4096)), quantise(torch.randn(6144, 4096))
    bias = torch.randn(6144).bfloat16() if with_bias else None
    scale = weight.scales[:, 0].contiguous()
    expected = scaled_product(x, weight.values, scale, bias, torch.float32)
    out = scaled_product(
        Fp8Rows(x.values.to(device), x.scales.to(device)),
        weight.values.to(device),
        scale.to(device),
        None if bias is None else bias.to(device),
        torch.bfloat16,
    )
    error = (out.cpu().float() - expected).abs().max() / expected.abs().max()
    assert error < 2**-8


@on_gpu
@pytest.mark.parametrize("width", [80, 4096, 12288])
def test_kernels_on_cuda(device: str, width: int) -> None:
    from zipage.kernels.triton.quantise import TritonElementwise

    mine, reference = TritonElementwise(), TorchElementwise()
    x, delta = (torch.randn(9, width, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=device).bfloat16()
    gate_up = torch.randn(9, 2 * width, device=device).bfloat16()
    x[3], gate_up[3], delta[3] = 0.0, 0.0, 0.0
    assert_same(mine.quantise(x), reference.quantise(x))
    assert_same(mine.quantise_silu_mul(gate_up), reference.quantise_silu_mul(gate_up.clone()))
    one, other = x.clone(), x.clone()
    rows = mine.quantise_rms_norm(one, delta, weight, 1e-6)
    assert_same(rows, reference.quantise_rms_norm(other, delta, weight, 1e-6))
    assert torch.equal(one, other)
    x[1, 5] = float("nan")
    assert wide(mine.quantise(x))[1].isnan().any()


@on_gpu
def test_loading_on_cuda_takes_no_more_than_the_weights(device: str) -> None:
    config = shape_model_config("qwen3-4b")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = load_model(
        config, None, torch.bfloat16, device, load_format="dummy", quantization="fp8"
    )
    peak = torch.cuda.max_memory_allocated() - before
    print(f"weights {decoder.weight_bytes >> 20} MiB, peak {peak >> 20} MiB")
    assert decoder.weight_bytes < 1.25 * decoder.num_parameters
    assert peak < 1.15 * decoder.weight_bytes


@on_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_texts_on_cuda_are_those_of_the_reference(device: str, enforce_eager: bool) -> None:
    """zipage-tiny, in graphs and without: the first tokens of most texts are the CPU's."""
    with make_llm(quantization="fp8", kv_budget=None) as llm:
        prompts = [prompt_ids(llm, 1 + i, seed=i) for i in range(12)]
        expected = llm.generate(prompts, greedy(24))
    options = {"device": device, "dtype": "bfloat16", "enforce_eager": enforce_eager}
    with make_llm(quantization="fp8", kv_budget=None, **options) as llm:
        outputs = llm.generate(prompts, greedy(24))
        assert_empty(llm)
        assert (llm.engine.core.runner.graphs is None) is enforce_eager
    equal = [tokens_of(a) == tokens_of(b) for a, b in zip(outputs, expected, strict=True)]
    assert sum(equal) >= 8
