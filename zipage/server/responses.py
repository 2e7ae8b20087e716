"""/v1/responses: the chat pipeline with OpenAI's newer items and events. Nothing is stored."""

from __future__ import annotations

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
from zipage.server.generation import DeltaTracker, Generation
from zipage.server.prompts import ChatPrompt, chat_prompt, chat_sampling, check_role
from zipage.server.protocol.chat import (
    ChatTemplateFields,
    FunctionCall,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from zipage.server.protocol.responses import (
    FunctionChoice,
    InputItem,
    InputPart,
    ResponsesRequest,
)
from zipage.server.protocol.sampling import JsonSchemaFormat, ResponseFormat
from zipage.server.response_items import ResponseItems
from zipage.server.serving import Serving, request_id_of, without_none
from zipage.server.streaming import event, stream_error
from zipage.server.structured import form_of
from zipage.server.usage import usage


async def respond(serving: Serving, request: Request, body: ResponsesRequest) -> Response:
    """Answer a request for a response."""
    model = serving.accept(request, body, unsupported.RESPONSES)
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    plan = plan_tools(
        serving, _tools(body), choice, body.parallel_tool_calls, "tools.{}.parameters"
    )
    conversation = ChatTemplateFields(
        messages=_messages(serving, body),
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    prompt = await chat_prompt(serving, conversation, plan.described, "input")
    most = body.max_output_tokens
    if most is not None and most < 1:
        raise bad_request("max_output_tokens", f"max_output_tokens={most} must be at least 1")
    serving.check_length(len(prompt.token_ids), "input", most, "max_output_tokens")
    forms = {"tool_choice": plan.form}
    if body.text is not None and body.text.format is not None:
        schema = JsonSchemaFormat(schema=body.text.format.json_schema)
        wanted = ResponseFormat(type=body.text.format.type, json_schema=schema)
        forms["text.format"] = form_of("text.format", wanted, "schema")
    params, form = chat_sampling(serving, prompt, body, most, forms=forms)
    answer = _Answer(serving, body, model, plan, prompt, params, request_id_of(request))
    job = serving.job(answer.id, body, prompt.text, prompt.token_ids, params)
    return await serving.deliver(request, [job], answer, body.stream or False, form)


def _tools(body: ResponsesRequest) -> list[Tool] | None:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            message = f"tools.{index} is of type {tool.type!r}: only named functions are supported"
            raise bad_request(f"tools.{index}", message)
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.parameters
        )
        tools.append(Tool(type="function", function=function))
    return tools or None


def _messages(serving: Serving, body: ResponsesRequest) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    reasoning: str | None = None
    for index, item in enumerate(body.input):
        kind = item.type or "message"
        if kind == "reasoning":
            reasoning = _text(item.content, f"input.{index}.content")
            continue
        if kind == "function_call":
            call = ToolCall(
                id=item.call_id,
                function=FunctionCall(name=item.name or "", arguments=item.arguments or ""),
            )
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or ()), call]
                continue
            message = Message(role="assistant", tool_calls=[call])
        elif kind == "function_call_output":
            output = _text(item.output, f"input.{index}.output")
            message = Message(role="tool", content=output, tool_call_id=item.call_id)
        else:
            message = _message(item, kind, index)
            check_role(serving, message.role, f"input.{index}.role")
        if message.role == "assistant":
            message.reasoning_content, reasoning = reasoning, None
        elif reasoning:  # of an answer that was cut
            messages.append(Message(role="assistant", reasoning_content=reasoning))
            reasoning = None
        messages.append(message)
    if reasoning:
        messages.append(Message(role="assistant", reasoning_content=reasoning))
    return messages


def _message(item: InputItem, kind: str, index: int) -> Message:
    if kind != "message" or item.role is None or item.content is None:
        expected = "a message with role and content, function_call, function_call_output, reasoning"
        raise bad_request(f"input.{index}", f"input.{index} ({kind}) must be {expected}")
    return Message(role=item.role, content=_text(item.content, f"input.{index}.content"))


def _text(content: str | Sequence[InputPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            message = f"{param} has a part of type {part.type!r}: only text is supported"
            raise bad_request(param, message)
    return "".join(part.text or "" for part in content)


class _Answer:
    """Reports the output of a request."""

    def __init__(
        self,
        serving: Serving,
        body: ResponsesRequest,
        model: str,
        plan: ToolPlan,
        prompt: ChatPrompt,
        params: SamplingParams,
        request_id: str,
    ) -> None:
        self.id = f"resp_{request_id}"
        self._counter = reasoning_counter(serving, prompt.opens_reasoning)
        parser = plan.make_parser(body.stream or False) if plan.make_parser else None
        self._parser = AnswerParser(serving.reasons, prompt.opens_reasoning, parser)
        self._tracker = DeltaTracker()
        self._items = ResponseItems()
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tool_choice": body.tool_choice.model_dump()
            if isinstance(body.tool_choice, FunctionChoice)
            else body.tool_choice or "auto",
            "tools": [without_none(tool.model_dump()) for tool in body.tools or ()],
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response when not streamed, a `ResponseObject`."""
        (output,) = outputs
        self._take(output)
        return self._finished(output)

    async def events(
        self, generation: Generation, log_fields: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """The response as a stream; its first event is empty."""
        number = 0

        def numbered(kind: str, fields: dict[str, Any]) -> bytes:
            nonlocal number
            data = {"type": kind, "sequence_number": number, **fields}
            number += 1
            return event(data, kind)

        output: RequestOutput | None = None
        async with generation:
            await generation.ready()
            yield b""
            started = {**self._head, "status": "in_progress", "output": [], "usage": None}
            yield numbered("response.created", {"response": started})
            yield numbered("response.in_progress", {"response": started})
            try:
                async for _, output in generation.updates():
                    events = [numbered(*told) for told in self._take(output)]
                    if events:  # at once, as each write is a system call
                        yield b"".join(events)
            except Exception as error:
                answer = stream_error(error, log_fields).body()
                yield numbered("error", {**answer["error"], **answer})
                return
        assert output is not None
        response = self._finished(output)
        yield numbered(f"response.{response['status']}", {"response": response})

    def _take(self, output: RequestOutput) -> list[tuple[str, dict[str, Any]]]:
        """Add what is new to the items; returns the events that report it."""
        (completion,) = output.outputs
        delta = self._tracker.update(completion)
        if delta is None:
            return []
        events = self._items.add(self._parser.push(delta.text))
        if completion.finished:
            truncated = completion.finish_reason == "length"
            events += self._items.add(self._parser.finish(truncated))
            events += self._items.close("incomplete" if truncated else "completed")
        return events

    def _finished(self, output: RequestOutput) -> dict[str, Any]:
        counts = usage([output], reasoning=self._counter or (lambda completion: 0))
        truncated = output.outputs[0].finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": self._items.items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        }
