"""Several engines on one machine do not get in each other's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zipage.kernels import native

_ANSWER = """
import json
from zipage import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
with LLM(block_size=16, kv_budget=64, num_kv_blocks=100, async_compression=True) as llm:
    (output,) = llm.generate([[1, 258, 259, 270, 271]], params)
    print(json.dumps([output.outputs[0].token_ids, llm.engine.core.runner.backend.name]))
"""


_FORK = """
import asyncio, os, sys
import zipage
from zipage import SamplingParams
params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
engine = getattr(zipage, sys.argv[1])(block_size=16, kv_budget=None, num_kv_blocks=20)
async def answer():
    async for output in engine.generate([1, 258, 259, 270, 271], params):
        pass
    return len(output.outputs[0].token_ids)
async def limited():
    return await asyncio.wait_for(answer(), 20)
assert asyncio.run(limited()) == 10
fork = os.fork()
if not fork:
    try:
        asyncio.run(limited())
    except zipage.EngineDeadError as error:
        assert "is a fork" in str(error)
        sys.exit(7)  # with all finalizers
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
assert asyncio.run(limited()) == 10
engine.shutdown()
"""


@pytest.mark.parametrize("engine", ["AsyncLLM", "EngineProcessClient"])
def test_a_fork_is_refused_and_its_end_harms_nobody(engine: str) -> None:
    """It has no threads of its parent's, and shares its sockets."""
    command = [sys.executable, "-W", "ignore", "-c", _FORK, engine]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


#: Writes the library that is there already, in two parts.
_SLOW_COMPILER = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
head -c 5000 {library} > "$2"
sleep 1
cat {library} > "$2"
"""


@pytest.mark.skipif(not native.available(), reason="needs a C compiler")
@pytest.mark.parametrize("builds", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_build_the_kernels_and_run_at_once(tmp_path: Path, builds: bool) -> None:
    """Both start with an empty kernel cache: no lock, port or half-written file between them."""
    environment = {**os.environ, "ZIPAGE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if not builds:
        compiler = tmp_path / "cc"
        compiler.write_text(_SLOW_COMPILER.format(library=native.load()._name))
        compiler.chmod(0o755)
        environment["CC"] = str(compiler)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _ANSWER],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = []
    try:
        for process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            answers.append(json.loads(out))
    finally:
        for process in running:
            process.kill()
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 60 and answers[0][1] == "native"
    (library,) = (tmp_path / "cache").iterdir()
    assert library.suffix == ".so", "nothing but the kernels is left"


def test_failed_build_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("ZIPAGE_CACHE", str(cache))
    with pytest.raises(native.NativeUnavailable, match="no such option"):
        native.load.__wrapped__()
    assert list(cache.iterdir()) == []
