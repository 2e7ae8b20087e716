"""`zipage bench ablation`: what is planned, how cells are run and compared, what is shown."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import Invocation, invoke
from tests.cli.stand_in_workers import serve
from zipage import ConfigError, EngineConfig
from zipage.bench import ablation, ablation_work, ablation_worker
from zipage.bench.ablation import (
    BASE,
    GROUPS,
    Cell,
    plan_ablation,
    read_results,
    run_ablation,
    with_ratios,
)
from zipage.bench.ablation_work import Work
from zipage.cli.bench_ablation import notes

BASE_CONFIG = EngineConfig(kv_budget=256, block_size=64, max_num_seqs=16)
RANDOM = Work("tiny", num_requests=4, scale=0.2, output_len=100)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cell_changes_what_its_label_says_and_nothing_else(device: str) -> None:
    cells = plan_ablation(BASE_CONFIG, Work(num_requests=4), device)
    assert [c.label for c in cells[:1] + cells[-1:]] == ["base", "base, again"]
    assert len({c.label for c in cells}) == len(cells)
    by_label = {c.label: c for c in cells}
    on_cuda = device == "cuda"
    expected = {
        f"asynchronous compression {'off' if on_cuda else 'on'}": {
            "async_compression": not on_cuda
        },
        f"overlapped scheduling {'off' if on_cuda else 'on'}": {"async_scheduling": not on_cuda},
        "1 query slots instead of 8": {"num_query_slots": 1},
        "a slot for each of 16": {"num_query_slots": 16},
        "hybrid scheduling off, 8 run at most": {"num_query_slots": 8, "max_num_seqs": 8},
        "optimistic admission": {"admission": "optimistic"},
        "raw redundancy": {"policy_options": {"redundancy": "raw"}},
        "no redundancy": {"policy_options": {"lam": 1.0}},
        "budget 64": {"kv_budget": 64},
        "budget 128": {"kv_budget": 128},
        "budget 512": {"kv_budget": 512},
        "full KV": {"compression": "full", "policy_options": {}},
    }
    if on_cuda:
        expected["CUDA graphs off"] = {"enforce_eager": True}
    assert {label: dict(by_label[label].options) for label in expected} == expected
    left = set(by_label) - set(expected) - {"base", "base, again"}
    assert left == {
        "shared prefix, prefix cache on",
        "shared prefix, prefix cache off",
        "ample memory, compression on",
        "ample memory, full KV",
    }
    given = {f.name: getattr(BASE_CONFIG, f.name) for f in fields(BASE_CONFIG)}
    for cell in cells:
        EngineConfig.from_options({**given, **cell.options})
        assert cell.against in by_label
        assert by_label[cell.against].shared == cell.shared


def test_a_change_starts_from_what_the_base_has() -> None:
    base = EngineConfig(
        kv_budget=256,
        max_num_seqs=8,
        admission="optimistic",
        async_compression=True,
        policy_options={"redundancy": "raw", "gamma": 0.5},
    )
    cells = plan_ablation(base, RANDOM, "cpu", ("async", "slots", "redundancy"))
    assert [(c.label, dict(c.options)) for c in cells[1:-1]] == [
        ("asynchronous compression off", {"async_compression": False}),
        ("1 query slots instead of 8", {"num_query_slots": 1}),
        ("bounded admission", {"admission": "bounded"}),
        ("lightning redundancy", {"policy_options": {"redundancy": "lightning", "gamma": 0.5}}),
        ("no redundancy", {"policy_options": {"redundancy": "raw", "gamma": 0.5, "lam": 1.0}}),
    ]
    snapkv = EngineConfig(kv_budget=256, compression="snapkv")
    assert len(plan_ablation(snapkv, RANDOM, "cpu", ("redundancy",))) == 2


@pytest.mark.parametrize(
    ("config", "groups", "budgets", "word"),
    [
        ({}, ("speed",), None, "legal are async"),
        ({"compression": "full"}, GROUPS, None, "must compress"),
        ({"kv_budget": None}, GROUPS, None, "must compress"),
        ({}, ("budget",), [100], "kv_budget=100"),
        ({}, ("graphs",), None, "CUDA"),
    ],
)
def test_what_can_not_be_planned(
    config: dict[str, Any], groups: tuple[str, ...], budgets: list[int] | None, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        plan_ablation(EngineConfig(**config), RANDOM, "cpu", groups, budgets)


def test_the_work() -> None:
    problems, shared = Work(num_requests=8).problems(), Work(num_requests=8, shared=True).problems()
    assert shared == problems[:2] and Work(num_requests=8, shared=True).samples == 4
    lengths = Work(num_requests=8).lengths()
    assert all(n > p.cot_tokens >= 800 for n, p in zip(lengths, problems, strict=True))
    plain = RANDOM.requests(320)
    prefixed = Work("tiny", 4, 100, 0.2, shared=True).requests(320)
    prefix = prefixed[0].prompt_token_ids[:1024]
    assert max(prefix) < 320
    for one, other in zip(plain, prefixed, strict=True):
        assert other.prompt_token_ids == prefix + one.prompt_token_ids
        assert other.output_len == one.output_len == 100
    assert RANDOM.longest() == max(RANDOM.lengths())
    assert Work(num_requests=8).longest() == 1750 + 10 + max(
        n - p.cot_tokens - 26 for n, p in zip(lengths, problems, strict=True)
    )
    with pytest.raises(ConfigError, match="legal are problems, tiny"):
        Work("amd")
    with pytest.raises(ConfigError, match="scale"):
        Work(scale=0.5)


# ---------------------------------------------------------------------- one cell


OPTIONS = {"kv_budget": 64, "max_num_seqs": 4, "num_kv_blocks": 40}


def test_a_cell_is_measured() -> None:
    row = ablation_worker.measure(OPTIONS, RANDOM, None)
    prompts = [len(r.prompt_token_ids) for r in RANDOM.requests(320)]
    assert row["status"] == "ok"
    assert row["generated_tokens"] == 400 and row["prefill_tokens"] == sum(prompts)
    assert row["tokens_per_second"] == pytest.approx(400 / row["wall_seconds"], rel=0.01)
    assert row["ms_per_step"] == pytest.approx(1000 * row["wall_seconds"] / row["steps"], rel=0.01)
    # Tokens are written up to the one before the last; 64 go whenever 128 are full.
    assert row["compressions"] == sum((n + 99 - 65) // 64 for n in prompts)
    assert row["compression_share"] > 0 and row["prefix_hit_rate"] == 0
    assert row["mean_running"] > 3.5
    assert row["pool_blocks"] == 40 and row["kv_bytes"] > 40 * 64 * 8192
    assert row["curve"][-1][1] == 400 and len(row["curve"]) <= 201
    assert row["machine"]["dtype"] == "float32"
    again = ablation_worker.measure(
        {**OPTIONS, "num_kv_blocks": None, "kv_cache_memory": row["kv_bytes"]}, RANDOM, None
    )
    assert again["pool_blocks"] == 40


def test_shared_prefixes_are_found_unless_the_cache_is_off() -> None:
    work = Work("tiny", num_requests=4, scale=0.2, output_len=2, shared=True)
    options = {**OPTIONS, "kv_budget": 2048, "num_kv_blocks": 100}
    on = ablation_worker.measure(options, work, None)
    off = ablation_worker.measure({**options, "enable_prefix_caching": False}, work, None)
    # All but the first request find the prefix.
    assert 0.6 < on["prefix_hit_rate"] < 0.75 and off["prefix_hit_rate"] == 0
    assert off["prefill_tokens"] - on["prefill_tokens"] == 3 * 1024


def test_a_cell_is_cut_at_its_limit() -> None:
    work = Work("tiny", num_requests=4, scale=0.2, output_len=5000)
    row = ablation_worker.measure(OPTIONS, work, 1.0)
    assert row["status"] == "cut"
    assert 0 < row["generated_tokens"] < 20000
    assert row["wall_seconds"] < 2
    assert row["curve"][-1][1] == row["generated_tokens"]


def test_answers_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_work, "_CHAINS", (40, 150))
    work = Work(num_requests=2)
    row = ablation_worker.measure({**OPTIONS, "kv_budget": 1024}, work, None)
    assert (row["right"], row["total"]) == (2, 2)
    four = Work(num_requests=8, shared=True)
    small_blocks = {"kv_budget": 1024, "block_size": 16, "window": 8, "num_kv_blocks": 400}
    sampled = ablation_worker.measure(small_blocks, four, None)
    assert (sampled["right"], sampled["total"]) == (8, 8)
    assert sampled["prefix_hit_rate"] > 0.4
    monkeypatch.setattr(Work, "reply_limit", lambda self: 5)
    cut_short = ablation_worker.measure({**OPTIONS, "kv_budget": 1024}, work, None)
    assert (cut_short["right"], cut_short["total"]) == (0, 2)


# ---------------------------------------------------------------------- supervision


def cell(label: str, **options: Any) -> Cell:
    return Cell("async", label, options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_worker, "serve", serve)
    monkeypatch.setattr(ablation, "_GRACE", 0.3)
    monkeypatch.setattr(ablation, "_LEAST_SECONDS", 0.0)


@pytest.mark.usefixtures("stand_in")
def test_a_failure_costs_a_worker_but_no_other_cell() -> None:
    cells = [cell(str(i), behave=b) for i, b in enumerate(["ok", "ok", "die", "ok", "fail", "ok"])]
    rows = list(run_ablation(cells, {}, RANDOM))
    assert [r["status"] for r in rows] == ["ok", "ok", "failed", "ok", "failed", "ok"]
    assert rows[0]["pid"] == rows[1]["pid"] != os.getpid()
    assert "exit code 7" in rows[2]["error"] and rows[4]["error"] == "no"
    assert len({rows[i]["pid"] for i in (1, 3, 5)}) == 3


@pytest.mark.usefixtures("stand_in")
def test_time_is_shared_and_a_cell_that_hangs_is_ended() -> None:
    cells = [cell(str(i), behave=b) for i, b in enumerate(["ok", "ok", "hang", "ok"])]
    rows = list(run_ablation(cells, {}, RANDOM, seconds=4))
    assert [r["status"] for r in rows] == ["ok", "ok", "failed", "ok"]
    assert rows[0]["seconds"] == pytest.approx(2, abs=0.05)
    assert 0.5 < rows[1]["seconds"] < 4 / 3
    assert "limit" in rows[2]["error"]
    assert 0 < rows[3]["seconds"] < 3


def test_nothing_is_begun_without_time() -> None:
    (row,) = run_ablation([cell("a")], {}, RANDOM, seconds=3)
    assert (row["status"], row["error"]) == ("failed", "only 3 s were left")


@pytest.mark.usefixtures("stand_in")
def test_results_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    cells = [cell("a", behave="ok"), cell("b", behave="fail"), cell("c", behave="ok")]
    running = run_ablation(cells, {}, RANDOM, file)
    first = next(running)
    running.close()
    assert read_results(file)[1] == [first]
    with file.open("a") as lines:
        lines.write('{"cell": {"lab')
    assert read_results(file)[1] == [first]
    rows = list(run_ablation(cells, {}, RANDOM, file))
    assert rows[0] == first and [r["status"] for r in rows] == ["ok", "failed", "ok"]
    assert rows[2]["pid"] != first["pid"]
    setting, found = read_results(file)
    assert found == rows and setting["work"]["num_requests"] == 4
    again = list(run_ablation(cells, {}, RANDOM, file))
    assert again[2] == rows[2] and read_results(file) == (setting, again)
    with pytest.raises(ConfigError, match="other settings"):
        list(run_ablation(cells, {"kv_budget": 5}, RANDOM, file))
    for content in (b"[]\n", b"\x89PNG"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="no results"):
            read_results(file)


# ---------------------------------------------------------------------- comparison


def row(label: str, speed: float, against: str = BASE, **more: Any) -> dict[str, Any]:
    group = BASE if label.startswith(BASE) else "async"
    whole = {"status": "ok", "tokens_per_second": speed, "generated_tokens": 1000}
    whole["curve"] = [[500 / speed, 500], [1000 / speed, 1000]]
    return {"cell": asdict(Cell(group, label, against=against)), **whole, **more}


def test_ratios() -> None:
    rows = [row("base", 100), row("x", 210), row("y", 50, against="x"), row("base, again", 110)]
    ratios = [r["ratio"] for r in with_ratios(rows)]
    assert ratios == pytest.approx([1, 2.0, 50 / 210, 1.1], rel=0.01)
    rows[0] = {"cell": rows[0]["cell"], "status": "failed", "error": ""}
    assert [r["ratio"] for r in with_ratios(rows)][:2] == [None, None]


def test_notes_under_the_table() -> None:
    def of(*rows: dict[str, Any]) -> str:
        return "\n".join(notes(with_ratios(rows)))

    assert of(row("base", 100), row("x", 110)) == ""
    steady = of(row("base", 100), row("x", 110), row("base, again", 105))
    assert "mean of the two base rows" in steady and "say little" not in steady
    for speed, factor in ((150, "1.50"), (50, "0.50")):
        noisy = of(row("base", 100), row("x", 110), row("base, again", speed))
        assert f"factor of {factor}" in noisy and "say little" in noisy
    assert "cut" in of(row("base", 100), row("x", 110, status="cut"))
    rows = [row("base", 100, machine={"threads": n}) for n in (2, 1)]
    assert "1 and 2 threads" in of(*rows) and of(*rows[:1], row("failed", 1)) == ""


def test_a_cut_row_is_compared_over_equal_work() -> None:
    # The base is fast at first and slow at its end; the cut row did its first 600 tokens.
    base = row("base", 100, curve=[[1, 500], [2, 700], [10, 1000]])
    cut = row("x", 300, status="cut", generated_tokens=600, curve=[[1, 300], [2, 600]])
    assert with_ratios([base, cut])[1]["ratio"] == pytest.approx(1.5 / 2)
    assert with_ratios([{**base, "status": "cut"}, row("y", 100)])[1]["ratio"] == pytest.approx(1)


# ---------------------------------------------------------------------- the commands


def run_command(monkeypatch: pytest.MonkeyPatch, *args: str) -> Invocation:
    """`zipage bench ablation` with the worker in this process."""

    def run(self: Any, task: tuple[Any, ...], seconds: float | None) -> dict[str, Any]:
        return json.loads(json.dumps(ablation_worker.measure(*task, seconds)))

    monkeypatch.setattr(ablation._Worker, "run", run)
    return invoke("bench", "ablation", *args)


SMALL = ["-w", "tiny", "--num-requests", "4", "--scale", "0.2", "--output-len", "100"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "a.jsonl", tmp_path / "a.svg"
    args = [*SMALL, "--kv-budget", "64", "--only", "budget,async", "--budgets", "128"]
    result = run_command(monkeypatch, *args, "--json", str(file), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    for words in ("5 cells of 4 requests", "budget 128", "full KV", "base, again", "preempted"):
        assert words in result.output, words
    setting, rows = read_results(file)
    assert [r["cell"]["label"] for r in rows] == [
        "base",
        "budget 128",
        "full KV",
        "asynchronous compression on",
        "base, again",
    ]
    assert setting["options"]["max_num_seqs"] == 4
    assert len({r["kv_bytes"] // (64 * 8192) for r in rows}) == 1
    assert rows[2]["compressions"] == 0 and rows[2]["pool_blocks"] > rows[0]["pool_blocks"]
    drawn = picture.read_text()
    assert "<svg" in drawn
    again = tmp_path / "b.svg"
    assert invoke("bench", "plot", str(file), "-o", str(again)).exit_code == 0
    assert again.read_text() == drawn


def test_a_failed_cell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, task: tuple[Any, ...], seconds: float | None) -> dict[str, Any]:
        return {"status": "failed", "error": "out of luck"}

    monkeypatch.setattr(ablation._Worker, "run", run)
    result = invoke("bench", "ablation", *SMALL, "--only", "async")
    assert result.exit_code == 1
    assert result.output.count("failed: out of luck") == 3


def test_a_missing_matplotlib_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("bench", "ablation", *SMALL, "--plot", str(tmp_path / "a.svg"))
    assert result.exit_code == 2
    assert "zipage[plots]" in result.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--model", "here"], "embedded model"),
        (["--only", "speed"], "legal are async"),
        (["--pool-share", "0"], "pool_share"),
        (["--seconds", "0"], "seconds=0.0 must be a positive number"),
        (["--seconds", "nan"], "seconds=nan must be a positive number"),
        (["--budgets", "many"], "integers"),
        (["--plot", "a.bmp2"], "format"),
    ],
)
def test_errors(args: list[str], word: str) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("bench", "ablation", *args)
    assert result.exit_code == 2
    assert word in result.stderr


def test_the_pool_is_a_share_that_every_cell_can_run_in() -> None:
    from zipage.cli.bench_ablation import _plan

    def blocks(only: str, share: float, **options: Any) -> int:
        engine = {f.name: getattr(BASE_CONFIG, f.name) for f in fields(BASE_CONFIG)} | options
        return _plan(engine, "tiny", 8, 100, 0.2, only, None, share)[1]["num_kv_blocks"]

    lengths = Work("tiny", 8, 100, 0.2).lengths()
    assert blocks("async", 1.0) == -(-sum(lengths) // 64)
    assert blocks("async", 0.01) == 256 // 64 + 1
    assert blocks("budget", 0.01) == 512 // 64 + 1
    assert blocks("async", 0.01, kv_budget=64) == -(-max(lengths) // 64) + 1
    assert blocks("async", 0.01, num_kv_blocks=7) == 7


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    result = invoke("bench", "ablation", *SMALL, "--only", "async", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [r["status"] for r in read_results(file)[1]] == ["ok"] * 3


@pytest.mark.slow
def test_a_worker_ends_with_its_parent() -> None:
    long = [*SMALL[:-1], "5000", "--max-model-len", "6000", "--only", "async"]
    command = [sys.executable, "-m", "zipage", "bench", "ablation", *long]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

    def workers() -> list[int]:
        found = [int(pid) for pid in children.read_text().split()]
        return [p for p in found if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]

    until(lambda: bool(workers()))
    (worker,) = workers()
    # It has set up everything once it has imported the engine.
    until(lambda: "libtorch" in Path(f"/proc/{worker}/maps").read_text())
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{worker}").exists())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
