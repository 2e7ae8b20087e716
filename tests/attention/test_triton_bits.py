"""Batch-invariant attention: a token's bits depend on its own sequence alone, however it is cut."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from tests.attention.paged import Geometry, Paged, Piece, relative_error
from tests.attention.test_native_bits import contents
from tests.kernels.test_invariant_linear import DEVICES, even_products  # noqa: F401
from zipage.attention.triton_backend import TritonBackend

#: Tokens of the text: more than a tile of keys in fp32 (32) and in bf16 (64).
LENGTHS = {torch.float32: 37, torch.bfloat16: 135}
#: How the text is cut into chunks after a first one, and how many tokens others have beside it.
SCHEDULES = {
    "whole": ([], [0]),
    "among others": ([], [40, 1]),
    "token by token": ([1, 1, 1], [0]),
    "odd chunks beside others": ([1, 17, 2], [9, 1]),
}


def run(paged: Paged, schedule: tuple[list[int], list[int]], rows: torch.Tensor) -> torch.Tensor:
    """Outputs, keys and values of the text with these projected `rows`."""
    backend = TritonBackend(paged.cache, paged.geometry.scale, batch_invariant=True)
    chunks, company = schedule
    text = paged.text(len(rows))
    text.qkv = rows
    outputs = []
    for count in [len(rows) - sum(chunks), *chunks]:
        others = [Piece(paged.text(n), n) for n in company if n]
        place = len(others) // 2
        pieces = [*others[:place], Piece(text, count), *others[place:]]
        outputs.append(paged.run(backend, pieces)[place])
        for piece in others:
            paged.free += piece.text.blocks
    out = torch.cat(outputs)
    if schedule is SCHEDULES["whole"]:
        tolerance = 2e-6 if paged.dtype == torch.float32 else 1.5e-2
        assert relative_error(out, paged.expected(text)) < tolerance
    kept = contents(paged.cache, text).cpu().flatten().view(torch.uint8)
    return torch.cat((out.flatten().view(torch.uint8), kept))


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_batch_leave_the_bits_alone(device: str) -> None:
    small, odd = Geometry(4, 2, 32, block_size=32), Geometry(6, 2, 48, block_size=48)
    large = Geometry(32, 8, 128, block_size=256)
    for geometry, dtype in (
        [(small, torch.float32)]
        if device == "cpu"
        else itertools.product([small, odd, large], LENGTHS)
    ):
        found = []
        rows = None
        for schedule in SCHEDULES.values():
            paged = Paged(geometry, dtype=dtype, device=device)
            if rows is None:
                rows = paged.text(LENGTHS[dtype]).qkv
            found.append(run(paged, schedule, rows))
        for other in found[1:]:
            assert torch.equal(found[0], other)
