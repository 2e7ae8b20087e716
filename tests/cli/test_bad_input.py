"""`zipage generate`: what one bad line of the input does, and inputs that can't be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import Invocation, invoke

GOOD = '{"id": "good", "prompt_token_ids": [10, 20], "max_tokens": 2, "ignore_eos": true}'


def generate(*args: str, stdin: Any = None) -> Invocation:
    return invoke("generate", "--num-kv-blocks", "64", *args, stdin=stdin)


def answers(result: Invocation) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = result.stdout.split("\n")[:-1]
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("[" * 200_000, "nested"),
        ('{"prompt": "x", "metadata": ' + "[" * 80 + "]" * 80 + "}", "nested deeper than 64"),
        ('{"prompt": "x", "logit_bias": {"' + "9" * 5000 + '": 1}}', "logit_bias='999"),
        ('{"prompt": "x", "metadata": {"score": NaN}}', "NaN is not a JSON number"),
        ('{"prompt": "x", "id": -Infinity}', "-Infinity"),
        ('{"prompt": "x", "metadata": [1e999]}', "1e999 is too large"),
        ('{"prompt": null}', "found none"),
        ("null", "must be a JSON object"),
    ],
)
def test_one_bad_line_does_not_stop_the_others(line: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "in.JSONL"
    file.write_text("\n".join((GOOD, line, GOOD)))
    result = generate("--file", str(file))
    assert result.exit_code == 1
    first, bad, last = answers(result)
    assert "error" not in first and first["text"] == last["text"]
    assert word in bad["error"] and bad["line"] == 2
    assert f"line 2: {bad['error']}" in result.stderr


def test_a_line_that_is_not_utf8_does_not_stop_the_others(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n' + GOOD.encode())
    result = generate("--file", str(file))
    assert result.exit_code == 1
    assert [r.get("error") for r in answers(result)] == [None, "not valid UTF-8", None]


def test_text_without_a_tokenizer_is_an_error_of_its_line(tmp_path: Path) -> None:
    ids = '{"prompt_token_ids": [10, 20], "max_tokens": 2, "detokenize": false}'
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join((ids, '{"prompt": "text"}', ids)))
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape))
    options = ["--model", str(directory), "--load-format", "dummy"]
    result = generate("--file", str(file), "--ignore-eos", *options)
    assert result.exit_code == 1, result.stderr
    first, bad, last = answers(result)
    assert first["finish_reason"] == last["finish_reason"] == "length"
    assert "tokenizer" in bad["error"] and bad["line"] == 2


def test_byte_order_mark_is_no_part_of_the_input(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("\ufeff" + GOOD)
    result = generate("--file", str(file))
    assert result.exit_code == 0, result.stderr
    piped = generate("--format", "jsonl", stdin=b"\xef\xbb\xbf" + GOOD.encode())
    assert answers(piped)[0]["text"] == answers(result)[0]["text"]


def test_null_token_ids_beside_a_prompt_are_absent() -> None:
    line = '{"prompt": "x", "messages": null, "prompt_token_ids": null, "max_tokens": 2}'
    result = generate("--format", "jsonl", stdin=line)
    assert result.exit_code == 0, result.stderr
    assert answers(result)[0]["prompt"] == "x"


def test_text_that_is_not_utf8_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ab\xff")
    for result in (
        generate("--file", str(file)),
        generate(stdin=b"ab\xff"),
        generate("ab\udcff"),
    ):
        assert result.exit_code == 2
        assert "the input is not valid UTF-8 at character 2" in result.stderr


def test_bad_lines_are_logged_as_json() -> None:
    result = generate(
        "--format", "jsonl", "--log-format", "json", stdin=f'oops\n{GOOD}\n{{"id": 5}}'
    )
    assert result.exit_code == 1
    first, second = (json.loads(line) for line in result.stderr.splitlines())
    assert first["level"] == "error" and first["message"].startswith("line 1: not JSON")
    assert second["record_id"] == 5 and second["message"].startswith("line 3: ")
