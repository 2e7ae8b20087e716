"""The demo: both sides in the same memory, its pictures and its command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from zipage.cli import app
from zipage.demo.contest import (
    Owner,
    Snapshot,
    full_side,
    longest_prompt,
    reply_limit,
    run_side,
    same_answers,
    zipage_side,
)
from zipage.demo.view import View, pool_map, result_table, verdict
from zipage.engine.stats import EngineStats
from zipage.errors import ConfigError
from zipage.evals.problems import generate_problems
from zipage.tokenizer import apply_chat, load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "zipage" / "assets" / "zipage-tiny"


class Recorder:
    """A watcher that sees every step."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def due(self, now: float) -> bool:
        return True

    def show(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)


def test_both_sides_in_the_same_memory() -> None:
    problems = generate_problems(5, seed=2, min_tokens=90, max_tokens=200)
    pool_tokens = 384
    limit = reply_limit(problems, pool_tokens)
    full_watch, zipage_watch = Recorder(), Recorder()
    full = run_side(
        full_side({}, 16),
        problems,
        pool={"num_kv_blocks": pool_tokens // 16},
        max_tokens=limit,
        watcher=full_watch,
    )
    zipage = run_side(
        zipage_side({}, 64, 16, pool_tokens),
        problems,
        pool={"num_kv_blocks": pool_tokens // 16},
        max_tokens=limit,
        watcher=zipage_watch,
    )
    assert full.kv_bytes == pool_tokens * 8192
    assert full.right == len(problems) and full.failed == zipage.failed == 0
    assert full.stats.compressions == 0 < zipage.stats.compressions
    assert zipage.peak_blocks <= max(5, -(-longest_prompt(problems) // 16)) < full.peak_blocks
    assert zipage.stats.mean_running > full.stats.mean_running
    assert 0 <= same_answers(full, zipage) <= len(problems)
    assert same_answers(full, full) == len(problems)
    for side, watch in ((full, full_watch), (zipage, zipage_watch)):
        last = watch.seen[-1]
        assert (last.finished, last.right, last.total) == (5, side.right, 5)
        for snapshot in watch.seen:
            owned = sum(owner.blocks for owner in snapshot.owners)
            assert snapshot.stats.blocks_owned <= owned <= 2 * snapshot.stats.blocks_total
        assert any(snapshot.reasoning for snapshot in watch.seen)
    rendered = io.StringIO()
    Console(file=rendered, width=120).print(result_table(full, zipage))
    assert "5/5 (100.0 %)" in rendered.getvalue()
    assert "same 3.0 MiB" in verdict(full, zipage)


def test_template_is_counted() -> None:
    problems = generate_problems(2, seed=2, max_tokens=200)
    tokenizer = load_tokenizer(TOKENIZER)
    prompts = [apply_chat(tokenizer, [{"role": "user", "content": p.prompt}]) for p in problems]
    assert longest_prompt(problems) == max(map(len, prompts))


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    problems = generate_problems(1, seed=2, min_tokens=300, max_tokens=400)
    with pytest.raises(ConfigError, match="pool_tokens=256"):
        reply_limit(problems, 256)
    assert reply_limit(problems, 100_000) < 2 * problems[0].cot_tokens


def test_pool_map() -> None:
    owners = [Owner("a", 4, False), Owner("b", 2, True), Owner("c", 1, False)]
    assert pool_map(owners, 10, 20).plain == "████████▒▒▒▒██······"
    assert pool_map([], 10, 5).plain == "·····"
    assert pool_map([Owner("a", 30, False)], 10, 5).plain == "█████"
    assert len(pool_map([Owner(str(i), 1, False) for i in range(100)], 100, 7).plain) == 7


def snapshot(seconds: float, tokens: int) -> Snapshot:
    stats = EngineStats(
        running=3, waiting=4, blocks_total=10, blocks_owned=7, generated_tokens=tokens
    )
    owners = (Owner("a", 7, False),)
    return Snapshot("Zipage", stats, seconds, 9, 2, 1, owners, "#1 a\n#2 b\n[bold]#3 c")


def test_plain_view_writes_lines() -> None:
    out = io.StringIO()
    with View(Console(file=out, width=200)) as view:
        assert view.due(10.0) and not view.due(11.0) and view.due(16.0)
        view.show(snapshot(1.0, 500))
        view.show(snapshot(2.0, 1500))
    first, second = out.getvalue().splitlines()
    assert "finished 2/9 (1 right) | running 3, waiting 4 | blocks 7/10 | 500 tokens/s" in first
    assert "750 tokens/s" in second
    assert "\x1b" not in out.getvalue()


def test_live_view_draws_everything() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, height=40, force_terminal=True)
    with View(console) as view:
        view.show(snapshot(1.0, 500))
    drawn = out.getvalue()
    for text in ("Zipage", "3 running, 4 waiting", "7/10 blocks", "500", "[bold]#3 c", "2/9"):
        assert text in drawn


def test_command(tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    done = CliRunner().invoke(
        app,
        [
            "demo", "--count", "3", "--min-tokens", "60", "--max-tokens", "150",
            "--pool-tokens", "512", "--kv-budget", "128", "--block-size", "16",
            "--json", str(report),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "right answers" in done.output and "x as fast" in done.output
    record = json.loads(report.read_text())
    assert record["full"]["right"] == 3
    assert record["zipage"]["kv_bytes"] <= record["full"]["kv_bytes"]
    assert len(record["zipage"]["answers"]) == 3
    assert record["settings"]["kv_budget"] == 128


def test_threads_are_checked() -> None:
    done = CliRunner().invoke(app, ["demo", "--threads", "0"])
    assert done.exit_code == 2 and "threads=0 must be at least 1" in done.output


def test_a_failed_request_is_a_failed_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("kernel fault")

    monkeypatch.setattr("zipage.execution.model_runner.ModelRunner.compress", broken)
    done = CliRunner().invoke(
        app,
        [
            "demo", "--count", "2", "--min-tokens", "100", "--max-tokens", "150",
            "--pool-tokens", "512", "--kv-budget", "64", "--block-size", "16",
        ],
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "failed" in done.output
