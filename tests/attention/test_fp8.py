"""A cache in fp8: conversions, and attention to what is stored."""

from __future__ import annotations

import pytest
import torch

from tests.attention.paged import Geometry, Paged, Piece, relative_error
from tests.attention.test_backends import HAS_TRITON, name_of, needs_triton
from zipage.attention.backend import make_backend
from zipage.cache.quantisation import dequantise, quantise, scales_for

E4M3 = torch.float8_e4m3fn
GPU = pytest.param(
    "triton",
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
BACKENDS = [("torch", "cpu"), pytest.param("triton", "cpu", marks=needs_triton), GPU]
ODD = [0.0, -0.0, 1e-42, -1e-42, 1e38, -3e38, torch.inf, -torch.inf, torch.nan, 448.0, -464.0]


def numbers() -> torch.Tensor:
    """Every kind of rounding: random bits, halfway cases of all codes, subnormals, abnormal."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (3000,), generator=generator).int()
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(-halfway)))
    spread = torch.randn(3000, generator=generator) * 10 ** torch.linspace(-5, 4, 3000)
    return torch.cat((bits.view(torch.float32), codes, near, -near, spread, torch.tensor(ODD)))


def test_quantise_saturates_and_keeps_nan() -> None:
    x = numbers()
    restored = dequantise(quantise(x, torch.tensor(0.25)), torch.tensor(0.25), torch.float32)
    finite = x.isfinite()
    assert torch.equal(restored.isfinite(), finite)
    assert (restored[finite].abs() <= 112).all()
    inside = x[finite].clamp(-112, 112)
    allowed = torch.maximum(inside.abs() / 16, torch.tensor(0.25 * 2**-10))
    assert ((restored[finite] - inside).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_are_powers_of_two_with_room(dtype: torch.dtype) -> None:
    largest = torch.tensor([1e-30, 0.0, 1.0, 1.7, 224.0, 3.0e4, torch.nan, torch.inf])
    scales = scales_for(largest, dtype)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (scales * 448 <= torch.finfo(dtype).max).all()
    room = scales[2:5] * 448 / largest[2:5]
    assert ((room >= 2) & (room < 4)).all()
    assert scales[0] == 2.0**-12
    assert (scales[[1, 6, 7]] == 1).all()


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=needs_triton),
        pytest.param("cuda", marks=GPU.marks),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
def test_triton_converts_as_torch_does(device: str) -> None:
    triton = pytest.importorskip("triton")
    from tests.attention.fp8_kernels import decode_bytes, encode_numbers

    x = numbers().to(device)
    for scale in (1.0, 2.0**-7):
        coded = torch.empty(len(x), dtype=torch.uint8, device=device).view(E4M3)
        encode_numbers[(triton.cdiv(len(x), 256),)](x, coded, scale, len(x), TILE=256)
        expected = quantise(x, torch.tensor(scale, device=device))
        got, sign = coded.view(torch.uint8), torch.where(x.isfinite(), 0x80, 0)  # NaN has none
        assert torch.equal(got & (sign | 0x7F), expected & (sign | 0x7F))
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(256, dtype=dtype, device=device)
        decode_bytes[(1,)](codes, out, dtype == torch.float32, TILE=256)
        torch.testing.assert_close(out, codes.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.parametrize(
    ("geometry", "dtype", "tolerance"),
    [
        (Geometry(4, 2, 40, block_size=48, rotary=20), torch.float32, 3e-6),
        (Geometry(3, 1, 64), torch.float16, 8e-3),
        (Geometry(8, 1, 128, block_size=128, qk_norm=False), torch.bfloat16, 6e-2),
    ],
    ids=lambda x: name_of(x) if isinstance(x, Geometry) else str(x),
)
def test_attention_to_stored_tokens(
    name: str, device: str, geometry: Geometry, dtype: torch.dtype, tolerance: float
) -> None:
    """Chunks and decodes against dense attention to the dequantised cache, in float64."""
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("the interpreter adds bfloat16 as integers")
    paged = Paged(geometry, device=device, dtype=dtype, kv_dtype=E4M3, num_blocks=40)
    backend = make_backend(name, paged.cache, geometry.scale)
    assert backend.name == name
    later = 30 if (name, device) == ("triton", "cpu") else 110  # the interpreter is slow
    one, two = texts = [paged.text(30, offset=9), paged.text(50 + later, offset=900)]
    parts = [
        paged.run(backend, [Piece(one, 20), Piece(two, 30)]),
        paged.run(backend, [Piece(one, 1), Piece(two, later)]),
        paged.run(backend, [Piece(one, 1), Piece(two, 1)]),
    ]
    for text, *rows in zip(texts, *parts, strict=True):
        expected = paged.expected(text, from_cache=True)
        assert relative_error(torch.cat(rows), expected) < tolerance
        _, keys, values = paged.heads(text)
        exact = zip(paged.stored(text), (keys, values), paged.cache.kv_scales[0], strict=True)
        for stored, true, scale in exact:
            true, scale = true[: text.done], scale.cpu().view(1, -1, 1).double()
            true = true.clamp(-448 * scale, 448 * scale)
            step = torch.maximum(true.abs() / 16, scale * 2**-10)
            rounding = 4 * torch.finfo(dtype).eps * true.abs().max()
            assert ((stored.double() - true).abs() <= step * 1.01 + rounding).all()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_store_the_same_bytes_and_only_theirs(name: str, device: str) -> None:
    """Values bit for bit; keys but for those whose rotation was rounded another way."""
    geometry = Geometry(4, 2, 64, block_size=16)
    pools = []
    for backend_name, where in (("torch", "cpu"), (name, device)):
        paged = Paged(geometry, device=where, kv_dtype=E4M3, num_blocks=8)
        backend = make_backend(backend_name, paged.cache, geometry.scale)
        paged.run(backend, [Piece(paged.text(50), 45)])
        pools.append(paged.cache.kv_bits.cpu())
    reference, got = pools
    assert torch.equal(got[:, :, 1], reference[:, :, 1])
    different = got != reference
    assert different.sum() <= 0.002 * 45 * 2 * 64
    assert ((got.int() - reference.int()).abs()[different] == 1).all()
    assert (reference == 0x7F).sum() == (8 * 16 - 45) * 2 * 2 * 64


@pytest.mark.parametrize(("name", "device"), BACKENDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_is_seen(name: str, device: str, bad: float) -> None:
    """Everything that attends to it is NaN, though stored numbers saturate."""
    geometry = Geometry(4, 2, 32, qk_norm=False, rotary=16)
    paged = Paged(geometry, device=device, kv_dtype=E4M3, num_blocks=8)
    backend = make_backend(name, paged.cache, geometry.scale)
    text = paged.text(30)
    text.qkv[3] *= 1e6  # saturates
    key = geometry.heads * geometry.dim  # of KV head 0
    text.qkv[7, key + 20] = bad
    rows = [*paged.run(backend, [Piece(text, 20)])[0], *paged.run(backend, [Piece(text, 1)])[0]]
    half = geometry.heads // 2 * geometry.dim
    for i, row in enumerate(rows):
        assert row[:half].isnan().all() if i >= 7 else row[:half].isfinite().all()
        assert row[half:].isfinite().all()


@pytest.mark.skipif(not HAS_TRITON, reason="triton's interpreter is off or not installed")
def test_large_queries_do_not_overflow_fp16() -> None:
    geometry = Geometry(4, 2, 32, qk_norm=False, rotary=0)
    paged = Paged(geometry, kv_dtype=E4M3, num_blocks=8, dtype=torch.float16)
    text = paged.text(24)
    text.qkv[:, : 4 * 32] *= 12000
    text.qkv[:, 4 * 32 : 6 * 32] *= 1e-3
    backend = make_backend("triton", paged.cache, geometry.scale)
    out = [*paged.run(backend, [Piece(text, 20)]), *paged.run(backend, [Piece(text, 1)])]
    assert relative_error(torch.cat(out), paged.expected(text, from_cache=True)) < 8e-3
