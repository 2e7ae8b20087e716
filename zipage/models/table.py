"""docs/models.md, written from the registry: ``python -m zipage.models.table > docs/models.md``."""

from __future__ import annotations

from collections.abc import Iterator

from zipage.models.gguf import FAMILIES
from zipage.models.registry import ARCHITECTURES, REFUSED, Architecture
from zipage.models.rope import ROPE_TYPES
from zipage.models.shapes import SHAPES
from zipage.models.transformers_config import CONDITIONS, TESTED

_INTRODUCTION = """\
# Models

This page is written from the registry by `python -m zipage.models.table > docs/models.md`; a test
compares the two.

## What loads

`model` is a Hugging Face directory or hub id, or a GGUF file. These architectures run on the
decoder, in fp32, bf16 and fp16:

| architecture | models | what is particular |
| --- | --- | --- |
"""

_FILES = """
**Weights** are `model.safetensors`, or the files that `model.safetensors.index.json` names;
whatever else lies in the directory (`consolidated.safetensors`, adapters, `pytorch_model.bin`)
is ignored. Tensors that are missing, surplus or misshapen are refused by name; a tied
`lm_head.weight` and `rotary_emb.inv_freq` buffers may be there. Pickles (`pytorch_model.bin`)
are not loaded. Quantised safetensors (GPTQ, AWQ, FP8, bitsandbytes) are refused.

**`quantization="fp8"`** quantises the weights of the layers to e4m3 when they are loaded, with a
scale for every output, and activations token by token; the output head, embeddings and norms stay
as they are. It takes GPUs of compute capability 8.9 or higher in bfloat16, and runs on the CPU as a
slow reference. Mixtures of experts, models in transformers' code and weights whose sides are no
multiples of 16 are refused.

**Sliding windows** are not implemented. A model that has one loads if `max_model_len` is at
most the window, where a window changes nothing (`max_model_len=2047` for Phi-3-mini-4k).

**RoPE** {rope_types}, in the old (`rope_scaling`) and the new (`rope_parameters`) spelling,
equal to transformers within and beyond the original length. `yarn` and `dynamic` stretch the
longest text to `factor` times the original length. Two types change their frequencies with the
length of the text, and cached keys cannot be rotated again, which sets a limit to that:

- `dynamic`: position p is rotated by the frequencies of a text of p + 1 tokens. That equals
  transformers for texts within the original length and for texts that grow beyond it while they
  are generated. A *prompt* longer than the original length differs: transformers rotates all of
  it by the frequencies of its whole length, so that its answer depends on how the text was cut
  into prompt and answer; here it does not.
- `longrope`: the short factors if `max_model_len` is at most the original length, else the long
  ones for all texts (as vLLM does). transformers chooses by the length of each text, so set
  `max_model_len` to the original length for its results on short texts.

**End and sampling.** All end tokens of `generation_config.json` end an answer. `LLM`
without `SamplingParams`, and `zipage generate`, sample as that file says (greedy unless it has
`do_sample: true`); `LLM.get_default_sampling_params()` returns it.

## GGUF

`pip install '.[gguf]'` in the repository, then `model="path/to/file.gguf"`, or a directory whose
only weights are one GGUF file. Architectures: {gguf}. All quantisations that the gguf library can
read are dequantised to the engine's dtype when loaded: the file is small, the running model is
not. Config and tokenizer come from the file (a copy of `tokenizer.json` in
`tokenizer.huggingface.json` where there is one); if the tokenizer cannot be rebuilt, name one
with `tokenizer=`. Split files must be merged first.

## Random weights

`load_format="dummy"` needs a `config.json` alone, or with `model_shape` nothing at all:
{shapes}. Prompts are token ids then, with `SamplingParams(detokenize=False)`:

```
zipage bench offline --load-format dummy --model-shape qwen3-0.6b
```

## What falls back

Other causal language models run through transformers' own code with paged attention, prefix cache
and compression (`model_impl="auto"`; `"transformers"` takes that code for the architectures above
too, `"zipage"` never does). It is slower: no fused kernels, no CUDA graphs. The tests compare these
with transformers:
{tested}. A model runs if

{conditions}

All of that is proven of each model when it is loaded, see
[architecture](architecture.md#models-outside-the-decoder). A slow test tries every causal language
model of the installed transformers: equal logits, or a refusal.

## What is refused

These architectures would run wrongly, those with sliding windows or chunks in texts longer than
these; loading one says why. Whatever the name, refused are also
layers of sliding-window attention in texts longer than the window, RoPE that differs between
layers, unknown RoPE types, activations other than SiLU, and `partial_rotary_factor` in families
that have none.

| why | architectures |
| --- | --- |
"""


def render() -> str:
    """The text of docs/models.md."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield _INTRODUCTION
    for name, architecture in ARCHITECTURES.items():
        yield f"| `{name}` | {architecture.models} | {', '.join(_particulars(architecture))} |\n"
    yield _FILES.format(
        tested=", ".join(f"`{name}`" for name in TESTED),
        conditions="\n".join(f"- {condition};" for condition in CONDITIONS)[:-1] + ".",
        rope_types=", ".join(f"`{name}`" for name in ROPE_TYPES),
        gguf=", ".join(f"`{name}`" for name in FAMILIES),
        shapes=", ".join(f"`{name}`" for name in SHAPES),
    )
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        yield f"| {reason} | {', '.join(names)} |\n"


def _particulars(architecture: Architecture) -> Iterator[str]:
    biases = {
        "q, k, v": architecture.qkv_bias,
        "output": architecture.o_bias,
        "MLP": architecture.mlp_bias,
    }
    fixed = [name for name, bias in biases.items() if bias is True]
    optional = [name for name, bias in biases.items() if isinstance(bias, str)]
    if fixed:
        yield f"biases ({'; '.join(fixed)})"
    if optional:
        yield f"biases if config.json says so ({'; '.join(optional)})"
    if architecture.qk_norm:
        yield "norms of queries and keys"
    if architecture.moe is not None:
        yield "mixture of experts"
    if architecture.partial_rotary:
        yield "partial rotation"
    if architecture.fused_projections:
        yield "fused projections"
    if architecture.window:
        yield "sliding window if config.json says so: see below"


if __name__ == "__main__":
    print(render(), end="")
