"""Where the tensors of a checkpoint go in a decoder, whole or as a tensor-parallel shard."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from zipage.errors import ModelError
from zipage.models.checkpoint import Checkpoint
from zipage.models.config import ModelConfig
from zipage.models.decoder import Decoder, DecoderLayer
from zipage.models.fp8 import Fp8Matrix
from zipage.models.moe import MixtureOfExperts


def fill_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's tensors into a decoder one by one, quantising them for fp8 weights.

    Raises:
        ModelError: tensors are missing, surplus, misshapen or unreadable; the message names them.
    """
    targets = _Planner(decoder, checkpoint.shapes.keys()).plan()
    surplus: list[str] = []
    misshapen: list[str] = []
    for name, shape in checkpoint.shapes.items():
        target = targets.get(name)
        if target is None:
            if not _is_tolerated(name, decoder.config):
                surplus.append(name)
        elif shape != target.shape:
            misshapen.append(f"{name} {list(shape)}, expected {list(target.shape)}")
        else:
            for part in target.parts:
                part.destination.copy_(checkpoint.read(name, part.index))
    missing = sorted(targets.keys() - checkpoint.shapes.keys())
    faults = {"missing": missing, "surplus": surplus, "wrong shape": misshapen}
    found = [f"{fault}: {_abridge(names)}" for fault, names in faults.items() if names]
    if found:
        raise ModelError(
            f"{checkpoint.path}: the weights do not fit config.json; {'; '.join(found)}"
        )


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that `index` selects, and where it is copied."""

    index: tuple[slice, ...]
    destination: torch.Tensor | Fp8Matrix


@dataclass(frozen=True)
class _Target:
    """One tensor of a checkpoint: its whole shape, and the parts this rank needs of it."""

    shape: tuple[int, ...]
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Rows:
    """A projection whose outputs are split over the ranks.

    Attributes:
        total: its outputs.
        start, length: the outputs of this rank.
        at: row of the fused weight where they begin.
    """

    total: int
    start: int
    length: int
    at: int


class _Planner:
    """Maps every tensor the checkpoint must hold to where it goes.

    Args:
        decoder: the decoder to fill.
        names: names of the checkpoint's tensors, which show how it stores the experts.
    """

    def __init__(self, decoder: Decoder, names: Collection[str]) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.names = names
        self.targets: dict[str, _Target] = {}

    def plan(self) -> dict[str, _Target]:
        decoder = self.decoder
        self._whole("model.embed_tokens.weight", decoder.embed_weight)
        self._whole("model.norm.weight", decoder.final_norm)
        if not self.config.tie_word_embeddings:
            self._whole("lm_head.weight", decoder.head_weight)
        for i, layer in enumerate(decoder.decoder_layers):
            base = f"model.layers.{i}."
            self._whole(base + "input_layernorm.weight", layer.input_norm)
            self._whole(base + "post_attention_layernorm.weight", layer.post_norm)
            self._attention(base + "self_attn.", layer)
            if layer.moe is None:
                self._mlp(base + "mlp.", layer)
            else:
                self._experts(base, layer.moe)
        return self.targets

    def _attention(self, base: str, layer: DecoderLayer) -> None:
        config, decoder, rank = self.config, self.decoder, self.decoder.tp_rank
        dim = config.head_dim
        q, kv = decoder.num_heads * dim, decoder.num_kv_heads * dim
        # With more ranks than KV heads, several ranks hold the same head.
        kv_start = rank * config.num_kv_heads // decoder.tp_size * dim
        parts = {
            "q_proj": _Rows(config.num_heads * dim, rank * q, q, 0),
            "k_proj": _Rows(config.num_kv_heads * dim, kv_start, kv, q),
            "v_proj": _Rows(config.num_kv_heads * dim, kv_start, kv, q + kv),
        }
        self._rows(base, "qkv_proj", parts, layer.matrix("qkv"), layer.qkv_bias)
        total = config.num_heads * dim
        out = layer.matrix("o")
        self._columns(f"{base}o_proj", rank * q, total, out, layer.o_bias, config.o_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            self._whole(base + "q_norm.weight", layer.q_norm)
            self._whole(base + "k_norm.weight", layer.k_norm)

    def _mlp(self, base: str, layer: DecoderLayer) -> None:
        config, inner = self.config, self.decoder.intermediate_size
        start = self.decoder.tp_rank * inner
        parts = {
            "gate_proj": _Rows(config.intermediate_size, start, inner, 0),
            "up_proj": _Rows(config.intermediate_size, start, inner, inner),
        }
        self._rows(base, "gate_up_proj", parts, layer.matrix("gate_up"), layer.gate_up_bias)
        self._columns(
            f"{base}down_proj",
            start,
            config.intermediate_size,
            layer.matrix("down"),
            layer.down_bias,
            config.mlp_bias,
        )

    def _experts(self, base: str, moe: MixtureOfExperts) -> None:
        names, total = moe.config.names, moe.config.intermediate_size
        inner = self.decoder.expert_size
        start = self.decoder.tp_rank * inner
        gate_up, down = moe.gate_up_weight.data, moe.down_weight.data
        # transformers 5 can save the experts of a layer as two tensors.
        fused = f"{base}mlp.experts."
        if fused + "gate_up_proj" in self.names or fused + "down_proj" in self.names:
            self._whole(f"{base}mlp.gate.weight", moe.router_weight)
            every, columns = slice(None), slice(start, start + inner)
            gate, up = torch.split(gate_up, inner, dim=1)
            self.targets[fused + "gate_up_proj"] = _Target(
                (gate_up.shape[0], 2 * total, gate_up.shape[2]),
                (
                    _Part((every, columns), gate),
                    _Part((every, slice(total + start, total + start + inner)), up),
                ),
            )
            self.targets[fused + "down_proj"] = _Target(
                (*down.shape[:2], total), (_Part((every, every, columns), down),)
            )
            return
        block = f"{base}{names.block}."
        self._whole(f"{block}gate.weight", moe.router_weight)
        parts = {
            names.gate: _Rows(total, start, inner, 0),
            names.up: _Rows(total, start, inner, inner),
        }
        for expert in range(moe.config.num_experts):
            own = f"{block}experts.{expert}."
            self._separate_rows(own, parts, gate_up[expert], "weight")
            self._columns(f"{own}{names.down}", start, total, down[expert], None, False)

    def _whole(self, name: str, weight: torch.Tensor) -> None:
        self.targets[name] = _Target(tuple(weight.shape), (_Part((), weight.data),))

    def _rows(
        self,
        base: str,
        fused_name: str,
        parts: dict[str, _Rows],
        weight: torch.Tensor | Fp8Matrix,
        bias: torch.Tensor | None,
    ) -> None:
        """Projections that the decoder fuses into one, and the checkpoint may too."""
        for kind, tensor in (("weight", weight), ("bias", None if bias is None else bias.data)):
            if tensor is None:
                continue
            if not self.config.fused_projections:
                self._separate_rows(base, parts, tensor, kind)
                continue
            offset, copies = 0, []
            for rows in parts.values():
                index = (slice(offset + rows.start, offset + rows.start + rows.length),)
                copies.append(_Part(index, tensor[rows.at : rows.at + rows.length]))
                offset += rows.total
            self.targets[f"{base}{fused_name}.{kind}"] = _Target(
                (offset, *tensor.shape[1:]), tuple(copies)
            )

    def _separate_rows(
        self, base: str, parts: dict[str, _Rows], weight: torch.Tensor | Fp8Matrix, kind: str
    ) -> None:
        for name, rows in parts.items():
            part = _Part(
                (slice(rows.start, rows.start + rows.length),),
                weight[rows.at : rows.at + rows.length],
            )
            self.targets[f"{base}{name}.{kind}"] = _Target((rows.total, *weight.shape[1:]), (part,))

    def _columns(
        self,
        name: str,
        start: int,
        total: int,
        weight: torch.Tensor | Fp8Matrix,
        bias: torch.Tensor | None,
        has_bias: bool,
    ) -> None:
        """A projection whose inputs are split over the ranks; only the first rank has its bias."""
        outputs, inputs = weight.shape
        part = _Part((slice(None), slice(start, start + inputs)), weight)
        self.targets[f"{name}.weight"] = _Target((outputs, total), (part,))
        if has_bias:
            copies = () if bias is None else (_Part((), bias.data),)
            self.targets[f"{name}.bias"] = _Target((outputs,), copies)


def _is_tolerated(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold a tensor that the decoder does not use."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return name.endswith(".rotary_emb.inv_freq")


def _abridge(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
