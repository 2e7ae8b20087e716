"""Compression on CUDA: the results of the CPU, without waiting for the device."""

from __future__ import annotations

import pytest
import torch

from tests.compression.cached_request import clone, make_cache, make_job, moved, tokens_after
from zipage.compression.compressor import CompressionOptions, Compressor
from zipage.compression.kernels import KernelChoice
from zipage.compression.policies import make_policy, policy_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("compaction", ["stable", "holes"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_cuda_keeps_what_the_cpu_keeps(policy: str, compaction: str, kernels: KernelChoice) -> None:
    reference = make_cache(blocks=40, block_size=16, dim=32, group=4, window=16)
    job = make_job(
        reference,
        length=300,
        num_targets=12,
        new_blocks=2,
        num_scored=224,
        num_tokens=400,
        prompt_len=30,
    )
    options = CompressionOptions(window=16, compaction=compaction, num_sinks=2, protect_prompt=0.5)
    on_device = moved(reference, "cuda")
    warm_up = moved(reference, "cuda")
    made = make_policy(policy, {"later_pooling": 3} if policy == "zipage" else {})
    expected = clone(reference)
    Compressor(expected, made, options, 32**-0.5, "torch").run(job)
    Compressor(warm_up, made, options, 32**-0.5, kernels).run(job)
    torch.cuda.set_sync_debug_mode("error")
    try:
        Compressor(on_device, made, options, 32**-0.5, kernels).run(job)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(
        tokens_after(expected, job), tokens_after(moved(on_device, "cpu"), job), strict=True
    ):
        assert one.keys() == other.keys()
        for position, (key, value, score) in one.items():
            assert other[position][:2] == (key, value)
            assert other[position][2] == pytest.approx(score, rel=1e-4, abs=1e-9)
