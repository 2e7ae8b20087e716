"""How one request is sampled and stopped: vLLM's names and meanings, plus its KV budget."""

from __future__ import annotations

import contextlib
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from zipage.errors import RequestError, shown
from zipage.structured_outputs import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this select the most likely token, as in vLLM."""
MAX_TEMPERATURE = 1e4
"""Above it the distribution is uniform to fp32 precision."""
MAX_REPETITION_PENALTY = 1e4
MAX_PROMPT_LOGPROBS = 20
"""Most alternatives returned for each prompt token, vLLM's default limit."""
MAX_N = 1024
"""Most completions of one prompt."""
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 1 << 16
"""Most characters of all stop strings of a request together."""
_INT32_MAX = 2**31 - 1

CompressionMode = Literal["on", "off"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request, checked once on construction.

    Instances are immutable; `dataclasses.replace` makes a checked variant.

    Attributes:
        n: completions of the prompt, 1 to 1024. They share the prompt's blocks; with
            ``temperature=0`` they are all the same.
        temperature: 0 to 1e4; below 1e-5 the most likely token is taken (lowest id on ties).
        top_p: in (0, 1]. The smallest set of most likely tokens whose probability reaches it.
        top_k: most likely tokens kept; 0 or -1 keeps all.
        min_p: in [0, 1]. Tokens less likely than min_p times the most likely one are dropped.
            Filters apply in the order min_p, top_k, top_p, each to what the previous one left;
            tokens tied with the last one kept are kept too.
        repetition_penalty: 1e-4 to 1e4, 1 is none. Logits of tokens in the prompt or the output
            are divided by it when positive and multiplied by it when negative (CTRL,
            arXiv:1909.05858).
        presence_penalty: in [-2, 2], subtracted from the logit of every token of the output.
        frequency_penalty: in [-2, 2], subtracted once for every occurrence in the output.
        logit_bias: token id to a value in [-100, 100] added to its logit.
        seed: makes the draws of this request reproducible whatever else runs; completion i of n
            uses ``seed + i``. None or -1 uses the engine's generator.
        stop: strings that end the text, at most 1024 with 65536 characters in total. Stored as a
            tuple.
        stop_token_ids: tokens that end the output as end-of-sequence tokens do. Stored as a tuple.
        include_stop_str_in_output: keep the stop string, or the text of the stop token.
        ignore_eos: continue past the model's end-of-sequence tokens.
        max_tokens: most tokens generated; None (the default; vLLM's is 16) runs up to the
            model's length, since reasoning models write long answers.
        min_tokens: until this many tokens are generated, end-of-sequence and stop tokens are
            masked and stop strings are ignored.
        logprobs: return the log-probabilities of this many most likely tokens, and of the sampled
            one, at every position. They are the model's own, before penalties, bias, temperature
            and filters.
        prompt_logprobs: 0 to 20; return the log-probabilities of this many most likely tokens, and
            of the prompt's own token, at every prompt position but the first. The whole prompt is
            then computed, whatever the prefix cache holds.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: decode tokens to text; without it outputs have token ids and an empty text, and
            no tokenizer is needed.
        kv_budget: most KV cache tokens this request keeps per layer and KV head; None takes the
            engine's default.
        compression: "off" keeps the full KV cache of this request, "on" compresses it even if
            the engine's default is off, None takes the engine's default.
        return_kv_stats: return which tokens each compression kept, see
            `CompletionOutput.kv_stats`.
        structured_outputs: the form the answer must have, see `StructuredOutputsParams`; may be a
            mapping such as ``{"regex": "[0-9]+"}``.
        kv_stats_layers: with `return_kv_stats`, also count for each layer how many of its KV heads
            keep each token: a byte for each layer and token at every compression.

    Raises:
        RequestError: an option has an illegal value; the message names the option, the value
            and what is legal.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    kv_budget: int | None = None
    compression: CompressionMode | None = None
    return_kv_stats: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    kv_stats_layers: bool = False

    def __post_init__(self) -> None:
        """Checks every option and converts it to its plain type."""
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        top_p = _real("top_p", self.top_p, 0.0, 1.0, "a number above 0, at most 1")
        if top_p == 0.0:
            raise _illegal("top_p", self.top_p, "a number above 0, at most 1")
        self._set("top_p", top_p)
        top_k = _integer("top_k", self.top_k, -1, _INT32_MAX, "-1 or 0 (off) or a positive integer")
        self._set("top_k", max(top_k, 0))
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0))
        self._set(
            "repetition_penalty",
            _real(
                "repetition_penalty",
                self.repetition_penalty,
                1.0 / MAX_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _real(name, getattr(self, name), -2.0, 2.0))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -(2**63), 2**63 - 1)
            self._set("seed", None if seed == -1 else seed)
        self._set("stop", _stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise _illegal("stop", self.stop, "empty with detokenize=False: it is found in text")
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
            "return_kv_stats",
            "kv_stats_layers",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _illegal(name, getattr(self, name), "True or False")
        if self.kv_stats_layers and not self.return_kv_stats:
            raise _illegal("kv_stats_layers", True, "False without return_kv_stats")
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, _INT32_MAX))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT32_MAX))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _illegal(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, 0, _INT32_MAX))
        if self.prompt_logprobs is not None:
            self._set(
                "prompt_logprobs",
                _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_PROMPT_LOGPROBS),
            )
        if self.kv_budget is not None:
            self._set("kv_budget", _integer("kv_budget", self.kv_budget, 1, _INT32_MAX))
        mode = self.compression
        if mode is not None and not (isinstance(mode, str) and mode in ("on", "off")):
            raise _illegal("compression", self.compression, '"on", "off" or None')
        form: object = self.structured_outputs
        if isinstance(form, Mapping):
            self._set("structured_outputs", StructuredOutputsParams.from_dict(form))
        elif form is not None and not isinstance(form, StructuredOutputsParams):
            raise _illegal("structured_outputs", form, "StructuredOutputsParams or None")
        if self.compression == "off" and self.kv_budget is not None:
            raise _illegal("kv_budget", self.kv_budget, 'None when compression="off"')

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Makes parameters from a mapping, such as a decoded JSON object.

        Args:
            options: option names to values. Keys of ``logit_bias`` may be decimal strings, as JSON
                keys are always strings.

        Raises:
            RequestError: `options` is not a mapping, a key is not an option (close names are
                suggested) or a value is illegal.
        """
        if not isinstance(options, Mapping):
            raise RequestError(
                f"sampling options must be a mapping from names to values, not {shown(options)}"
            )
        names = [field.name for field in fields(cls)]
        for key in options:
            if key not in names:
                close = difflib.get_close_matches(str(key), names)
                hint = f"did you mean {' or '.join(close)}?" if close else f"known: {names}"
                raise RequestError(f"unknown sampling option {shown(key)}; {hint}")
        values = dict(options)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_bias_key(key): value for key, value in bias.items()}
        return cls(**values)

    def verify(self, vocab_size: int) -> None:
        """Checks the options that depend on the model.

        Args:
            vocab_size: number of token ids the model has logits for.

        Raises:
            RequestError: a token id of ``logit_bias``, ``stop_token_ids`` or
                ``reasoning_end_token_ids`` is outside the vocabulary, or ``logprobs`` or
                ``prompt_logprobs`` exceed its size.
        """
        legal = f"token ids from 0 to {vocab_size - 1}"
        form = self.structured_outputs
        reasoning_end = () if form is None else form.reasoning_end_token_ids or ()
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_id_set),
            ("structured_outputs.reasoning_end_token_ids", reasoning_end),
        ):
            outside = [token_id for token_id in ids if token_id >= vocab_size]
            if outside:
                raise _illegal(name, outside[0], legal)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise _illegal(name, count, f"at most the vocabulary size, {vocab_size}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` with its checked type."""
        return tuple(self.stop or ())

    @cached_property
    def stop_token_id_set(self) -> frozenset[int]:
        """`stop_token_ids` for lookups."""
        return frozenset(self.stop_token_ids or ())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _illegal(name: str, value: object, legal: str) -> RequestError:
    return RequestError(f"{name}={shown(value)} is not legal: must be {legal}")


def _integer(name: str, value: object, low: int, high: int, legal: str | None = None) -> int:
    if legal is None:
        legal = f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _illegal(name, value, legal)
    if not low <= int(value) <= high:
        raise _illegal(name, value, legal)
    return int(value)


def _real(name: str, value: object, low: float, high: float, legal: str | None = None) -> float:
    if legal is None:
        legal = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _illegal(name, value, legal)
    try:
        number = float(value)
    except OverflowError:
        raise _illegal(name, value, legal) from None
    # NaN fails both comparisons, infinities one of them.
    if not low <= number <= high:
        raise _illegal(name, value, legal)
    return number


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    legal = "a list of token ids (integers from 0)"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _illegal(name, value, legal)
    return tuple(_integer(name, token_id, 0, _INT32_MAX, legal) for token_id in value)


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _illegal("logit_bias", value, "a mapping from token id to a number")
    bias: dict[int, float] = {}
    for token_id, amount in value.items():
        key = _integer("logit_bias", token_id, 0, _INT32_MAX, "keyed by token ids (integers)")
        bias[key] = _real(f"logit_bias[{key}]", amount, -100.0, 100.0)
    return bias


def _bias_key(key: object) -> object:
    """A key of a decoded JSON object as a token id, if it is one."""
    if isinstance(key, str) and key.isdecimal():
        # A number with more digits than Python converts is not a token id either.
        with contextlib.suppress(ValueError):
            return int(key)
    return key


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    legal = "a string or a list of strings, none of them empty"
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, bytes | Mapping) or not isinstance(strings, Iterable):
        raise _illegal("stop", value, legal)
    checked: list[str] = []
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _illegal("stop", string, legal)
        checked.append(string)
    distinct = tuple(dict.fromkeys(checked))
    if len(distinct) > MAX_STOP_STRINGS or sum(map(len, distinct)) > MAX_STOP_CHARACTERS:
        most = f"at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters altogether"
        raise _illegal("stop", value, most)
    return distinct
