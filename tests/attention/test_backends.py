"""Both backends against dense attention in float64, token by token."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from tests.attention.paged import Geometry, Paged, Piece, relative_error
from zipage.attention.backend import AttentionBackend, make_backend
from zipage.attention.torch_backend import TorchBackend
from zipage.kernels import native

needs_native = pytest.mark.skipif(
    not native.available(), reason="no C compiler: native kernels cannot be built"
)
HAS_TRITON = (
    os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
)
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="triton's interpreter is off or not installed"
)
BACKENDS = [
    "torch",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=needs_triton),
]
GEOMETRIES = [
    Geometry(8, 2, 64, block_size=64),
    Geometry(9, 3, 64),
    Geometry(4, 4, 80, block_size=32),
    Geometry(8, 1, 96, qk_norm=False),
    Geometry(6, 2, 128, block_size=48),
    Geometry(4, 2, 48, rotary=24),
    Geometry(2, 1, 64, block_size=5, rotary=0),
    Geometry(3, 1, 20, block_size=4, rotary=10),
    Geometry(10, 2, 256, block_size=16, rotary=64),
    Geometry(72, 1, 16),
]


def name_of(geometry: Geometry) -> str:
    g = geometry
    return f"{g.heads}x{g.kv_heads}x{g.dim}-b{g.block_size}"


def build(name: str, paged: Paged) -> AttentionBackend:
    backend = make_backend(name, paged.cache, paged.geometry.scale)
    assert backend.name == name
    return backend


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
def test_prefill_chunks_and_decode(geometry: Geometry, backend_name: str) -> None:
    """Prompts around a block boundary, in one chunk or several, then decoded together."""
    paged = Paged(geometry)
    backend = build(backend_name, paged)
    b = geometry.block_size
    lengths = [b - 1, b, b + 1, 3 * b + 2, 75]
    if backend_name == "triton":  # the interpreter is slow
        lengths = [b - 1, b + 1, min(2 * b + 2, 70)]
    texts = [paged.text(n + 3, offset=7 * i) for i, n in enumerate(lengths)]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]

    def run(counts: list[int]) -> None:
        chosen = [i for i, count in enumerate(counts) if count]
        out = paged.run(backend, [Piece(texts[i], counts[i]) for i in chosen])
        for i, rows in zip(chosen, out, strict=True):
            outputs[i].append(rows)

    run([min(n, 20 + i) for i, n in enumerate(lengths)])
    if any(n > text.done for n, text in zip(lengths, texts, strict=True)):
        run([n - text.done for n, text in zip(lengths, texts, strict=True)])
    for _ in range(3):
        run([1] * len(texts))
    for i, text in enumerate(texts):
        error = relative_error(torch.cat(outputs[i]), paged.expected(text))
        assert error < 2e-6, f"text {i}"


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("host", [False, True])
def test_mixed_step_with_shared_blocks(backend_name: str, host: bool) -> None:
    """Decoding, first chunks and later chunks in one step; two texts share their first blocks."""
    paged = Paged(Geometry(8, 2, 64))
    backend = build(backend_name, paged)
    origin = paged.text(60)
    paged.run(backend, [Piece(origin, 55)], host=host)
    before = paged.cache.kv.clone()
    twin, partial, fresh = paged.text(70, shared=origin), paged.text(40), paged.text(33)
    assert twin.done == 48 and twin.blocks[:3] == origin.blocks[:3]
    paged.run(backend, [Piece(partial, 17)], host=host)
    out = paged.run(
        backend,
        [Piece(twin, 9), Piece(origin, 1), Piece(partial, 23), Piece(fresh, 30)],
        host=host,
    )
    assert relative_error(out[0], paged.expected(twin)[48:57]) < 2e-6
    assert relative_error(out[1], paged.expected(origin)[55:56]) < 2e-6
    assert relative_error(out[2], paged.expected(partial)[17:]) < 2e-6
    assert relative_error(out[3], paged.expected(fresh)[:30]) < 2e-6
    shared = origin.blocks[:3]
    assert torch.equal(paged.cache.kv[:, shared], before[:, shared])
    out = paged.run(backend, [Piece(t, 1) for t in (fresh, origin, twin)], host=host)
    assert relative_error(out[0], paged.expected(fresh)[30:31]) < 2e-6
    assert relative_error(out[2], paged.expected(twin)[57:58]) < 2e-6


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[5], GEOMETRIES[7]], ids=name_of)
def test_cache_contents_and_capture(geometry: Geometry, backend_name: str) -> None:
    """Keys after norm and RoPE and plain values at their slots; captured queries; nothing else."""
    paged = Paged(geometry)
    backend = build(backend_name, paged)
    text, other = paged.text(3 * geometry.block_size), paged.text(9)
    count = 2 * geometry.block_size + 1
    paged.run(backend, [Piece(other, 6), Piece(text, count)])
    assert paged.cache.queries.isnan().all()
    paged.run(backend, [Piece(other, 2, capture=0), Piece(text, 3, capture=5)])
    q, k, v = paged.heads(text)
    kv = paged.cache.kv[0][text.blocks]
    flat = kv.permute(1, 0, 3, 2, 4).reshape(2, -1, geometry.kv_heads, geometry.dim)
    written = count + 3
    assert relative_error(flat[0, :written], k[:written]) < 1e-6
    assert torch.equal(flat[1, :written], v[:written].float())
    assert flat[:, written:].isnan().all()
    untouched = sorted(set(range(paged.num_blocks)) - set(text.blocks) - set(other.blocks))
    assert paged.cache.kv[:, untouched].isnan().all()
    rows = paged.cache.queries[0].flatten(0, 1)
    assert relative_error(rows[5:8], q[count : count + 3]) < 1e-6
    assert relative_error(rows[:2], paged.heads(other)[0][6:8]) < 1e-6
    assert rows[2:5].isnan().all() and len(rows) == 8


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_layers_are_separate(backend_name: str) -> None:
    paged = Paged(Geometry(4, 2, 64), num_layers=2)
    backend = build(backend_name, paged)
    text = paged.text(20)
    qkv, step = paged.step([Piece(text, 18, capture=None)])
    other = -qkv
    first = backend.attend(0, qkv, paged.transform, step)[:18]
    second = backend.attend(1, other, paged.transform, step)[:18]
    assert relative_error(first, paged.expected(text)[:18]) < 2e-6
    assert relative_error(second, paged.expected(replace(text, qkv=-text.qkv))[:18]) < 2e-6


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_extreme_scores(backend_name: str) -> None:
    """Scores of hundreds: one key takes all the weight, nothing overflows."""
    paged = Paged(Geometry(4, 2, 64, qk_norm=False))
    backend = build(backend_name, paged)
    text = paged.text(70)
    text.qkv[:, : 6 * 64] *= 12
    out = paged.run(backend, [Piece(text, 70)])[0]
    scores = paged.heads(text)[0][-1, 0] @ paged.heads(text)[1][:, 0].T * paged.geometry.scale
    assert scores.abs().max() > 200
    assert relative_error(out, paged.expected(text)) < 1e-4


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_equal_keys_give_the_mean_of_values(backend_name: str) -> None:
    paged = Paged(Geometry(4, 2, 64, qk_norm=False))
    backend = build(backend_name, paged)
    text = paged.text(50)
    text.qkv[:, 4 * 64 : 6 * 64] = 0
    out = paged.run(backend, [Piece(text, 50)])[0]
    values = text.qkv[:, 6 * 64 :].double().view(50, 2, 1, 64)
    mean = values.cumsum(0) / torch.arange(1, 51).double().view(-1, 1, 1, 1)
    assert relative_error(out, mean.expand(50, 2, 2, 64).reshape(50, -1)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_in_half_precision(dtype: torch.dtype) -> None:
    paged = Paged(Geometry(6, 2, 64), dtype=dtype)
    backend = TorchBackend(paged.cache, paged.geometry.scale)
    texts = [paged.text(40), paged.text(23)]
    prefilled = paged.run(backend, [Piece(texts[0], 38), Piece(texts[1], 22)])
    decoded = paged.run(backend, [Piece(text, 1) for text in texts])
    tolerance = 8 * torch.finfo(dtype).eps
    for i, text in enumerate(texts):
        out = torch.cat((prefilled[i], decoded[i]))
        assert relative_error(out, paged.expected(text)[: text.done]) < tolerance


def test_torch_backend_gathers_large_batches_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipage.attention.torch_backend._GATHER_ELEMENTS", 2 * 2 * 64 * 30 * 2)
    paged = Paged(Geometry(4, 2, 64))
    backend = TorchBackend(paged.cache, paged.geometry.scale)
    texts = [paged.text(20 + i) for i in range(7)]
    paged.run(backend, [Piece(text, 15 + i) for i, text in enumerate(texts)])
    out = paged.run(backend, [Piece(text, 1) for text in texts])
    for i, text in enumerate(texts):
        assert relative_error(out[i], paged.expected(text)[15 + i : 16 + i]) < 2e-6


def test_step_of_padding_only_writes_nothing() -> None:
    """What a CUDA graph is warmed up with."""
    paged = Paged(Geometry(4, 2, 64))
    backend = TorchBackend(paged.cache, paged.geometry.scale)
    text = paged.text(4)
    qkv, step = paged.step([Piece(text, 4)])
    step.slot_mapping.fill_(-1)
    backend.attend(0, qkv, paged.transform, step)
    assert paged.cache.kv.isnan().all()


@pytest.mark.parametrize("backend_name", ["native", "triton"])
def test_a_key_that_is_nan_is_seen(backend_name: str) -> None:
    """Everything that attends to it is NaN, instead of going on without it."""
    geometry = Geometry(4, 2, 32, qk_norm=False)
    if backend_name == "native" and not native.available():
        pytest.skip("no C compiler")
    if backend_name == "triton" and not HAS_TRITON:
        pytest.skip("no interpreter")
    paged = Paged(geometry)
    backend = build(backend_name, paged)
    text = paged.text(30)
    key = geometry.heads * geometry.dim  # of KV head 0
    text.qkv[7, key : key + geometry.dim] = torch.nan
    rows = [*paged.run(backend, [Piece(text, 20)])[0], *paged.run(backend, [Piece(text, 1)])[0]]
    half = geometry.heads // 2 * geometry.dim
    for i, row in enumerate(rows):
        assert row[:half].isnan().all() if i >= 7 else row[:half].isfinite().all()
        assert row[half:].isfinite().all()
