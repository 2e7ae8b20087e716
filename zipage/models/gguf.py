"""GGUF files: the model's config, its weights by their Hugging Face names, and its tokenizer.

The format is llama.cpp's. Weights are dequantised when they are read; nothing runs quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zipage.errors import ModelError
from zipage.models.checkpoint import Checkpoint
from zipage.models.config_values import whole_number
from zipage.models.import_lock import IMPORT_LOCK
from zipage.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Family:
    """How llama.cpp names a family's parts.

    Attributes:
        architecture: name in `ARCHITECTURES`.
        experts_architecture: the same for files with experts; None if there are none.
        interleaved: query and key rows are stored for a rotation of neighbouring dimensions.
        up: name of ``ffn_up`` in Hugging Face checkpoints.
    """

    architecture: str
    experts_architecture: str | None = None
    interleaved: bool = False
    up: str = "up_proj"


FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "MixtralForCausalLM", interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM"),
    "phi3": _Family("Phi3ForCausalLM", up="gate_up_proj"),
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
# Divisors of the RoPE frequencies, read with the config.
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GGUFFile:
    """An open GGUF file.

    Args:
        path: the file.

    Raises:
        ModelError: the ``gguf`` library is not installed, the file is not a whole GGUF file, or
            its architecture is not one of `FAMILIES`.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader, dequantize
        except ImportError:
            raise ModelError(
                f"{path} needs the gguf library: pip install 'zipage[gguf]', or pip install gguf"
            ) from None
        self.path = path
        self._dequantize: Callable[..., Any] = dequantize
        try:
            self._reader: Any = GGUFReader(path)
            self.tensors: dict[str, Any] = {t.name: t for t in self._reader.tensors}
        # The reader checks little: a damaged file shows up as whatever numpy raises.
        except (ValueError, IndexError, KeyError, OSError, TypeError, OverflowError) as error:
            raise ModelError(
                f"{path} cannot be read as GGUF (truncated or damaged?): {error}"
            ) from error
        parts = self.get("split.count")
        if parts not in (None, 0, 1):
            raise ModelError(
                f"{path} is one of {parts} parts: merge them first with llama-gguf-split --merge"
            )
        self.kind = str(self.get("general.architecture"))
        if self.kind not in FAMILIES:
            raise ModelError(
                f"{path}: GGUF architecture {self.kind!r} is not supported; supported are "
                f"{', '.join(FAMILIES)}"
            )
        self.family = FAMILIES[self.kind]

    def get(self, key: str) -> Any:
        """A metadata value; None if it is missing."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def option(self, key: str) -> Any:
        """A metadata value of the architecture."""
        return self.get(f"{self.kind}.{key}")

    def read(self, name: str, expert: int | None = None) -> np.ndarray:
        """A tensor, or one expert of it, dequantised to float32."""
        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values: np.ndarray = self._dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: {name} has quantisation {tensor.tensor_type.name}, which the gguf "
                f"library cannot dequantise"
            ) from None
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, slowest dimension first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    # ------------------------------------------------------------------ config

    def config(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The contents of the equivalent config.json and generation_config.json.

        Raises:
            ModelError: metadata or tensors that every file has are missing.
        """
        for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
            if name not in self.tensors:
                raise ModelError(f"{self.path} has no tensor {name}")
        heads = self._count("attention.head_count")
        hidden = self._count("embedding_length")
        rotated = self._count("rope.dimension_count", 0)
        head_dim = self._count("attention.key_length", 0) or (
            rotated if self.family.interleaved and rotated else hidden // heads
        )
        experts = self._count("expert_count", 0)
        architecture = self.family.architecture
        if experts:
            if self.family.experts_architecture is None:
                raise ModelError(
                    f"{self.path}: {self.kind}.expert_count {experts}: models of architecture "
                    f"{self.kind!r} have no experts"
                )
            architecture = self.family.experts_architecture
        raw: dict[str, Any] = {
            "architectures": [architecture],
            "vocab_size": self.shape("token_embd.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self.option("feed_forward_length"),
            "num_hidden_layers": self.option("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.option("attention.head_count_kv"),
            "head_dim": head_dim,
            "max_position_embeddings": self.option("context_length"),
            "rms_norm_eps": self.option("attention.layer_norm_rms_epsilon") or 1e-6,
            "sliding_window": self.option("attention.sliding_window"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "dtype": self._dtype(),
            "rope_parameters": self._rope(head_dim, rotated or head_dim),
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [
                token
                for name in ("eos", "eot", "eom")
                if (token := self.get(f"tokenizer.ggml.{name}_token_id")) is not None
            ],
        }
        if experts:
            names = ARCHITECTURES[architecture].moe
            assert names is not None
            size = self.option("expert_feed_forward_length") or raw["intermediate_size"]
            # llama.cpp divides the chosen experts' weights by their sum in these families.
            raw |= {
                "num_local_experts": experts,
                "num_experts_per_tok": self.option("expert_used_count"),
                names.intermediate_size: size,
                "norm_topk_prob": True,
            }
            raw["intermediate_size"] = raw["intermediate_size"] or size
        return raw, {}

    def _count(self, key: str, default: int | None = None) -> int:
        """A whole number from the architecture's metadata; 0 only if that is the default."""
        name = f"{self.kind}.{key}"
        try:
            return whole_number(
                {name: self.get(name)}, name, default, smallest=1 if default is None else 0
            )
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None

    def _dtype(self) -> str:
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        if kinds == {"F32"}:
            return "float32"
        return "float16" if kinds <= {"F32", "F16"} else "bfloat16"

    def _rope(self, head_dim: int, rotated: int) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_theta": self.option("rope.freq_base") or 10000.0,
            "partial_rotary_factor": rotated / max(head_dim, 1),
        }
        # As in llama.cpp, the old name is read if the factor is missing, and a factor without a
        # type means linear scaling.
        factor = self.option("rope.scaling.factor") or self.option("rope.scale_linear")
        stated = self.option("rope.scaling.type")
        kind = stated or ("none" if factor in (None, 0, 1) else "linear")
        original = self.option("rope.scaling.original_context_length")
        factors = [
            self.read(name).astype(float).tolist() if name in self.tensors else None
            for name in _ROPE_FACTORS
        ]
        given = [name for name in _ROPE_FACTORS if name in self.tensors]
        if given in ([_ROPE_FACTORS[1]], [_ROPE_FACTORS[2]]):
            raise ModelError(f"{self.path} has {given[0]}, but not its counterpart")
        if given and kind not in ("none", "longrope") and (kind, factor) != ("linear", 1):
            name = "rope.scaling.type" if stated else "rope.scale_linear or rope.scaling.factor"
            raise ModelError(
                f"{self.path}: {self.kind}.{name} ({kind} scaling, factor {factor!r}) is not "
                f"supported together with the tensor {given[0]}"
            )
        if factors[0] is not None:
            # Llama 3.1's scaling, precomputed: the same divisors at every length.
            kind, short, long = "longrope", factors[0], factors[0]
            rope |= {"factor": 1.0, "attention_factor": 1.0}
        else:
            short, long = factors[1:]
            if short is not None and long is not None:
                kind = "longrope"
                rope["attention_factor"] = self.option("rope.scaling.attn_factor")
        if kind == "longrope":
            rope |= {"short_factor": short, "long_factor": long}
        elif kind in ("linear", "yarn"):
            rope["factor"] = factor
        elif kind != "none":
            raise ModelError(f"{self.path}: {self.kind}.rope.scaling.type {kind!r} is unknown")
        return {
            **rope,
            "rope_type": "default" if kind == "none" else kind,
            "original_max_position_embeddings": original,
        }

    # ------------------------------------------------------------------ tokenizer

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer: the file's copy of tokenizer.json, else built from its vocabulary.

        Raises:
            Exception: whatever transformers raises about a vocabulary it cannot convert.
        """
        with IMPORT_LOCK:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

        source = self.get("tokenizer.huggingface.json")
        if source is None:
            built: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(self.path.parent), gguf_file=self.path.name
            )
            return built
        from tokenizers import Tokenizer

        tokens: Sequence[str] = self.get("tokenizer.ggml.tokens") or ()
        special = {
            f"{name}_token": tokens[index]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (index := self.get(f"tokenizer.ggml.{key}_token_id")) is not None
            and index < len(tokens)
        }
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer.from_str(source),
            chat_template=self.get("tokenizer.chat_template"),
            **special,
        )
        return tokenizer


class GGUFCheckpoint(Checkpoint):
    """The weights of a GGUF file under the names of a Hugging Face checkpoint.

    Tensors with no such name keep their own, to be reported as surplus.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file
        self._sources: dict[str, tuple[str, int | None]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in file.tensors:
            if name in _ROPE_FACTORS:
                continue
            shape = file.shape(name)
            for known, expert in self._names(name, shape):
                self._sources[known] = name, expert
                self.shapes[known] = shape if expert is None else shape[1:]

    def _names(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        """The Hugging Face names of a tensor, one for each expert if it holds several."""
        if name in _TOP:
            return [(_TOP[name], None)]
        pieces = name.split(".")
        if len(pieces) != 4 or pieces[0] != "blk":
            return [(name, None)]
        base, part, kind = f"model.layers.{pieces[1]}.", pieces[2], pieces[3]
        family = self._file.family
        names = ARCHITECTURES[family.experts_architecture or family.architecture].moe
        if part in _EXPERTS and names is not None:
            own = f"{base}{names.block}.experts.{{}}.{getattr(names, _EXPERTS[part])}.{kind}"
            return [(own.format(expert), expert) for expert in range(shape[0])]
        if part == "ffn_gate_inp" and names is not None:
            return [(f"{base}{names.block}.gate.{kind}", None)]
        if part == "ffn_up":
            return [(f"{base}mlp.{family.up}.{kind}", None)]
        known = _IN_LAYER.get(part)
        return [(name if known is None else f"{base}{known}.{kind}", None)]

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        source, expert = self._sources[name]
        values = self._file.read(source, expert)
        if self._file.family.interleaved and ".self_attn.q_proj." in name:
            values = _deinterleave(values, self._file.option("attention.head_count"))
        elif self._file.family.interleaved and ".self_attn.k_proj." in name:
            heads = self._file.option("attention.head_count")
            values = _deinterleave(values, self._file.option("attention.head_count_kv") or heads)
        # A copy, because values that need no dequantising are views of the read-only file.
        return torch.from_numpy(np.array(values[index], dtype=np.float32))


def _deinterleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``(a0 b0 a1 b1 ...)`` of every head to ``(a0 a1 ... b0 b1 ...)``.

    llama.cpp rotates neighbouring dimensions of Llama's heads, and its converter orders the rows
    of queries and keys for that; the decoder rotates halves.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
