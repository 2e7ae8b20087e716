"""Ctrl-C at a terminal, with a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_ctrl_c_writes_what_is_finished_and_leaves_nothing(tmp_path: Path) -> None:
    lengths = [3, 4000, 5, 4000]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [{"id": n, "prompt_token_ids": [9], "max_tokens": n} for n in lengths]
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    command = [sys.executable, "-c", "from zipage.cli import app; app()", "generate"]
    options = ["--ignore-eos", "--kv-budget", "64", "--num-kv-blocks", "64"]
    options.append("--async-compression")
    process = subprocess.Popen(
        [*command, "-f", str(source), "-o", str(out), *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        last = time.monotonic() + 60
        while not (out.exists() and out.read_text()):
            assert process.poll() is None and time.monotonic() < last, process.stderr
            time.sleep(0.05)
        time.sleep(0.3)
        # As a terminal does: to every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, err
    assert "Stopped: 2 of 4 requests had ended." in err and "Traceback" not in err
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["finish_reason"]) for r in written] == [(3, "length"), (5, "length")]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
