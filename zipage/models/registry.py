"""Which Hugging Face architectures the decoder runs, as options of that one decoder."""

from __future__ import annotations

from dataclasses import dataclass

from zipage.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """How one family uses the decoder.

    An option of type ``bool | str`` is fixed by the family, or read from the named key of
    config.json (False when the key is absent).

    Attributes:
        qkv_bias: query, key and value projections have a bias.
        o_bias: the attention output projection has a bias.
        mlp_bias: gate, up and down projections have a bias.
        qk_norm: RMSNorm over each query and key head, before RoPE.
        head_dim: head dimension when config.json names none; None means hidden size / heads.
        window_switch: config.json key that must be true for `sliding_window` to be in force;
            None means that a `sliding_window` always is.
        default_window: `sliding_window` when config.json names none.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    window_switch: str | None = None
    default_window: int | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Architecture(default_window=4096),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, window_switch="use_sliding_window", default_window=4096
    ),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        window_switch="use_sliding_window",
        default_window=4096,
    ),
}


def find_architecture(names: list[str]) -> tuple[str, Architecture]:
    """Return the first of `names` that is supported, with its options.

    Raises:
        ModelError: none is; the message lists those that are.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    found = ", ".join(names) or "none"
    raise ModelError(f"unsupported architecture: {found}; supported are {', '.join(ARCHITECTURES)}")
