"""Linear layers in fp8: e4m3 weights with a scale per output channel, activations per token.

Weights are quantised when they are loaded, activations in every step, both to the largest value
of their row: ``x = values * scale`` with ``scale = max|x| / 448``. Embeddings, norms, biases and
the output head stay in the model's dtype: the head's rounding would affect every probability, and
its share of the bytes is small (8 % of Qwen3-8B's).

Letters: M rows, K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from zipage.cache.quantisation import FP8_MAX
from zipage.errors import ConfigError
from zipage.execution.faults import is_out_of_memory

if TYPE_CHECKING:
    from zipage.attention.backend import AttentionBackend, StepInputs
    from zipage.models.decoder import Decoder

FP8 = torch.float8_e4m3fn
#: `torch._scaled_mm` requires both sides of a weight to be multiples of this.
FP8_ALIGNMENT = 16
# Most weights quantised at once: 64 MiB in fp32.
_MOST_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Fp8Rows:
    """Rows ``values * scales``.

    Attributes:
        values: ``[M, K]`` e4m3.
        scales: ``[M, 1]`` fp32.
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Fp8Matrix:
    """Weights ``weight * scale[:, None]`` of all or some of the N outputs.

    Attributes:
        weight: ``[N, K]`` e4m3.
        scale: ``[N]`` fp32.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.weight.shape

    def __getitem__(self, rows: slice) -> Fp8Matrix:
        return Fp8Matrix(self.weight[rows], self.scale[rows])

    def copy_(self, source: torch.Tensor) -> None:
        """Quantise ``source [N, K]`` into this matrix, some rows at a time."""
        step = max(1, _MOST_AT_ONCE // source.shape[1])
        for start in range(0, len(source), step):
            rows = quantise(source[start : start + step].to(self.weight.device))
            self.weight[start : start + step] = rows.values
            self.scale[start : start + step] = rows.scales.squeeze(1)


class Elementwise(Protocol):
    """Operations between the products: in torch here, `kernels.triton.quantise` on CUDA."""

    def quantise(self, x: torch.Tensor) -> Fp8Rows:
        """Rows of ``[M, K]`` in fp8."""

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `x` in place, both ``[M, K]``; returns the sum's RMSNorm, rounded once.

        `delta` may be ``[S, M, K]``, parts to be summed first, if the products return parts.
        """

    def quantise_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Fp8Rows:
        """`add_rms_norm` in fp8, without rounding to the dtype of `x` in between."""

    def quantise_silu_mul(self, gate_up: torch.Tensor) -> Fp8Rows:
        """``silu(gate) * up`` of ``[M, 2 K]``, gates first, in fp8."""


class SmallProducts(Protocol):
    """Products of few rows, for which another method than `Product` is faster."""

    def product(
        self, x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """``[M, N]`` in `dtype`; None if there are too many rows or the shape does not fit."""

    def parts(self, x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
        """``[S, M, N]`` fp32 whose sum is the product, for `Elementwise` to add; or None."""


class TorchElementwise:
    """The reference."""

    def quantise(self, x: torch.Tensor) -> Fp8Rows:
        return quantise(x)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            x.add_(delta)
        return F.rms_norm(x, weight.shape, weight, eps)

    def quantise_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> Fp8Rows:
        if delta is not None:
            x.add_(delta)
        return quantise(F.rms_norm(x.float(), weight.shape, weight.float(), eps))

    def quantise_silu_mul(self, gate_up: torch.Tensor) -> Fp8Rows:
        from zipage.models.modules import silu_mul

        return quantise(silu_mul(gate_up.float()))


def quantise(x: torch.Tensor) -> Fp8Rows:
    """Rows of ``x [M, K]`` in fp8; a row of zeros gets the scale 1, NaN and inf become NaN."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / FP8_MAX
    scales = scales.masked_fill(scales == 0.0, 1.0)
    return Fp8Rows((wide / scales).to(FP8), scales)


#: ``(x, weight [N, K], scale [N], bias [N] or None, dtype of the result) -> [M, N]``.
Product = Callable[
    [Fp8Rows, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.dtype], torch.Tensor
]


def scaled_product(
    x: Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of rows and a weight, summed in fp32: torch's scaled product on CUDA.

    On the CPU both are widened to fp32. There a row's result depends on that row alone if the
    number of rows is a multiple of 4.
    """
    if weight.device.type == "cuda":
        return torch._scaled_mm(
            x.values,
            weight.t(),
            scale_a=x.scales,
            scale_b=scale.unsqueeze(0),
            bias=bias,
            out_dtype=dtype,
            # Accumulating in fewer bits costs accuracy and speeds up large prefills only.
            use_fast_accum=False,
        )
    out = F.linear(x.values.float(), _widen(weight)).mul_(x.scales).mul_(scale)
    return (out if bias is None else out.add_(bias)).to(dtype)


def _widen(weight: torch.Tensor) -> torch.Tensor:
    """``weight.float()``: on the CPU, a lookup table is six times as fast as torch's cast."""
    table = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return table.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)


class Fp8Path:
    """The forward pass of a decoder whose layers have fp8 weights.

    Each sum over the residual stream is fused into the norm after it.

    Args:
        elementwise: operations between the products.
        product: computes the products.
        small: computes products of few rows, if there is a faster method.
    """

    def __init__(
        self,
        elementwise: Elementwise,
        product: Product = scaled_product,
        small: SmallProducts | None = None,
    ) -> None:
        self._between = elementwise
        self._product = product
        self._small = small

    def forward(
        self, decoder: Decoder, x: torch.Tensor, backend: AttentionBackend, step: StepInputs
    ) -> torch.Tensor:
        """Run all layers and the final norm over embeddings ``x [T', E]``; `x` is overwritten."""
        between, eps, dtype = self._between, decoder.config.norm_eps, decoder.dtype
        reduce = decoder.all_reduce
        delta: torch.Tensor | None = None
        for layer in decoder.decoder_layers:
            h = between.quantise_rms_norm(x, delta, layer.input_norm, eps)
            qkv = self._multiply(h, layer.qkv_weight, layer.qkv_scale, layer.qkv_bias, dtype)
            attended = backend.attend(layer.index, qkv, layer.transform, step)
            h = between.quantise(attended)
            delta = self._delta(h, layer.o_weight, layer.o_scale, layer.o_bias, dtype, reduce)
            h = between.quantise_rms_norm(x, delta, layer.post_norm, eps)
            gate_up = self._multiply(
                h, layer.gate_up_weight, layer.gate_up_scale, layer.gate_up_bias, dtype
            )
            h = between.quantise_silu_mul(gate_up)
            delta = self._delta(
                h, layer.down_weight, layer.down_scale, layer.down_bias, dtype, reduce
            )
        return between.add_rms_norm(x, delta, decoder.final_norm, eps)

    def _multiply(
        self,
        x: Fp8Rows,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if self._small is not None and bias is None:
            out = self._small.product(x, weight, scale, dtype)
            if out is not None:
                return out
        return self._product(x, weight, scale, bias, dtype)

    def _delta(
        self,
        x: Fp8Rows,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """What a product adds to the residual stream, possibly in parts."""
        if self._small is not None and bias is None and reduce is None:
            parts = self._small.parts(x, weight, scale)
            if parts is not None:
                return parts
        delta = self._product(x, weight, scale, bias, dtype)
        return delta if reduce is None else reduce(delta)


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device or dtype that fp8 products do not support.

    Raises:
        ConfigError: the GPU is below compute capability 8.9, the dtype on a GPU is not bfloat16, or
            this torch lacks the product for the GPU.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"quantization='fp8' needs a GPU of compute capability 8.9 or higher (Ada, Hopper), "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: "
            f"leave quantization out"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization='fp8' on CUDA needs dtype='bfloat16', got "
            f"{str(dtype).removeprefix('torch.')}"
        )
    _try_product(device)


def _try_product(device: torch.device) -> None:
    """Try a product: which torch supports a scale per row on which GPU is not documented.

    Raises:
        ConfigError: this torch does not on this GPU.
    """
    rows = quantise(torch.zeros(128, 128, dtype=torch.bfloat16, device=device))
    scale = rows.scales[:, 0].contiguous()
    try:
        scaled_product(rows, rows.values, scale, None, torch.bfloat16)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        cause = str(error).partition("\n")[0]
        raise ConfigError(
            f"quantization='fp8': torch {torch.__version__} cannot multiply fp8 with a scale per "
            f"row on {torch.cuda.get_device_name(device)} ({cause}): leave quantization out, or "
            f"use another version of torch"
        ) from error


def check_fp8_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a weight ``(N, K)`` that the scaled product cannot take.

    Raises:
        ConfigError: a side is not a multiple of 16.
    """
    if any(side % FP8_ALIGNMENT for side in shape):
        raise ConfigError(
            f"quantization='fp8' needs weights whose sides are multiples of {FP8_ALIGNMENT}; "
            f"{name} is {list(shape)}: leave quantization out"
        )
