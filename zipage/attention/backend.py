"""The interface between the decoder and the paged KV cache."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from zipage.cache.kv_cache import KVCache
from zipage.cache.quantisation import converts_fp8
from zipage.errors import ConfigError

#: Largest head dimension of the native and the Triton kernels.
MAX_HEAD_DIM = 256

_ROW_PADDING = 4


def padded_rows(num_tokens: int) -> int:
    """T', the rows of a step of T tokens: the next multiple of 4.

    On the CPU, an fp32 product of a row then does not depend on the number of rows.
    """
    return -(-num_tokens // _ROW_PADDING) * _ROW_PADDING


@dataclass
class StepInputs:
    """Tensors of one forward pass over the new tokens of S sequences.

    The tokens of all sequences follow one another, T in total, then padding rows up to T', see
    `padded_rows`.
    On CPU every tensor is contiguous.

    Attributes:
        input_ids: ``[T']`` int64.
        positions: ``[T']`` int64, RoPE positions (text positions, never renumbered).
        slot_mapping: ``[T']`` int64, slot ``block_id * block_size + offset`` to which the token's
            key and value are written; -1 for padding.
        capture: ``[T']`` int64, ``query_slot * window + index`` at which the token's query is
            stored; -1 for none.
        query_start: ``[S + 1]`` int32, where each sequence's tokens start in the rows above.
        cache_lens: ``[S]`` int32, valid cache slots of each sequence including this step's tokens.
            Token i of the q new tokens of a sequence sits at slot ``cache_len - q + i`` and
            attends to the slots up to and including its own.
        block_tables: ``[S, max_blocks]`` int32, rows padded with 0.
        num_tokens: T.
        max_query_len: longest q of the step.
        max_cache_len: longest cache_len of the step.
        any_capture: whether any entry of `capture` is not -1.
        query_start_host, cache_lens_host: the values of `query_start` and `cache_lens` if the
            caller has them in host memory; without them, a backend that needs them must wait for
            the device.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    capture: torch.Tensor
    query_start: torch.Tensor
    cache_lens: torch.Tensor
    block_tables: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_cache_len: int
    any_capture: bool
    query_start_host: np.ndarray | None = None
    cache_lens_host: np.ndarray | None = None


def on_host(known: np.ndarray | None, tensor: torch.Tensor) -> np.ndarray:
    """Values of a step's tensor: the host's copy if there is one, else read from the device."""
    if known is not None:
        return known
    values: np.ndarray = tensor.cpu().numpy()
    return values


@dataclass(frozen=True)
class QKVTransform:
    """What happens to a projected query and key before attention.

    Attributes:
        q_norm: ``[D]`` RMSNorm weight applied to each query head, or None.
        k_norm: ``[D]`` the same for keys.
        norm_eps: epsilon of both norms.
        cos, sin: ``[max_positions, R / 2]`` fp32 RoPE tables, with any scaling factor applied;
            R <= D is the rotated width, 0 where queries and keys arrive rotated. Halves are
            rotated as in Llama:
            ``out[:R/2] = x[:R/2]*cos - x[R/2:R]*sin``, ``out[R/2:R] = x[R/2:R]*cos + x[:R/2]*sin``.
    """

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    cos: torch.Tensor
    sin: torch.Tensor


class AttentionBackend(ABC):
    """Attention of one model over one KV cache."""

    name: str

    def __init__(self, cache: KVCache, scale: float) -> None:
        self.cache = cache
        self.scale = scale

    @abstractmethod
    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        """Write this step's keys and values to the cache and attend to it.

        Norms and rotates queries and keys, writes K and V to `step.slot_mapping`, stores the
        queries of captured tokens, then computes causal attention over each sequence's slots.

        Args:
            layer: index of the layer.
            qkv: ``[T', (Q + 2 H) * D]`` projected queries, keys, values, heads contiguous.
            transform: norms and RoPE.
            step: the step's metadata.

        Returns:
            ``[T', Q * D]`` in the dtype of `qkv`; padding rows hold finite values.
        """


def make_backend(
    name: str,
    cache: KVCache,
    scale: float,
    max_sequences: int = 256,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Build a backend.

    Args:
        name: ``torch``, ``native`` (CPU), ``triton`` (CUDA, or the CPU under Triton's
            interpreter), or ``auto`` for the fastest one that can run.
        cache: the KV pool.
        scale: factor of the attention logits.
        max_sequences: most sequences of a step.
        batch_invariant: a token's result must not depend on the batch: true of ``native``,
            possible with ``triton``, impossible with ``torch``.

    Raises:
        ConfigError: the backend does not fit the device, the dtype, the head dimension or
            `batch_invariant`.
    """
    spec = cache.spec
    on_cuda = spec.device.type == "cuda"
    if name == "triton" or (name == "auto" and on_cuda and spec.head_dim <= MAX_HEAD_DIM):
        return _make_triton(name, cache, scale, max_sequences, batch_invariant)
    fits = (
        spec.device.type == "cpu"
        and spec.dtype == torch.float32
        and spec.head_dim <= MAX_HEAD_DIM
        and not spec.is_quantised
    )
    if name in ("auto", "native") and fits:
        from zipage.kernels import native

        if name == "native" or native.available():
            from zipage.attention.native_backend import NativeBackend

            return NativeBackend(cache, scale)
    if name == "native":
        raise ConfigError(
            f"attention_backend='native' needs device cpu, dtype float32, head_dim <= "
            f"{MAX_HEAD_DIM} and kv_cache_dtype='auto', got {spec.device}, {spec.dtype}, "
            f"{spec.head_dim} and {spec.kv_dtype or spec.dtype}"
        )
    if batch_invariant:
        raise ConfigError(
            f"batch_invariant=True with attention_backend={name!r} on {spec.device} in "
            f"{spec.dtype}: torch's attention computes sequences together; legal are 'triton' on "
            f"CUDA (head_dim <= {MAX_HEAD_DIM}), and 'native' on the CPU in float32 where there is "
            "a C compiler"
        )
    from zipage.attention.torch_backend import TorchBackend

    return TorchBackend(cache, scale)


def _make_triton(
    name: str, cache: KVCache, scale: float, max_sequences: int, batch_invariant: bool
) -> AttentionBackend:
    spec = cache.spec
    try:
        from zipage.attention.triton_backend import TritonBackend
    except ImportError as error:
        raise ConfigError(
            f"attention_backend={name!r} on {spec.device} needs the package triton ({error}): "
            "install it, or use attention_backend='torch'"
        ) from error
    if spec.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"attention_backend='triton' needs head_dim <= {MAX_HEAD_DIM}, got {spec.head_dim}"
        )
    if spec.device.type == "cuda" and spec.is_quantised and not converts_fp8(spec.device):
        raise ConfigError(
            f"kv_cache_dtype='fp8' with attention_backend='triton' needs a GPU of compute "
            f"capability 8.9 (Ada, Hopper) or newer, which {spec.device} is not: use 'auto', or "
            f"attention_backend='torch'"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if spec.device.type != "cuda" and not interpreted:
        raise ConfigError(
            f"attention_backend='triton' needs device cuda, got {spec.device}: use 'torch' or "
            "'native'"
        )
    return TritonBackend(cache, scale, max_sequences, batch_invariant)
