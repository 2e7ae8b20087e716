"""Streamed text, whole text and the tokenizer's own text agree, whatever the tokens."""

import random
import time

import pytest

from tests.sampling.tokenizers_for_tests import (
    FORMS,
    decode,
    encode,
    make_tokenizer,
    random_text,
)
from zipage.engine.detokenizer import IncrementalDetokenizer, decode_final, token_text
from zipage.engine.stop_strings import StopStringMatcher
from zipage.sampling_params import SamplingParams

ONE_PASS = ["byte_level", "llama", "gemma", "metaspace", "zipage_tiny"]


def stream(form, prompt, token_ids, params=None, picks=None, **options):
    """Chunks of a detokeniser fed token by token, or in random groups."""
    detokenizer = IncrementalDetokenizer(
        make_tokenizer(form), prompt, params or SamplingParams(), **options
    )
    chunks, start = [], 0
    while start < len(token_ids):
        size = picks.randint(0, 5) if picks else 1
        chunks.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    chunks.append(detokenizer.finish())
    assert "".join(chunks) == detokenizer.text
    return chunks


def whole(form, prompt, token_ids, params=None, **options):
    return decode_final(
        make_tokenizer(form), prompt, token_ids, params or SamplingParams(), **options
    )


@pytest.mark.parametrize("form", FORMS)
def test_text_is_what_the_tokens_add_to_the_prompt(form):
    picks = random.Random(form)
    for _ in range(200):
        token_ids = encode(form, random_text(picks))
        cut = picks.randrange(len(token_ids))
        prompt, output = token_ids[:cut], token_ids[cut:]
        if decode(form, prompt).endswith("\ufffd"):
            continue
        expected = decode(form, token_ids)[len(decode(form, prompt)) :]
        assert decode(form, token_ids).startswith(decode(form, prompt))
        assert whole(form, prompt, output) == expected
        assert "".join(stream(form, prompt, output)) == expected
        assert "".join(stream(form, prompt, output, picks=picks)) == expected


@pytest.mark.parametrize("form", FORMS)
def test_text_without_a_prompt_is_the_decoded_text(form):
    picks = random.Random(form)
    bos = make_tokenizer(form).convert_tokens_to_ids("<|im_start|>" if "tiny" in form else "<s>")
    for _ in range(50):
        token_ids = encode(form, random_text(picks, 8))
        expected = decode(form, token_ids)
        for prompt in ([], [bos], [bos, bos]):
            assert whole(form, prompt, token_ids) == expected
            assert "".join(stream(form, prompt, token_ids)) == expected


def test_a_first_word_keeps_its_space_after_a_prompt():
    for form in ("byte_level", "llama", "gemma", "metaspace"):
        prompt, token_ids = encode(form, "think"), encode(form, "think step by step")
        assert token_ids[: len(prompt)] == prompt
        assert whole(form, prompt, token_ids[len(prompt) :]) == " step by step"


@pytest.mark.parametrize("form", FORMS)
def test_any_tokens_stream_to_the_whole_text(form):
    """Random token ids: broken characters, special tokens, ids beyond the vocabulary."""
    tokenizer = make_tokenizer(form)
    picks = random.Random(form)
    for _ in range(200):
        ids = [*range(len(tokenizer)), len(tokenizer) + 5]
        prompt, token_ids = picks.choices(ids, k=picks.randint(0, 4)), picks.choices(ids, k=25)
        params = SamplingParams(skip_special_tokens=picks.random() < 0.5)
        final = whole(form, prompt, token_ids, params)
        assert "".join(stream(form, prompt, token_ids, params)) == final
        assert "".join(stream(form, prompt, token_ids, params, picks)) == final
        if form in ("byte_level", "word_piece") and prompt:
            before = decode(form, prompt, params.skip_special_tokens)
            everything = decode(form, prompt + token_ids, params.skip_special_tokens)
            if before and not before.endswith("\ufffd"):
                assert before + final == everything


@pytest.mark.parametrize("form", ["byte_level", "byte_level_unusual", "llama", "gemma"])
def test_characters_are_never_broken(form):
    picks = random.Random(form)
    for _ in range(50):
        text = random_text(picks).replace("\ufffd", "")
        token_ids = encode(form, text)
        chunks = stream(form, [], token_ids)
        assert not any("\ufffd" in chunk for chunk in chunks)
        if form == "byte_level_unusual":  # decoded in windows: a token may be held as a whole
            continue
        # A character comes out with its last token, not later. The library gives up a whole run
        # of byte tokens when its end is incomplete, so its text may be behind.
        emitted = ""
        for number, chunk in enumerate(chunks[:-1], start=1):
            emitted += chunk
            complete = decode(form, token_ids[:number]).rstrip("\ufffd")
            assert emitted.startswith(complete)
            assert form != "byte_level" or emitted == complete


@pytest.mark.parametrize("form", ["byte_level", "byte_level_unusual", "llama", "gemma"])
def test_an_incomplete_end_becomes_one_replacement_character(form):
    token_ids = encode(form, "a🙂")
    for missing in (1, 2, 3):
        cut = token_ids[:-missing]
        detokenizer = IncrementalDetokenizer(make_tokenizer(form), [], SamplingParams())
        assert detokenizer.push(cut) == "a"
        rest = detokenizer.finish()
        assert set(rest) <= {"\ufffd"}
        assert whole(form, [], cut) == "a" + rest
    if form != "byte_level_unusual":
        assert whole(form, [], token_ids[:-1]) == "a\ufffd"


@pytest.mark.parametrize("form", ["byte_level", "byte_level_unusual", "gemma"])
def test_a_character_begun_by_the_prompt_is_completed(form):
    token_ids = encode(form, "x你")
    for cut in range(2, len(token_ids)):
        assert whole(form, token_ids[:cut], token_ids[cut:]) == "你"
        assert whole(form, token_ids[:cut], encode(form, "y")) == "y"
        assert whole(form, token_ids[:cut], []) == ""


def test_a_text_that_starts_with_bytes():
    space, *byte_tokens = encode("llama", "你")
    assert len(byte_tokens) == 3
    assert whole("llama", [], byte_tokens) == "你"
    assert whole("llama", [], [space, *byte_tokens]) == "你"
    assert whole("llama", [space], byte_tokens) == "你"


def test_valid_characters_next_to_a_broken_byte_survive():
    token_ids = encode("gemma", "你好")
    broken = token_ids + encode("gemma", "你")[:1] + encode("gemma", " a")
    assert whole("gemma", [], broken) == "你好\ufffd a"
    assert "".join(stream("gemma", [], broken)) == "你好\ufffd a"


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens(form):
    tokenizer = make_tokenizer(form)
    eos = tokenizer.eos_token_id
    word = encode(form, "42")
    thought = tokenizer.convert_tokens_to_ids("</think>")
    shown = SamplingParams(skip_special_tokens=False)
    base = decode(form, word)
    assert whole(form, [], [*word, eos, eos]) == base
    assert tokenizer.eos_token in whole(form, [], [*word, eos], shown)
    assert "</think>" in whole(form, [], [*word, thought])
    # Thousands of skipped tokens, as benchmarks make with ignore_eos, cost nothing.
    assert "".join(stream(form, [], word + [eos] * 5000)) == base


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_end_the_output_are_not_text(form):
    tokenizer = make_tokenizer(form)
    eos, word, end = tokenizer.eos_token_id, encode(form, "42"), encode(form, "7")[-1:]
    shown = {"skip_special_tokens": False}
    base = decode(form, word)
    for params, visible in [
        (SamplingParams(**shown), False),
        (SamplingParams(**shown, include_stop_str_in_output=True), True),
        (SamplingParams(**shown, ignore_eos=True), True),
        (SamplingParams(**shown, ignore_eos=True, stop_token_ids=[eos]), False),
        (SamplingParams(), False),
        (SamplingParams(include_stop_str_in_output=True), False),
    ]:
        text = whole(form, [], [*word, eos], params, eos_token_ids=(eos,))
        assert (text != base) == visible, params
        chunks = stream(form, [], [*word, eos], params, eos_token_ids=(eos,))
        assert "".join(chunks) == text
    stop = SamplingParams(stop_token_ids=end)
    assert whole(form, [], word + end, stop) == base
    assert whole(form, [], word + end, SamplingParams()) != base


# ---------------------------------------------------------------------- stop strings


def first_stop(text, stops):
    """Where the first stop string to be completed starts and ends, the longest on ties."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return len(text), len(text), None


def longest_prefix_at_end(text, stops):
    """Length of the longest end of the text that is a proper beginning of a stop string."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("metaspace", "word_piece")])
def test_stop_strings_at_every_boundary(form):
    picks = random.Random(form)
    for _ in range(60):
        token_ids = encode(form, random_text(picks, 12))
        text = whole(form, [], token_ids)
        start = picks.randrange(len(text))
        stops = [text[start : start + picks.randint(1, 7)]]
        if picks.random() < 0.7:
            other = picks.randrange(len(text))
            stops += [text[other : other + 3] + picks.choice(["", "#"]), "END", text[start:]]
        include = picks.random() < 0.3
        params = SamplingParams(stop=stops, include_stop_str_in_output=include)
        begin, end, stop = first_stop(text, stops)
        expected = text[: end if include else begin]
        for groups in (None, picks):
            assert "".join(stream(form, [], token_ids, params, groups)) == expected
        assert whole(form, [], token_ids, params) == expected

        detokenizer = IncrementalDetokenizer(make_tokenizer(form), [], params)
        free = IncrementalDetokenizer(make_tokenizer(form), [], SamplingParams())
        taken = 0
        for token_id in token_ids:
            detokenizer.push([token_id])
            free.push([token_id])
            taken += 1
            if detokenizer.stopped is not None:
                assert detokenizer.stopped == stop
                assert detokenizer.text == expected
                assert detokenizer.num_tokens == taken
                break
            # Held back is exactly what may still become a stop string.
            held = longest_prefix_at_end(free.text, stops)
            assert detokenizer.text == free.text[: len(free.text) - held]
        if stop is not None and detokenizer.stopped is None:
            # The stop string ends within a character that only the end of the request settles.
            assert detokenizer.finish() is not None
            assert detokenizer.stopped == stop
        grouped = IncrementalDetokenizer(make_tokenizer(form), [], params)
        grouped.push(token_ids)
        assert grouped.num_tokens == taken
        assert grouped.push(token_ids) == "" or grouped.stopped is None


def test_stop_string_across_many_tokens_with_a_false_start():
    token_ids = encode("byte_level", "aab aabaac the end")
    params = SamplingParams(stop=["aabaac"])
    assert whole("byte_level", [], token_ids, params) == "aab "
    unfinished = encode("byte_level", "x aabaa")
    detokenizer = IncrementalDetokenizer(make_tokenizer("byte_level"), [], params)
    assert detokenizer.push(unfinished) == "x "
    assert detokenizer.finish() == "aabaa"
    assert detokenizer.stopped is None


def test_stop_strings_are_not_sought_in_the_prompt():
    prompt, token_ids = encode("byte_level", "say EN"), encode("byte_level", "D not END x")
    params = SamplingParams(stop="END")
    assert whole("byte_level", prompt, token_ids, params) == "D not "


@pytest.mark.parametrize("min_tokens", range(12))
def test_stop_strings_wait_for_min_tokens(min_tokens):
    """A stop string counts if its last character comes from a token after the first min_tokens."""
    token_ids = encode("byte_level", "x##x##y##z##")
    texts = [decode("byte_level", token_ids[: n + 1]) for n in range(len(token_ids))]
    before = texts[min_tokens - 1] if 0 < min_tokens <= len(texts) else ""
    text = texts[-1]
    ends = [i + 2 for i in range(len(text)) if text.startswith("##", i) and i + 2 > len(before)]
    expected = text[: ends[0] - 2] if ends and min_tokens < len(token_ids) else text
    params = SamplingParams(stop="##", min_tokens=min_tokens)
    assert whole("byte_level", [], token_ids, params) == expected
    assert "".join(stream("byte_level", [], token_ids, params)) == expected


def test_matcher_against_brute_force():
    picks = random.Random(0)
    for _ in range(3000):
        stops = ["".join(picks.choices("ab", k=picks.randint(1, 5))) for _ in range(3)]
        text = "".join(picks.choices("abc", k=15))
        matcher = StopStringMatcher(stops)
        begin, _, stop = first_stop(text, stops)
        emitted, start = "", 0
        while start < len(text) and matcher.matched is None:
            size = picks.randint(1, 4)
            emitted += matcher.push(text[start : start + size])
            start += size
            if matcher.matched is None:
                seen = text[:start]
                assert emitted == seen[: len(seen) - longest_prefix_at_end(seen, stops)]
        assert matcher.matched == stop
        assert emitted + ("" if stop else matcher.release()) == text[:begin]


def test_matcher_ignores_what_may_not_stop():
    matcher = StopStringMatcher(["ab", "b"])
    assert matcher.push("xab", may_stop=False) == "xab"
    assert matcher.push("b") == ""
    assert matcher.matched == "b"
    matcher = StopStringMatcher(["aba"])
    assert matcher.push("xaba", may_stop=False) == "xab"
    assert matcher.push("ba") == ""
    assert matcher.matched == "aba"


# ---------------------------------------------------------------------- single tokens and speed


@pytest.mark.parametrize("form", ONE_PASS)
def test_token_texts_join_to_the_text(form):
    token_ids = encode(form, " the answer is 42")
    text = "".join(token_text(make_tokenizer(form), token_id) for token_id in token_ids)
    assert text.lstrip() == decode(form, token_ids).lstrip()


def test_token_text_of_parts_and_specials():
    tokenizer = make_tokenizer("byte_level")
    first, *_ = encode("byte_level", "🙂")
    assert token_text(tokenizer, first) == "\ufffd"
    assert token_text(tokenizer, tokenizer.eos_token_id) == "</s>"
    assert token_text(make_tokenizer("word_piece"), encode("word_piece", "the")[0]) == "the"


@pytest.mark.parametrize("form", FORMS)
def test_cost_per_token(form):
    """Well under what a step of the smallest model takes; a long text costs no more per token."""
    picks = random.Random(0)
    token_ids = encode(form, "".join(random_text(picks) for _ in range(200)))
    params = SamplingParams(stop=["no such text", "never"])
    detokenizer = IncrementalDetokenizer(make_tokenizer(form), [], params)
    best = float("inf")
    for start in range(0, len(token_ids) - 200, 200):
        part = [[token_id] for token_id in token_ids[start : start + 200]]
        began = time.perf_counter()
        for one in part:
            detokenizer.push(one)
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 40e-6
