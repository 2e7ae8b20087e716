"""Turns what clients send into token ids."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zipage.errors import RequestError, shown
from zipage.sampling_params import SamplingParams
from zipage.server.errors import bad_request
from zipage.server.protocol.chat import ChatTemplateFields, Message
from zipage.server.protocol.sampling import SamplingFields
from zipage.server.reasoning import prompt_opens_reasoning
from zipage.server.serving import NO_TOKENIZER, Serving
from zipage.server.structured import RequestedForm
from zipage.tokenizer import render_chat

#: Roles that every model gets, developer as system.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class TextPrompt:
    """A prompt of /v1/completions; `text` is None for one that came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        text: the rendered text.
        token_ids: its tokens.
        opens_reasoning: see `prompt_opens_reasoning`.
    """

    text: str
    token_ids: list[int]
    opens_reasoning: bool | None


async def text_prompts(
    serving: Serving,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    add_special_tokens: bool | None,
) -> list[TextPrompt]:
    """The prompts of a request for completions.

    Raises:
        ApiError: there is no prompt, one is empty, or there are too many.
    """
    if len(prompt) == 0 and not isinstance(prompt, str):
        raise bad_request("prompt", "prompt is an empty list: give at least one prompt")
    given: Any = prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        given = [prompt]
    most = serving.settings.max_prompts
    if len(given) > most:
        raise bad_request("prompt", f"prompt has {len(given)} prompts, at most {most} are taken")
    texts = [text for text in given if isinstance(text, str)]
    encoded = [list(ids) for ids in given if not isinstance(ids, str)]
    if texts:
        special = add_special_tokens is not False

        def encode(tokenizer: Any) -> list[list[int]]:
            return [serving.encode(tokenizer, text, special, "prompt") for text in texts]

        try:
            encoded = await serving.tokenizing(sum(map(len, texts)), encode)
        except RequestError as error:
            raise bad_request("prompt", str(error)) from None
    prompts = []
    for index, token_ids in enumerate(encoded):
        if not token_ids:
            raise bad_request("prompt", "a prompt is empty: at least one token is needed")
        last = serving.engine.vocab_size - 1
        if min(token_ids) < 0 or max(token_ids) > last:
            outside = next(token_id for token_id in token_ids if not 0 <= token_id <= last)
            raise bad_request("prompt", f"token id {outside} is not in the vocabulary, 0 to {last}")
        prompts.append(TextPrompt(texts[index] if texts else None, token_ids))
    return prompts


def chat_sampling(
    serving: Serving,
    prompt: ChatPrompt,
    body: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    *,
    forms: Mapping[str, RequestedForm | None],
) -> tuple[SamplingParams, RequestedForm | None]:
    """`Serving.sampling` for an answer that may reason before its structured part.

    A model that can reason is assumed to do so unless the prompt closed its reasoning. Then all
    text before the structured part is reasoning, whether or not the model opens it with its tag:
    `prompt.opens_reasoning` is set.
    """
    may_reason = serving.reasons and prompt.opens_reasoning is not False
    params, form = serving.sampling(
        body, max_tokens, logprobs, prompt_logprobs, forms=forms, may_reason=may_reason
    )
    if form is not None and may_reason:
        prompt.opens_reasoning = True
    return params, form


async def chat_prompt(
    serving: Serving,
    body: ChatTemplateFields,
    tools: list[dict[str, Any]] | None,
    param: str = "messages",
) -> ChatPrompt:
    """The prompt that the model's chat template makes of a conversation.

    Args:
        serving: the server.
        body: the conversation and how to render it.
        tools: functions the template may describe.
        param: the request's field with the conversation.

    Raises:
        ApiError: the conversation is malformed, or the template refuses it.
    """
    if serving.tokenizer is None:
        raise bad_request(param, NO_TOKENIZER)
    if not body.messages:
        raise bad_request(param, f"{param} is an empty list: there is nothing to answer")
    continues = body.continue_final_message or False
    if continues and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
        )
    opens = body.add_generation_prompt is not False and not continues
    options = dict(body.chat_template_kwargs or {})
    taken = inspect.signature(serving.tokenizer.apply_chat_template).parameters
    for name in options:
        if name in taken or name in ("messages", "tokenizer"):
            message = f"chat_template_kwargs may not have {name!r}: it is not a template variable"
            raise bad_request("chat_template_kwargs", message)
    template = serving.chat_template
    if body.chat_template is not None:
        # A template is a program; one that never ends would block the tokenizer for everybody.
        if not serving.settings.trust_chat_templates:
            message = "chat_template is only accepted by servers with --trust-chat-templates"
            raise bad_request("chat_template", message)
        template = body.chat_template
    for index, given in enumerate(body.messages):
        check_role(serving, given.role, f"messages.{index}.role", template)
    if template is not None:
        options.setdefault("chat_template", template)
    if body.documents:
        options.setdefault("documents", body.documents)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if continues:
        options.setdefault("continue_final_message", True)
    if tools:
        options.setdefault("tools", tools)

    def render(tokenizer: Any) -> ChatPrompt:
        messages = [_for_template(message, index) for index, message in enumerate(body.messages)]
        text = render_chat(tokenizer, messages, opens, **options)
        special = body.add_special_tokens or False
        continued = str(messages[-1].get("content") or "") if continues else None
        return ChatPrompt(
            text,
            serving.encode(tokenizer, text, special, param),
            prompt_opens_reasoning(text, continued) if opens or continues else None,
        )

    try:
        described = [*(tools or ()), *(body.documents or ())]
        size = sum(map(_size, body.messages)) + sum(len(str(part)) for part in described)
        return await serving.tokenizing(size, render)
    except RequestError as error:
        # The API's name of a message is that of the errors about its fields.
        told = re.sub(r"^messages\[(\d+)\]", r"messages.\1", str(error))
        raise bad_request(param, told) from None


def check_role(serving: Serving, role: str, param: str, template: str | None = None) -> None:
    """Refuse a role that neither the API nor the model's chat template knows.

    Args:
        serving: the server.
        role: a message's role.
        param: the field that gives it.
        template: the template in place of the model's.

    Raises:
        ApiError: templates would write it into the prompt without a word.
    """
    if role in ROLES:
        return
    found = template or serving.chat_template or getattr(serving.tokenizer, "chat_template", None)
    texts = found.values() if isinstance(found, dict) else [found or ""]
    if not any(f"{quote}{role}{quote}" in text for text in texts for quote in "'\""):
        legal = ", ".join(ROLES)
        raise bad_request(param, f"{param}={shown(role)} is not legal: must be one of {legal}")


def _size(message: Message) -> int:
    """Approximate size of a message in characters, with 50 for each message and part."""
    if not isinstance(message.content, list):
        return 50 + len(message.content or "")
    return 50 + sum(50 + len(part.text or "") for part in message.content)


def _for_template(message: Message, index: int) -> dict[str, Any]:
    """A message in the format that templates expect."""
    fields = message.model_dump(exclude_none=True)
    # Templates handle the system role; few know its newer name.
    if message.role == "developer":
        fields["role"] = "system"
    if isinstance(message.content, list):
        for position, part in enumerate(message.content):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise bad_request(
                    f"messages.{index}.content",
                    f"messages.{index}.content.{position} is of type {part.type!r}"
                    + (" and has none" if part.type.endswith("text") else "")
                    + ": only text is supported",
                )
        fields["content"] = "".join(part.text or "" for part in message.content)
    if "reasoning" in fields:
        fields.setdefault("reasoning_content", fields["reasoning"])
    # Templates serialise arguments to JSON themselves.
    for call in fields.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return fields
