"""The backends on CUDA: against dense attention in float64, in every dtype."""

from __future__ import annotations

import pytest
import torch

from tests.attention.paged import Geometry, Paged, Piece, relative_error
from tests.attention.test_backends import GEOMETRIES, name_of
from tests.kernels.devices import SANITIZED
from zipage.attention.backend import make_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LARGE = [
    Geometry(32, 8, 128, block_size=256),
    Geometry(28, 4, 128, block_size=128),
    Geometry(16, 8, 64, block_size=64),
    Geometry(32, 32, 96, block_size=32, qk_norm=False),
]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("backend_name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES + LARGE, ids=name_of)
def test_prefill_chunks_and_decode(
    geometry: Geometry, dtype: torch.dtype, backend_name: str
) -> None:
    """Prompts around a block boundary, in one chunk or several, then decoded together."""
    paged = Paged(geometry, dtype=dtype, device="cuda")
    backend = make_backend(backend_name, paged.cache, geometry.scale)
    b = geometry.block_size
    lengths = [b - 1, b, b + 1, 2 * b + 2, 75, 300]
    texts = [paged.text(n + 3, offset=7 * i) for i, n in enumerate(lengths)]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]

    def run(counts: list[int]) -> None:
        chosen = [i for i, count in enumerate(counts) if count]
        out = paged.run(backend, [Piece(texts[i], counts[i]) for i in chosen])
        for i, rows in zip(chosen, out, strict=True):
            outputs[i].append(rows)

    run([min(n, 20 + 30 * i) for i, n in enumerate(lengths)])
    # The first ones decode while the others are still in their prompts.
    run([max(1, n - text.done) for n, text in zip(lengths, texts, strict=True)])
    for _ in range(2):
        run([1] * len(texts))
    for i, text in enumerate(texts):
        error = relative_error(torch.cat(outputs[i]), paged.expected(text)[: text.done])
        assert error < TOLERANCE[dtype], f"text {i}"


#: Of caches that are split; the longest ones take minutes under a sanitizer.
LENGTHS = (700, 1, 513, 255, 600) if SANITIZED else (4000, 1, 2049, 255, 3000)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_long_caches_are_split(block_size: int) -> None:
    """Decoding over caches of very different lengths, more units than sequences."""
    paged = Paged(
        Geometry(8, 2, 128, block_size=block_size), device="cuda", num_blocks=12000 // block_size
    )
    backend = make_backend("triton", paged.cache, paged.geometry.scale)
    texts = [paged.text(n + 1) for n in LENGTHS]
    for text in texts:
        paged.run(backend, [Piece(text, len(text.qkv) - 1)])
    out = paged.run(backend, [Piece(text, 1) for text in texts])
    for text, rows in zip(texts, out, strict=True):
        q, k, v = paged.heads(text)
        scores = torch.einsum("hgd,thd->hgt", q[-1].view(2, 4, 128), k) * paged.geometry.scale
        expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).reshape(1, -1)
        assert relative_error(rows, expected) < 3e-6
