"""`zipage generate` on zipage-tiny."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import Invocation, invoke
from tests.observe.chrome_format import check_trace
from zipage import LLM, SamplingParams
from zipage.cli.generate import _open_output
from zipage.engine.engine import LLMEngine
from zipage.observe.keepers import decode_runs

PROBLEM = "Add these numbers.\n#1 74\n#2 79\nWhat is the sum (#1-#2)? No checks."
#: A small pool: the default one takes longer to allocate than all the rest.
POOL = ["--num-kv-blocks", "64"]


def generate(*args: str, stdin: str | None = None) -> Invocation:
    return invoke("generate", *POOL, *args, stdin=stdin)


def write_jsonl(path: Path, records: list[Any]) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.fixture(scope="module")
def answer() -> str:
    with LLM(num_kv_blocks=64) as llm:
        output = llm.chat([{"role": "user", "content": PROBLEM}])[0]
    assert "\\boxed{153}" in output.outputs[0].text
    return output.outputs[0].text


def test_a_prompt_is_answered_through_the_chat_template(answer: str) -> None:
    result = generate(PROBLEM)
    assert result.exit_code == 0
    assert result.stdout == answer + "\n"
    assert result.stderr == ""


def test_raw_leaves_the_template_out(answer: str) -> None:
    result = generate(PROBLEM, "--raw", "--max-tokens", "8")
    with LLM(num_kv_blocks=64) as llm:
        raw = llm.generate(PROBLEM, SamplingParams(temperature=0, max_tokens=8))[0]
    assert result.stdout == raw.outputs[0].text + "\n"
    assert not answer.startswith(raw.outputs[0].text)


def test_standard_input_and_text_files_are_one_prompt(answer: str, tmp_path: Path) -> None:
    assert generate(stdin=PROBLEM + "\n").stdout == answer + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text(PROBLEM + "\n")
    assert generate("--file", str(file)).stdout == answer + "\n"


def test_jsonl_in_and_out(answer: str, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl",
        [
            {"id": "text", "prompt": PROBLEM, "metadata": {"answer": 153}},
            {"id": "chat", "messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 4},
            {"id": "ids", "prompt_token_ids": [10, 20, 30], "ignore_eos": True, "n": 2},
        ],
    )
    out = tmp_path / "out.jsonl"
    result = generate("-f", source, "-o", str(out), "--token-ids", "--max-tokens", "100")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    text, chat, ids = read_jsonl(out)
    assert [r["id"] for r in (text, chat, ids)] == ["text", "chat", "ids"]
    assert (text["prompt"], text["text"], text["finish_reason"]) == (PROBLEM, answer, "stop")
    assert text["metadata"] == {"answer": 153}
    assert text["usage"]["completion_tokens"] == len(text["token_ids"])
    assert text["metrics"]["peak_blocks"] == 2
    # A record's own options come before those of the command line.
    assert (chat["usage"]["completion_tokens"], chat["finish_reason"]) == (4, "length")
    assert answer.startswith(chat["text"])
    assert [len(o["token_ids"]) for o in ids["outputs"]] == [100, 100]


def test_a_bad_record_does_not_stop_the_others(tmp_path: Path) -> None:
    good = {"prompt_token_ids": [10, 20], "max_tokens": 2, "ignore_eos": True}
    source = write_jsonl(
        tmp_path / "in.jsonl",
        [
            {"id": "first", **good},
            "oops",
            {"id": "typo", "prompt": "x", "max_token": 3},
            {"id": "value", "prompt": "x", "temperature": "hot"},
            {"id": "vocabulary", "prompt_token_ids": [1, 320]},
            {"id": "last", **good},
        ],
    )
    out = tmp_path / "out.jsonl"
    result = generate("-f", source, "-o", str(out))
    assert result.exit_code == 1
    records = read_jsonl(out)
    assert [r["id"] for r in records] == ["first", 1, "typo", "value", "vocabulary", "last"]
    assert ["error" in r for r in records] == [False, True, True, True, True, False]
    assert [r["line"] for r in records if "error" in r] == [2, 3, 4, 5]
    for line, word in ((2, "JSON"), (3, "max_tokens"), (4, "temperature='hot'"), (5, "320")):
        assert any(f"line {line}: " in e and word in e for e in result.stderr.splitlines())


def test_many_answers_go_to_standard_output_as_jsonl(tmp_path: Path) -> None:
    records = [{"prompt_token_ids": [10 + i], "max_tokens": 9 - i} for i in range(6)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    result = generate("-f", source, "--ignore-eos")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    # The last one ends first, and is written last.
    assert [r["id"] for r in lines] == list(range(6))
    assert [r["usage"]["completion_tokens"] for r in lines] == [9, 8, 7, 6, 5, 4]
    piped = generate("--format", "jsonl", "--ignore-eos", stdin=Path(source).read_text())
    texts = [r["text"] for r in lines]
    assert [json.loads(line)["text"] for line in piped.stdout.splitlines()] == texts


def test_sampling_options_reach_the_engine() -> None:
    same = ["--temperature", "5", "--seed", "3", "--max-tokens", "20", "--ignore-eos", "--raw"]
    first, second = generate("x", *same), generate("x", *same)
    other = generate("x", *same, "--seed", "4")
    assert first.stdout == second.stdout != other.stdout
    stopped = generate(PROBLEM, "--stop", "Answer", "--include-stop-str-in-output")
    assert stopped.stdout.endswith("Answer\n")
    several = generate(PROBLEM, "--n", "2", "--max-tokens", "3").stdout.removesuffix("\n")
    assert several == "--- answer 1 of 2 ---\n#1 74\n\n--- answer 2 of 2 ---\n#1 74", several


@pytest.mark.parametrize("asynchronous", ["--async-compression", "--no-async-compression"])
def test_an_interrupt_writes_what_is_finished(
    asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [3, 400, 6, 400]
    records = [{"id": n, "prompt_token_ids": [9], "max_tokens": n} for n in lengths]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    out = tmp_path / "out.jsonl"
    steps = 0
    step = LLMEngine.step

    def counted(engine: LLMEngine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 180:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", counted)
    threads, handler = threading.active_count(), signal.getsignal(signal.SIGINT)
    options = ["--ignore-eos", "--kv-budget", "64", asynchronous]
    result = generate("-f", source, "-o", str(out), *options)
    assert result.exit_code == 130
    assert steps == 180
    assert [r["id"] for r in read_jsonl(out)] == [3, 6]
    assert "2 of 4" in result.stderr
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_single_prompt_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    step = LLMEngine.step

    def interrupted(engine: LLMEngine) -> Any:
        outputs = step(engine)
        if engine.stats().generated_tokens == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return outputs

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    result = generate(PROBLEM)
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.stdout.startswith("#1 74") and result.stdout.endswith("\n")


def test_when_the_engine_dies_the_answers_so_far_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt_token_ids": [9], "max_tokens": n} for n in (2, 50)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    out = tmp_path / "out.jsonl"
    from zipage.engine.scheduler import Scheduler

    schedule = Scheduler.schedule
    calls = 0

    def failing(scheduler: Scheduler) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("a bug")
        return schedule(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", failing)
    result = generate("-f", source, "-o", str(out), "--ignore-eos")
    assert result.exit_code == 2
    assert "a bug" in result.stderr
    done, failed = read_jsonl(out)
    assert done["finish_reason"] == "length" and "error" not in done
    assert failed["finish_reason"] == "error" and "a bug" in failed["error"]


@pytest.mark.parametrize(
    ("args", "stdin", "word"),
    [
        (["hello", "--file", "x.txt"], None, "not both"),
        (["--file", "no-such-file.txt"], None, "can't be read"),
        ([], "", "no prompt"),
        (["hello", "--kv-buget", "64"], None, "kv-buget"),
        (["hello", "--policy-option", "lamda=1"], None, "no option 'lamda'; legal are"),
        (["hello", "--max-tokens", "0"], None, "max_tokens=0"),
        (["hello", "--temperature", "nan"], None, "temperature=nan"),
        (["hello", "--top-p", "0"], None, "top_p=0"),
        (["hello", "--block-size", "24"], None, "multiple of 16"),
        (["hello", "--model", "no/such/model/here"], None, "no/such/model/here"),
        (["hello", "--output", "no-such-folder/out.jsonl"], None, "can't be written"),
    ],
)
def test_usage_errors(args: list[str], stdin: str | None, word: str) -> None:
    result = generate(*args, stdin=stdin)
    assert result.exit_code == 2
    assert word in result.output


def test_an_interrupt_while_loading_ends_the_process() -> None:
    # The signal comes in the middle of an import, where a KeyboardInterrupt does not get through.
    code = (
        "import os, signal, sys\n"
        "import zipage.cli\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "zipage.cli.app(['generate', 'hello'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == b""


LONG = (
    "Add these numbers.\n"
    + "".join(f"#{i} {30 + i}\n" for i in range(1, 9))
    + ("What is the sum (#1-#8)? Check every step.")
)
BUDGET = ["--block-size", "16", "--kv-budget", "128"]


def test_trace_is_written_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plain = generate(LONG, *BUDGET)
    traced = generate(LONG, *BUDGET, "--trace", str(path))
    assert traced.exit_code == plain.exit_code == 0
    assert (traced.stdout, traced.stderr) == (plain.stdout, "")
    events = check_trace(json.loads(path.read_text()))
    compressions = [e["args"] for e in events if e["name"] == "compression"]
    assert compressions
    for args in compressions:
        keepers = decode_runs(args["keepers"], args["text_tokens"])
        assert sum(keepers) == args["lists"] * 128


def test_trace_that_cannot_be_written_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = generate(PROBLEM, "--trace", "missing/trace.json")
    assert result.exit_code == 2
    assert "--trace: 'missing/trace.json' can't be written: there is no folder" in result.stderr
    assert result.stdout == ""


def test_kv_stats_of_a_record(tmp_path: Path) -> None:
    records = [
        {"prompt": LONG, "return_kv_stats": True, "max_tokens": 150},
        {"prompt": LONG, "max_tokens": 5},
    ]
    file, out = write_jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    assert generate("--file", file, "--output", str(out), *BUDGET).exit_code == 0
    first, second = read_jsonl(out)
    assert len(first["kv_stats"]) == first["metrics"]["compressions"] > 0
    assert len(first["kv_stats"][0]["keepers"]) == first["kv_stats"][0]["num_tokens"]
    assert "kv_stats" not in second


def test_log_goes_to_stderr_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    args = (LONG, *BUDGET, "--max-tokens", "150")
    quiet = generate(*args)
    loud = generate(*args, "--log-level", "debug", "--log-format", "json")
    assert quiet.stderr == "" and loud.stdout == quiet.stdout
    entries = [json.loads(line) for line in loud.stderr.splitlines()]
    assert {e["level"] for e in entries} == {"info", "debug"}
    of_request = [e for e in entries if "request_id" in e]
    assert {e["request_id"] for e in of_request} == {"request-0"}
    assert sum("compressed from" in e["message"] for e in of_request) > 0
    assert of_request[-1]["finish_reason"] == "length"
    assert "Add these" not in loud.stderr
    monkeypatch.setenv("ZIPAGE_LOG_LEVEL", "info")
    lines = generate(*args).stderr.splitlines()
    assert sum("request request-0" in line for line in lines) == 2
    assert generate(*args).stderr != "" and generate(*args, "--log-level", "error").stderr == ""
    assert generate(PROBLEM, "--log-level", "loud").exit_code == 2


def test_characters_that_the_locale_lacks(tmp_path: Path) -> None:
    file = write_jsonl(
        tmp_path / "in.jsonl",
        [{"prompt_token_ids": [10], "max_tokens": 1, "metadata": "\u00e9\u4e2d"}],
    )
    ended = subprocess.run(
        [sys.executable, "-m", "zipage", "generate", *POOL, "--file", file],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0 and ended.stderr == b""
    assert json.loads(ended.stdout.decode())["metadata"] == "\u00e9\u4e2d"


def test_text_in_characters_that_the_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    with _open_output(None, as_jsonl=False) as stream:
        print("\u00e9\u4e2d", file=stream, flush=True)
    assert written.getvalue() == b"\xe9?\n"
