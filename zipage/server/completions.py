"""/v1/completions: prompts continued without a chat template."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from zipage.engine.detokenizer import token_text
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams
from zipage.server import unsupported
from zipage.server.generation import Delta, DeltaTracker, Generation
from zipage.server.logprobs import CompletionLogprobWriter, most_likely, prompt_logprobs
from zipage.server.prompts import TextPrompt, text_prompts
from zipage.server.protocol.completions import CompletionRequest
from zipage.server.serving import Serving, request_id_of
from zipage.server.streaming import (
    DONE,
    event,
    stream_error,
)
from zipage.server.usage import StreamedUsage, kv_stats, usage

#: Default of max_tokens, as in OpenAI's API.
_DEFAULT_MAX_TOKENS = 16


async def complete(serving: Serving, request: Request, body: CompletionRequest) -> Response:
    """Answer a request for completions."""
    model = serving.accept(request, body, unsupported.COMPLETIONS)
    serving.check_prompt_logprobs(body.prompt_logprobs, body.stream)
    prompts = await text_prompts(serving, body.prompt, body.add_special_tokens)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:
        max_tokens = max(1, min(max_tokens, serving.engine.max_model_len - longest))
    serving.check_length(longest, "prompt", max_tokens, "max_tokens")
    # Asked for by name, or because the prompt is echoed.
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params, form = serving.sampling(
        body,
        # The engine always generates at least one token; it is dropped if none was requested.
        max_tokens or 1,
        body.logprobs,
        max((count for count in wanted if count is not None), default=None),
    )
    answer = _Answer(serving, body, model, prompts, params, f"cmpl-{request_id_of(request)}")
    jobs = [serving.job(answer.id, body, p.text, p.token_ids, params) for p in prompts]
    return await serving.deliver(request, jobs, answer, body.stream or False, form)


class _Answer:
    """Reports the outputs of a request."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        model: str,
        prompts: list[TextPrompt],
        params: SamplingParams,
        answer_id: str,
    ) -> None:
        self.id = answer_id
        self._serving, self._body, self._prompts, self._params = serving, body, prompts, params
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._no_tokens = body.max_tokens == 0
        count = len(prompts) * params.n
        self._trackers = [DeltaTracker() for _ in range(count)]
        as_ids = body.return_tokens_as_token_ids or False
        self._logprobs = [CompletionLogprobWriter(as_ids) for _ in range(count)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer when not streamed, a `CompletionResponse`."""
        choices = []
        for position, output in enumerate(outputs):
            choices += self._choices(position, output)
        return {**self._head, "choices": choices, "usage": self._usage(outputs)}

    async def events(
        self, generation: Generation, log_fields: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream; its first event is empty."""
        counts = StreamedUsage(self._body.stream_options)
        outputs: dict[int, RequestOutput] = {}
        async with generation:
            await generation.ready()
            yield b""
            try:
                async for position, output in generation.updates():
                    outputs[position], events = output, b""
                    for choice in self._choices(position, output):
                        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
                        chunk |= counts.fields(functools.partial(self._usage, [output]))
                        events += event(chunk)
                    if events:  # at once, as each write is a system call
                        yield events
            except Exception as error:
                yield event(stream_error(error, log_fields).body())
                return
        if counts.at_end:
            yield event({**self._head, "choices": [], "usage": self._usage([*outputs.values()])})
        yield DONE

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        spent = sum(output.usage.completion_tokens for output in outputs)
        return usage(outputs, discarded=spent if self._no_tokens else 0)

    def _choices(self, position: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new in the choices of a prompt."""
        choices = []
        for completion in output.outputs:
            index = position * self._params.n + completion.index
            delta = self._trackers[index].update(completion)
            if delta is not None:
                choices.append(self._choice(index, position, output, delta))
        return choices

    def _choice(
        self, index: int, position: int, output: RequestOutput, delta: Delta
    ) -> dict[str, Any]:
        completion, body = delta.completion, self._body
        finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
        text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        if self._no_tokens:
            text, token_ids, entries = "", [], entries and []
            finish_reason, stop_reason = finish_reason and "length", None
        logprobs: dict[str, Any] | None = None
        if body.echo and delta.first:
            text = self._prompt_text(position) + text
            if output.prompt_logprobs is not None and body.logprobs is not None:
                shown = output.prompt_token_ids
                logprobs = self._logprobs[index].write(
                    most_likely(output.prompt_logprobs, shown, body.logprobs),
                    shown,
                    self._token_text(shown[0]),
                )
        if entries is not None:
            written = self._logprobs[index].write(entries, token_ids, "")
            if logprobs is None:
                logprobs = written
            else:
                for name, values in written.items():
                    logprobs[name] += values
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if delta.first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, body.prompt_logprobs)
        if body.return_kv_stats:
            choice["kv_stats"] = kv_stats(delta)
        return choice

    def _prompt_text(self, position: int) -> str:
        prompt = self._prompts[position]
        if prompt.text is None and self._serving.tokenizer is not None:
            skips = self._params.skip_special_tokens
            return str(
                self._serving.tokenizer.decode(
                    prompt.token_ids,
                    skip_special_tokens=skips,
                    clean_up_tokenization_spaces=False,
                )
            )
        return prompt.text or ""

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._serving.tokenizer
        return "" if tokenizer is None else token_text(tokenizer, token_id)
