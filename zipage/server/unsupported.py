"""Fields of OpenAI's and vLLM's APIs that would change the answer, and are refused.

Fields that are in no table and no schema are ignored: clients send many that change nothing
(`user`, `metadata`, `store`, `service_tier`, `request_id`, ...).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from zipage.server.errors import bad_request


@dataclass(frozen=True)
class Refused:
    """Why a field is refused.

    Attributes:
        advice: what to use instead, or why there is nothing.
        neutral: values that ask for nothing, beside null, false, [] and "".
        equal: a field whose own value asks for nothing here.
    """

    advice: str
    neutral: tuple[Any, ...] = ()
    equal: str | None = None


#: Most characters of a value in a message.
_LONGEST_SHOWN = 100
_STRUCTURE = "prescribe the form of the answer with structured_outputs"
_STORED = "responses are not stored"
_CHAT_ONLY = "it is a field of /v1/chat/completions"
_BOTH = "it is a field of /v1/completions and /v1/chat/completions"

#: Refused by every endpoint that generates.
_ALL = {
    "best_of": Refused("ask for n answers and choose", (1,), equal="n"),
    "use_beam_search": Refused("ask for n answers and choose"),
    "bad_words": Refused("give the tokens of the words a logit_bias of -100"),
    "allowed_token_ids": Refused(_STRUCTURE),
    "guided_whitespace_pattern": Refused("use structured_outputs with disable_any_whitespace"),
    "structural_tag": Refused(_STRUCTURE),
    "logits_processors": Refused("use logit_bias or structured_outputs"),
    "logprob_token_ids": Refused("ask for the most likely tokens and read theirs"),
    "repetition_detection": Refused("use repetition_penalty, stop or a limit of tokens"),
    "thinking_token_budget": Refused("limit the tokens of the whole answer", (-1,)),
    "truncate_prompt_tokens": Refused("shorten the prompt"),
    "prompt_embeds": Refused("send text or token ids"),
    "watermarking": Refused("answers are not marked"),
    "vllm_xargs": Refused("there are no extensions that read it", ({},)),
}
COMPLETIONS = {
    **_ALL,
    "suffix": Refused("prompts are continued at their end"),
    # Some clients give the limit under both names, whatever the endpoint.
    "max_completion_tokens": Refused("use max_tokens", equal="max_tokens"),
    "max_output_tokens": Refused("use max_tokens", equal="max_tokens"),
    "top_logprobs": Refused("use logprobs, which is a number here", (0,)),
}
CHAT = {
    **_ALL,
    "max_output_tokens": Refused("use max_completion_tokens or max_tokens"),
    "echo": Refused("use /v1/completions"),
    "functions": Refused("use tools"),
    "function_call": Refused("use tool_choice", ("auto", "none")),
    "web_search_options": Refused("use tools of your own"),
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "verbosity": Refused("ask for it in a message", ("medium",)),
    "return_prompt_text": Refused("use return_token_ids and /detokenize"),
}
RESPONSES = {
    **_ALL,
    "max_tokens": Refused("use max_output_tokens", equal="max_output_tokens"),
    "max_completion_tokens": Refused("use max_output_tokens", equal="max_output_tokens"),
    "previous_response_id": Refused(f"{_STORED}: send the conversation in input"),
    "conversation": Refused(f"{_STORED}: send the conversation in input"),
    "background": Refused(_STORED),
    "truncation": Refused("shorten the input", ("disabled",)),
    "n": Refused("a response has one answer", (1,)),
    "logprobs": Refused(_BOTH),
    "top_logprobs": Refused(_CHAT_ONLY, (0,)),
    "prompt_logprobs": Refused(_BOTH),
    "return_kv_stats": Refused(_BOTH),
    "return_token_ids": Refused(_BOTH),
    "reasoning_effort": Refused("use reasoning.effort"),
    "text.verbosity": Refused("ask for it in the instructions", ("medium",)),
}


def refuse_unsupported(body: BaseModel, fields: Mapping[str, Refused]) -> None:
    """Refuse a request that uses one of `fields`.

    Args:
        body: the request; its fields outside the schema count too.
        fields: fields by name; a dot leads into an object.

    Raises:
        ApiError: it does; the message names the field, its value and what to use instead.
    """
    for name, refused in fields.items():
        value: Any = body
        for part in name.split("."):
            value = getattr(value, part, None)
        neutral = ([], "", *refused.neutral)
        if refused.equal is not None:
            neutral += (getattr(body, refused.equal, None),)
        if value is None or value is False or value in neutral:  # 0 is not False here
            continue
        # Piece by piece, as a list may have millions of members.
        pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
        text = "".join(itertools.islice(pieces, _LONGEST_SHOWN + 1))
        if len(text) > _LONGEST_SHOWN:
            text = f"{text[:_LONGEST_SHOWN]}..."
        raise bad_request(name, f"{name}={text} is not supported: {refused.advice}")
