"""200 texts through every kind of tokenizer, with stop strings cut at every token boundary."""

from functools import cache

import pytest

from tests.sampling.stream_texts import TEXTS
from tests.sampling.tokenizers_for_tests import FORMS, decode, encode, make_tokenizer
from zipage.engine.detokenizer import IncrementalDetokenizer, decode_final
from zipage.sampling_params import SamplingParams

LOSSLESS = ["byte_level", "byte_level_unusual", "llama", "gemma"]


def detokenizer(form, prompt=(), **options):
    return IncrementalDetokenizer(make_tokenizer(form), list(prompt), SamplingParams(**options))


def complete(form, text, token_ids):
    """The characters of `text` that these first tokens of it contain as a whole."""
    if form not in ("llama", "gemma"):
        return decode(form, token_ids).rstrip("\ufffd")
    size = sum(
        1 if token.startswith("<0x") else len(token.replace("▁", " ").encode())
        for token in make_tokenizer(form).convert_ids_to_tokens(token_ids)
    )
    if form == "llama":  # the space that it puts before every text
        size -= bool(token_ids)
    return text.encode()[:size].decode("utf-8", "ignore")


@cache
def streamed(form, index):
    """Tokens of a text, the text they stand for, and what was emitted after each of them."""
    token_ids = encode(form, TEXTS[index])
    one, emitted = detokenizer(form), [""]
    for token_id in token_ids:
        emitted.append(emitted[-1] + one.push([token_id]))
    rest = one.finish()
    return token_ids, emitted[-1] + rest, emitted


def held_back(text, stop):
    """Length of the longest end of the text that is a proper beginning of the stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


@pytest.mark.parametrize("form", FORMS)
def test_streams_add_up_to_the_text_and_are_always_valid(form):
    for index, text in enumerate(TEXTS):
        token_ids, final, emitted = streamed(form, index)
        assert final == decode(form, token_ids)
        assert final == decode_final(make_tokenizer(form), [], token_ids, SamplingParams())
        assert form not in LOSSLESS or final == text
        assert "\ufffd" not in final
        for number, now in enumerate(emitted):
            now.encode()  # no half of a surrogate pair
            assert final.startswith(now)
            expected = complete(form, text, token_ids[:number])
            if form == "byte_level_unusual":
                # Decoded in windows: a token with the beginning of a character waits for its end.
                whole = not decode(form, token_ids[:number]).endswith("\ufffd")
                assert now == expected if whole else expected.startswith(now)
            else:
                assert now == expected


@pytest.mark.parametrize("form", FORMS)
def test_stop_strings_cut_at_every_token_boundary(form):
    """Nothing of the stop string comes out; and only proper beginnings of it are held back."""
    cuts = 0
    for index in range(len(TEXTS)):
        token_ids, final, emitted = streamed(form, index)
        for number in range(1, len(token_ids)):
            middle = len(emitted[number])
            before, after = 1 + number % 3, 1 + number % 2
            stop = final[max(0, middle - before) : middle + after]
            if not stop:
                continue
            cuts += 1
            include = number % 4 == 0
            options = {"stop": [stop], "include_stop_str_in_output": include}
            begin = final.find(stop)
            expected = final[: begin + len(stop) if include else begin]
            one = detokenizer(form, **options)
            start = max(0, number - 5)
            one.push(token_ids[:start])
            for taken in range(start, len(token_ids)):
                if one.stopped is not None:
                    break
                seen = emitted[taken]
                assert one.text == seen[: len(seen) - held_back(seen, stop)]
                one.push([token_ids[taken]])
            one.finish()
            assert one.stopped == stop
            assert one.text == expected
    assert cuts > 200


@pytest.mark.parametrize("form", FORMS)
def test_stop_strings_that_never_come_are_given_back(form):
    for index in range(0, len(TEXTS), 2):
        token_ids, final, emitted = streamed(form, index)
        for number in range(1, len(token_ids), 3):
            # Its beginning ends at the boundary, and then something else follows.
            middle = len(emitted[number])
            stop = final[max(0, middle - 2) : middle] + "\x00"
            one = detokenizer(form, stop=[stop])
            for taken, token_id in enumerate(token_ids):
                seen = emitted[taken]
                assert one.text == seen[: len(seen) - held_back(seen, stop)]
                one.push([token_id])
            one.finish()
            assert one.stopped is None and one.text == final


@pytest.mark.parametrize("form", LOSSLESS)
def test_prompts_cut_at_every_token_boundary(form):
    """Also within a character: it is completed, and nothing else of the prompt leaks."""
    broken = 0
    for index, text in enumerate(TEXTS):
        token_ids, _, _ = streamed(form, index)
        for number in range(1, len(token_ids)):
            prompt, output = token_ids[:number], token_ids[number:]
            before = complete(form, text, prompt)
            broken += decode(form, prompt).endswith("\ufffd")
            one = detokenizer(form, prompt)
            chunks = [one.push([token_id]) for token_id in output]
            chunks.append(one.finish())
            assert "".join(chunks) == text[len(before) :]
            assert not any("\ufffd" in chunk for chunk in chunks)
            # The same with a stop string that begins in the prompt: it is not found there.
            stop = text[max(0, len(before) - 2) : len(before) + 1]
            if len(stop) > 1 and stop not in text[len(before) :]:
                options = SamplingParams(stop=[stop])
                assert decode_final(make_tokenizer(form), prompt, output, options) == "".join(
                    chunks
                )
    assert broken > 500
