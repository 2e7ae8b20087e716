"""Two threads use an engine for the first time in a process, and load a model of other dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, threading
from zipage import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
first = LLM(kv_budget=64, block_size=16, num_kv_blocks=60)
texts, stop = [], threading.Event()

def serve():
    while not stop.is_set():
        texts.append(first.generate(["hello"] * 4, params)[0].outputs[0].text)

thread = threading.Thread(target=serve)
thread.start()
for _ in range(2):
    options = dict(model_impl="transformers", dtype="bfloat16", compression="full")
    LLM(sys.argv[1], num_kv_blocks=20, block_size=16, **options).shutdown()
stop.set()
thread.join()
assert len(texts) > 0 and len(set(texts)) == 1, texts
print("done")
"""


def test_engines_of_two_threads(small_model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(small_model)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "done"
