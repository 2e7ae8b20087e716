"""`zipage bench offline`: its workloads, its roofline and its report."""

import json
import math
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.invoke import Invocation, invoke
from zipage import LLM, ConfigError, ZipageError
from zipage.bench.offline import median_result, run_offline, speed_ratio
from zipage.bench.roofline import Roofline, measure_copy_bandwidth, weight_bytes_per_step
from zipage.bench.workloads import BenchRequest, check_lengths, make_workload
from zipage.engine.engine import LLMEngine

#: Fewer requests and shorter texts than any preset.
SMALL = ["--num-requests", "3", "--scale", "0.2", "--output-len", "120"]


def published(n: int, mean: float, sigma: float, hi: int) -> list[tuple[list[int], int]]:
    """The generator that figures of other engines were measured with, as published."""
    r, lo, vocab = random.Random(0), 512, 32000
    mu = math.log(mean) - sigma * sigma / 2
    work = []
    for _ in range(n):
        p = r.randint(64, 256)
        o = int(min(hi, max(lo, r.lognormvariate(mu, sigma))))
        work.append(([r.randrange(10, vocab) for _ in range(p)], o))
    return work


@pytest.mark.parametrize(
    ("name", "args", "prompt_tokens", "output_tokens"),
    [
        ("amc", (96, 8192, 0.7, 16384), 15_187, 806_468),
        ("aime", (64, 14000, 0.5, 32768), 10_064, 948_378),
        ("short", (256, 1024, 0.4, 2048), 40_149, 270_210),
    ],
)
def test_presets_are_the_published_requests(
    name: str, args: tuple[int, float, float, int], prompt_tokens: int, output_tokens: int
) -> None:
    work = [(r.prompt_token_ids, r.output_len) for r in make_workload(name, 151_936)]
    assert work == published(*args)
    assert sum(len(ids) for ids, _ in work) == prompt_tokens
    assert sum(length for _, length in work) == output_tokens


def test_the_tiny_workload() -> None:
    requests = make_workload("tiny", 320)
    assert len(requests) == 32 and {r.output_len for r in requests} == {256}
    mean = sum(len(r.prompt_token_ids) for r in requests) / 32
    assert abs(mean - 309) < 10
    assert max(max(r.prompt_token_ids) for r in requests) < 320


def test_options_only_cut_a_workload() -> None:
    whole = make_workload("amc", 32000)
    assert make_workload("amc", 32000, num_requests=5) == whole[:5]
    assert make_workload("amc", 32000, num_requests=100)[:96] == whole
    small = make_workload("amc", 1000, scale=0.25)
    for before, after in zip(whole, small, strict=True):
        count = len(after.prompt_token_ids)
        assert count == len(before.prompt_token_ids) // 4
        assert after.prompt_token_ids == [t % 1000 for t in before.prompt_token_ids[:count]]
        assert after.output_len == before.output_len // 4
    fixed = make_workload("amc", 32000, output_len=7, scale=0.5)
    assert {r.output_len for r in fixed} == {7}


@pytest.mark.parametrize(
    "options", [{"scale": 0.0}, {"scale": 1.5}, {"num_requests": 0}, {"output_len": 0}]
)
def test_illegal_workload_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_workload("tiny", 320, **options)
    with pytest.raises(ConfigError, match="amc"):
        make_workload("tinny", 320)


@pytest.mark.parametrize("scale", [1.0, 0.9])
def test_a_workload_too_long_is_refused_with_a_scale_that_fits(scale: float) -> None:
    with pytest.raises(ConfigError, match="max_model_len=8,192") as caught:
        check_lengths(make_workload("amc", 320, scale=scale), 8192, scale)
    advised = float(str(caught.value).partition("scale=")[2].split()[0])
    assert 0.3 < advised < 0.5
    check_lengths(make_workload("amc", 320, scale=advised), 8192, advised)


def test_weights_read_per_step() -> None:
    with LLM(num_kv_blocks=64) as llm:
        model = llm.engine.core.runner.model
        assert weight_bytes_per_step(model) == 4 * 7_427_328
        assert 1e8 < measure_copy_bandwidth(torch.device("cpu")) < 1e13


def test_roofline_arithmetic() -> None:
    roofline = Roofline(weight_bytes=6, kv_read_bytes=3, kv_moved_bytes=1, bandwidth=5.0)
    assert roofline.total_bytes == 10
    assert roofline.seconds == 2.0


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(num_kv_blocks=64, kv_budget=64, max_num_seqs=8) as llm:
        yield llm


def test_a_run_is_measured(llm: LLM) -> None:
    requests = [BenchRequest([5 + i] * 70, 100) for i in range(4)]
    seen = []
    full_bytes = [4 * sum(70 + step for step in range(100))]

    results = run_offline(
        llm, requests, repeats=2, compare_full=True, watch=lambda s, done: seen.append(done)
    )

    assert [r.mode for r in results] == ["zipage", "full", "zipage", "full"]
    for result in results:
        assert (result.prefill_tokens, result.generated_tokens) == (280, 400)
        assert result.tokens_per_second == pytest.approx(400 / result.wall_seconds)
        assert result.step_ms.p50 <= result.step_ms.p99
        assert result.pool_blocks == 64 and result.peak_memory_bytes > 10**7
        assert result.roofline.weight_bytes == result.steps * 4 * 7_427_328
        assert 0 < result.roofline_share < 1
    zipage, full = results[:2]
    # 169 tokens are written: blocks of 64 are full, and cut by 64, at 128 and after 64 more.
    assert zipage.compressions == 4 and full.compressions == 0
    assert zipage.evicted_tokens == 4 * 64
    assert zipage.roofline.kv_moved_bytes == 2 * 4 * 64 * 8192
    assert zipage.pool_blocks_peak == 8 and full.pool_blocks_peak == 12
    assert full.steps == 100 and full.mean_running == 4
    # All tokens attended to, but those of each request's last step.
    assert full.roofline.kv_read_bytes == (full_bytes[0] - 4 * 169) * 8192
    assert zipage.roofline.kv_read_bytes < full.roofline.kv_read_bytes
    assert seen.count(4) == 4 and max(seen) == 4
    ratio = speed_ratio(results)
    assert ratio is not None and ratio > 0
    middle = median_result(results, "zipage")
    assert middle is not None
    assert middle.wall_seconds == max(results[0].wall_seconds, results[2].wall_seconds)


def test_later_runs_get_nothing_from_the_prefix_cache(llm: LLM) -> None:
    requests = [BenchRequest(list(range(10, 200)), 2)]
    before = llm.stats().prefix_cache_hits
    run_offline(llm, requests, repeats=3)
    assert llm.stats().prefix_cache_hits == before


def test_a_run_that_fails_leaves_the_engine_empty(llm: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        llm.engine.core.runner,
        "compress",
        lambda job: (_ for _ in ()).throw(RuntimeError("no compressor")),
    )
    with pytest.raises(ZipageError, match="no compressor"):
        run_offline(llm, [BenchRequest([5] * 70, 100), BenchRequest([6] * 70, 100)])
    assert not llm.engine.has_unfinished
    assert llm.stats().blocks_owned == 0


def test_there_must_be_something_to_compare() -> None:
    with (
        LLM(num_kv_blocks=64, compression="full") as full,
        pytest.raises(ConfigError, match="compare_full"),
    ):
        run_offline(full, [BenchRequest([1], 1)], compare_full=True)


def bench(*args: str) -> Invocation:
    return invoke("bench", "offline", "--num-kv-blocks", "64", "--max-num-seqs", "8", *args)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench(*SMALL, "--kv-budget", "64", "--compare-full", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in (
        "tiny, lengths scaled by 0.2: 3 requests",
        "360 output tokens",
        "ms per step, p99",
        "copy bandwidth",
        "full KV",
        "ratio",
        "one pair",
    ):
        assert words in result.output, words
    record = json.loads(file.read_text())
    assert record["workload"]["scale"] == 0.2
    assert record["engine"]["kv_budget"] == 64
    assert record["machine"]["dtype"] == "float32"
    assert [run["mode"] for run in record["runs"]] == ["zipage", "full"]
    assert record["runs"][0]["compressions"] > 0
    assert record["runs"][0]["roofline"]["share"] > 0
    assert record["speed_ratio"] > 0


def test_full_kv_alone() -> None:
    result = bench(*SMALL, "--compression", "full")
    assert result.exit_code == 0, result.output
    assert "full KV" in result.output and "ratio" not in result.output


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--workload", "huge"], "legal are tiny"),
        (["--workload", "amc"], "scale=0.4"),
        (["--repeats", "0"], "repeats=0"),
    ],
)
def test_errors(args: list[str], word: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert word in result.stderr


def test_it_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, which is no terminal here; what comes to stdout is the report alone."""
    monkeypatch.setattr("zipage.cli.progress._LINE_SECONDS", 0.0)
    result = bench(*SMALL)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if " requests of 3, " in line]
    assert len(lines) > 100
    assert re.fullmatch(
        r"0 requests of 3, \d+ tokens, [\d,]+ tokens/s, running 3, waiting 0", lines[5]
    )
    assert lines[-1].startswith("3 requests of 3, ")
    assert "requests of" not in result.stdout


def test_an_interrupt_ends_it_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step = LLMEngine.step
    engines = []

    def interrupted(engine: LLMEngine) -> Any:
        if engine.stats().steps == 50:
            os.kill(os.getpid(), signal.SIGINT)
            engines.append(engine)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    result = bench(*SMALL)
    assert result.exit_code == 130
    assert "tokens/s" not in result.output
    assert engines and engines[0].stats().blocks_owned == 0


def test_a_comparison_without_compressions_says_so() -> None:
    result = bench(*SMALL, "--kv-budget", "1024", "--compare-full")
    assert result.exit_code == 0, result.output
    assert "Nothing was compressed" in result.output
    assert "Speed with compression" not in result.output
