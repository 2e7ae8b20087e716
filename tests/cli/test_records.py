"""JSONL in and out."""

import io
import json
import math

from zipage.cli.records import InputRecord, OrderedWriter, output_record, read_records
from zipage.outputs import CompletionOutput, Logprob, RequestOutput, Usage


def test_records_of_all_kinds() -> None:
    lines = [
        '{"prompt": "a", "id": 7, "temperature": 0.5, "metadata": {"answer": 3}}\n',
        "\n",
        '{"messages": [{"role": "user", "content": "b"}], "kv_budget": 512}\n',
        '{"prompt_token_ids": [1, 2], "seed": 3}',
    ]
    first, second, third = read_records(lines)
    assert (first.index, first.line, first.kind) == (0, 1, "prompt")
    assert (first.content, first.id) == ("a", 7)
    assert first.sampling == {"temperature": 0.5}
    assert first.metadata == {"answer": 3}
    assert (second.index, second.line, second.kind, second.id) == (1, 3, "messages", 1)
    assert second.sampling == {"kv_budget": 512}
    assert third.content == [1, 2] and third.sampling == {"seed": 3}
    assert not any(r.error for r in (first, second, third))


def test_bad_lines_keep_their_place_and_say_what_is_wrong() -> None:
    lines = [
        "{broken",
        '["prompt"]',
        '{"id": "x"}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
        '{"prompt": 3}',
        '{"messages": "a"}',
        '{"id": "typo", "prompt": "a", "max_token": 3}',
    ]
    records = read_records(lines)
    assert [r.line for r in records] == [1, 2, 3, 4, 5, 6, 7]
    words = ["JSON", "object", "none", "prompt and prompt_token_ids", "text", "list", "max_token"]
    for record, word in zip(records, words, strict=True):
        assert record.error is not None and word in record.error
    assert "max_tokens" in (records[6].error or "")
    assert records[2].id == "x" and records[6].id == "typo"


def test_lines_are_written_in_input_order_as_soon_as_they_can_be() -> None:
    stream = io.StringIO()
    writer = OrderedWriter(stream)
    writer.put(1, {"id": 1})
    assert stream.getvalue() == ""
    writer.put(0, {"id": 0})
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == [0, 1]
    writer.put(4, {"id": 4})
    writer.put(3, {"id": 3})
    writer.close()
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == [0, 1, 3, 4]


def test_any_text_can_be_written() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    writer = OrderedWriter(stream)
    texts = ["naïve 数", "line\u2028separator", "lone \ud800 surrogate"]
    for index, text in enumerate(texts):
        writer.put(index, {"text": text})
    stream.seek(0)
    lines = stream.read().removesuffix("\n").split("\n")
    assert [json.loads(line)["text"] for line in lines] == texts
    assert "数" in lines[0]


def test_one_completion_is_flat_and_several_are_a_list() -> None:
    record = InputRecord(0, 1, "prompt", "p", "a", {}, {"answer": 1})
    one = CompletionOutput(0, "x", [5], finish_reason="stop")
    two = CompletionOutput(1, "y", [6, 7], finish_reason="length")
    usage = Usage(3, 1)

    flat = output_record(record, RequestOutput("r", "p", [1], [one], True, usage=usage))
    assert (flat["id"], flat["prompt"]) == ("a", "p")
    assert (flat["text"], flat["finish_reason"]) == ("x", "stop")
    assert flat["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert flat["metrics"]["compressions"] == 0
    assert flat["metadata"] == {"answer": 1}
    assert "token_ids" not in flat and "error" not in flat

    several = output_record(record, RequestOutput("r", "p", [1], [one, two], True), token_ids=True)
    assert "text" not in several
    assert [o["text"] for o in several["outputs"]] == ["x", "y"]
    assert [o["token_ids"] for o in several["outputs"]] == [[5], [6, 7]]
    json.dumps(several)


def test_logprobs_are_json() -> None:
    record = InputRecord(0, 1, "prompt", "p", "a", {})
    likely, impossible = Logprob(-0.5, 1, "x"), Logprob(-math.inf, 300, "y")
    answer = CompletionOutput(0, "x", [5], -0.5, [{5: likely}], finish_reason="stop")
    output = RequestOutput(
        "r", "p", [1, 7], [answer], True, prompt_logprobs=[None, {7: impossible, 5: likely}]
    )
    line = json.loads(json.dumps(output_record(record, output), allow_nan=False))
    shown = {"logprob": -0.5, "rank": 1, "decoded_token": "x"}
    assert line["logprobs"] == [{"5": shown}]
    hidden = {"logprob": -9999.0, "rank": 300, "decoded_token": "y"}
    assert line["prompt_logprobs"] == [None, {"7": hidden, "5": shown}]
