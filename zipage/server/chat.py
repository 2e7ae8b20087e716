"""/v1/chat/completions: conversations through the model's chat template."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams
from zipage.server import unsupported
from zipage.server.answer import AnswerParser, ToolPlan, plan_tools, reasoning_counter
from zipage.server.errors import bad_request
from zipage.server.generation import Delta, DeltaTracker, Generation
from zipage.server.logprobs import chat_logprobs, prompt_logprobs
from zipage.server.prompts import ChatPrompt, chat_prompt, chat_sampling
from zipage.server.protocol.chat import ChatCompletionRequest
from zipage.server.serving import Serving, request_id_of
from zipage.server.streaming import (
    DONE,
    event,
    stream_error,
)
from zipage.server.tool_calls import Piece, ToolCallDelta
from zipage.server.usage import StreamedUsage, kv_stats, usage


async def chat(serving: Serving, request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    model = serving.accept(request, body, unsupported.CHAT)
    serving.check_logprobs("top_logprobs", body.top_logprobs)
    serving.check_prompt_logprobs(body.prompt_logprobs, body.stream)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs=true")
    plan = plan_tools(serving, body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = await chat_prompt(serving, body, plan.described)
    max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_tokens, "max_tokens"
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(name, f"{name}={max_tokens} must be at least 1")
    serving.check_length(len(prompt.token_ids), "messages", max_tokens, name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    forms = {"tool_choice": plan.form}
    params, form = chat_sampling(
        serving, prompt, body, max_tokens, logprobs, body.prompt_logprobs, forms=forms
    )
    answer = _Answer(serving, body, model, plan, prompt, params, request_id_of(request))
    job = serving.job(answer.id, body, prompt.text, prompt.token_ids, params)
    return await serving.deliver(request, [job], answer, body.stream or False, form)


class _Answer:
    """Reports the output of a request."""

    def __init__(
        self,
        serving: Serving,
        body: ChatCompletionRequest,
        model: str,
        plan: ToolPlan,
        prompt: ChatPrompt,
        params: SamplingParams,
        request_id: str,
    ) -> None:
        self.id = f"chatcmpl-{request_id}"
        self._serving, self._body = serving, body
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._shows_reasoning = body.include_reasoning is not False
        self._counter = reasoning_counter(serving, prompt.opens_reasoning)
        streams = body.stream or False
        self._parsers = [
            AnswerParser(
                serving.reasons,
                prompt.opens_reasoning,
                plan.make_parser(streams) if plan.make_parser else None,
            )
            for _ in range(params.n)
        ]
        self._trackers = [DeltaTracker() for _ in range(params.n)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer when not streamed, a `ChatCompletionResponse`."""
        (output,) = outputs
        choices = []
        for completion in output.outputs:
            delta = self._trackers[completion.index].update(completion)
            assert delta is not None
            parser = self._parsers[completion.index]
            piece, rest = parser.push(delta.text), parser.finish(_truncated(delta))
            reasoning = piece.reasoning + rest.reasoning
            content = piece.content + rest.content
            calls = joined_calls(piece.tool_calls + rest.tool_calls)
            reasoning_shown = reasoning if reasoning and self._shows_reasoning else None
            message: dict[str, Any] = {
                "role": "assistant",
                "refusal": None,
                # As in OpenAI's API, content beside calls is null unless the model wrote some.
                "content": content if content or not calls else None,
                "reasoning_content": reasoning_shown,
                "reasoning": reasoning_shown,
                "tool_calls": [_tool_call(call) for call in calls] or None,
            }
            choices.append(
                {
                    "index": completion.index,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": parser.finish_reason(completion),
                    "stop_reason": completion.stop_reason,
                    **self._extras(delta),
                }
            )
        fields = {**self._head, "object": "chat.completion", "choices": choices}
        fields["usage"] = self._usage(output)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output, self._body.prompt_logprobs)
        return fields

    async def events(
        self, generation: Generation, log_fields: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream; its first event is empty."""
        counts = StreamedUsage(self._body.stream_options)
        head = {**self._head, "object": "chat.completion.chunk"}
        output: RequestOutput | None = None
        async with generation:
            await generation.ready()
            yield b""
            try:
                async for _, output in generation.updates():
                    events = b""
                    for completion in output.outputs:
                        delta = self._trackers[completion.index].update(completion)
                        if delta is None:
                            continue
                        for choice in self._pieces(delta):
                            chunk: dict[str, Any] = {**head, "choices": [choice]}
                            chunk |= counts.fields(functools.partial(self._usage, output))
                            if self._body.return_token_ids and "role" in choice["delta"]:
                                chunk["prompt_token_ids"] = output.prompt_token_ids
                            events += event(chunk)
                    if events:  # at once, as each write is a system call
                        yield events
            except Exception as error:
                yield event(stream_error(error, log_fields).body())
                return
        if counts.at_end and output is not None:
            yield event({**head, "choices": [], "usage": self._usage(output)})
        yield DONE

    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The events that report a delta."""
        completion = delta.completion
        parser = self._parsers[completion.index]
        choices = []
        if delta.first:
            role = {"role": "assistant", "content": ""}
            choices.append(_chunk(completion.index, role))
        piece = parser.push(delta.text)
        if completion.finished:
            rest = parser.finish(_truncated(delta))
            piece.reasoning += rest.reasoning
            piece.content += rest.content
            piece.tool_calls += rest.tool_calls
        told = self._told(piece)
        extras = self._extras(delta)
        # A token without text is reported where the client asked for more than text.
        if told or completion.finished or extras:
            choice = _chunk(completion.index, told)
            choice |= extras
            if completion.finished:
                choice["finish_reason"] = parser.finish_reason(completion)
                choice["stop_reason"] = completion.stop_reason
            choices.append(choice)
        return choices

    def _told(self, piece: Piece) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if piece.reasoning and self._shows_reasoning:
            told["reasoning_content"] = told["reasoning"] = piece.reasoning
        if piece.content:
            told["content"] = piece.content
        if piece.tool_calls:
            told["tool_calls"] = [_tool_call(call) for call in piece.tool_calls]
        return told

    def _extras(self, delta: Delta) -> dict[str, Any]:
        """What a choice reports besides its text."""
        extras: dict[str, Any] = {}
        if delta.logprobs is not None:
            extras["logprobs"] = chat_logprobs(
                delta.logprobs,
                delta.token_ids,
                self._body.top_logprobs or 0,
                self._serving.texts,
                self._body.return_tokens_as_token_ids or False,
            )
        if self._body.return_token_ids:
            extras["token_ids"] = delta.token_ids
        if self._body.return_kv_stats:
            extras["kv_stats"] = kv_stats(delta)
        return extras

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        return usage([output], reasoning=self._counter)


def joined_calls(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """The complete calls that deltas add up to."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(ToolCallDelta(delta.index, delta.id, delta.name, delta.arguments))
        else:
            calls[-1].arguments += delta.arguments
    return calls


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    function["name"] = delta.name
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _truncated(delta: Delta) -> bool:
    return delta.completion.finish_reason == "length"
