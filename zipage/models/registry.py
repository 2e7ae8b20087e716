"""Which Hugging Face architectures the decoder runs, and why others are refused.

A supported family is a row of options of the one decoder. A family that would run incorrectly has
a row in `REFUSED` with the reason. Any other architecture is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipage.errors import ModelError


@dataclass(frozen=True)
class MoENames:
    """Names of tensors and config.json keys in a family with a mixture of experts.

    Attributes:
        block: module of the MLP in every layer, as named in per-expert checkpoints.
        gate, up, down: an expert's projections in per-expert checkpoints.
        intermediate_size: key of the experts' intermediate size.
        renormalise: key that says whether the chosen experts' weights are divided by their sum;
            True if they always are.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    intermediate_size: str = "moe_intermediate_size"
    renormalise: str | bool = "norm_topk_prob"


@dataclass(frozen=True)
class Architecture:
    """How one family uses the decoder.

    An option of type ``bool | str`` is fixed by the family, or read from the named key of
    config.json (False when the key is absent).

    Attributes:
        models: well-known models of the family, for the docs.
        qkv_bias: query, key and value projections have a bias.
        o_bias: the attention output projection has a bias.
        mlp_bias: gate, up and down projections have a bias.
        qk_norm: RMSNorm over each query and key head, before RoPE.
        head_dim: head dimension when config.json names none; None means hidden size / heads.
        window: the family uses `sliding_window`; the others ignore the key.
        window_switch: config.json key that must be true for `sliding_window` to apply; None means
            that a `sliding_window` always applies.
        default_window: `sliding_window` when config.json names none.
        partial_rotary: the family supports `partial_rotary_factor`.
        fused_projections: checkpoints hold q, k and v, and gate and up, as one tensor each.
        moe: the family has a mixture of experts in place of the MLP.
    """

    models: str = ""
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: bool = False
    window_switch: str | None = None
    default_window: int | None = None
    partial_rotary: bool = False
    fused_projections: bool = False
    moe: MoENames | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        models="Llama 2, 3, 3.1, 3.2, DeepSeek-R1-Distill-Llama, SmolLM2, Yi",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Architecture(
        models="Mistral 7B, Nemo, Small", window=True, default_window=4096
    ),
    "Qwen2ForCausalLM": Architecture(
        models="Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
        qkv_bias=True,
        window=True,
        window_switch="use_sliding_window",
        default_window=4096,
    ),
    "Qwen3ForCausalLM": Architecture(
        models="Qwen3 dense models, DeepSeek-R1-0528-Qwen3-8B",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        window=True,
        window_switch="use_sliding_window",
        default_window=4096,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window=True,
        window_switch="use_sliding_window",
        default_window=4096,
        moe=MoENames(),
    ),
    "MixtralForCausalLM": Architecture(
        models="Mixtral 8x7B, 8x22B",
        window=True,
        moe=MoENames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", True),
    ),
    "Phi3ForCausalLM": Architecture(
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini, Phi-4-reasoning",
        window=True,
        partial_rotary=True,
        fused_projections=True,
    ),
    "SeedOssForCausalLM": Architecture(
        models="Seed-OSS 36B",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
}

_MLA = "multi-head latent attention: its cache holds latents, not keys and values of heads"
_HYBRID = (
    "recurrent or linear-attention layers, whose state is not a cache of tokens and cannot be paged"
)
_WINDOW = "sliding-window layers: they attend to less than the whole text"
_SINKS = "sliding-window layers and attention sinks learnt per head"
_SPARSE = "sparse attention that chooses tokens by an index of its own"
_CHUNKED = "layers of chunked local attention"
_ENCODER_DECODER = "an encoder and cross-attention; only decoder-only models run"
_ENCODER = "an encoder: it does not generate text"
_MULTIMODAL = "images or audio beside text; only text models run"
_ALIBI = "ALiBi position biases, which the paged attention does not add"
_SOFTCAP = "capped attention scores and sliding-window layers"
_CODEBOOKS = "several tokens per position; only text models run"

#: Architectures that would run incorrectly, and why.
REFUSED: dict[str, str] = {
    name: reason
    for reason, names in {
        _MLA: "DeepseekV2ForCausalLM DeepseekV3ForCausalLM KimiK2ForCausalLM MiniCPM3ForCausalLM "
        "LongcatFlashForCausalLM Glm4MoeLiteForCausalLM YoutuForCausalLM",
        _HYBRID: "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM JambaForCausalLM "
        "BambaForCausalLM Zamba2ForCausalLM ZambaForCausalLM FalconH1ForCausalLM "
        "NemotronHForCausalLM GraniteMoeHybridForCausalLM Qwen3NextForCausalLM "
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM "
        "Lfm2ForCausalLM Lfm2MoeForCausalLM MiniMaxForCausalLM MiniMaxText01ForCausalLM "
        "MiniMaxM1ForCausalLM KimiLinearForCausalLM xLSTMForCausalLM Phi4FlashForCausalLM "
        "Plamo2ForCausalLM",
        _WINDOW: "Gemma3ForCausalLM Gemma3nForCausalLM Cohere2ForCausalLM Olmo3ForCausalLM "
        "MiMoV2FlashForCausalLM GPTNeoForCausalLM AfmoeForCausalLM VaultGemmaForCausalLM",
        _SOFTCAP: "Gemma2ForCausalLM",
        _SINKS: "GptOssForCausalLM",
        _SPARSE: "DeepseekV32ForCausalLM GlmMoeDsaForCausalLM",
        _CHUNKED: "Llama4ForCausalLM Llama4ForConditionalGeneration",
        _ALIBI: "BloomForCausalLM MPTForCausalLM MptForCausalLM BaiChuanForCausalLM "
        "BaichuanForCausalLM",
        _ENCODER_DECODER: "T5ForConditionalGeneration MT5ForConditionalGeneration "
        "UMT5ForConditionalGeneration LongT5ForConditionalGeneration "
        "SwitchTransformersForConditionalGeneration BartForConditionalGeneration "
        "MBartForConditionalGeneration PegasusForConditionalGeneration "
        "M2M100ForConditionalGeneration MarianMTModel ProphetNetForConditionalGeneration "
        "LEDForConditionalGeneration T5GemmaForConditionalGeneration "
        "WhisperForConditionalGeneration SeamlessM4TModel",
        _ENCODER: "BertModel BertForMaskedLM RobertaModel RobertaForMaskedLM DebertaV2Model "
        "ModernBertModel ModernBertForMaskedLM DistilBertModel AlbertModel XLMRobertaModel "
        "ElectraModel MPNetModel",
        _MULTIMODAL: "LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
        "LlavaOnevisionForConditionalGeneration MllamaForConditionalGeneration "
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration "
        "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration "
        "Qwen2AudioForConditionalGeneration Qwen2_5OmniModel "
        "Qwen3OmniMoeForConditionalGeneration Gemma3ForConditionalGeneration "
        "Gemma3nForConditionalGeneration PaliGemmaForConditionalGeneration "
        "Mistral3ForConditionalGeneration PixtralForConditionalGeneration "
        "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration Phi3VForCausalLM "
        "Phi4MMForCausalLM Phi4MultimodalForCausalLM InternVLForConditionalGeneration "
        "InternVLChatModel MiniCPMV MiniCPMO Glm4vForConditionalGeneration "
        "Glm4vMoeForConditionalGeneration KimiVLForConditionalGeneration "
        "DeepseekVLV2ForCausalLM Blip2ForConditionalGeneration FuyuForCausalLM "
        "AriaForConditionalGeneration Ovis2ForConditionalGeneration CLIPModel",
        _CODEBOOKS: "MusicgenForConditionalGeneration BarkModel CsmForConditionalGeneration",
    }.items()
    for name in names.split()
}


class UnknownArchitectureError(ModelError):
    """config.json names an architecture that is neither supported nor in `REFUSED`."""


def find_architecture(names: Sequence[str]) -> tuple[str, Architecture]:
    """Return the first of `names` that the decoder runs, with its options.

    Raises:
        UnknownArchitectureError: none is known; the message lists the supported ones.
        ModelError: one of them is refused; the message says why.
    """
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    for name in names:
        if name in REFUSED:
            raise ModelError(f"architecture {name} is not supported: it has {REFUSED[name]}")
    found = ", ".join(names) or "none"
    raise UnknownArchitectureError(
        f"unsupported architecture: {found}; supported are {', '.join(ARCHITECTURES)}"
    )
