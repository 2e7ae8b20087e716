"""Turns a caller's request into a checked `EngineRequest`: prompts, budgets, lengths."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from zipage.config import EngineConfig
from zipage.engine.accounts import RequestAccounts
from zipage.engine.core_io import EngineRequest, ModelInfo
from zipage.errors import ConfigError, ModelError, RequestError, shown
from zipage.execution.grammar import GrammarCompiler
from zipage.sampling_params import SamplingParams
from zipage.tokenizer import encode_prompt, load_tokenizer

#: A prompt: text, token ids, or vLLM's ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}``.
Prompt = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Checks requests and turns prompts into token ids. Does not track requests.

    Args:
        config: the engine's options.
        model: the engine's model.
        accounts: records refused requests.

    Attributes:
        grammars: compiles the forms of answers for this tokenizer.
    """

    def __init__(self, config: EngineConfig, model: ModelInfo, accounts: RequestAccounts) -> None:
        self.config = config
        self.model = model
        self._accounts = accounts
        self._ids = itertools.count()
        self._tokenizer: Any = None
        self._serial = itertools.count()
        self.grammars = GrammarCompiler(
            lambda: self.tokenizer, model.vocab_size, model.eos_token_ids
        )

    def prepare(self, params: SamplingParams) -> None:
        """Compile the answer's form in advance, so that checking the request is fast. May be called
        from any thread.

        Raises:
            RequestError: the form is not legal.
        """
        if params.structured_outputs is not None:
            self.grammars.compile(params.structured_outputs)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when first needed.

        Raises:
            ModelError: there is none, or it cannot be loaded.
        """
        if self._tokenizer is None:
            if self.model.tokenizer is None:
                raise ModelError(
                    f"model_shape={self.config.model_shape!r} has no tokenizer: give prompts as "
                    f"token ids and set detokenize=False in SamplingParams, or name a tokenizer"
                )
            self._tokenizer = load_tokenizer(self.model.tokenizer, self.config.revision)
        return self._tokenizer

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
        live: Container[str] = (),
    ) -> tuple[EngineRequest, str | None]:
        """Check a request; returns it and the prompt's text, None if token ids were given.

        Args:
            prompt: text or token ids.
            params: how to sample, `kv_budget` and `compression` included.
            request_id: the caller's id; None makes up one that is not in `live`.
            priority: lower runs earlier.
            cache_salt: requests share prefix-cache blocks only with requests of equal salt.
            stream: whether its outputs are read while it runs.
            live: ids in use.

        Raises:
            RequestError: the request is not legal.
        """
        try:
            text, token_ids = self._resolve_prompt(prompt)
        except RequestError:
            # The message may quote the prompt.
            self._accounts.refused(request_id, "its prompt is not legal")
            raise
        try:
            name = request_id
            if name is None:
                name = next(made for i in self._ids if (made := f"request-{i}") not in live)
            return self._check(token_ids, params, name, priority, cache_salt, stream), text
        except RequestError as error:
            self._accounts.refused(request_id, str(error))
            raise

    def kv_budget_of(self, request: EngineRequest) -> int | None:
        """Tokens a request keeps per layer and KV head; None for full KV."""
        most = request.max_blocks
        return None if most is None else (most - 1) * self.config.block_size

    def _check(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str,
        stream: bool,
    ) -> EngineRequest:
        if not isinstance(cache_salt, str) or not _is_unicode(cache_salt):
            raise RequestError(f"cache_salt={shown(cache_salt)} must be a string of valid Unicode")
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={shown(request_id)} must be a string or None")
        if not _is_unicode(request_id):
            raise RequestError(f"request_id={shown(request_id)} must be valid Unicode")
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise RequestError(f"priority={shown(priority)} must be an integer")
        if not -(2**63) <= priority < 2**63:
            raise RequestError(f"priority={shown(priority)} must be a 64-bit integer")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}"
            )
        if params.detokenize:
            _ = self.tokenizer  # fails here if there is none, not when the answer is decoded
        params.verify(self.model.vocab_size)
        self.prepare(params)
        max_blocks = self._resolve_budget(params)
        max_tokens = self._resolve_max_tokens(params, len(token_ids), max_blocks)
        serial = next(self._serial)
        return EngineRequest(
            request_id=request_id,
            # Never reused, unlike the caller's id, which is free again once the request has ended.
            sequence_ids=[f"{request_id}#{index}@{serial}" for index in range(params.n)],
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            max_blocks=max_blocks,
            priority=int(priority),
            cache_salt=cache_salt,
            stream=stream,
        )

    def _resolve_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"prompt has keys {shown(list(prompt))}: legal are 'prompt' (text) and "
                    "'prompt_token_ids'"
                )
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids")
            ids = text if given is None else given
            if given is not None:
                if isinstance(ids, str):
                    raise RequestError(f"prompt_token_ids={shown(ids)} must be a list of token ids")
                if text is not None and not isinstance(text, str):
                    raise RequestError(f"prompt={shown(text)} must be text")
        if isinstance(ids, str):
            text = ids
            ids = encode_prompt(self.tokenizer, text)
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise RequestError(f"prompt must be text or token ids, got {type(ids).__name__}")
        token_ids = list(ids)
        if not token_ids:
            raise RequestError("prompt is empty: at least one token is needed")
        if set(map(type, token_ids)) != {int}:
            token_ids = [_token_id(token) for token in token_ids]
        for token in token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise RequestError(
                    f"prompt_token_ids holds {shown(token)}: the vocabulary has ids 0 to "
                    f"{self.model.vocab_size - 1}"
                )
        if len(token_ids) >= self.model.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens: with at least one generated token it "
                f"exceeds max_model_len={self.model.max_model_len}"
            )
        return text, token_ids

    def _resolve_budget(self, params: SamplingParams) -> int | None:
        if params.compression == "off":
            if params.kv_budget is not None:
                raise RequestError("kv_budget has no meaning with compression='off'")
            return None
        if not self.config.compresses:
            if params.kv_budget is not None or params.compression == "on":
                raise RequestError(
                    "kv_budget and compression='on' need an engine with a compression policy, "
                    "this one runs with compression='full'"
                )
            return None
        budget = self.config.kv_budget if params.kv_budget is None else params.kv_budget
        if budget is None and params.compression == "on":
            raise RequestError("compression='on' needs a kv_budget: the engine has no default")
        try:
            self.config.check_budget(budget)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return self.config.max_blocks_of(budget)

    def _resolve_max_tokens(
        self, params: SamplingParams, prompt_len: int, max_blocks: int | None
    ) -> int:
        room = self.model.max_model_len - prompt_len
        if params.max_tokens is None:
            if max_blocks is None:
                # Full KV: what the pool can hold is a limit like the model's length.
                pool = self.model.num_kv_blocks * self.config.block_size
                room = max(1, min(room, pool - prompt_len + 1))
            if params.min_tokens > room:
                raise RequestError(
                    f"min_tokens={params.min_tokens} is not legal: after {prompt_len} prompt "
                    f"tokens there is room for {room}"
                )
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens} and {prompt_len} prompt tokens exceed "
                f"max_model_len={self.model.max_model_len}: max_tokens can be at most {room}"
            )
        return params.max_tokens


def _token_id(token: Any) -> int:
    """An integer of any library as an int."""
    if isinstance(token, bool) or not isinstance(token, numbers.Integral):
        raise RequestError(f"prompt_token_ids holds {shown(token)}, which is not an integer")
    return int(token)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
