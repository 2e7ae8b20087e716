"""Paged attention inside transformers' own modelling code, and the check that it is valid there.

Transformers' models call a function of their attention interface with queries, keys and values
that are already normalised and rotated. `register` adds two functions: one passes the tensors to an
attention backend, the other records how a model calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zipage.attention.backend import AttentionBackend, QKVTransform, StepInputs
from zipage.errors import ModelError

#: Names in transformers' attention interface.
PAGED = "zipage"
LOCAL = "zipage-local"
PROBE = "zipage-probe"

#: Arguments of the attention interface that change nothing about the scores.
_NEUTRAL = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"}
)

#: Meaning of other arguments, for the message that refuses them.
_MEANING = {
    "softcap": "capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "head_mask": "a head mask",
    "is_causal": "attention to later tokens",
}

# Attributes set on modules and, in a probe, on their configurations.
_BINDING, _PROBE_RECORD, _LENGTH = "zipage_binding", "zipage_probe", "zipage_max_len"


@dataclass
class StepContext:
    """The running step, as far as a model's attention layers need it; empty between steps."""

    transform: QKVTransform
    backend: AttentionBackend | None = None
    step: StepInputs | None = None


@dataclass(frozen=True)
class _Binding:
    """The model and layer that an attention module belongs to."""

    context: StepContext
    layer: int
    scale: float
    max_len: int


@dataclass(frozen=True)
class AttentionShape:
    """How the layers of a model attend: all in the same way, causally, to the whole text.

    Attributes:
        num_layers: number of layers.
        num_heads, num_kv_heads, head_dim: Q, H and D of each.
        scale: factor of the attention scores.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass
class Probe:
    """Records the calls of the attention interface in a forward pass.

    Attributes:
        max_len: longest text the model is to run on, in tokens.
        shapes: (Q, H, D, scale) of each call.
        modules: the module that made each call.
    """

    max_len: int
    shapes: list[tuple[int, int, int, float]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def shape(self) -> AttentionShape:
        """The shape common to all calls.

        Raises:
            ModelError: there were no calls, a module made several, or layers differ.
        """
        if not self.modules:
            raise ModelError("its code does not call transformers' attention interface")
        if len({id(module) for module in self.modules}) < len(self.modules):
            raise ModelError("a module attends more than once in a forward pass")
        kinds = sorted(set(self.shapes))
        if len(kinds) > 1:
            raise ModelError(
                f"its layers differ in (query heads, KV heads, head_dim, scale): "
                f"{kinds[0]} and {kinds[-1]}"
            )
        return AttentionShape(len(self.modules), *kinds[0])


def register() -> None:
    """Add the functions to transformers' attention interface; repeated calls are harmless.

    Raises:
        ModelError: the installed transformers has no interface for masks, which is needed to tell
            which tokens a model attends to.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError:
        raise ModelError(
            f"that needs transformers >= 4.53, with its interfaces for attention and masks; "
            f"found {transformers.__version__}"
        ) from None
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(LOCAL, _record)
    AttentionInterface.register(PROBE, _record)
    # If no mask function is registered, transformers builds no mask.
    AttentionMaskInterface.register(PROBE, _inspect_mask)


@contextmanager
def probing(model: nn.Module, max_len: int, masks: bool = False) -> Iterator[Probe]:
    """Record the attention calls of a model's forward passes.

    Attention is replaced by a local function: a token's result is its own value plus, at the same
    magnitude, its query and key, which depend on its position.

    Args:
        model: a transformers model or a part of one.
        max_len: longest text the model is to run on, in tokens.
        masks: let transformers build attention masks and refuse those that are not plainly
            causal; positions must then be 0, 1, 2...
    """
    probe = Probe(max_len)
    modules = list(model.modules())
    found: list[Any] = [getattr(module, "config", None) for module in modules]
    configs = [config for config in found if isinstance(config, transformers.PretrainedConfig)]
    for module in modules:
        module.__dict__[_PROBE_RECORD] = probe
    for config in configs:
        config._attn_implementation = PROBE if masks else LOCAL
        config.__dict__[_LENGTH] = max_len
    try:
        yield probe
    finally:
        for module in modules:
            del module.__dict__[_PROBE_RECORD]
        for config in configs:
            config._attn_implementation = PAGED
            config.__dict__.pop(_LENGTH, None)


def bind(probe: Probe, context: StepContext) -> None:
    """Give each attention module its model and its layer index, the order of its call."""
    for layer, (module, shape) in enumerate(zip(probe.modules, probe.shapes, strict=True)):
        module.__dict__[_BINDING] = _Binding(context, layer, shape[-1], probe.max_len)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention interface: ``query [1, Q, T', D]``, ``key, value [1, H, T', D]``.

    Returns:
        ``[1, T', Q, D]``, and None for the attention weights.
    """
    binding: _Binding = getattr(module, _BINDING)
    _, heads, rows, dim = query.shape
    _check_options(module, attention_mask, options, binding.max_len)
    if (dim**-0.5 if scaling is None else scaling) != binding.scale:
        raise ModelError(f"layer {binding.layer} changed the scale of its attention to {scaling}")
    context = binding.context
    assert context.backend is not None and context.step is not None
    qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).reshape(rows, -1)
    out = context.backend.attend(
        binding.layer, qkv.to(context.backend.cache.spec.dtype), context.transform, context.step
    )
    return out.view(1, rows, heads, dim).to(value.dtype), None


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    probe: Probe = getattr(module, _PROBE_RECORD)
    _check_options(module, attention_mask, options, probe.max_len)
    _, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    if key.shape != value.shape or key.shape[0] != 1 or key.shape[2:] != (rows, dim):
        raise ModelError(
            f"its queries, keys and values have the shapes {list(query.shape)}, "
            f"{list(key.shape)} and {list(value.shape)}: keys and values of equal width, one of "
            f"each per token, are needed"
        )
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    probe.modules.append(module)
    probe.shapes.append((heads, kv_heads, dim, dim**-0.5 if scaling is None else scaling))
    own_key, own_value = (
        x.float().repeat_interleave(heads // kv_heads, dim=1) for x in (key, value)
    )
    mixed = query.float() + own_key
    size = own_value.norm(dim=-1, keepdim=True)
    local = own_value + mixed * (size / mixed.norm(dim=-1, keepdim=True).clamp(min=1e-6))
    return local.to(value.dtype).transpose(1, 2).contiguous(), None


def _check_options(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
    max_len: int,
) -> None:
    """Raise ModelError unless a call means plain causal attention."""
    if getattr(module, "is_causal", True) is False:
        raise ModelError("a layer attends to later tokens")
    for name, value in options.items():
        if value is None or name in _NEUTRAL or name == "sliding_window":
            continue
        if name == "is_causal":
            plain = value is True
        else:
            plain = isinstance(value, (bool, int, float)) and not value
        if not plain:
            shown = "" if isinstance(value, torch.Tensor) else f"={value}"
            raise ModelError(
                f"it asks for {_MEANING.get(name, 'attention with an unknown option')} "
                f"({name}{shown})"
            )
    window = options.get("sliding_window")
    if window is not None and window < max_len:
        raise ModelError(
            f"a layer attends to a sliding window of {window} tokens, less than the {max_len} of "
            f"a text: set max_model_len={window} or less"
        )
    if attention_mask is not None:
        raise ModelError(
            f"its attention is not causal over a whole text of {max_len} tokens: there is a mask "
            f"for a window, a chunk, later tokens or a bias"
        )


def _inspect_mask(*_: Any, mask_function: Any, config: Any, **__: Any) -> torch.Tensor | None:
    """Mask interface: None for a mask that is causal over the whole text, else a dummy tensor."""
    length = getattr(config, _LENGTH)
    with unset_fake_temporarily():
        zero, keys = torch.tensor(0), torch.arange(length)
        try:
            plain = all(
                torch.equal(mask_function(zero, zero, zero + i, keys).expand(length), keys <= i)
                for i in {0, length // 2, length - 1}
            )
        except Exception:  # it reads tensors of this pass, which a plain mask does not
            plain = False
    return None if plain else torch.zeros(1, 1, 1, 1)
