"""Messages reach the chat template: without content, with reasoning alone, in roles of its own."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import CHAT, SUM, Client, listening
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from tests.server.test_chat import TOOLS
from zipage.tokenizer import render_chat

URL, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CALLS = "{% for c in m['tool_calls'] or [] %}CALL {{ c['function']['name'] }};{% endfor %}"
_TEXT = "[{{ m['role'] }}]"
#: Takes a content for a text: joins it, writes it, or goes through it.
JOINS = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}" + _CALLS
WRITES = "{% for m in messages %}" + _TEXT + "{{ m['content'] | trim }}" + _CALLS
LOOPS = "{% for m in messages %}" + _TEXT + "{% for x in m.content %}{{ x }}{% endfor %}" + _CALLS
#: Has a form of its own for messages without content, as the template of DeepSeek-R1-Distill has.
TESTS = (
    f"\n  {{% for m in messages %}}{_TEXT}{{% if m['content'] is none %}}none;{_CALLS}"
    "{% else %}{{ m['content'] }}{% endif %}"
)
ASKS = (
    f"{{% for m in messages %}}{_TEXT}{{% if m.content is defined and m.content is not none %}}"
    f"{{{{ m.content }}}}{{% endif %}}{_CALLS}"
)
TEMPLATES = {"joins": JOINS, "writes": WRITES, "loops": LOOPS, "tests": TESTS, "asks": ASKS}


@pytest.mark.parametrize("question", ["Which?", "None?"])
@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_a_content_that_is_none(kind: str, question: str) -> None:
    tokenizer = tiny_tokenizer(TEMPLATES[kind] + "{% endfor %}{{ messages | length }}")
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "So"},
    ]
    before, none = ("\n", "none;") if kind == "tests" else ("", "")
    begun = f"{before}[user]{question}[assistant]{none}CALL f;[tool]4[assistant]So"
    assert render_chat(tokenizer, messages, False) == begun + "4"
    assert render_chat(tokenizer, messages, False, continue_final_message=True) == begun
    del messages[1]["content"]
    assert render_chat(tokenizer, messages, False) == begun + "4"


@pytest.mark.parametrize("text", ["m.content", "'' + m.content"], ids=["writes", "joins"])
def test_contents_that_are_none_in_two_ways(text: str) -> None:
    template = f"{{% for m in messages %}}{_TEXT}{{% if m.tool_calls %}}{_CALLS}{{% if m.content "
    template += (
        f"is none %}}none{{% endif %}}{{% else %}}{{{{ {text} }}}}{{% endif %}}{{% endfor %}}"
    )
    messages = [
        {"role": "user", "content": "None?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    found = render_chat(tiny_tokenizer(template), messages, False)
    assert found == "[user]None?[assistant][assistant]CALL f;none"


def test_conversations_of_texts_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a template that takes None costs a copy of all messages for each of them."""
    tokenizer = tiny_tokenizer()
    render, given = tokenizer.apply_chat_template, []

    def count(*arguments: Any, **options: Any) -> Any:
        given.append(options)
        return render(*arguments, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    assert SUM in render_chat(tokenizer, CHAT)
    assert given == [{"tokenize": False, "add_generation_prompt": True}]


def test_a_template_that_refuses_is_still_heard() -> None:
    tokenizer = tiny_tokenizer("{{ raise_exception('no tools here') }}")
    client = Client(ScriptedEngine(["a"], tokenizer))
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert "no tools here" in client.error(URL, {"messages": messages})["message"]


@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_a_call_is_sent_back(kind: str) -> None:
    """OpenAI's loop: the message with the call goes back as it came, with the tool's result."""
    tokenizer = tiny_tokenizer(TEMPLATES[kind] + "{% endfor %}")
    engine = ScriptedEngine(['{"city": ', '"Rome"}'], tokenizer)
    named = {"type": "function", "function": {"name": "get_weather"}}
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with listening(engine, reasoning_parser="none") as (url, _):
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chat: Any = sdk.chat.completions
        asked = chat.create(model="", messages=messages, tools=TOOLS, tool_choice=named)
        message = asked.choices[0].message
        (call,) = message.tool_calls
        assert message.content is None
        engine.pieces = ["Sunny"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        for sent in (message, message.model_dump()):
            answer = chat.create(model="", messages=[*messages, sent, result])
            assert answer.choices[0].message.content == "Sunny"
            assert engine.texts[-1].count("CALL get_weather;") == 1
            assert "None" not in engine.texts[-1] and engine.texts[-1].endswith("[tool]sunny")


def test_reasoning_without_content() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    engine = ScriptedEngine(["ok"], tiny_tokenizer(template + "{% endfor %}"))
    client = Client(engine)
    for field in ("reasoning_content", "reasoning"):
        thought = {"role": "assistant", "content": None, field: "hm"}
        client.ok(URL, {"messages": [*CHAT, thought, *CHAT]})
        assert engine.texts[-1] == f"[user]{SUM}[assistant]hm[user]{SUM}"
    for message in ({**thought, "role": "user"}, {**thought, field: ""}):
        error = client.error(URL, {"messages": [*CHAT, message]})
        assert error["message"].startswith("messages.1 has no content"), error
    # Reasoning of a response that was cut stays where it was.
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for items, text in [
        ([user, item, said], "[user]a[assistant]hmb"),
        ([user, item, user, said], "[user]a[assistant]hm[user]a[assistant]b"),
        ([user, item], "[user]a[assistant]hm"),
    ]:
        client.ok(RESPONSES, {"input": items})
        assert engine.texts[-1] == text


def test_roles() -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% if m.role == 'ipython' %}!"
    template += "{% endif %}{% endfor %}"
    client = Client(engine := ScriptedEngine(["ok"], tiny_tokenizer(template)))
    for role in ("system", "developer", "user", "assistant", "tool", "ipython"):
        client.ok(URL, {"messages": [{"role": role, "content": "a"}]})
        client.ok(RESPONSES, {"input": [{"role": role, "content": "a"}]})
    assert engine.texts[-1] == "ipythona!"
    plain = Client(ScriptedEngine(["ok"], tiny_tokenizer()), trust_chat_templates=True)
    for role in ("ipython", "User", "wizard", ""):
        message = {"role": role, "content": "a"}
        for path, name in ((URL, "messages"), ("/tokenize", "messages"), (RESPONSES, "input")):
            error = plain.error(path, {name: [*CHAT, message]})
            assert error["param"] == f"{name}.1.role" and repr(role) in error["message"]
            assert "system, developer, user, assistant, tool" in error["message"]
    ipython = [{"role": "ipython", "content": "a"}]
    plain.ok(URL, {"messages": ipython, "chat_template": template})


def test_documents() -> None:
    template = "{% for d in documents or [] %}<{{ d.text }}>{% endfor %}{{ messages[0].content }}"
    client = Client(engine := ScriptedEngine(["ok"], tiny_tokenizer(template)))
    body = {"messages": [{"role": "user", "content": "a"}]}
    for documents, text in (([{"title": "t", "text": "b"}], "<b>a"), (None, "a"), ([], "a")):
        client.ok(URL, {**body, "documents": documents})
        assert engine.texts[-1] == text
    assert client.error(URL, {**body, "documents": ["b"]})["param"] == "documents.0"


def test_empty_instructions_are_none() -> None:
    client = Client(engine := ScriptedEngine(["ok"], tiny_tokenizer()))
    for instructions in ("", None):
        answer = client.ok(RESPONSES, {"input": "a", "instructions": instructions})
        assert answer["instructions"] == instructions
    assert engine.texts[0] == engine.texts[1] and "system" not in (engine.texts[0] or "")
