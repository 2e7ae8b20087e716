"""Tokens per second of Zipage and of transformers' `generate`, on the same batch.

Full KV on both sides, an ample pool, the same threads and dtype; transformers gets the batch
padded on the left. Runs alternate, and each pair gives a ratio, so that a machine's moods hit
both. Greedy, end-of-sequence tokens suppressed on both sides, so that every request generates the
same number of tokens.

    python benchmarks/vs_transformers.py --repeats 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from zipage import LLM, SamplingParams
from zipage.bench.workloads import BenchRequest, make_workload
from zipage.evals.machine import describe_machine
from zipage.models.loader import resolve_model_path


def time_transformers(model: Any, requests: list[BenchRequest], output_len: int) -> float:
    """Seconds of one batch, padded on the left."""
    longest = max(len(r.prompt_token_ids) for r in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        prompt = torch.tensor(request.prompt_token_ids)
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
        ).cpu()
    seconds = time.perf_counter() - started
    assert output.shape == (len(requests), longest + output_len)
    return seconds


def time_zipage(llm: LLM, requests: list[BenchRequest], output_len: int, run: int) -> float:
    """Seconds of the same batch; prompts of earlier runs are not found in the prefix cache."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    started = time.perf_counter()
    for request in requests:
        llm.engine.add_request(request.prompt_token_ids, params, cache_salt=f"run {run}")
    generated = 0
    while llm.engine.has_unfinished:
        generated += sum(o.usage.completion_tokens for o in llm.engine.step() if o.finished)
    seconds = time.perf_counter() - started
    assert generated == len(requests) * output_len
    return seconds


def compare(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Alternating runs of both in one dtype."""
    path = resolve_model_path(args.model)
    model = AutoModelForCausalLM.from_pretrained(path).to(args.device, getattr(torch, dtype)).eval()
    llm = LLM(args.model, dtype=dtype, device=args.device, compression="full")
    requests = make_workload("tiny", llm.engine.vocab_size, args.requests)
    tokens = len(requests) * args.output_len
    llm.get_tokenizer()
    time_transformers(model, requests, 2)
    time_zipage(llm, requests, 2, -1)
    pairs = []
    for run in range(args.repeats):
        theirs = tokens / time_transformers(model, requests, args.output_len)
        ours = tokens / time_zipage(llm, requests, args.output_len, run)
        pairs.append({"transformers": theirs, "zipage": ours, "ratio": ours / theirs})
        print(f"  {dtype} pair {run}: transformers {theirs:,.0f}, zipage {ours:,.0f} tokens/s")
    medians = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
    backend = llm.engine.core.runner.backend.name
    llm.shutdown()
    return {
        "dtype": dtype,
        "prompt_tokens_mean": statistics.fmean(len(r.prompt_token_ids) for r in requests),
        "attention_backend": backend,
        "transformers_attention": model.config._attn_implementation,
        "pairs": pairs,
        "median": medians,
    }


def main() -> None:
    """Compare in each dtype and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or hub id; zipage-tiny if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads of both; default: torch's")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = describe_machine(args.device)
    print(f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}")
    results = [compare(args, dtype) for dtype in args.dtypes]
    for result in results:
        median = result["median"]
        print(
            f"{result['dtype']}: transformers {median['transformers']:,.0f} tokens/s, "
            f"zipage {median['zipage']:,.0f} tokens/s, ratio {median['ratio']:.2f} "
            f"(medians of {args.repeats} pairs; {args.requests} requests x {args.output_len} "
            f"tokens, prompts of {result['prompt_tokens_mean']:.0f} on average)"
        )
    if args.json is not None:
        record = {"machine": machine, "results": results}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
