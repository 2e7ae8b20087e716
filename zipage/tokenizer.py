"""Loading a tokenizer and turning prompts and chats into token ids."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zipage.errors import ModelError, RequestError
from zipage.models.import_lock import IMPORT_LOCK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Gives every message a content, None where it has none. Newer versions of transformers drop what
#: is None from messages. The line break belongs to the block (`trim_blocks`).
_WITH_CONTENT = (
    "{% set zipage = namespace(messages=[]) %}{% for message in messages %}"
    "{% set zipage.messages = zipage.messages + [dict({'content': none}, **message)] %}"
    "{% endfor %}{% set messages = zipage.messages %}\n"
)
#: A content that no message has.
_MARK = "\uf8ff\ue000\uf8ff"


def load_tokenizer(
    path_or_name: str | os.PathLike[str], revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    Args:
        path_or_name: a Hugging Face model directory, a GGUF file, or a hub id such as
            ``Qwen/Qwen3-0.6B``.
        revision: branch, tag or commit of the hub repository.

    Raises:
        ModelError: the tokenizer is missing, broken or empty.
    """
    # Importing transformers takes seconds, and `zipage --help` does not need it.
    with IMPORT_LOCK:
        from transformers import AutoTokenizer

    name = os.path.expanduser(os.fspath(path_or_name))
    is_gguf = name.lower().endswith(".gguf") and os.path.isfile(name)
    if not os.path.isdir(name) and not is_gguf and (os.path.isabs(name) or name.startswith(".")):
        raise ModelError(
            f"tokenizer={name!r} is not a directory; give a Hugging Face model directory or a hub "
            "id such as Qwen/Qwen3-0.6B"
        )
    try:
        if is_gguf:
            from zipage.models.gguf import GGUFFile

            tokenizer = GGUFFile(Path(name)).tokenizer()
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except Exception as error:  # a broken file raises whatever its parser raises
        raise ModelError(
            f"the tokenizer of model={name!r} cannot be loaded ({type(error).__name__}: "
            f"{str(error).strip()}); {_advice(name)}"
        ) from error
    # A directory without tokenizer files gives some classes a vocabulary of special tokens only.
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder):
        raise ModelError(f"the tokenizer of model={name!r} is empty; {_advice(name)}")
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True
) -> list[int]:
    """Encodes a plain prompt, with or without the special tokens the tokenizer adds by itself.

    A text that already starts with the beginning-of-sequence token does not get a second one.

    Raises:
        RequestError: `text` is not a string, or not one that UTF-8 can encode.
    """
    _check_text("prompt", text)
    token_ids = _encode(tokenizer, text, add_special_tokens)
    bos_token, bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
    if bos_token and text.startswith(bos_token) and token_ids[:2] == [bos_token_id] * 2:
        given = _encode(tokenizer, text, add_special_tokens=False)
        if token_ids[1 : 1 + len(given)] == given:
            return token_ids[1:]
    return token_ids


def apply_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **chat_template_kwargs: Any,
) -> list[int]:
    """Renders a conversation through the model's chat template and encodes it.

    The template writes all special tokens itself, so none are added. See `render_chat`.
    """
    text = render_chat(tokenizer, messages, add_generation_prompt, **chat_template_kwargs)
    return _encode(tokenizer, text, add_special_tokens=False)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **chat_template_kwargs: Any,
) -> str:
    """Renders a conversation through the model's chat template.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation, ``{"role": ..., "content": ...}`` each. A content may be a
            list of ``{"type": "text", "text": ...}`` parts, which are joined. It may be None
            beside ``tool_calls`` and, in assistant messages, beside their reasoning: the template
            gets the None it may test for, or an empty text if it treats a content as text.
        add_generation_prompt: end with the opening of the assistant's turn.
        **chat_template_kwargs: passed to the template, such as ``enable_thinking=False``;
            ``tools``, ``chat_template`` and ``continue_final_message`` have the same meaning as in
            transformers.

    Raises:
        RequestError: there is no chat template, `messages` is malformed, or the template refuses
            the conversation.
    """
    if not tokenizer.chat_template and not chat_template_kwargs.get("chat_template"):
        raise RequestError(
            "the model's tokenizer has no chat template; send a plain prompt, or pass "
            "chat_template= with a Jinja template"
        )
    for option in ("tokenize", "return_dict", "return_tensors"):
        if option in chat_template_kwargs:
            raise RequestError(f"chat template option {option!r} is not supported")
    conversation = _conversation(messages)
    options = {"add_generation_prompt": add_generation_prompt, **chat_template_kwargs}
    text: str | None = None
    kinds = _kinds_without_content(conversation)
    for nullable in ({True, False}, {False}, {True}):
        if text is None and nullable <= kinds:
            some = _filled(conversation, "", kinds - nullable)
            text = _render_none(tokenizer, some, options)
    if text is None:
        try:
            text = _render(tokenizer, _filled(conversation, ""), options)
        except Exception as error:  # a template is a program that comes with the model
            raise RequestError(
                f"the chat template refused the messages ({type(error).__name__}: {error})"
            ) from error
    _check_text("messages", text)
    return text


def _render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    options: Mapping[str, Any],
) -> str:
    # With tokenize=False the result is text in every version of transformers.
    return cast(str, tokenizer.apply_chat_template(conversation, tokenize=False, **options))


def _render_none(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[dict[str, Any]],
    options: Mapping[str, Any],
) -> str | None:
    """The text if the template can take a content that is None; None if it takes texts only."""
    try:
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        nullable = {**options, "chat_template": _WITH_CONTENT + template}
        text = _render(tokenizer, conversation, nullable)
    except Exception:  # such as `content + ...`; errors for other reasons come again with texts
        return None
    if "None" in text:
        # Without a test for None, the template writes the word where it would write a text.
        for kind in _kinds_without_content(conversation):
            try:
                marked = _render(tokenizer, _filled(conversation, _MARK, {kind}), nullable)
            except Exception:  # it refuses a text here
                continue
            if _MARK in marked and marked.replace(_MARK, "None") == text:
                return None
    return text


def _kinds_without_content(conversation: list[dict[str, Any]]) -> set[bool]:
    """Whether messages that have no content have calls: templates test for one, but not the other
    kind of message."""
    return {_has_calls(message) for message in conversation if message["content"] is None}


def _has_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _filled(
    conversation: list[dict[str, Any]], text: str, kinds: Collection[bool] = (True, False)
) -> list[dict[str, Any]]:
    """The conversation with `text` as the content of messages that have none, of some kinds."""
    return [
        {**message, "content": text}
        if message["content"] is None and _has_calls(message) in kinds
        else message
        for message in conversation
    ]


def _advice(name: str) -> str:
    if name.lower().endswith(".gguf"):
        return "give the directory or hub id of the model's tokenizer as tokenizer="
    if os.path.isdir(name):
        return "the directory needs a valid tokenizer.json (or tokenizer.model) of the model"
    return (
        "check the hub id and the network, or download the model and give its directory "
        "(with tokenizer.json)"
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    # verbose=False: the engine itself refuses prompts over the model's length.
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{name} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a lone surrogate, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}; it must be valid Unicode"
        ) from error


def _conversation(messages: object) -> list[dict[str, Any]]:
    legal = 'a list of {"role": ..., "content": ...}'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be {legal}, not {type(messages).__name__}")
    if not messages:
        raise RequestError(f"messages is empty: must be {legal} with at least one message")
    conversation: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{name} is {type(message).__name__}: messages must be {legal}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"{name} has role {message.get('role')!r}: must be a string")
        if message.get("content") is None and not _may_lack_content(message):
            raise RequestError(
                f"{name} has no content: only messages with tool_calls, and the assistant's with "
                "reasoning_content, need none"
            )
        # As newer versions of transformers do: templates test whether a field is there.
        given = {field: value for field, value in message.items() if value is not None}
        conversation.append({**given, "content": _content(name, message.get("content"))})
    return conversation


def _may_lack_content(message: Mapping[str, Any]) -> bool:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return _has_calls(message) or bool(message["role"] == "assistant" and reasoning)


def _content(name: str, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise RequestError(
            f"{name} has content of type {type(content).__name__}: must be a string or a list of "
            '{"type": "text", "text": ...}'
        )
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise RequestError(
                f'{name} has a content part {part!r}: must be {{"type": "text", "text": ...}}'
            )
        texts.append(text)
    return "".join(texts)
