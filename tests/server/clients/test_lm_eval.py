"""lm-eval: tasks of its kinds, by the API of completions and that of chats; its likelihoods are the
engine's. Needs `make test-clients`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import SUM
from tests.server.scripted import TINY
from zipage import LLM, SamplingParams

lm_eval = pytest.importorskip("lm_eval", reason="needs tests/server/clients/requirements.txt")
pytestmark = pytest.mark.slow

NUMBERS = [(74, 79), (11, 35), (62, 18), (90, 7), (23, 45), (58, 66)]
QUESTIONS = [SUM.replace("74", f"{a}").replace("79", f"{b}") for a, b in NUMBERS]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(block_size=16, num_kv_blocks=600, kv_budget=None, max_model_len=2048) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the data of the tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def evaluate(model: str, url: str, task: str, **options: Any) -> dict[str, Any]:
    """What lm-eval finds, with its samples."""
    from lm_eval.tasks import TaskManager

    arguments = {"model": "zipage-tiny", "base_url": url, "max_length": 2048, **options}
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(Path(__file__).parent), include_defaults=False),
        apply_chat_template=task == "sums",
        log_samples=True,
        bootstrap_iters=0,
    )
    return found


@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        ("local-chat-completions", "/v1/chat/completions", {"num_concurrent": 3}),
        ("local-completions", "/v1/completions", {"tokenizer": TINY, "batch_size": 4}),
    ],
)
def test_generate_until(
    served: str, folder: Path, model: str, path: str, options: dict[str, Any]
) -> None:
    lines = [
        json.dumps({"question": question, "answer": str(a + b)})
        for question, (a, b) in zip(QUESTIONS, NUMBERS, strict=True)
    ]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    found = evaluate(model, served + path, "sums", **options)
    assert found["results"]["sums"]["exact_match,boxed"] == 1.0, found["samples"]


@pytest.mark.parametrize("tokenized", [True, False])
def test_multiple_choice(served: str, folder: Path, llm: LLM, tokenized: bool) -> None:
    lines = []
    greedy = SamplingParams(temperature=0.0, max_tokens=300)
    prompts = llm.chat_prompts([[{"role": "user", "content": q}] for q in QUESTIONS])
    tokenizer = llm.get_tokenizer()
    for index, (prompt, (a, b)) in enumerate(zip(prompts, NUMBERS, strict=True)):
        (output,) = llm.generate([prompt], greedy)
        text = tokenizer.decode(output.prompt_token_ids) + tokenizer.decode(
            output.outputs[0].token_ids
        )
        wrong = [f"{a + b + 1}}}.", f"{a + b - 10}}}.", "7}."]
        choices = [*wrong[: index % 4], f"{a + b}}}.", *wrong[index % 4 :]]
        context = text.rpartition("boxed{")[0] + "boxed{"
        lines.append(json.dumps({"context": context, "choices": choices, "gold": index % 4}))
    (folder / "choices.jsonl").write_text("\n".join(lines))
    found = evaluate(
        "local-completions",
        f"{served}/v1/completions",
        "choices",
        tokenizer=TINY,
        tokenized_requests=tokenized,
        batch_size=3 if tokenized else 1,
    )
    assert found["results"]["choices"]["acc,none"] == 1.0
    compared = 0
    for sample in found["samples"]["choices"]:
        for arguments, ((told, is_greedy),) in zip(
            sample["arguments"], sample["resps"], strict=True
        ):
            context, choice = arguments
            expected, best = likelihood(llm, context, choice)
            assert float(told) == pytest.approx(expected, rel=1e-6, abs=1e-6)
            assert (str(is_greedy) == "True") == best
            compared += 1
    assert compared == 4 * len(NUMBERS)


def likelihood(llm: LLM, context: str, text: str) -> tuple[float, bool]:
    """The engine's own log-probability of `text`, and whether it is the most likely one."""
    tokenizer = llm.get_tokenizer()
    whole = tokenizer.encode(context + text, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": whole}], params)
    assert output.prompt_logprobs is not None
    entries = [
        entry[token_id]
        for token_id, entry in zip(whole[start:], output.prompt_logprobs[start:], strict=True)
        if entry is not None
    ]
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)
