"""The native backend's promise: a token's bits depend on its own sequence alone."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.paged import Geometry, Paged, Piece, Text, relative_error
from zipage.attention.backend import make_backend
from zipage.attention.torch_backend import TorchBackend
from zipage.cache.kv_cache import KVCache
from zipage.kernels import native

pytestmark = pytest.mark.skipif(
    not native.available(), reason="no C compiler: native kernels cannot be built"
)

GEOMETRIES = [
    Geometry(8, 2, 64, block_size=64),
    Geometry(9, 3, 64),
    Geometry(4, 4, 80, block_size=32),
    Geometry(8, 1, 128),
    Geometry(6, 3, 96, block_size=48),
    Geometry(5, 1, 36, block_size=7, rotary=10),
]


@pytest.fixture(autouse=True)
def _restore_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def contents(cache: KVCache, text: Text) -> torch.Tensor:
    """Keys and values ``[2, H, tokens, D]`` of a text."""
    kv = cache.kv[0][text.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
    return kv[:, :, : text.done]


def solo(
    geometry: Geometry, qkv: torch.Tensor, chunks: list[int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and cache of one text computed alone, in the given chunks."""
    paged = Paged(geometry, seed=seed, num_blocks=-(-len(qkv) // geometry.block_size) + 3)
    backend = make_backend("native", paged.cache, geometry.scale)
    text = paged.text(len(qkv))
    text.qkv = qkv
    out = [paged.run(backend, [Piece(text, n)])[0] for n in chunks]
    return torch.cat(out), contents(paged.cache, text)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.heads}x{g.kv_heads}x{g.dim}")
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_chunks_batch_and_threads_leave_the_bits_alone(
    geometry: Geometry, data: st.DataObject
) -> None:
    """Random chunks in random company on 1 to 4 threads equal decoding alone on one thread."""
    seed = data.draw(st.integers(0, 10**6), label="seed")
    paged = Paged(geometry, seed=seed, num_blocks=400)
    backend = make_backend("native", paged.cache, geometry.scale)
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=4), label="lengths")
    texts = [paged.text(n) for n in lengths]
    outputs: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(text.done < n for text, n in zip(texts, lengths, strict=True)):
        waiting = [i for i, n in enumerate(lengths) if texts[i].done < n]
        chosen = data.draw(st.sets(st.sampled_from(waiting), min_size=1), label="chosen")
        pieces, order = [], data.draw(st.permutations(sorted(chosen)), label="order")
        for i in order:
            most = lengths[i] - texts[i].done
            # Mostly large steps, so that a schedule ends soon, but also single tokens.
            count = data.draw(st.one_of(st.just(1), st.integers(1, most)), label="count")
            pieces.append(Piece(texts[i], max(count, most // 4)))
        torch.set_num_threads(data.draw(st.integers(1, 4), label="threads"))
        for i, out in zip(order, paged.run(backend, pieces), strict=True):
            outputs[i].append(out)
    torch.set_num_threads(1)
    for i, text in enumerate(texts):
        out, kv = solo(geometry, text.qkv, [1] * lengths[i], seed)
        assert torch.equal(torch.cat(outputs[i]), out)
        assert torch.equal(contents(paged.cache, text), kv)


@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=["8x2", "9x3"])
def test_long_caches_split_over_threads(geometry: Geometry) -> None:
    """Beyond 512 slots softmaxes are merged, on several threads in another place than on one."""
    length = 1700
    qkv = torch.randn(length, geometry.width, generator=torch.Generator().manual_seed(1))
    results = []
    for threads, chunks in (
        (1, [length]),
        (2, [700, 811, 1, 1, 187]),
        (4, [511, 1, 1, 512, *[1] * 30, 645]),
        (3, [1695, 1, 1, 1, 1, 1]),
    ):
        torch.set_num_threads(threads)
        results.append(solo(geometry, qkv, chunks))
    for out, kv in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(kv, results[0][1])
    paged = Paged(geometry, num_blocks=120)
    text = paged.text(length)
    text.qkv = qkv
    reference = TorchBackend(paged.cache, geometry.scale)
    expected = paged.run(reference, [Piece(text, length)])[0]
    assert relative_error(results[0][0], expected) < 2e-6


def test_block_size_does_not_change_the_bits() -> None:
    qkv = torch.randn(200, 12 * 64, generator=torch.Generator().manual_seed(2))
    reference = solo(Geometry(8, 2, 64, block_size=64), qkv, [200])
    for block_size in (16, 32, 48, 128):
        out = solo(Geometry(8, 2, 64, block_size=block_size), qkv, [150, 50])
        assert torch.equal(out[0], reference[0])


def test_two_engines_in_two_threads() -> None:
    """Backends share no state: concurrent runs give what they give alone."""
    geometry = Geometry(8, 2, 64)
    inputs = [torch.randn(90, geometry.width) for _ in range(2)]
    chunks = [40, *[1] * 50]
    expected = [solo(geometry, qkv, chunks)[0] for qkv in inputs]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        for _ in range(5):
            if not torch.equal(solo(geometry, inputs[i], chunks)[0], expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("slot_mapping", 10**6, IndexError),
        ("positions", 10**6, IndexError),
        ("capture", 10**6, IndexError),
        ("block_tables", 10**6, IndexError),
        ("cache_lens", 10**6, ValueError),
        ("cache_lens", 1, ValueError),
    ],
)
def test_metadata_out_of_range_raises(field: str, value: int, error: type[Exception]) -> None:
    paged = Paged(Geometry(4, 2, 64))
    backend = make_backend("native", paged.cache, paged.geometry.scale)
    qkv, step = paged.step([Piece(paged.text(8), 8)])
    getattr(step, field)[0] = value
    with pytest.raises(error, match="attention of layer 0"):
        backend.attend(0, qkv, paged.transform, step)


def test_unsupported_caches_are_refused() -> None:
    half = Paged(Geometry(4, 2, 64), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        make_backend("native", half.cache, 1.0)
    wide = Paged(Geometry(2, 1, 320))
    with pytest.raises(ValueError, match="320"):
        make_backend("native", wide.cache, 1.0)
