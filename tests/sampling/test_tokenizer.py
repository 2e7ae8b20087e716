"""Loading tokenizers, encoding prompts and rendering chats."""

import json
import shutil

import pytest
from tokenizers.processors import TemplateProcessing

from tests.sampling.tokenizers_for_tests import ZIPAGE_TINY, make_tokenizer
from zipage.errors import ModelError, RequestError
from zipage.tokenizer import apply_chat, encode_prompt, load_tokenizer

LLAMA_STYLE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('roles: user, assistant') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(ZIPAGE_TINY)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    """A byte-level tokenizer that puts <s> before every text, saved and loaded again."""
    tokenizer = make_tokenizer("byte_level")
    directory = tmp_path_factory.mktemp("with_bos")
    tokenizer.save_pretrained(directory)
    loaded = load_tokenizer(directory)
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", loaded.bos_token_id)]
    )
    loaded.chat_template = LLAMA_STYLE
    return loaded


def test_loads_the_packaged_tokenizer(tiny):
    assert load_tokenizer(str(ZIPAGE_TINY)).get_vocab() == tiny.get_vocab()
    assert tiny.eos_token == "<|im_end|>"
    assert tiny.decode(encode_prompt(tiny, "The answer is 42.")) == "The answer is 42."


@pytest.mark.parametrize("name", ["/no/such/directory", "./no_such_directory", "../no/such"])
def test_missing_directory(name):
    with pytest.raises(ModelError, match="is not a directory; give a Hugging Face model directory"):
        load_tokenizer(name)


def test_hub_id_that_cannot_be_fetched(monkeypatch):
    import transformers

    def refuse(*_args, **_kwargs):
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"'some/model' .*couldn't connect.*check the hub id"):
        load_tokenizer("some/model")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": None},
        {"tokenizer.json": "{ not json"},
        {"tokenizer.json": "{}", "tokenizer_config.json": None},
        {"tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
        {"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}', "config.json": None},
    ],
    ids=["empty", "no tokenizer", "broken", "wrong", "no vocabulary", "no vocabulary, by class"],
)
def test_broken_directories(tmp_path, files):
    for name, content in files.items():
        if content is None:
            shutil.copy(ZIPAGE_TINY / name, tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=r"needs a valid tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_one_beginning_of_sequence(with_bos):
    bos = with_bos.bos_token_id
    plain = with_bos.encode("hello", add_special_tokens=False)
    assert encode_prompt(with_bos, "hello") == [bos, *plain]
    assert encode_prompt(with_bos, "<s>hello") == [bos, *plain]
    # What the user wrote twice stays twice.
    assert encode_prompt(with_bos, "<s><s>hello") == [bos, bos, *plain]
    assert encode_prompt(with_bos, "<s><s>") == [bos, bos]
    assert encode_prompt(with_bos, "<s>") == [bos]
    assert encode_prompt(with_bos, "") == [bos]


def test_no_beginning_of_sequence_is_invented(tiny):
    assert encode_prompt(tiny, "") == []
    without = make_tokenizer("byte_level")
    plain = without.encode("hello")
    assert encode_prompt(without, "hello") == plain
    assert encode_prompt(without, "<s>hello") == [without.bos_token_id, *plain]
    assert encode_prompt(without, "<s><s>hello") == [without.bos_token_id] * 2 + plain


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_prompts_are_text(tiny, text):
    with pytest.raises(RequestError, match="prompt must be text"):
        encode_prompt(tiny, text)


def test_lone_surrogates(tiny):
    with pytest.raises(RequestError, match=r"prompt has a lone surrogate, U\+D800, at character 2"):
        encode_prompt(tiny, "ab\ud800c")
    with pytest.raises(RequestError, match=r"messages has a lone surrogate"):
        apply_chat(tiny, [{"role": "user", "content": "ab\udfffc"}])


def test_chat(tiny):
    messages = [{"role": "user", "content": "What is the sum"}]
    text = "<|im_start|>user\nWhat is the sum<|im_end|>\n"
    opened = text + "<|im_start|>assistant\n<think>\n"
    ids = apply_chat(tiny, messages)
    assert type(ids) is list and all(type(token_id) is int for token_id in ids)
    assert ids == tiny.encode(opened, add_special_tokens=False)
    assert tiny.decode(ids) != ""
    assert apply_chat(tiny, messages, add_generation_prompt=False) == tiny.encode(text)


def test_chat_adds_no_second_beginning_of_sequence(with_bos):
    ids = apply_chat(with_bos, [{"role": "user", "content": "hello"}])
    assert with_bos.decode(ids) == "<s>[user]hello[assistant]"
    assert ids.count(with_bos.bos_token_id) == 1


def test_chat_template_options(with_bos):
    messages = [{"role": "user", "content": "hello"}]
    assert with_bos.decode(apply_chat(with_bos, messages, thinking=True)).endswith("<think>")
    other = apply_chat(with_bos, messages, chat_template="{{ messages[0]['content'] }}!")
    assert with_bos.decode(other) == "hello!"
    with pytest.raises(RequestError, match="'return_tensors' is not supported"):
        apply_chat(with_bos, messages, return_tensors="pt")


def test_text_parts_are_joined(with_bos):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = apply_chat(with_bos, [{"role": "user", "content": "hello"}])
    assert apply_chat(with_bos, [{"role": "user", "content": parts}]) == whole
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match=r"messages\[0\] has a content part"):
        apply_chat(with_bos, [{"role": "user", "content": image}])


def test_tool_calls_need_no_content(tiny):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    token_ids = apply_chat(
        tiny,
        [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}],
        chat_template="{% for m in messages %}{{ m['content'] or 0 }}{% endfor %}",
    )
    assert tiny.decode(token_ids) == "10"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "must be a list"),
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([], "is empty"),
        (["hello"], r"messages\[0\] is str"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] has role 5"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": [5]}], r"messages\[0\] has a content part 5"),
    ],
)
def test_malformed_messages(tiny, messages, complaint):
    with pytest.raises(RequestError, match=complaint):
        apply_chat(tiny, messages)


def test_refusals_of_the_template_are_passed_on(with_bos):
    with pytest.raises(RequestError, match="roles: user, assistant"):
        apply_chat(with_bos, [{"role": "wizard", "content": "x"}])
    with pytest.raises(RequestError, match="chat template refused"):
        apply_chat(with_bos, [{"role": "user", "content": "x"}], chat_template="{% broken")


def test_no_chat_template(tmp_path):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(ZIPAGE_TINY / name, tmp_path / name)
    options = json.loads((ZIPAGE_TINY / "tokenizer_config.json").read_text())
    del options["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(RequestError, match="no chat template"):
        apply_chat(load_tokenizer(tmp_path), [{"role": "user", "content": "x"}])
