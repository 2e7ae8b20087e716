"""Reasoning is told from the answer, however the text is cut."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from zipage import CompletionOutput
from zipage.server.answer import reasoning_counter
from zipage.server.reasoning import ReasoningSplitter, prompt_opens_reasoning, uses_think_tags

CASES = [
    # text, opened by the prompt, reasoning, answer
    ("a b\nc</think>\n\nok", True, "a b\nc", "ok"),
    ("<think>\na</think>b", None, "a", "b"),
    (" \n<think>a <b </thin </think> b", None, "a <b </thin", "b"),
    ("<think>a</think>b", True, "a", "b"),
    ("no tags <th", None, "", "no tags <th"),
    ("  <thin", None, "", "  <thin"),
    ("x</think>y", None, "", "x</think>y"),
    ("x</think>y", False, "", "x</think>y"),
    ("<think>x", False, "", "<think>x"),
    ("never ends </thi", True, "never ends </thi", ""),
    ("  <thi", True, "<thi", ""),
    ("a</think>", True, "a", ""),
    ("</think> b", True, "", "b"),
    ("a</think>b</think>c<think>d", True, "a", "b</think>c<think>d"),
    ("", True, "", ""),
    ("", None, "", ""),
]


def run(pieces: list[str], opened: bool | None) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


@pytest.mark.parametrize(("text", "opened", "reasoning", "answer"), CASES)
def test_every_cut_in_three(text: str, opened: bool | None, reasoning: str, answer: str) -> None:
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert run([text[:i], text[i:j], text[j:]], opened) == (reasoning, answer), (i, j)
    assert run(list(text), opened) == (reasoning, answer)


def test_nothing_certain_is_held_back() -> None:
    splitter = ReasoningSplitter(True)
    assert splitter.push("one two") == ("one two", "")
    assert splitter.push(" <") == ("", "")
    assert splitter.push("b") == (" <b", "")
    assert splitter.push(" </think> yes") == ("", "yes")
    assert splitter.push(" <") == ("", " <")


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n") is True
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert prompt_opens_reasoning("what is <think>?<|im_start|>assistant\n") is None
    assert prompt_opens_reasoning("...", continued="<think>so far") is True
    assert prompt_opens_reasoning("...", continued="<think>a</think>b") is False
    assert prompt_opens_reasoning("<think>", continued="plain") is False
    assert prompt_opens_reasoning("<think>\n", continued="") is True


def test_auto_goes_by_the_template() -> None:
    assert uses_think_tags("... <think> ...", None)
    assert not uses_think_tags("plain", None)


@pytest.mark.parametrize(
    ("opened", "text", "token_ids", "count"),
    [
        (None, "<think>a</think>b", [3, 7, 4, 8], 3),
        (None, "\n<think>a", [9, 3, 7], 3),
        (None, "a</think>b", [7, 4, 8], 0),
        (None, "ab", [7, 8], 0),
        (True, "a</think>b", [7, 4, 8], 2),
        (True, "<think>a", [3, 7], 2),
        (False, "a</think>b", [7, 4, 8], 0),
    ],
)
def test_what_is_counted_is_what_is_split_off(
    opened: bool | None, text: str, token_ids: list[int], count: int
) -> None:
    assert (count > 0) == bool(run([text], opened)[0])
    serving: Any = SimpleNamespace(think_end=4)
    counter = reasoning_counter(serving, opened)
    assert counter is not None
    assert counter(CompletionOutput(index=0, text=text, token_ids=token_ids)) == count
