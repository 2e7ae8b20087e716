"""Accuracy of many policy configurations, several engines at a time on one device.

Each line of the specification is a cell: a policy as `zipage eval` reads it, a budget, and engine
options, for example ``zipage:lam=0.8 512 block_size=128 window=32``. The problems are generated, or
read from a file; results go to a folder, so that an interrupted sweep goes on where it stopped.

    python benchmarks/policy_sweep.py --spec cells.txt --out results --jobs 8 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def parse_line(line: str) -> tuple[str, int | None, dict[str, Any]]:
    """Read ``policy budget option=value ...``; the budget of ``full`` is ``-``."""
    policy, budget, *options = line.split()
    pairs = dict(option.split("=", 1) for option in options)
    return policy, None if budget == "-" else int(budget), {k: _value(v) for k, v in pairs.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def run_one(args: argparse.Namespace) -> None:
    """Run one cell in this process and print its result as a line of JSON."""
    import torch

    from zipage.evals.problems import generate_problems, load_problems
    from zipage.evals.runner import Cell, parse_policy, run_cells

    torch.set_num_threads(1 if args.device == "cuda" else args.threads)
    name, budget, options = parse_line(args.cell)
    policy, knobs = parse_policy(name)
    if args.problems:
        problems = load_problems(args.problems, args.min_tokens)
    else:
        problems = generate_problems(
            args.count, args.seed, min_tokens=args.min_tokens, max_tokens=args.max_tokens
        )
    defaults = {"device": args.device, "dtype": "float32", "max_num_seqs": len(problems)}
    block_size = int(options.get("block_size", 64))
    defaults["num_kv_blocks"] = args.pool_tokens // block_size
    cell = Cell(policy, budget, knobs)
    (result, _), *_ = run_cells(
        [cell], problems, {**defaults, **options}, 4096, folder=Path(args.out)
    )
    record = result.to_dict()
    del record["answers"], record["settings"]
    print("RESULT " + json.dumps({"cell": args.cell, **record}))


def sweep(args: argparse.Namespace) -> None:
    """Run all cells, `jobs` at a time, and print a table."""
    lines = [ln.strip() for ln in Path(args.spec).read_text().splitlines()]
    todo = [ln for ln in lines if ln and not ln.startswith("#")]
    running: list[tuple[str, subprocess.Popen[str], float]] = []
    base = [sys.executable, __file__, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if args.device == "cuda" else "2"}
    while todo or running:
        while todo and len(running) < args.jobs:
            cell = todo.pop(0)
            process = subprocess.Popen(
                [*base, "--cell", cell],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            running.append((cell, process, time.time()))
        for entry in list(running):
            cell, process, started = entry
            if process.poll() is None:
                continue
            running.remove(entry)
            text = process.stdout.read() if process.stdout else ""
            results = [ln for ln in text.splitlines() if ln.startswith("RESULT ")]
            if not results:
                print(f"FAILED {cell}\n{text[-1500:]}", flush=True)
                continue
            r = json.loads(results[-1][7:])
            families = " ".join(f"{k} {v[0]}/{v[1]}" for k, v in sorted(r["families"].items()))
            print(
                f"{r['right']:4d}/{r['total']} {100 * r['accuracy']:5.1f}%  {cell:70s} {families}"
                f"  cut {r['truncated']}  {r['mean_compressions']:.1f} compressions"
                f"  {r['tokens_per_second']:.0f} tok/s  {time.time() - started:.0f} s",
                flush=True,
            )
        time.sleep(0.2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spec", help="file of cells, one a line")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="sweep-results")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--problems", help="JSONL of problems; generated if not given")
    parser.add_argument("--count", type=int, default=132)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--min-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=4000)
    parser.add_argument("--pool-tokens", type=int, default=600_000)
    args = parser.parse_args()
    if args.cell:
        run_one(args)
    else:
        sweep(args)


if __name__ == "__main__":
    main()
