"""Attention on the CPU in fp32 by native kernels; bitwise independent of batch and threads."""

from __future__ import annotations

import ctypes

import torch

from zipage.attention.backend import (
    MAX_HEAD_DIM,
    AttentionBackend,
    QKVTransform,
    StepInputs,
)
from zipage.cache.kv_cache import KVCache
from zipage.kernels import native

_ERRORS = {
    1: (IndexError, "slot_mapping points outside the KV cache"),
    2: (IndexError, "a position lies outside the RoPE tables"),
    3: (IndexError, "capture points outside the query slots"),
    4: (ValueError, "query_start, cache_lens and block_tables do not fit each other"),
    5: (IndexError, "a block table names a block outside the KV cache"),
    6: (MemoryError, "no memory for the kernel's work list"),
    7: (ValueError, "head counts, head_dim or block_size are not supported"),
}


class _Layer(ctypes.Structure):
    """``zp_attn_layer`` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "queries", "q_norm", "k_norm", "cos", "sin")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_blocks",
                "block_size",
                "heads",
                "kv_heads",
                "dim",
                "half",
                "max_positions",
                "capture_rows",
            )
        ),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """``zp_attn_step`` of attention.c."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "positions",
                "slot_mapping",
                "capture",
                "query_start",
                "cache_lens",
                "block_tables",
            )
        ),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "sequences", "max_blocks")),
    )


class NativeBackend(AttentionBackend):
    """One fused C kernel per layer: norms, RoPE, cache write, query capture, paged attention.

    The result of a token is bitwise the same whatever else is in the batch, however many threads
    run, and whether the token is computed in a decode step or in a prefill chunk of any size.
    The number of threads is torch's (`torch.get_num_threads()` of the calling thread). Backends
    hold no scratch memory, so several engines may run in different threads.
    A step whose metadata is out of range raises before anything is written.

    Raises:
        ValueError: the cache is not fp32 on the CPU, or quantised, or head_dim > 256.
        NativeUnavailable: the kernels cannot be built on this machine.
    """

    name = "native"

    def __init__(self, cache: KVCache, scale: float) -> None:
        super().__init__(cache, scale)
        spec = cache.spec
        if spec.device.type != "cpu" or spec.dtype != torch.float32:
            raise ValueError(
                f"attention backend 'native' needs device cpu and dtype float32, "
                f"got {spec.device} and {spec.dtype}"
            )
        if spec.is_quantised:
            raise ValueError("attention backend 'native' cannot read quantised keys and values")
        if spec.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim {spec.head_dim} exceeds {MAX_HEAD_DIM}")
        self._forward = native.load().zp_attn_forward
        self._forward.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_int)
        self._forward.restype = ctypes.c_int
        # The transform is kept alongside the pointers into it, so that they cannot dangle.
        self._layers: dict[int, tuple[QKVTransform, _Layer]] = {}

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QKVTransform, step: StepInputs
    ) -> torch.Tensor:
        known = self._layers.get(layer)
        if known is None or known[0] is not transform:
            known = self._layers[layer] = (transform, self._describe(layer, transform))
        spec = self.cache.spec
        rows = qkv.shape[0]
        if qkv.dtype != torch.float32 or not qkv.is_contiguous():
            raise ValueError(f"qkv must be contiguous float32, got {qkv.dtype} {qkv.stride()}")
        out = torch.empty(rows, spec.num_heads * spec.head_dim, dtype=torch.float32, device="cpu")
        tables = step.block_tables
        described = _Step(
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            step.capture.data_ptr(),
            step.query_start.data_ptr(),
            step.cache_lens.data_ptr(),
            tables.data_ptr(),
            rows,
            step.num_tokens,
            tables.shape[0],
            tables.shape[1],
        )
        status = self._forward(
            ctypes.addressof(known[1]),
            ctypes.addressof(described),
            qkv.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if status:
            kind, reason = _ERRORS[status]
            raise kind(f"attention of layer {layer}: {reason}")
        return out

    def _describe(self, layer: int, transform: QKVTransform) -> _Layer:
        cache, spec = self.cache, self.cache.spec
        for name in ("q_norm", "k_norm", "cos", "sin"):
            tensor: torch.Tensor | None = getattr(transform, name)
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous float32, got {tensor.dtype}")

        def pointer(tensor: torch.Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        return _Layer(
            cache.kv[layer].data_ptr(),
            cache.queries[layer].data_ptr(),
            pointer(transform.q_norm),
            pointer(transform.k_norm),
            pointer(transform.cos),
            pointer(transform.sin),
            spec.num_blocks,
            spec.block_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            transform.cos.shape[1],
            transform.cos.shape[0],
            spec.num_query_slots * spec.window,
            transform.norm_eps,
            self.scale,
        )
