"""Conversations and prompts in the wrong form are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zipage import LLM, SamplingParams
from zipage.errors import ModelError, RequestError

MESSAGE = {"role": "user", "content": "x"}
SHORT = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_kv_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (MESSAGE, "messages must be a list .* not dict"),
        ((m for m in [MESSAGE]), "messages must be a list .* not generator"),
        (None, "messages must be a list .* not NoneType"),
        ("hello", "messages must be a list .* not str"),
        (3, "messages must be a list .* not int"),
        ([], "messages is empty"),
    ],
)
def test_messages_of_the_wrong_type(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat(messages)


@pytest.mark.parametrize("key", ["messages", "conversation", "tokenizer", "add_generation_prompt"])
def test_template_options_that_are_none(llm: LLM, key: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs has the key '{key}'"):
        llm.chat([MESSAGE], chat_template_kwargs={key: []})


@pytest.mark.parametrize(
    ("options", "words"),
    [([1], "must be a mapping, not list"), ({3: 1}, "key 3: must be a string")],
)
def test_template_options_of_the_wrong_type(llm: LLM, options: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs .*{words}"):
        llm.chat([MESSAGE], chat_template_kwargs=options)


def test_token_ids_that_are_none_are_absent(llm: LLM) -> None:
    prompt: Any = {"prompt": "x", "prompt_token_ids": None}
    expected = llm.generate("x", SHORT)[0].outputs[0].token_ids
    outputs = [*llm.generate(prompt, SHORT), *llm.generate([prompt], SHORT)]
    assert [output.outputs[0].token_ids for output in outputs] == [expected, expected]
    with pytest.raises(RequestError):
        llm.generate({"prompt_token_ids": None}, SHORT)  # type: ignore[dict-item]


def test_a_priority_for_each_conversation(llm: LLM) -> None:
    assert len(llm.chat([[MESSAGE], [MESSAGE]], SHORT, priority=[1, 0])) == 2
    with pytest.raises(RequestError, match="priority has 2 entries for 1 prompts"):
        llm.chat([MESSAGE], SHORT, priority=[1, 0])


def test_missing_tokenizer_is_named_as_such(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with (
        LLM(num_kv_blocks=64, tokenizer=missing) as llm,
        pytest.raises(ModelError, match=f"tokenizer='{missing}' is not a directory"),
    ):
        llm.generate("x", SHORT)
