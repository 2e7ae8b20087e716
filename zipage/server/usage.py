"""What answers report about their cost: tokens, and the events of their KV caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zipage.outputs import CompletionOutput, RequestOutput
from zipage.server.generation import Delta
from zipage.server.protocol.sampling import StreamOptions


class StreamedUsage:
    """Which events of a stream have token counts, as its `stream_options` ask.

    Attributes:
        at_end: whether a last event of its own has the counts. The `usage` of the others is then
            null, unless they report counts too.
    """

    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = bool(options and options.include_usage)
        self._in_all = bool(options and options.continuous_usage_stats)

    def fields(self, count: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Usage fields of an event with text; `count` is called if the event has counts."""
        if not self.at_end:
            return {}
        return {"usage": count() if self._in_all else None}


def kv_stats(delta: Delta) -> dict[str, Any]:
    """What the API reports about a choice's KV cache."""
    completion = delta.completion
    return {
        "compressions": [record.as_json() for record in delta.compressions],
        "evicted_tokens": completion.metrics.evicted_tokens,
        "peak_blocks": completion.metrics.peak_blocks,
    }


def usage(
    outputs: Sequence[RequestOutput],
    *,
    discarded: int = 0,
    reasoning: Callable[[CompletionOutput], int] | None = None,
) -> dict[str, Any]:
    """Token counts of a request.

    Args:
        outputs: the outputs of its prompts.
        discarded: generated tokens that were not requested.
        reasoning: counts the reasoning tokens of a choice.

    Returns:
        OpenAI's fields, and what compression did to the choices, added up over them: how often it
        ran, and the tokens it evicted from each layer and KV head.
    """
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    completion = sum(output.usage.completion_tokens for output in outputs) - discarded
    details = {
        "compressions": sum(output.metrics.compressions for output in outputs),
        "evicted_tokens": sum(output.metrics.evicted_tokens for output in outputs),
    }
    if reasoning is not None:
        spent = sum(reasoning(c) for output in outputs for c in output.outputs)
        details = {"reasoning_tokens": spent, **details}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.metrics.cached_prompt_tokens for output in outputs)
        },
        "completion_tokens_details": details,
    }
