"""/v1/completions on the embedded model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.engine.small_model import save_small_model, small_options
from tests.server.conftest import SUM, Client, texts_of
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage import AsyncLLM
from zipage.server.protocol.completions import CompletionResponse

URL = "/v1/completions"
TEN = {"prompt": SUM, "max_tokens": 10}


def test_the_answer_has_openais_shape(client: Client) -> None:
    answer = client.ok(URL, {"model": "zipage-tiny", **TEN})
    CompletionResponse.model_validate(answer, strict=True)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["text"]
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (10, usage["prompt_tokens"] + 10)


def test_sixteen_tokens_by_default(client: Client) -> None:
    assert client.ok(URL, {"prompt": SUM, "ignore_eos": True})["usage"]["completion_tokens"] == 16


def test_a_stream_adds_up_to_the_answer(client: Client) -> None:
    body = {**TEN, "n": 2, "seed": 3, "temperature": 1.0, "logprobs": 1, "echo": True}
    whole = client.ok(URL, body)
    events = client.events(URL, {**body, "stream_options": {"include_usage": True}})
    for event in events:
        CompletionResponse.model_validate(event, strict=True)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 20
    assert all(event["usage"] is None for event in events[:-1])
    assert texts_of(events) == {c["index"]: c["text"] for c in whole["choices"]}
    for choice in whole["choices"]:
        for name, values in choice["logprobs"].items():
            streamed: list[Any] = []
            for event in events:
                for part in event["choices"]:
                    if part["index"] == choice["index"]:
                        streamed += part["logprobs"][name]
            assert streamed == values
    reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert reasons == ["length", "length"]


def test_usage_with_every_event(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events(URL, {**TEN, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 10 and counts[0] < 10


def test_usage_tells_of_compressions(client: Client) -> None:
    long = {"max_tokens": 120, "ignore_eos": True}
    body = {"prompt": SUM, **long, "n": 2, "seed": 1, "temperature": 1.0, "kv_budget": 64}
    whole = client.ok(URL, {**body, "return_kv_stats": True})
    CompletionResponse.model_validate(whole, strict=True)
    told = [choice["kv_stats"] for choice in whole["choices"]]
    details = whole["usage"]["completion_tokens_details"]
    assert details == {
        "compressions": sum(len(stats["compressions"]) for stats in told),
        "evicted_tokens": sum(stats["evicted_tokens"] for stats in told),
    }
    assert details["compressions"] > 2 and details["evicted_tokens"] > 32
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [event["usage"] for event in client.events(URL, {**body, "stream_options": options})]
    assert usages[0]["completion_tokens_details"] == {"compressions": 0, "evicted_tokens": 0}
    assert usages[-1]["completion_tokens_details"] == details
    chat = {"messages": [{"role": "user", "content": SUM}], **long, "kv_budget": 64}
    answer = client.ok("/v1/chat/completions", {**chat, "stream": False})["usage"]
    respond = {"input": SUM, "max_output_tokens": 120, "ignore_eos": True, "kv_budget": 64}
    response = client.ok("/v1/responses", respond)["usage"]
    for details in (answer["completion_tokens_details"], response["output_tokens_details"]):
        assert details["reasoning_tokens"] > 0 and details["compressions"] > 1
        # A compression is due when a block is full: each evicts as many tokens as one holds.
        assert details["evicted_tokens"] == 16 * details["compressions"]
    off = client.ok(URL, {**body, "kv_budget": None, "compression": "off"})["usage"]
    assert off["completion_tokens_details"] == {"compressions": 0, "evicted_tokens": 0}


def test_no_usage_unless_asked(client: Client) -> None:
    assert all("usage" not in event for event in client.events(URL, TEN))


def test_batches_and_token_ids(client: Client) -> None:
    texts = [SUM, "Add these"]
    ids = [client.ok("/tokenize", {"prompt": text})["tokens"] for text in texts]
    by_text = client.ok(URL, {"prompt": texts, "max_tokens": 5, "n": 2})
    by_ids = client.ok(URL, {"prompt": ids, "max_tokens": 5, "n": 2})
    assert [c["index"] for c in by_text["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in by_text["choices"]] == [c["text"] for c in by_ids["choices"]]
    alone = client.ok(URL, {"prompt": ids[1], "max_tokens": 5})
    assert alone["choices"][0]["text"] == by_ids["choices"][2]["text"]
    assert by_text["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert by_text["usage"]["completion_tokens"] == 20
    streamed = client.events(URL, {"prompt": texts, "max_tokens": 5, "n": 2})
    assert texts_of(streamed) == {c["index"]: c["text"] for c in by_text["choices"]}


def test_echo_for_loglikelihoods(client: Client) -> None:
    """What evaluation harnesses read: log-probabilities of the prompt's own tokens."""
    ids = client.ok("/tokenize", {"prompt": SUM})["tokens"]
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    one = client.ok(URL, {**body, "max_tokens": 1})["choices"][0]
    none = client.ok(URL, {**body, "max_tokens": 0})
    logprobs = none["choices"][0]["logprobs"]
    assert none["choices"][0]["text"] == SUM and none["choices"][0]["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0
    assert len(logprobs["tokens"]) == len(ids) == len(one["logprobs"]["tokens"]) - 1
    assert logprobs["token_logprobs"] == one["logprobs"]["token_logprobs"][:-1]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert SUM[offset : offset + len(token)] == token
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for value, top in list(pairs)[1:]:
        assert value in top.values() and max(top.values()) >= value
    plain = client.ok(URL, {"prompt": SUM, "echo": True, "max_tokens": 0})["choices"][0]
    assert plain["text"] == SUM and plain["logprobs"] is None


def test_logprobs_of_the_prompt(client: Client) -> None:
    """In vLLM's format: for each token, the most likely ones and itself, by id."""
    ids = client.ok("/tokenize", {"prompt": SUM})["tokens"]
    body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    echoed = client.ok(URL, body)["choices"][0]["logprobs"]
    answer = client.ok(URL, {"prompt": [ids, ids[:5]], "max_tokens": 1, "prompt_logprobs": 2})
    CompletionResponse.model_validate(answer, strict=True)
    told, short = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert len(told) == len(ids) and told[0] is None
    values = echoed["token_logprobs"][:-1]
    for token, entry, value in list(zip(ids, told, values, strict=True))[1:]:
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        ranks = sorted(each["rank"] for each in entry.values())
        assert ranks[:2] == [1, 2] and len(ranks) == (2 if entry[str(token)]["rank"] <= 2 else 3)
        assert isinstance(entry[str(token)]["decoded_token"], str)
    assert len(short) == 5 and short[1].keys() == told[1].keys()
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    # Each of two numbers applies to its own report.
    for more in (0, 2):
        both = client.ok(URL, {**body, "prompt_logprobs": more})["choices"][0]
        assert both["logprobs"] == echoed
        assert len(both["prompt_logprobs"][5]) in ((1,) if more == 0 else (2, 3))
    plain = client.ok(URL, {**body, "logprobs": None, "prompt_logprobs": 1})["choices"][0]
    assert plain["logprobs"] is None and plain["prompt_logprobs"][0] is None
    error = client.error(URL, {"prompt": ids, "prompt_logprobs": 0, "stream": True})
    assert error["param"] == "prompt_logprobs" and "streamed" in error["message"]


def test_logprobs_of_the_answer(client: Client) -> None:
    body = {**TEN, "logprobs": 3, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = client.ok(URL, body)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    # The sampled token, which is the most likely one here, is among the three.
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    assert choice["prompt_token_ids"] == client.ok("/tokenize", {"prompt": SUM})["tokens"]


def test_stop_strings_neither_leak_nor_hold_back(client: Client) -> None:
    text = client.ok(URL, {"prompt": SUM, "max_tokens": 30})["choices"][0]["text"]
    stop = text[10:14]
    assert text.find(stop) == 10
    body = {"prompt": SUM, "max_tokens": 30, "stop": [stop, "never said"]}
    choice = client.ok(URL, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:10], "stop")
    assert choice["stop_reason"] == stop
    assert texts_of(client.events(URL, body)) == {0: text[:10]}
    # The text ends inside what could have become a stop string: it must all be there.
    late = {"prompt": SUM, "max_tokens": 30, "stop": text[-3:] + "never said"}
    assert texts_of(client.events(URL, late)) == {0: text}
    kept = client.ok(URL, {**body, "include_stop_str_in_output": True})["choices"][0]
    assert kept["text"] == text[:14]


def test_stop_tokens_and_bias(client: Client) -> None:
    first = client.ok(URL, {**TEN, "return_token_ids": True})["choices"][0]["token_ids"]
    choice = client.ok(URL, {**TEN, "stop_token_ids": [first[2]]})["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == first[2]
    body = {**TEN, "logit_bias": {"9": 100}, "return_token_ids": True, "ignore_eos": True}
    assert client.ok(URL, body)["choices"][0]["token_ids"] == [9] * 10
    body["frequency_penalty"] = 2.0
    body["logit_bias"] = {"9": 15}
    assert client.ok(URL, body)["choices"][0]["token_ids"].count(9) < 10


def test_a_seed_beside_unseeded_requests(client: Client) -> None:
    seeded = {**TEN, "temperature": 1.5, "seed": 11}
    alone = client.ok(URL, seeded)["choices"][0]["text"]
    beside = client.ok(URL, {**seeded, "prompt": [SUM, "Add", SUM]})["choices"]
    assert beside[0]["text"] == beside[2]["text"] == alone
    unseeded = {**TEN, "temperature": 1.5, "n": 8, "max_tokens": 30}
    assert len({c["text"] for c in client.ok(URL, unseeded)["choices"]}) > 1
    assert client.ok(URL, seeded)["choices"][0]["text"] == alone


def test_kv_options_and_statistics(client: Client) -> None:
    body = {"prompt": SUM, "max_tokens": 120, "ignore_eos": True, "return_kv_stats": True}
    full = client.ok(URL, body)["choices"][0]["kv_stats"]
    assert full["compressions"] == [] and full["peak_blocks"] == 9
    small = client.ok(URL, {**body, "kv_budget": 64})["choices"][0]["kv_stats"]
    assert small["peak_blocks"] == 5 and small["evicted_tokens"] > 0
    assert len(small["compressions"]) == 4
    assert small["compressions"][0]["kept"] == 64
    events = client.events(URL, {**body, "kv_budget": 64})
    told = [r for e in events for c in e["choices"] for r in c["kv_stats"]["compressions"]]
    assert [r["num_tokens"] for r in told] == [r["num_tokens"] for r in small["compressions"]]
    by_layer = {**body, "kv_budget": 64, "kv_stats_layers": True}
    for event in client.events(URL, by_layer):
        for record in event["choices"][0]["kv_stats"]["compressions"]:
            layers = base64.b64decode(record["layer_keepers"])
            assert len(layers) == record["num_tokens"] * len(record["layer_positions"])
            assert sum(layers) == sum(record["keepers"]) == record["kept"] * record["lists"]
    assert client.ok(URL, by_layer)["choices"][0]["kv_stats"]["compressions"][-1]["layer_keepers"]
    assert client.error(URL, {**body, "kv_budget": 7})["param"] == "kv_budget"


def test_unknown_fields_are_ignored_and_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="zipage.server"):
        client.ok(URL, {**TEN, "store": True, "suffix": None, "user": "someone", "stop": None})
    (record,) = [r for r in caplog.records if "ignored" in r.getMessage()]
    assert "store" in record.getMessage() and record.request_id
    assert "user" not in record.getMessage()


def test_impossible_log_probabilities_are_json() -> None:
    engine = ScriptedEngine(["a", "b"], tiny_tokenizer())
    engine.logprob = -float("inf")
    answer = Client(engine).ok(URL, {"prompt": "Add", "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0, -9999.0]
    assert logprobs["top_logprobs"][0] == {"x": -9999.0, "y": -9999.0}


def test_a_model_without_a_tokenizer() -> None:
    engine = ScriptedEngine(["", ""], None)
    client = Client(engine)
    answer = client.ok(URL, {"prompt": [6, 7], "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == [6, 6] and answer["choices"][0]["text"] == ""
    assert not engine.seen[0][1].detokenize
    engine.delay = 0.02  # outputs that wait together are told together
    assert len(client.events(URL, {"prompt": [6, 7], "echo": True})) == 2
    for path, body in [
        (URL, {"prompt": "Add"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "Add"}),
        ("/detokenize", {"tokens": [6]}),
    ]:
        assert "no tokenizer" in client.error(path, body)["message"]


def bos_tokenizer() -> Any:
    """A byte-level tokenizer that starts every text with <s>, and has a template that does so."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{c: i for i, c in enumerate(alphabet, 2)}}
    raw = Tokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def test_one_bos_at_every_entry() -> None:
    engine = ScriptedEngine(["."], bos_tokenizer())
    client = Client(engine)
    messages = [{"role": "user", "content": "hi"}]
    client.ok(URL, {"prompt": ["hi", "<s>hi"]})
    client.ok(URL, {"prompt": "hi", "add_special_tokens": False})
    client.ok("/v1/chat/completions", {"messages": messages})
    client.ok("/v1/chat/completions", {"messages": messages, "add_special_tokens": True})
    client.ok("/v1/responses", {"input": "hi"})
    starts = [ids.count(0) for ids, _ in engine.seen]
    assert starts == [1, 1, 0, 1, 1, 1]
    for body in ({"prompt": "hi"}, {"prompt": "<s>hi"}, {"messages": messages}):
        assert client.ok("/tokenize", body)["tokens"].count(0) == 1
    # A beginning-of-sequence token makes an empty text a prompt.
    assert client.ok(URL, {"prompt": [""]})["usage"]["prompt_tokens"] == 1


def test_pieces_of_characters_in_streams(tmp_path: Path) -> None:
    """Prompts and streams that end inside a character: nothing leaks, nothing is lost."""
    model = save_small_model(tmp_path, vocab_size=258, eos_token_id=1)
    bos_tokenizer().save_pretrained(model)
    llm = AsyncLLM(**small_options(model, kv_budget=None, num_kv_blocks=60))
    client = Client(llm)
    ids = client.ok("/tokenize", {"prompt": "Größe: 漢"})["tokens"][:-1]
    body = {"prompt": ids, "max_tokens": 40, "n": 6, "temperature": 1.3, "seed": 5, "stop": ["a"]}
    whole = {c["index"]: c["text"] for c in client.ok(URL, body)["choices"]}
    assert texts_of(client.events(URL, body)) == whole and len(set(whole.values())) > 1
    assert not any("Größe" in text for text in whole.values())
    echoed = client.ok(URL, {**body, "echo": True})["choices"]
    assert all("Größe: " in c["text"] for c in echoed)
    llm.shutdown()


def test_bytes_of_pieces_of_characters() -> None:
    """Tokens that are pieces of characters: the bytes are told, the text has no U+FFFD."""
    tokenizer = bos_tokenizer()
    texts = Client(ScriptedEngine(["é", "漢"], tokenizer)).ok(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "é漢🙂"}], "logprobs": True, "top_logprobs": 2},
    )
    assert texts["choices"][0]["message"]["content"] == "é漢"
    piece = texts["choices"][0]["logprobs"]["content"][0]
    assert piece["bytes"] == list(tokenizer.decode([6]).encode())
    ids = Client(ScriptedEngine([""], tokenizer)).ok("/tokenize", {"prompt": "é漢🙂"})["tokens"]
    text = Client(ScriptedEngine([""], tokenizer)).ok("/detokenize", {"tokens": ids})["prompt"]
    assert text == "<s>é漢🙂"
