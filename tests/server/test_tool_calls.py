"""Tool calls are found, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest

from zipage.server.chat import joined_calls
from zipage.server.tool_calls import (
    HermesParser,
    JsonCallsParser,
    NamedCallParser,
    Piece,
    ToolCallDelta,
    ToolCallParser,
    call_style,
)

NAMES = ("f", "get_weather")
CALL = '{"name": "f", "arguments": {"a": "}<{\\"", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}<{\\"", "b": [1, {"c": null}]}'


def hermes(streaming: bool, most: int | None = None) -> ToolCallParser:
    return HermesParser(NAMES, streaming, most)


def llama(streaming: bool, most: int | None = None) -> ToolCallParser:
    return JsonCallsParser(NAMES, streaming, most)


def required(streaming: bool, most: int | None = None) -> ToolCallParser:
    return JsonCallsParser(NAMES, streaming, most, "[", ",", "]")


def run(parser: ToolCallParser, pieces: list[str], truncated: bool = False) -> tuple[str, list]:
    content, deltas = "", []
    for piece in [*(parser.push(p) for p in pieces), parser.finish(truncated)]:
        content += piece.content
        deltas += piece.tool_calls
    for delta in deltas:
        assert (delta.id is None) == (delta.name is None)
    return content, [(c.index, c.name, c.arguments) for c in joined_calls(deltas)]


NOT_A_TOOL = '<tool_call>{"name": "g", "arguments": {}}'
NO_OBJECT = '<tool_call>{"name": "f", "arguments": 5}x'
IN_STRING = '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>'
TWO = f'{CALL}; {{"name":"get_weather","parameters":{{"y":2}}}}'

CASES: list[tuple[Callable[..., ToolCallParser], str, str, list]] = [
    (hermes, f"<tool_call>\n{CALL}\n</tool_call>", "", [(0, "f", ARGUMENTS)]),
    (hermes, f"Look. \n<tool_call>{CALL}</tool_call>\n", "Look.", [(0, "f", ARGUMENTS)]),
    (
        hermes,
        f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"arguments":{{}},"name":"get_weather"}}',
        "",
        [(0, "f", ARGUMENTS), (1, "get_weather", "{}")],
    ),
    (hermes, '<tool_call>{"name":"f"}</tool_call>', "", [(0, "f", "{}")]),
    (hermes, IN_STRING, "", [(0, "f", '{"a":1}')]),
    (hermes, "no call, only <tool_cal", "no call, only <tool_cal", []),
    (hermes, " <tool_call>oops</tool_call> x", " <tool_call>oops</tool_call> x", []),
    (hermes, '<tool_call>{"nome": "f"}</tool_call>', '<tool_call>{"nome": "f"}</tool_call>', []),
    (hermes, NOT_A_TOOL, NOT_A_TOOL, []),
    (hermes, '<tool_call>{"name": "f", ', '<tool_call>{"name": "f", ', []),
    (hermes, NO_OBJECT, NO_OBJECT, []),
    (hermes, '<tool_call>{"name":3}', '<tool_call>{"name":3}', []),
    (hermes, f"<tool_call>{CALL}</tool_call>after", "after", [(0, "f", ARGUMENTS)]),
    (hermes, f"<tool_call>bad<tool_call>{CALL}", "<tool_call>bad", [(0, "f", ARGUMENTS)]),
    (llama, '{"name": "f", "parameters": {"x": 1}}', "", [(0, "f", '{"x": 1}')]),
    (llama, '<|python_tag|> {"name": "f", "parameters": {}}', "", [(0, "f", "{}")]),
    (llama, TWO, "", [(0, "f", ARGUMENTS), (1, "get_weather", '{"y":2}')]),
    (llama, "plain text {}", "plain text {}", []),
    (llama, '{"answer": {"name": 1}} yes', '{"answer": {"name": 1}} yes', []),
    (llama, '{"name": "Bob", "id": 3}', '{"name": "Bob", "id": 3}', []),
    (llama, "<|pyth", "<|pyth", []),
    (
        required,
        f'[{CALL}, {{"name":"f","parameters":{{}}}}]',
        "",
        [(0, "f", ARGUMENTS), (1, "f", "{}")],
    ),
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_every_cut_in_three(
    make: Callable[..., ToolCallParser], text: str, content: str, calls: list, streaming: bool
) -> None:
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        if streaming or (i, j) in ((0, 0), (3, 9)):
            pieces = [text[:i], text[i:j], text[j:]]
            assert run(make(streaming), pieces) == (content, calls), (i, j)
    assert run(make(streaming), list(text)) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = hermes(True)
    assert not parser.push('<tool_call>\n{"name": "f", ')
    first = parser.push('"arguments": {"a"')
    assert [(d.name, d.arguments) for d in first.tool_calls] == [("f", '{"a"')]
    assert first.tool_calls[0].id is not None
    assert parser.push(": 1") == Piece(tool_calls=[ToolCallDelta(0, None, None, ": 1")])
    assert parser.push("}}") == Piece(tool_calls=[ToolCallDelta(0, None, None, "}")])
    assert not parser.push("\n</tool_call>")


@pytest.mark.parametrize("make", [hermes, llama])
def test_malformed_arguments(make: Callable[..., ToolCallParser]) -> None:
    """An answer that is not streamed can take the call back; a stream has told it already."""
    call = '{"name": "f", "arguments": {"a": }}'
    text = f"<tool_call>{call}</tool_call>" if make is hermes else call
    assert run(make(False), [text]) == (text, [])
    assert run(make(True), [text]) == ("", [(0, "f", '{"a": }')])


@pytest.mark.parametrize("streaming", [True, False])
def test_a_call_cut_by_the_length_limit(streaming: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert run(hermes(streaming), [text], truncated=True) == ("", [(0, "f", '{"a": "b')])
    text = '<tool_call>{"name": "f"'
    assert run(hermes(streaming), [text], truncated=True) == (text, [])


def test_one_call_at_most() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert run(hermes(True, 1), list(text)) == ("", [(0, "f", ARGUMENTS)])
    assert run(hermes(False, 2), [text])[1] == [(0, "f", ARGUMENTS), (1, "f", ARGUMENTS)]


def test_a_named_call_is_the_text() -> None:
    content, calls = run(NamedCallParser("f"), [" ", '{"a"', ": 1}"])
    assert (content, calls) == ("", [(0, "f", '{"a": 1}')])
    assert json.loads(calls[0][2]) == {"a": 1}


def test_styles() -> None:
    assert call_style("... <tool_call> ...") == "hermes"
    assert call_style('{% for t in tools %} "parameters": dictionary') == "llama3_json"
    assert call_style("{{ messages }}") == "none"
    assert call_style(None) == "none"
