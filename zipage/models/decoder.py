"""The decoder: one inference-only transformer; Llama, Qwen, Mistral and Phi-3 are its options.

Shapes: T' rows of one step (a multiple of 4), E hidden size, Q query heads, H KV heads, D head
dimension, I intermediate size, V vocabulary size. Q, H and I are those of one tensor-parallel
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, padded_rows
from zipage.errors import ConfigError
from zipage.models.config import ModelConfig
from zipage.models.fp8 import (
    FP8,
    Fp8Matrix,
    Fp8Path,
    TorchElementwise,
    check_fp8_shape,
    scaled_product,
)
from zipage.models.modules import WeightHolder, silu_mul
from zipage.models.moe import MixtureOfExperts
from zipage.models.rope import build_rope_tables

if TYPE_CHECKING:
    from zipage.kernels.native.linear import PackedLinear

AllReduce = Callable[[torch.Tensor], torch.Tensor]
#: ``torch.nn.functional.linear`` or the like.
Linear = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class DecoderLayer(WeightHolder):
    """Attention and MLP of one layer, each behind an RMSNorm and added to the residual.

    Attributes:
        input_norm, post_norm: ``[E]``.
        qkv_weight, qkv_bias: ``[(Q + 2 H) D, E]`` and ``[(Q + 2 H) D]`` or None; rows of queries,
            then keys, then values.
        q_norm, k_norm: ``[D]`` or None.
        o_weight, o_bias: ``[E, Q D]`` and ``[E]`` or None.
        gate_up_weight, gate_up_bias: ``[2 I, E]`` and ``[2 I]`` or None; rows of gate, then up.
        down_weight, down_bias: ``[E, I]`` and ``[E]`` or None.
        qkv_scale, o_scale, gate_up_scale, down_scale: scales of fp8 weights, ``[rows]`` fp32, else
            None.
        moe: a mixture of experts that replaces gate, up and down (then None); or None.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_weight: torch.Tensor
    o_bias: torch.Tensor | None
    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_weight: torch.Tensor
    down_bias: torch.Tensor | None
    qkv_scale: torch.Tensor
    o_scale: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor
    moe: MixtureOfExperts | None

    def __init__(self, model: Decoder, index: int) -> None:
        super().__init__()
        config = model.config
        hidden, head_dim, inner = config.hidden_size, config.head_dim, model.intermediate_size
        qkv = (model.num_heads + 2 * model.num_kv_heads) * head_dim
        # A bias must be added once to the sum over ranks, so only the first rank holds it.
        first = model.tp_rank == 0
        dense = config.moe is None or index not in config.moe.layers
        shapes: dict[str, tuple[int, ...] | None] = {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "qkv_weight": (qkv, hidden),
            "qkv_bias": (qkv,) if config.qkv_bias else None,
            "q_norm": (head_dim,) if config.qk_norm else None,
            "k_norm": (head_dim,) if config.qk_norm else None,
            "o_weight": (hidden, model.num_heads * head_dim),
            "o_bias": (hidden,) if config.o_bias and first else None,
            "gate_up_weight": (2 * inner, hidden) if dense else None,
            "gate_up_bias": (2 * inner,) if dense and config.mlp_bias else None,
            "down_weight": (hidden, inner) if dense else None,
            "down_bias": (hidden,) if dense and config.mlp_bias and first else None,
        }
        fp8 = model.quantization == "fp8"
        scales = dict.fromkeys(f"{name}_scale" for name in ("qkv", "o", "gate_up", "down"))
        for name, shape in shapes.items():
            if shape is None:
                self.__dict__[name] = None
            elif fp8 and name.endswith("_weight"):
                check_fp8_shape(name, shape)
                self.add_weight(name, *shape, dtype=FP8, device=model.device)
                scale = name.replace("_weight", "_scale")
                self.add_weight(scale, shape[0], dtype=torch.float32, device=model.device)
                del scales[scale]
            else:
                self.add_weight(name, *shape, dtype=model.dtype, device=model.device)
        self.__dict__.update(scales)
        self.moe = None
        if config.moe is not None and not dense:
            self.moe = MixtureOfExperts(
                config.moe, hidden, model.expert_size, model.dtype, model.device
            )
        self.packed: _PackedLayer | None = None
        self.fused: _FusedLayer | None = None
        self.index = index
        self.norm_shape = (hidden,)
        self.norm_eps = config.norm_eps
        self.all_reduce = model.all_reduce
        self.transform = QKVTransform(
            self.q_norm, self.k_norm, config.norm_eps, model.cos, model.sin
        )

    def forward(self, x: torch.Tensor, backend: AttentionBackend, step: StepInputs) -> None:
        """Add attention and MLP to the residual stream `x` ``[T', E]`` in place."""
        if self.packed is not None:
            self.packed.forward(self, x, backend, step)
            return
        if self.fused is not None:
            self.fused.forward(self, x, backend, step)
            return
        h = F.rms_norm(x, self.norm_shape, self.input_norm, self.norm_eps)
        qkv = F.linear(h, self.qkv_weight, self.qkv_bias)
        attended = backend.attend(self.index, qkv, self.transform, step)
        self._add_reduced(x, F.linear(attended, self.o_weight, self.o_bias))

        h = F.rms_norm(x, self.norm_shape, self.post_norm, self.norm_eps)
        if self.moe is not None:
            self._add_reduced(x, self.moe(h))
            return
        h = silu_mul(F.linear(h, self.gate_up_weight, self.gate_up_bias))
        self._add_reduced(x, F.linear(h, self.down_weight, self.down_bias))

    def matrix(self, name: str) -> torch.Tensor | Fp8Matrix:
        """The target for loading the weights of ``qkv``, ``o``, ``gate_up`` or ``down``."""
        weight: torch.Tensor = getattr(self, f"{name}_weight").data
        scale: torch.Tensor | None = getattr(self, f"{name}_scale")
        return weight if scale is None else Fp8Matrix(weight, scale.data)

    def _add_reduced(self, x: torch.Tensor, partial: torch.Tensor) -> None:
        x.add_(partial if self.all_reduce is None else self.all_reduce(partial))


class _PackedLayer:
    """A layer's matrices laid out for the native CPU kernels; the originals are freed."""

    def __init__(self, layer: DecoderLayer) -> None:
        from zipage.kernels.native.elementwise import add_rms_norm, silu_mul
        from zipage.kernels.native.linear import PackedLinear

        self._add_rms_norm, self._silu_mul = add_rms_norm, silu_mul
        self.qkv = PackedLinear(layer.qkv_weight, layer.qkv_bias)
        self.o = PackedLinear(layer.o_weight, layer.o_bias)
        for weight in (layer.qkv_weight, layer.o_weight):
            weight.data = torch.empty(0)
        if layer.moe is not None:
            layer.moe.pack()
            return
        self.gate_up = PackedLinear(layer.gate_up_weight, layer.gate_up_bias)
        self.down = PackedLinear(layer.down_weight, layer.down_bias)
        for weight in (layer.gate_up_weight, layer.down_weight):
            weight.data = torch.empty(0)

    def forward(
        self, layer: DecoderLayer, x: torch.Tensor, backend: AttentionBackend, step: StepInputs
    ) -> None:
        """`DecoderLayer.forward` with fused native operations."""
        qkv = self.qkv(self._add_rms_norm(x, None, layer.input_norm, layer.norm_eps))
        self.o.add_to(x, backend.attend(layer.index, qkv, layer.transform, step))
        h = self._add_rms_norm(x, None, layer.post_norm, layer.norm_eps)
        if layer.moe is not None:
            x.add_(layer.moe(h))
        else:
            self.down.add_to(x, self._silu_mul(self.gate_up(h)))


class _FusedLayer:
    """A layer's elementwise operations as Triton kernels, with residual sums fused into products.

    Small products leave their sum to the following norm, which may be the next layer's.
    """

    def __init__(self, device: torch.device) -> None:
        from zipage.kernels.triton import elementwise, skinny_linear
        from zipage.kernels.triton.launch import num_multiprocessors, shared_memory

        self._elementwise, self._skinny = elementwise, skinny_linear
        self._processors, self._memory = num_multiprocessors(device), shared_memory(device)
        self._linear: Linear = F.linear
        self._unsummed: torch.Tensor | None = None

    def forward(
        self, layer: DecoderLayer, x: torch.Tensor, backend: AttentionBackend, step: StepInputs
    ) -> None:
        """`DecoderLayer.forward` with fused operations; `norm` must follow the last layer."""
        h = self.norm(x, layer.input_norm, layer.norm_eps)
        qkv = self._linear(h, layer.qkv_weight, layer.qkv_bias)
        attended = backend.attend(layer.index, qkv, layer.transform, step)
        self._add_product(layer, x, attended, layer.o_weight, layer.o_bias)
        h = self.norm(x, layer.post_norm, layer.norm_eps)
        if layer.moe is not None:
            layer._add_reduced(x, layer.moe(h))
            return
        gate_up = self._linear(h, layer.gate_up_weight, layer.gate_up_bias)
        active = self._elementwise.silu_mul(gate_up)
        self._add_product(layer, x, active, layer.down_weight, layer.down_bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of `x`, after adding the last product if that is still pending."""
        parts, self._unsummed = self._unsummed, None
        return self._elementwise.add_rms_norm(x, parts, weight, eps)

    def reset(self) -> None:
        """Forget a product left pending by a forward pass that failed."""
        self._unsummed = None

    def _add_product(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        h: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        if bias is not None or layer.all_reduce is not None:
            layer._add_reduced(x, F.linear(h, weight, bias))
            return
        plan = self._skinny.plan_skinny(len(h), weight, self._processors, self._memory)
        if plan is None:
            x.addmm_(h, weight.t())
        else:
            self._unsummed = self._skinny.skinny_linear(h, weight, plan)


class _InvariantLayer(_FusedLayer):
    """A fused layer whose products, too, do not depend on the number of rows."""

    def __init__(self, device: torch.device) -> None:
        from zipage.kernels.triton.linear import linear

        super().__init__(device)
        self._linear = self._add_linear = linear

    def _add_product(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        h: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        if layer.all_reduce is None:
            self._add_linear(h, weight, bias, out=x, add=True)
        else:
            layer._add_reduced(x, self._linear(h, weight, bias))


class Decoder(WeightHolder):
    """A decoder-only transformer for inference; device and dtype are fixed when it is built.

    Weights are left uninitialised: `zipage.models.loader.load_model` fills them.

    Args:
        config: the model.
        dtype: dtype of weights and activations.
        device: where they live.
        tp_rank, tp_size: which tensor-parallel shard this is. Heads and the MLP are split; KV
            heads are replicated if there are fewer of them than ranks; embeddings, norms and the
            output head are whole on every rank.
        all_reduce: sums a tensor over the ranks, in place or not, and returns the sum; needed
            when `tp_size` > 1.
        max_positions: rows of the RoPE tables; None for the model's longest text.
        quantization: ``fp8`` for layers with fp8 weights, see `zipage.models.fp8`; or None.

    Attributes:
        num_heads, num_kv_heads, intermediate_size: those of this rank.
        expert_size: intermediate size of an expert on this rank; 0 without experts.
        scale: factor of the attention scores, ``D ** -0.5``.
        cos, sin: RoPE tables, see `QKVTransform`.
        embed_weight: ``[V, E]``.
        head_weight: ``[V, E]``, the same tensor if embeddings are tied.
        final_norm: ``[E]``.
        num_parameters, weight_bytes: those of this rank; tied embeddings count once, and scales of
            fp8 weights only as bytes.

    Raises:
        ConfigError: the model cannot be split over `tp_size` ranks, or its layers cannot be fp8.
    """

    embed_weight: torch.Tensor
    final_norm: torch.Tensor
    head_weight: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        all_reduce: AllReduce | None = None,
        max_positions: int | None = None,
        quantization: str | None = None,
    ) -> None:
        super().__init__()
        _check_split(config, tp_size)
        if quantization is not None and config.moe is not None:
            raise ConfigError(
                f"quantization={quantization!r} does not run {config.architecture}: its experts "
                f"have no fp8 products; leave quantization out"
            )
        if tp_size > 1 and all_reduce is None:
            raise ValueError(f"tp_size {tp_size} needs an all_reduce")
        self.config = config
        self.dtype = dtype
        self.device = device
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.all_reduce = all_reduce
        self.quantization = quantization
        self.num_heads = config.num_heads // tp_size
        self.num_kv_heads = max(1, config.num_kv_heads // tp_size)
        self.intermediate_size = config.intermediate_size // tp_size
        self.expert_size = config.moe.intermediate_size // tp_size if config.moe else 0
        self.scale = config.head_dim**-0.5
        self.cos, self.sin = build_rope_tables(
            config.rope, config.head_dim, max_positions or config.max_position_embeddings, device
        )
        vocab, hidden = config.vocab_size, config.hidden_size
        self.add_weight("embed_weight", vocab, hidden, dtype=dtype, device=device)
        self.add_weight("final_norm", hidden, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.__dict__["head_weight"] = self.embed_weight
        else:
            self.add_weight("head_weight", vocab, hidden, dtype=dtype, device=device)
        layers = tuple(DecoderLayer(self, i) for i in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.decoder_layers: tuple[DecoderLayer, ...] = layers
        self.num_parameters = sum(
            weight.numel()
            for name, weight in self.named_parameters()
            if not name.endswith("_scale")
        )
        self.weight_bytes = sum(weight.nbytes for weight in self.parameters())
        self._packed_head: PackedLinear | None = None
        self._fused: _FusedLayer | None = None
        self._invariant_head: Callable[..., torch.Tensor] | None = None
        self._fp8 = Fp8Path(TorchElementwise()) if quantization == "fp8" else None

    def pack(self) -> None:
        """Lay out the loaded weights for the native CPU kernels, once: fp32, one rank.

        Layers in fp8 stay as they are.

        Raises:
            NativeUnavailable: the kernels cannot be built on this machine.
            ValueError: the weights are not fp32 on the CPU, or a shard.
        """
        from zipage.kernels.native.linear import PackedLinear

        if self._packed_head is not None:
            return
        if self.all_reduce is not None:
            raise ValueError("only an unsharded model can be packed")
        if self._fp8 is None:
            for layer in self.decoder_layers:
                layer.packed = _PackedLayer(layer)
        self._packed_head = PackedLinear(self.head_weight)
        if not self.config.tie_word_embeddings:
            self.head_weight.data = torch.empty(0)

    def fuse(self, batch_invariant: bool = False) -> None:
        """Use Triton kernels for the operations between matrix products (CUDA).

        Args:
            batch_invariant: also for the products, so that a row does not depend on the others.
        """
        if batch_invariant:
            from zipage.kernels.triton.linear import linear

            self._invariant_head = linear
        if self._fp8 is not None:
            from zipage.kernels.triton.launch import num_multiprocessors, shared_memory
            from zipage.kernels.triton.linear import scaled_linear
            from zipage.kernels.triton.quantise import SkinnyProducts, TritonElementwise

            if batch_invariant:
                self._fp8 = Fp8Path(TritonElementwise(), scaled_linear)
            else:
                device = self.device
                small = SkinnyProducts(num_multiprocessors(device), shared_memory(device))
                self._fp8 = Fp8Path(TritonElementwise(), scaled_product, small)
            return
        fused = (_InvariantLayer if batch_invariant else _FusedLayer)(self.device)
        for layer in self.decoder_layers:
            layer.fused = fused
        self._fused = fused

    def forward(self, step: StepInputs, backend: AttentionBackend) -> torch.Tensor:
        """Run the layers over the new tokens of one step.

        In fp32 on CPU a row's result does not depend on the other rows or on their number, if
        the backend's does not.

        Args:
            step: the step; its T' is a multiple of 4.
            backend: attention over this model's KV cache.

        Returns:
            ``[T', E]`` hidden states after the final norm.
        """
        x = F.embedding(step.input_ids, self.embed_weight)
        if self._fp8 is not None:
            return self._fp8.forward(self, x, backend, step)
        if self._fused is not None:
            self._fused.reset()
        for layer in self.decoder_layers:
            layer(x, backend, step)
        if self._fused is not None:
            return self._fused.norm(x, self.final_norm, self.config.norm_eps)
        return F.rms_norm(x, (self.config.hidden_size,), self.final_norm, self.config.norm_eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output head.

        Args:
            hidden: ``[R, E]`` rows of what `forward` returned; any R.

        Returns:
            ``[R, V]`` fp32.
        """
        if self._packed_head is not None:
            return self._packed_head(hidden.contiguous())
        return self.project(hidden).float()

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Like `compute_logits`, but in the model's dtype and only for a model that is not packed.

        Args:
            hidden: ``[R, E]``.
            out: ``[R, V]`` to be filled, if given.
        """
        if self._invariant_head is not None:
            return self._invariant_head(hidden, self.head_weight, out=out)
        rows = hidden.shape[0]
        if out is not None and rows == padded_rows(rows):
            return torch.mm(hidden, self.head_weight.t(), out=out)
        padding = padded_rows(max(rows, 1)) - rows
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        logits = F.linear(hidden, self.head_weight)[:rows]
        return logits if out is None else out.copy_(logits)


def _check_split(config: ModelConfig, tp_size: int) -> None:
    """Raise ConfigError unless heads and MLP divide evenly over `tp_size` ranks."""
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    kv_fits = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
    expert = config.moe.intermediate_size if config.moe else 0
    if heads % tp_size or inner % tp_size or expert % tp_size or not kv_fits:
        raise ConfigError(
            f"tensor_parallel_size {tp_size} does not fit this model: it must divide "
            f"{heads} attention heads and the intermediate size {inner}"
            f"{f' (of an expert {expert})' if expert else ''}, and divide or be a multiple of "
            f"{kv_heads} KV heads"
        )
