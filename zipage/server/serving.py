"""What the handlers of all APIs share: the engine, its tokenizer, and the path of a request."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from zipage.engine.client import EngineClient
from zipage.errors import ModelError, RequestError
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams
from zipage.server.errors import ApiError, bad_request, unavailable
from zipage.server.generation import EndOfJob, Generation, Job
from zipage.server.logprobs import TokenTexts
from zipage.server.protocol.sampling import RequestModel, SamplingFields
from zipage.server.reasoning import CLOSE, uses_think_tags
from zipage.server.settings import ServerSettings
from zipage.server.streaming import EventStream, encode, unless_disconnected
from zipage.server.structured import RequestedForm, structured_output
from zipage.server.tool_calls import call_style
from zipage.server.tracing import RequestTracer, otlp_exporter
from zipage.server.unsupported import Refused, refuse_unsupported
from zipage.tokenizer import encode_prompt

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Texts of at least this many characters are tokenised on a separate thread.
_LONG_TEXT = 1 << 18
#: Answers with at least this many tokens and alternatives are serialised on a thread.
_LARGE_ANSWER = 2_000
NO_TOKENIZER = "the model has no tokenizer: send token ids to /v1/completions"
#: Fields of a request that are options of `SamplingParams` of the same name.
_OPTIONS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "kv_budget", "compression", "return_kv_stats", "kv_stats_layers"),
)


class Answer(Protocol):
    """Reports the outputs of a request."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer when not streamed, as a JSON object."""

    def events(
        self, generation: Generation, log_fields: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream; its first event is empty, and comes with the first token."""


class Serving:
    """The state of the server.

    Args:
        engine: answers the requests.
        settings: the server's options.

    Raises:
        ConfigError: engine and settings contradict each other.

    Attributes:
        tokenizer: the model's tokenizer; None if it has none.
        names: the model's names in requests.
        draining: set when the server shuts down: new requests are refused.
        reasons: whether reasoning is split off.
        think_end: the token that ends reasoning, if it is a single token.
        tracer: makes spans of requests; None without tracing.
        call_style: how the model writes tool calls, ``hermes``, ``llama3_json`` or ``none``.
    """

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        settings.check_engine(engine.config)
        self.engine, self.settings = engine, settings
        self.created = int(time.time())
        self.draining = False
        self.tokenizer: Any = None
        try:
            self.tokenizer = engine.get_tokenizer()
        except ModelError as error:
            logger.warning("prompts must be token ids: %s", error)
        config = engine.config
        root = str(config.model or config.model_shape or "zipage-tiny")
        self.root = root
        name = Path(root).resolve().name if Path(root).exists() else root
        self.names = list(settings.served_model_names or dict.fromkeys([name, root]))
        self.chat_template: str | None = None
        if settings.chat_template is not None:
            self.chat_template = Path(settings.chat_template).read_text(encoding="utf-8")
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        self.reasons = settings.reasoning_parser == "think" or (
            settings.reasoning_parser == "auto" and uses_think_tags(template, self.tokenizer)
        )
        self.think_end: int | None = None
        if self.reasons and self.tokenizer is not None:
            self.think_end = self.tokenizer.get_added_vocab().get(CLOSE)
        self.call_style = settings.tool_call_parser
        if self.call_style == "auto":
            self.call_style = call_style(template)
        self.tracer: RequestTracer | None = None
        if settings.otlp_traces_endpoint is not None:
            exporter = otlp_exporter(settings.otlp_traces_endpoint)
            self.tracer = RequestTracer(exporter, self.names[0])
        self.texts = TokenTexts(self.tokenizer)
        self._serial = itertools.count()
        # Threads, because a long text must not block the event loop; a tokenizer each, because
        # tokenizers are not thread-safe; a separate thread for long texts, which take seconds, so
        # that short ones do not wait for them.
        self._tokenizing = ThreadPoolExecutor(1, "zipage-tokenizer")
        self._tokenizing_long = ThreadPoolExecutor(1, "zipage-tokenizer-long")
        self._copied_tokenizer: Any = None

    def close(self) -> None:
        """Stop the engine and the tokenizer threads, and send the last spans."""
        self._tokenizing.shutdown()
        self._tokenizing_long.shutdown()
        self.engine.shutdown()
        if self.tracer is not None:
            self.tracer.shutdown()

    @functools.cached_property
    def _longest_text(self) -> int:
        """Most characters that `max_model_len` tokens can have."""
        return int(self.engine.max_model_len * max(map(len, self.tokenizer.get_vocab())))

    def encode(self, tokenizer: Any, text: str, special: bool, param: str) -> list[int]:
        """Token ids of a text; for functions given to `tokenizing`.

        Raises:
            ApiError: the text is far too long; the longest that fits a body would take minutes.
            RequestError: the text is not legal.
        """
        if len(text) > self._longest_text:
            message = (
                f"This model's maximum context length is {self.engine.max_model_len} tokens. "
                f"However, {_your(param)} {len(text)} characters, more than that many tokens can "
                "have. Please shorten the text."
            )
            raise bad_request(param, message, "context_length_exceeded")
        return encode_prompt(tokenizer, text, special)

    async def tokenizing(self, size: int, function: Callable[[Any], _T]) -> _T:
        """Run a function that uses a tokenizer on a thread.

        Args:
            size: characters or tokens it processes.
            function: called with the tokenizer.
        """
        if self.tokenizer is None:
            raise bad_request(None, NO_TOKENIZER)
        loop = asyncio.get_running_loop()
        if size < _LONG_TEXT:
            return await loop.run_in_executor(self._tokenizing, function, self.tokenizer)

        def run() -> _T:
            if self._copied_tokenizer is None:
                self._copied_tokenizer = copy.deepcopy(self.tokenizer)
            return function(self._copied_tokenizer)

        return await loop.run_in_executor(self._tokenizing_long, run)

    # ------------------------------------------------------------------ checks

    def accept(
        self, request: Request, body: RequestModel, refused: Mapping[str, Refused] | None = None
    ) -> str:
        """Check what all requests have in common; returns the model's name in the request.

        Args:
            request: the request.
            body: its body.
            refused: known fields that the endpoint refuses.

        Raises:
            ApiError: the model is unknown, a field is refused, or the server is shutting down.
        """
        if self.draining:
            raise unavailable("the server is shutting down")
        refuse_unsupported(body, refused or {})
        fields = {"request_id": request_id_of(request)}
        if body.unknown_fields:
            names = ", ".join(body.unknown_fields)[:500]
            logger.info("fields that are no part of the API are ignored: %s", names, extra=fields)
        model: str | None = getattr(body, "model", None)
        return self.check_model(model or None)

    def check_model(self, model: str | None) -> str:
        """The name of the model, the first one by default.

        Raises:
            ApiError: the model is unknown.
        """
        if model is None:
            return self.names[0]
        if model not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {model!r} does not exist; this server has {known}",
                "model",
                "model_not_found",
            )
        return model

    def check_length(
        self, prompt_tokens: int, param: str, max_tokens: int | None, max_tokens_param: str
    ) -> None:
        """Refuse requests that exceed the model's length.

        Args:
            prompt_tokens: tokens of the prompt.
            param: the prompt's field.
            max_tokens: most tokens generated, if the request sets it.
            max_tokens_param: the field that sets it.

        Raises:
            ApiError: the request is too long; the message has the numbers.
        """
        limit = self.engine.max_model_len
        message = f"This model's maximum context length is {limit} tokens. However, "
        if prompt_tokens >= limit:
            message += (
                f"{_your(param)} {prompt_tokens} tokens, and at least one must be left for the "
                "answer. Please shorten the text."
            )
        elif max_tokens is not None and prompt_tokens + max_tokens > limit:
            message += (
                f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the "
                f"{param}, {max_tokens} in the completion). Please reduce one of them: "
                f"{max_tokens_param} can be at most {limit - prompt_tokens}."
            )
            param = max_tokens_param
        else:
            return
        raise bad_request(param, message, "context_length_exceeded")

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Refuse a number of alternatives that this server does not return.

        Args:
            name: the request's field.
            count: its value.

        Raises:
            ApiError: it is out of range.
        """
        most = self.settings.max_logprobs
        if count is not None and not 0 <= count <= most:
            raise bad_request(name, f"{name}={count} is not legal: must be from 0 to {most}")

    def check_prompt_logprobs(self, count: int | None, stream: bool | None) -> None:
        """Refuse `prompt_logprobs` out of range, and in streams, as vLLM does.

        Raises:
            ApiError: they are.
        """
        self.check_logprobs("prompt_logprobs", count)
        if count is not None and stream:
            message = "prompt_logprobs are not streamed: ask for them without stream=true"
            raise bad_request("prompt_logprobs", message)

    # ------------------------------------------------------------------ requests

    def sampling(
        self,
        body: SamplingFields,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        forms: Mapping[str, RequestedForm | None] | None = None,
        may_reason: bool = False,
    ) -> tuple[SamplingParams, RequestedForm | None]:
        """Sampling parameters of a request, its own or else the model's, and the required form.

        Args:
            body: the request.
            max_tokens: most tokens generated; None for as many as there is room for.
            logprobs: how many of the most likely tokens are reported at every generated token.
            prompt_logprobs: the same for the prompt's tokens.
            forms: required forms of the answer, by request field, see `structured_output`.
            may_reason: whether reasoning may precede the structured part.

        Raises:
            ApiError, RequestError: a value is illegal.
        """
        settings = self.settings
        options: dict[str, Any] = dict(self.engine.default_sampling)
        for name in _OPTIONS:
            value = getattr(body, name)
            if value is not None:
                options[name] = value
        if body.n is not None and body.n > settings.max_n:
            raise bad_request("n", f"n={body.n} is more than this server allows, {settings.max_n}")
        most_kept = settings.max_kv_budget
        if most_kept is not None:
            if body.kv_budget is not None and body.kv_budget > most_kept:
                message = f"kv_budget={body.kv_budget} is more than this server allows, {most_kept}"
                raise bad_request("kv_budget", message)
            if body.compression == "off":
                message = (
                    f"compression='off': this server requires a kv_budget of up to {most_kept}"
                )
                raise bad_request("compression", message)
        for name in ("stop", "stop_token_ids"):
            value = getattr(body, name)
            if isinstance(value, list) and len(value) > settings.max_stop:
                most = settings.max_stop
                raise bad_request(name, f"{name} has {len(value)} entries, at most {most} are read")
        self.check_logprobs("logprobs", logprobs)
        if body.compression == "off" and body.kv_budget is not None:
            message = f'kv_budget={body.kv_budget} must be left out with compression="off"'
            raise bad_request("kv_budget", message)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options", "stream_options is only legal with stream=true")
        if not -(2**31) <= (body.priority or 0) < 2**31:
            raise bad_request("priority", f"priority={body.priority} must be a 32-bit integer")
        if max_tokens is not None and max_tokens < 0:
            raise bad_request("max_tokens", f"max_tokens={max_tokens} must be at least 1")
        options |= {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "detokenize": self.tokenizer is not None,
        }
        wanted = structured_output(body, forms or {})
        if wanted is None:
            return SamplingParams.from_dict(options), None
        compact = settings.structured_outputs_disable_any_whitespace
        form = {"disable_any_whitespace": compact, **wanted.options}
        if may_reason:
            if self.think_end is None:
                name = wanted.field
                message = f"{name} needs a model whose reasoning ends with one token: turn it off"
                raise bad_request(name, message)
            form = {**form, "reasoning_end_token_ids": [self.think_end]}
        try:
            return SamplingParams.from_dict({**options, "structured_outputs": form}), wanted
        except RequestError as error:
            raise wanted.named(error) from None

    def job(
        self,
        answer_id: str,
        body: SamplingFields,
        text: str | None,
        token_ids: Sequence[int],
        params: SamplingParams,
    ) -> Job:
        """The engine's job for a prompt of a request."""
        # A client may use its request id twice.
        name = f"{answer_id}-{next(self._serial)}"
        priority, cache_salt = body.priority or 0, body.cache_salt or ""
        return Job(name, text, list(token_ids), params, priority, cache_salt)

    async def deliver(
        self,
        request: Request,
        jobs: Sequence[Job],
        answer: Answer,
        stream: bool,
        form: RequestedForm | None = None,
    ) -> Response:
        """Run the jobs of a request and answer it. Errors about their `form` name its field.

        Raises:
            ApiError, ZipageError: the engine refused them, or failed before the first token.
            ClientDisconnected: the client went away.
        """
        generation = self._generation(jobs, request, not stream, form)
        if stream:
            events = answer.events(generation, {"request_id": request_id_of(request)})
            # Errors before the first token are sent with their own HTTP status.
            await unless_disconnected(request, anext(events))
            return EventStream(events, self.settings.stall_timeout)
        async with generation:
            outputs = await unless_disconnected(request, generation.results())

        def write() -> bytes:
            return encode(answer.whole(outputs))

        tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
        entries = tokens * (1 + (jobs[0].params.logprobs or 0))
        if (top := jobs[0].params.prompt_logprobs) is not None:
            entries += sum(len(job.token_ids) for job in jobs) * (1 + top)
        # Megabytes take seconds, during which no other request should wait.
        data = await asyncio.to_thread(write) if entries > _LARGE_ANSWER else write()
        return Response(data, media_type="application/json")

    def _generation(
        self,
        jobs: Sequence[Job],
        request: Request,
        final_only: bool,
        form: RequestedForm | None,
    ) -> Generation:
        most = self.settings.max_queued_requests
        answers = sum(job.params.n for job in jobs)
        if most is not None and answers > (room := most + self.engine.config.max_num_seqs):
            message = f"{answers} answers are requested at once, this server allows at most {room}"
            raise bad_request("prompt" if len(jobs) > 1 else "n", message)
        ended: EndOfJob | None = None
        if self.tracer is not None:
            ended = functools.partial(self.tracer.ended, request.headers)
        timeout = self.settings.request_timeout
        return Generation(self.engine, jobs, timeout, ended, final_only, form)


def request_id_of(request: Request) -> str:
    """The id of a request, the client's own if it sent one."""
    found = request.scope.get("zipage.request_id")
    return found if isinstance(found, str) else uuid.uuid4().hex


def _your(param: str) -> str:
    """The subject of a sentence about the size of a field."""
    return f"your {param} {'have' if param == 'messages' else 'has'}"


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
