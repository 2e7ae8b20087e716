"""Splits the text of a chat answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zipage.outputs import CompletionOutput
from zipage.server.errors import bad_request
from zipage.server.protocol.chat import NamedToolChoice, Tool
from zipage.server.reasoning import OPEN, ReasoningSplitter
from zipage.server.serving import Serving
from zipage.server.structured import RequestedForm
from zipage.server.tool_calls import (
    HermesParser,
    JsonCallsParser,
    NamedCallParser,
    Piece,
    ToolCallParser,
)


@dataclass
class ToolPlan:
    """Which tools a request offers, and how their calls are found.

    Attributes:
        described: tool descriptions for the chat template.
        form: form that forces a call; None if the model may choose.
        make_parser: makes the parser of an answer, given whether it is streamed.
    """

    described: list[dict[str, Any]] | None = None
    form: RequestedForm | None = None
    make_parser: Callable[[bool], ToolCallParser] | None = None


def plan_tools(
    serving: Serving,
    tools: list[Tool] | None,
    choice: str | NamedToolChoice | None,
    parallel: bool | None,
    parameters_field: str = "tools.{}.function.parameters",
) -> ToolPlan:
    """Work out how a request's tools are described, forced and parsed.

    Args:
        serving: knows how the model writes calls.
        tools: tools offered.
        choice: which of them may or must be called.
        parallel: whether there may be several calls.
        parameters_field: maps a tool's index to the request's field with its parameters.

    Raises:
        ApiError: the choice fits no tool, or it is not known how the model writes calls.
    """
    names = [tool.function.name for tool in tools or ()]
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice", "tool_choice needs tools")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    most = 1 if parallel is False else None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise bad_request("tool_choice", f"tool_choice names {name!r}, which is not in tools")
        index = names.index(name)
        called = tools[index].function.parameters
        field = "tool_choice" if called is None else parameters_field.format(index)
        form = RequestedForm(field, {"json": _parameters(tools[index])})
        return ToolPlan(described, form, lambda streaming: NamedCallParser(name))
    if choice == "required":
        return ToolPlan(
            described,
            RequestedForm(
                "tool_choice",
                {"json": _required_schema(tools, most)},
                {parameters_field.format(i): _parameters(tool) for i, tool in enumerate(tools)},
            ),
            lambda streaming: JsonCallsParser(names, streaming, most, "[", ",", "]"),
        )
    styles: dict[str, Callable[..., ToolCallParser]] = {
        "hermes": HermesParser,
        "llama3_json": JsonCallsParser,
    }
    style = styles.get(serving.call_style)
    if style is None:
        raise bad_request(
            "tools",
            "the model's chat template does not mention tools: start the server with "
            "--tool-call-parser, or send tool_choice='required' or 'none'",
        )
    return ToolPlan(described, None, lambda streaming: style(names, streaming, most))


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


def _required_schema(tools: list[Tool], most: int | None) -> dict[str, Any]:
    given = [_parameters(tool).get("$id") for tool in tools]
    calls = []
    for index, (tool, own) in enumerate(zip(tools, given, strict=True)):
        # Its own document, so that its references (#/$defs/...) start from its root.
        document = own if own and given.count(own) == 1 else f"json-schema:///tool{index}/"
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": {**_parameters(tool), "$id": document},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        schema["maxItems"] = most
    return schema


class AnswerParser:
    """Splits one answer, however its text is cut into pieces.

    Args:
        reasons: whether reasoning is split off.
        opened: whether the prompt opened it, see `ReasoningSplitter`.
        tools: finds calls after the reasoning; None if there are no tools.
    """

    def __init__(self, reasons: bool, opened: bool | None, tools: ToolCallParser | None) -> None:
        self._reasoning = ReasoningSplitter(opened) if reasons else None
        self._tools = tools
        self.called = False

    def push(self, text: str) -> Piece:
        """Takes text; returns the parts that are now certain."""
        reasoning, content = "", text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(text)
        return self._split(reasoning, content)

    def finish(self, truncated: bool) -> Piece:
        """Returns the text held back."""
        reasoning, content = "", ""
        if self._reasoning is not None:
            reasoning, content = self._reasoning.finish()
        piece = self._split(reasoning, content)
        if self._tools is not None:
            rest = self._tools.finish(truncated)
            piece.content += rest.content
            piece.tool_calls += rest.tool_calls
            self.called |= bool(rest.tool_calls)
        return piece

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Why the answer ended."""
        if completion.finish_reason == "stop" and self.called:
            return "tool_calls"
        return completion.finish_reason

    def _split(self, reasoning: str, content: str) -> Piece:
        if self._tools is None or not content:
            return Piece(reasoning, content)
        piece = self._tools.push(content)
        piece.reasoning = reasoning
        self.called |= bool(piece.tool_calls)
        return piece


def reasoning_counter(
    serving: Serving, opened: bool | None
) -> Callable[[CompletionOutput], int] | None:
    """Counts the reasoning tokens of an answer; None where the closing tag is not one token."""
    close = serving.think_end
    if close is None:
        return None

    def count(completion: CompletionOutput) -> int:
        reasons = opened
        if reasons is None:  # only if the answer itself opens it, as its first word
            reasons = completion.text.lstrip().startswith(OPEN)
        if not reasons:
            return 0
        if close in completion.token_ids:
            return completion.token_ids.index(close) + 1
        return len(completion.token_ids)

    return count
