"""The embedded model: logits and greedy answers equal transformers'."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from zipage.models.config import load_model_config
from zipage.models.loader import load_model, resolve_model_path

from .paged_run import BackendFactory, PagedRun

PATH = resolve_model_path(None)
MAX_TOKENS = 160


@cache
def reference(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PATH, torch_dtype=dtype).eval()


def problems() -> list[tuple[str, str]]:
    """Twenty short problems and their answers, in the three families of the model."""
    rng = random.Random(11)
    made = []
    for _ in range(7):
        numbers = [rng.randrange(5, 300) for _ in range(rng.randrange(2, 5))]
        lines = "\n".join(f"#{i} {n}" for i, n in enumerate(numbers, 1))
        question = f"What is the sum (#1-#{len(numbers)})? No checks."
        made.append((f"Add these numbers.\n{lines}\n{question}", str(sum(numbers))))
    for _ in range(7):
        has = {name: rng.randrange(20, 90) for name in ("Zoe", "Lea", "Umar")}
        start = " ".join(f"{name} has {n}." for name, n in has.items())
        giver, taker = rng.sample(sorted(has), 2)
        given, won = rng.randrange(2, 19), rng.randrange(2, 19)
        has[giver] += won - given
        has[taker] += given
        steps = f"#1 {giver} gives {taker} {given}.\n#2 {giver} wins {won}."
        question = f"How much does {giver} have at the end (#1-#2)? No checks."
        made.append((f"Start: {start}\n{steps}\n{question}", str(has[giver])))
    for _ in range(6):
        ring = rng.sample(["jam", "sky", "pin", "oak", "sea", "elm", "fan"], 5)
        follows = dict(zip(ring, [*ring[1:], ring[0]], strict=True))
        keys = rng.sample(ring, 5)
        table = ", ".join(f"{key} -> {follows[key]}" for key in keys)
        hops, word = rng.randrange(2, 5), ring[0]
        for _ in range(hops):
            word = follows[word]
        question = f"Start at {ring[0]} and follow the table (#1-#{hops}). Which word is last?"
        made.append((f"Table: {table}.\n{question} No checks.", word))
    return made


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text, _ in problems()
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(tokenizer.unk_token_id not in prompt for prompt in ids)
    return ids


@cache
def reference_answers() -> list[list[int]]:
    """What `generate` answers; batches padded on the left, cut after the end token."""
    ids = prompts()
    config = load_model_config(PATH)
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in ids])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in ids])
    out = reference().generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS
    )
    answers = []
    for row in out[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in config.eos_token_ids]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


def test_fp32_logits(backend: BackendFactory) -> None:
    prompt, answer = prompts()[8], reference_answers()[8]
    tokens = prompt + answer
    with torch.inference_mode():
        expected = reference()(torch.tensor([tokens])).logits[0]
    decoder = load_model(load_model_config(PATH), PATH, dtype=torch.float32)
    chunked = [len(prompt) - 5, 5, *[1] * len(answer)]
    for chunks in ([len(tokens)], chunked):
        logits = PagedRun(decoder, backend, max_len=len(tokens)).logits(tokens, chunks)
        assert (logits - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("block_size", [16, 48])
def test_greedy_answers(backend: BackendFactory, block_size: int) -> None:
    config = load_model_config(PATH)
    decoder = load_model(config, PATH, dtype=torch.float32)
    ids = prompts()
    longest = max(map(len, ids)) + MAX_TOKENS
    run = PagedRun(decoder, backend, len(ids), longest, block_size)
    answers = run.greedy(ids, MAX_TOKENS, config.eos_token_ids)
    assert answers == reference_answers()
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    texts = tokenizer.batch_decode(answers)
    right = [
        f"\\boxed{{{answer}}}" in text.replace(" ", "")
        for text, (_, answer) in zip(texts, problems(), strict=True)
    ]
    assert sum(right) >= 18


def test_bfloat16_logits() -> None:
    tokens = prompts()[0] + reference_answers()[0]
    with torch.inference_mode():
        exact = reference()(torch.tensor([tokens])).logits[0]
        theirs = reference(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
    decoder = load_model(load_model_config(PATH), PATH)
    assert decoder.dtype == torch.bfloat16
    logits = PagedRun(decoder, max_len=len(tokens)).logits(tokens, [len(tokens)])
    assert (logits - exact).pow(2).mean() <= 2 * (theirs - exact).pow(2).mean()
