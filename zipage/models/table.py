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

This page is generated from the registry by `python -m zipage.models.table > docs/models.md`; a
test compares the two.

## What loads

`model` is a Hugging Face directory or hub id, or a GGUF file. The decoder runs these
architectures in fp32, bf16 and fp16:

| architecture | models | what is particular |
| --- | --- | --- |
"""

_FILES = """
**Weights** are read from `model.safetensors`, or from the files that
`model.safetensors.index.json` names. Other files in the directory (`consolidated.safetensors`,
adapters, `pytorch_model.bin`) are ignored. A checkpoint with missing, surplus or misshapen
tensors is refused, and the error names them; a tied `lm_head.weight` and `rotary_emb.inv_freq`
buffers may be present. Pickles (`pytorch_model.bin`) are not loaded. Quantised safetensors (GPTQ,
AWQ, FP8, bitsandbytes) are refused.

**`quantization="fp8"`** quantises the weights of the layers to e4m3 at load time, with a scale
for every output, and activations token by token. The output head, embeddings and norms keep their
dtype. The option needs a GPU of compute capability 8.9 or higher with bfloat16; on the CPU it
runs as a slow reference. Mixtures of experts, models in transformers' code and weights whose
sides are not multiples of 16 are refused.

**Sliding windows** are not implemented. A model that has one loads if `max_model_len` is at most
the window, because the window then changes nothing (`max_model_len=2047` for Phi-3-mini-4k).

**RoPE** {rope_types}, in the old (`rope_scaling`) and the new (`rope_parameters`) spelling.
Results equal transformers' within and beyond the original length, with the exceptions below.
`yarn` and `dynamic` stretch the longest text to `factor` times the original length. In
transformers, two types change their frequencies with the length of the text; that is not fully
possible here, because cached keys cannot be rotated again:

- `dynamic`: position p is rotated by the frequencies of a text of p + 1 tokens. Results equal
  transformers' for texts within the original length and for texts that grow beyond it during
  generation. A *prompt* longer than the original length differs: transformers rotates all of it
  by the frequencies of its whole length, so its answer depends on how the text is split into
  prompt and answer. Here it does not.
- `longrope`: the short factors if `max_model_len` is at most the original length, else the long
  ones for all texts (as in vLLM). transformers chooses by the length of each text. To get its
  results on short texts, set `max_model_len` to the original length.

**End and sampling.** All end tokens of `generation_config.json` end an answer. `LLM` without
`SamplingParams`, and `zipage generate`, sample as that file says (greedily unless it has
`do_sample: true`). `LLM.get_default_sampling_params()` returns these options. A file
with sampling options that requests could not have is refused when the model is loaded.

## GGUF

Run `pip install -e '.[gguf]'` in the repository, then pass `model="path/to/file.gguf"` or a
directory whose only weights are one GGUF file. Architectures: {gguf}. All quantisations that the
gguf library can read are dequantised to the engine's dtype at load time, so the file is small but
the running model is not. Config and tokenizer come from the file (from its copy of
`tokenizer.json` in `tokenizer.huggingface.json`, if it has one). If the tokenizer cannot be
rebuilt, name one with `tokenizer=`. Merge split files first.

## Random weights

`load_format="dummy"` needs only a `config.json`, or with `model_shape` nothing at all:
{shapes}.
Prompts are then token ids, with `SamplingParams(detokenize=False)`:

```
zipage bench offline --load-format dummy --model-shape qwen3-0.6b
```

## What falls back

Other causal language models run through transformers' own code with paged attention, prefix cache
and compression (`model_impl="auto"`). `"transformers"` uses that code for the architectures above
too; `"zipage"` never does. That code is slower: no fused kernels, no CUDA graphs. The tests
compare these models with transformers:
{tested}.

A model runs if

{conditions}

All of this is checked for each model when it is loaded, see
[architecture](architecture.md#models-outside-the-decoder). A slow test tries every causal
language model of the installed transformers: each must give equal logits or be refused.

## What is refused

The architectures below would run incorrectly (those with sliding windows or chunks only in texts
longer than these). Loading one raises an error that gives the reason. Under any name, these are
also refused: layers of sliding-window attention in texts longer than the window, RoPE that
differs between layers, unknown RoPE types, activations other than SiLU, and
`partial_rotary_factor` in families that have none.

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
