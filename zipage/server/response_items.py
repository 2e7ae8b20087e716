"""The output items of a response, and the events that report how they grow."""

from __future__ import annotations

import uuid
from copy import deepcopy
from typing import Any

from zipage.server.tool_calls import Piece, ToolCallDelta

#: An event's type and fields.
ItemEvent = tuple[str, dict[str, Any]]


class ResponseItems:
    """Items of one response, one after another: reasoning, message, calls.

    Attributes:
        items: the items so far; the last one may be unfinished.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False

    def add(self, piece: Piece) -> list[ItemEvent]:
        """Add a piece of the answer; returns the events that report it."""
        events: list[ItemEvent] = []
        if piece.reasoning:
            events += self._text("reasoning", "reasoning_text", piece.reasoning)
        if piece.content:
            events += self._text("message", "output_text", piece.content)
        for call in piece.tool_calls:
            events += self._call(call)
        return events

    def close(self, status: str = "completed") -> list[ItemEvent]:
        """End the open item; returns the events that report it."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        events: list[ItemEvent] = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(("response.function_call_arguments.done", {**self._place(), **done}))
        else:
            part = item["content"][0]
            place = {**self._place(), "content_index": 0}
            fields = {"text": part["text"]}
            if part["type"] == "output_text":
                fields["logprobs"] = []
            events.append((f"response.{part['type']}.done", {**place, **fields}))
            events.append(("response.content_part.done", {**place, "part": dict(part)}))
        added = {"output_index": len(self.items) - 1, "item": deepcopy(item)}
        return [*events, ("response.output_item.done", added)]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str, prefix: str, **fields: Any) -> list[ItemEvent]:
        events = self.close()
        item = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        self.items.append({**item, **fields})
        self._open = True
        added = {"output_index": len(self.items) - 1, "item": deepcopy(self.items[-1])}
        return [*events, ("response.output_item.added", added)]

    def _text(self, kind: str, part_type: str, text: str) -> list[ItemEvent]:
        events: list[ItemEvent] = []
        if not self._open or self.items[-1]["type"] != kind:
            if kind == "message":
                events = self._begin(kind, "msg", role="assistant", content=[])
            else:
                events = self._begin(kind, "rs", summary=[], content=[])
            part: dict[str, Any] = {"type": part_type, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self.items[-1]["content"].append(part)
            fields = {**self._place(), "content_index": 0, "part": dict(part)}
            events.append(("response.content_part.added", fields))
        self.items[-1]["content"][0]["text"] += text
        fields = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = []
        return [*events, (f"response.{part_type}.delta", fields)]

    def _call(self, call: ToolCallDelta) -> list[ItemEvent]:
        events: list[ItemEvent] = []
        if call.name is not None:
            identity = {"call_id": call.id, "name": call.name, "arguments": ""}
            events = self._begin("function_call", "fc", **identity)
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            fields = {**self._place(), "delta": call.arguments}
            events.append(("response.function_call_arguments.delta", fields))
        return events
