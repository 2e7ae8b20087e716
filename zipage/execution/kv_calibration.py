"""Scales of a quantised KV cache, from one forward pass over a fixed sequence of tokens."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from zipage.attention.backend import QKVTransform, StepInputs, padded_rows
from zipage.attention.torch_backend import StepIndices, TorchBackend
from zipage.cache.kv_cache import KVCache, KVCacheSpec
from zipage.cache.quantisation import scales_for
from zipage.errors import ModelError
from zipage.models.decoder import Decoder
from zipage.models.transformers_model import TransformersModel
from zipage.tokenizer import encode_prompt, load_tokenizer

logger = logging.getLogger(__name__)

#: Most tokens in the pass.
_TOKENS = 512

#: Prose, mathematics, code and several scripts.
_TEXT = """\
In the spring of that year the river rose higher than anyone could remember, and the ferryman, who
had counted floods for half his life, moved his bench up the bank for the third time. "It will be
gone by Sunday," he said to nobody in particular. It was not. By Monday the mill stood in water.

Question: A tank holds 240 litres. One pump fills it in 8 minutes, another empties it in 12. How
long does it take to fill the tank with both running? Let us think step by step. The first adds
240 / 8 = 30 litres a minute, the second takes away 240 / 12 = 20, so 10 litres a minute remain and
240 / 10 = 24. Check: 24 * 30 - 24 * 20 = 720 - 480 = 240. Therefore x^2 + 3x - 4 = (x + 4)(x - 1),
\\int_0^1 x^2 dx = 1/3, and P(A | B) = P(B | A) P(A) / P(B). The answer is \\boxed{24}.

def primes(limit: int) -> list[int]:
    sieve = [True] * (limit + 1)
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    return [n for n in range(2, limit + 1) if sieve[n]]

SELECT name, COUNT(*) FROM orders WHERE price > 9.99 GROUP BY name; {"id": 7, "tags": ["a", null]}
Der Zug nach München fährt heute später ab. La bibliothèque ferme à dix-huit heures. Завтра будет
дождь. 今日は天気がいいですね。 人工智能正在改变世界。 مرحبا بالعالم. 🙂
"""


class _Recorder(TorchBackend):
    """Attention that records the largest magnitudes of keys and values.

    All layers share a cache of one layer in turn.

    Attributes:
        largest: ``[L, 2, H]`` fp32.
    """

    def __init__(self, spec: KVCacheSpec, num_tokens: int, scale: float) -> None:
        blocks = -(-num_tokens // spec.block_size)
        one = replace(
            spec, num_layers=1, num_blocks=blocks, kv_dtype=None, window=0, num_query_slots=0
        )
        super().__init__(KVCache(one), scale)
        self.largest = torch.zeros(
            spec.num_layers, 2, spec.num_kv_heads, dtype=torch.float32, device=spec.device
        )
        self._layer = 0

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        self._layer = layer
        return super().attend(0, qkv, transform, step)

    def _write(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: StepIndices) -> None:
        self.largest[self._layer] = kv[: plan.step.num_tokens].abs().amax(dim=(0, 3)).float()
        super()._write(layer, q, kv, plan)


@torch.inference_mode()
def calibrate(
    model: Decoder | TransformersModel, spec: KVCacheSpec, token_ids: list[int]
) -> torch.Tensor:
    """Scales of the keys (after norm and RoPE) and values of each layer and KV head.

    Takes the memory of a prefill step over these tokens, and their cache for one layer.

    Args:
        model: the model with its weights.
        spec: shape of its KV pool.
        token_ids: the text to run it on.

    Returns:
        ``[L, 2, H]`` fp32, for `KVCache.kv_scales`.
    """
    started = time.perf_counter()
    count, device = len(token_ids), spec.device
    recorder = _Recorder(spec, count, model.scale)
    rows = padded_rows(count)
    slots = torch.arange(rows, device=device)
    ids = torch.zeros(rows, dtype=torch.int64)
    ids[:count] = torch.tensor(token_ids)
    starts = np.array([0, count], dtype=np.int32)
    lens = np.array([count], dtype=np.int32)
    blocks = torch.arange(recorder.cache.spec.num_blocks, dtype=torch.int32, device=device)
    step = StepInputs(
        input_ids=ids.to(device),
        positions=slots.where(slots < count, 0),
        slot_mapping=slots.where(slots < count, -1),
        capture=torch.full((rows,), -1, device=device),
        query_start=torch.from_numpy(starts).to(device),
        cache_lens=torch.from_numpy(lens).to(device),
        block_tables=blocks.unsqueeze(0),
        num_tokens=count,
        max_query_len=count,
        max_cache_len=count,
        any_capture=False,
        query_start_host=starts,
        cache_lens_host=lens,
    )
    model(step, recorder)
    scales = scales_for(recorder.largest, spec.dtype)
    least, most = scales.aminmax(dim=0)
    logger.info(
        "fp8 KV cache: scales of keys 2^%d to 2^%d, of values 2^%d to 2^%d, from %d tokens in "
        "%.1f s",
        *torch.stack((least.amin(-1), most.amax(-1)), dim=1).log2().flatten().int().tolist(),
        count,
        time.perf_counter() - started,
    )
    return scales


def calibration_tokens(
    tokenizer: str | None, revision: str | None, vocab_size: int, max_model_len: int
) -> list[int]:
    """A fixed text, then tokens drawn from the whole vocabulary; without a tokenizer only those.

    The drawn tokens cover what no text of this length contains. Scales that are too large cost
    nothing; scales that are too small clip values.

    Args:
        tokenizer: where to load the tokenizer from, or None.
        revision: its hub revision.
        vocab_size: V.
        max_model_len: longest text of the model.
    """
    token_ids: list[int] = []
    if tokenizer is not None:
        with suppress(ModelError):  # dummy weights need none
            token_ids = encode_prompt(load_tokenizer(tokenizer, revision), _TEXT)
    draw = random.Random(0)
    token_ids = [i for i in token_ids if i < vocab_size][: _TOKENS // 2]
    token_ids += [draw.randrange(vocab_size) for _ in range(_TOKENS - len(token_ids))]
    return token_ids[:max_model_len]
