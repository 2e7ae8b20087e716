"""A model in transformers' own code, with the forward contract of the decoder.

Shapes as in `zipage.models.decoder`: T' rows of one step, E hidden size, V vocabulary size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs, padded_rows
from zipage.errors import ModelError
from zipage.models.transformers_attention import PAGED, StepContext, bind, probing
from zipage.models.transformers_config import (
    BUILD_LOCK,
    CAUSAL_CLASSES,
    TransformersConfig,
)

# Largest relative error of a row that is rounding and not another token's influence.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_PROBE_ROWS = 8


class _GivenHidden(nn.Module):
    """Replaces the layers when only the output head is to be computed."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self.output_type = output_type
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        if self.hidden is None:
            raise ModelError("its layers are called more than once for one output")
        hidden, self.hidden = self.hidden, None
        return self.output_type(last_hidden_state=hidden)


class TransformersModel(nn.Module):
    """Paged attention around transformers' layers; device and dtype are those of the weights.

    Args:
        config: what `zipage.models.transformers_config.load_transformers_config` returned.
        model: transformers' causal language model, with its weights.

    Attributes:
        num_heads, num_kv_heads: Q and H.
        scale: factor of the attention scores.
        embed_weight: ``[>= V, E]``.
        num_parameters, weight_bytes: tied weights count once.

    Raises:
        ModelError: a forward pass shows that a token's result depends on other tokens other than
            through attention, or that the model cannot be split into layers and head.
    """

    def __init__(self, config: TransformersConfig, model: Any) -> None:
        super().__init__()
        model.eval().requires_grad_(False)
        self.config = config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.scale = config.scale
        self.embed_weight: torch.Tensor = model.get_input_embeddings().weight
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        # Queries and keys arrive rotated: tables of width 0 rotate nothing.
        table = torch.empty(config.max_position_embeddings, 0, device=self.device)
        self._context = StepContext(QKVTransform(None, None, 0.0, table, table))
        with torch.inference_mode():
            self._take_apart(model)

    def forward(self, step: StepInputs, backend: AttentionBackend) -> torch.Tensor:
        """Run the layers over the new tokens of one step.

        Args:
            step: the step.
            backend: attention over this model's KV cache.

        Returns:
            ``[T', E]`` hidden states, the input of the output head.
        """
        self._context.step, self._context.backend = step, backend
        try:
            return self._run_layers(step.input_ids, step.positions)
        finally:
            self._context.step = self._context.backend = None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output head, with the scaling and capping of the model's own code.

        Args:
            hidden: ``[R, E]`` rows of what `forward` returned; any R.

        Returns:
            ``[R, V]`` fp32.
        """
        rows = hidden.shape[0]
        padding = padded_rows(max(rows, 1)) - rows
        if padding:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head(input_ids=ids, use_cache=False).logits
        return logits[0, :rows].float()

    def _run_layers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._layers(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _take_apart(self, model: Any) -> None:
        """Split the model into its layers and its head, and check that they reproduce it."""
        layers = model.get_decoder() if hasattr(model, "get_decoder") else model
        if layers is model:
            layers = model.base_model
        places = [name for name, module in model.named_modules() if module is layers and name]
        if len(places) != 1:
            raise ModelError(f"{self.config.architecture} has no separate module of layers")
        limit, vocab = self.config.max_position_embeddings, self.config.vocab_size
        count = _PROBE_ROWS
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (count,), generator=generator).to(self.device)
        positions = (torch.tensor([0, 5, 2, 7, 1, 3, 6, 4]) % limit).to(self.device)

        with probing(model, limit) as probe:
            whole = model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False
            ).logits[0]
        bind(probe, self._context)

        sample = None

        def keep_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal sample
            sample = output

        # Registered as modules, so that tied weights of head and layers stay the same tensor.
        self._layers, self._head = layers, model
        hook = layers.register_forward_hook(keep_output)
        with probing(model, limit):
            hidden = self._run_layers(ids, positions)
        hook.remove()
        self._given = _GivenHidden(type(sample))
        parent, _, attribute = places[0].rpartition(".")
        setattr(model.get_submodule(parent), attribute, self._given)
        self._compare(
            self.compute_logits(hidden),
            whole,
            "its layers and its output head, called one after the other, give other logits",
        )

        # Other tokens in other rows, one at the far end of the text: a dynamic RoPE notices.
        kept = torch.tensor([6, 0, 3, 1], device=self.device)
        other_ids, other_positions = ids.flip(0), (positions + 1) % limit
        other_positions[0] = limit - 1
        other_ids[-4:], other_positions[-4:] = ids[kept], positions[kept]
        with probing(self._layers, limit):
            again = self._run_layers(other_ids, other_positions)
        self._compare(
            again[-4:],
            hidden[kept],
            "a token depends on other tokens, or on the length of their texts (as with longrope), "
            "other than through attention",
        )

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, reason: str) -> None:
        difference = (found.float() - expected.float()).norm(dim=-1)
        error = (difference / expected.float().norm(dim=-1).clamp(min=1e-6)).max().item()
        if not error <= _ROUNDING[self.dtype]:
            raise ModelError(
                f"{self.config.architecture} cannot run through transformers' code: {reason} "
                f"(relative difference {error:.2g})"
            )


def load_transformers_model(
    config: TransformersConfig,
    path: Path | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
) -> TransformersModel:
    """Build a model in transformers' code and fill it.

    Args:
        config: the model.
        path: its directory with safetensors files. Not needed for dummy weights.
        dtype: dtype to run in; None for the checkpoint's.
        device: where to run.
        load_format: ``auto``, or ``dummy`` for random weights as initialised for training.
        seed: seed of dummy weights.

    Raises:
        ModelError: files are missing or broken, tensors are missing, surplus or misshapen, or the
            model turns out to mix tokens other than through attention.
    """
    dtype = dtype or config.dtype
    if load_format == "dummy":
        auto_model: Any = transformers.AutoModelForCausalLM
        with BUILD_LOCK, torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model = auto_model.from_config(
                config.source,
                torch_dtype=dtype,
                attn_implementation=PAGED,
                trust_remote_code=False,
            )
    else:
        if path is None:
            raise ValueError("only dummy weights need no path")
        model = _from_files(config, path, dtype)
    # Only the device changes: RoPE frequencies stay fp32 whatever the dtype.
    return TransformersModel(config, model.to(device))


def _from_files(config: TransformersConfig, path: Path, dtype: torch.dtype) -> Any:
    model_class = CAUSAL_CLASSES[type(config.source)]
    try:
        with BUILD_LOCK:
            model, report = model_class.from_pretrained(
                path,
                torch_dtype=dtype,
                attn_implementation=PAGED,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with the others
            )
    except Exception as error:  # transformers and safetensors raise errors of many kinds
        raise ModelError(
            f"{path}: transformers cannot load the weights: {type(error).__name__}: {error}"
        ) from error
    faults = {
        "missing": report["missing_keys"],
        "surplus": report["unexpected_keys"],
        "wrong shape": [found[0] for found in report["mismatched_keys"]],
        "not loaded": report.get("error_msgs") or (),
    }
    found = [f"{fault}: {', '.join(sorted(names)[:8])}" for fault, names in faults.items() if names]
    if found:
        raise ModelError(f"{path}: the weights do not fit config.json; {'; '.join(found)}")
    return model
