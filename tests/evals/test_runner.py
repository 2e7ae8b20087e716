"""The evaluation runner: cells, scoring, resuming, tables and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zipage.cli import app
from zipage.config import FULL
from zipage.errors import ConfigError
from zipage.evals import runner as subject
from zipage.evals.problems import Problem, generate_problems
from zipage.evals.report import accuracy_rows, detail_rows, markdown
from zipage.evals.runner import (
    Answer,
    Cell,
    CellResult,
    cell_settings,
    engine_config,
    parse_policy,
    plan_cells,
    run_cell,
    run_cells,
)

ENGINE = {"block_size": 16, "num_kv_blocks": 64}


def short_problems(count: int = 2) -> list[Problem]:
    return generate_problems(count, seed=11, min_tokens=60, max_tokens=130)


def made_up(policy: str, budget: int | None, rights: list[bool]) -> CellResult:
    answers = tuple(
        Answer(
            problem_id=str(i),
            family=("ledger", "addition")[i % 2],
            expected="1",
            given="1" if right else None,
            right=right,
            finish_reason="stop" if right else "length",
            tokens=100,
            compressions=2,
            evicted_tokens=32,
            peak_blocks=5 + i,
            preemptions=i,
        )
        for i, right in enumerate(rights)
    )
    return CellResult(Cell(policy, budget), {"max_tokens": 9}, 2.0, answers)


# ---------------------------------------------------------------------- cells


def test_full_is_one_cell_and_others_one_each() -> None:
    cells = plan_cells(["full", "zipage", "zipage:lam=0.8", "zipage"], [512, 256])
    assert [(c.label, c.budget) for c in cells] == [
        ("full", None),
        ("zipage", 512),
        ("zipage", 256),
        ("zipage:lam=0.8", 512),
        ("zipage:lam=0.8", 256),
    ]


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match="nothing to run"):
        plan_cells([], [64])
    for policies in (["zipage"], ["full", "zipage"]):
        with pytest.raises(ConfigError, match="policy 'zipage' needs budgets"):
            plan_cells(policies, [])


def test_parse_policy() -> None:
    assert parse_policy("rkv") == ("rkv", {})
    text = "zipage:lam=0.8:first_pooling=5:redundancy=raw"
    name, options = parse_policy(text)
    assert (name, options) == ("zipage", {"lam": 0.8, "first_pooling": 5, "redundancy": "raw"})
    assert Cell(name, 64, options).label == text
    for malformed in ("zipage:lam", "zipage:=3"):
        with pytest.raises(ConfigError, match="option=value"):
            parse_policy(malformed)


def test_a_cell_decides_policy_and_budget() -> None:
    config = engine_config(Cell("zipage", 64, {"lam": 0.5}), ENGINE)
    assert (config.compression, config.kv_budget, config.block_size) == ("zipage", 64, 16)
    assert dict(config.policy_options) == {"lam": 0.5}
    assert engine_config(Cell(FULL, None), ENGINE).compression == FULL
    for legal_only_in_cells in ("kv_budget", "compression", "policy_options"):
        with pytest.raises(ConfigError, match=legal_only_in_cells):
            engine_config(Cell("zipage", 64), {legal_only_in_cells: None})
    with pytest.raises(ConfigError, match="no_such_policy"):
        engine_config(Cell("no_such_policy", 64), ENGINE)
    with pytest.raises(ConfigError, match="lambda"):
        engine_config(Cell("zipage", 64, {"lambda": 1}), ENGINE)


def test_settings_tell_different_runs_apart() -> None:
    problems = short_problems()
    cell = Cell("zipage", 64)
    base = cell_settings(cell, problems, ENGINE, 100)
    assert base == cell_settings(cell, list(problems), dict(ENGINE), 100)
    for other in (
        cell_settings(Cell("zipage", 80), problems, ENGINE, 100),
        cell_settings(Cell("zipage", 64, {"lam": 0.1}), problems, ENGINE, 100),
        cell_settings(cell, problems[:1], ENGINE, 100),
        cell_settings(cell, problems, {**ENGINE, "window": 8}, 100),
        cell_settings(cell, problems, ENGINE, 101),
    ):
        assert other != base
        assert subject.cell_path(Path(), cell, other) != subject.cell_path(Path(), cell, base)


# ---------------------------------------------------------------------- results


def test_counts_of_a_cell() -> None:
    result = made_up("zipage", 64, [True, True, False])
    assert (result.right, result.total, result.truncated, result.errors) == (2, 3, 1, 0)
    assert result.families == {"ledger": (1, 2), "addition": (1, 1)}
    assert result.tokens_per_second == 150
    assert (result.peak_blocks, result.preemptions) == (7, 3)
    assert result.mean("compressions") == 2
    failed = dataclasses.replace(result.answers[0], finish_reason="error", right=False)
    assert dataclasses.replace(result, answers=(failed,)).errors == 1


def test_a_result_survives_json() -> None:
    result = made_up("zipage", 64, [True, False])
    assert CellResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_tables() -> None:
    results = [
        made_up("full", None, [True, True]),
        made_up("zipage", 64, [True, False]),
        made_up("zipage", 128, [True, True]),
        made_up("random", 64, [False, False]),
    ]
    assert accuracy_rows(results) == [
        ["policy", "no limit", "128", "64"],
        ["full", "2/2 (100.0 %)", "", ""],
        ["zipage", "", "2/2 (100.0 %)", "1/2 (50.0 %)"],
        ["random", "", "", "0/2 (0.0 %)"],
    ]
    details = detail_rows(results)
    assert len(details) == 5 and len({len(row) for row in details}) == 1
    assert dict(zip(details[0], details[2], strict=True))["addition"] == "0/1"
    text = markdown(results, ["what was run"])
    assert "- what was run\n" in text
    assert "| zipage |  | 2/2 (100.0 %) | 1/2 (50.0 %) |" in text
    for table in text.split("\n\n"):
        widths = {row.count("|") for row in table.splitlines() if row.startswith("|")}
        assert len(widths) <= 1

    first = results[1].answers[0].problem_id
    assert "Of these" not in text
    split = markdown(results, [], {first}, 1000)
    assert "the 1 problems with reference chains of thought of 1,000 tokens or more" in split
    assert "| zipage |  | 1/1 (100.0 %) | 1/1 (100.0 %) |" in split


# ---------------------------------------------------------------------- with the model


def test_full_kv_answers_short_problems() -> None:
    seen = []
    result = run_cell(
        Cell(FULL, None), short_problems(3), ENGINE, 300, lambda cell, stats: seen.append(stats)
    )
    assert result.right == result.total == 3
    assert result.truncated == result.errors == 0
    assert result.mean("compressions") == 0
    assert len(seen) >= max(a.tokens for a in result.answers)


def test_a_budget_evicts_and_is_kept() -> None:
    result = run_cell(Cell("streaming", 32), short_problems(2), ENGINE, 60)
    assert all(a.compressions > 0 and a.evicted_tokens > 0 for a in result.answers)
    assert all(a.tokens <= 60 for a in result.answers)
    assert result.right == 0, "nothing of the prompt is left after 32 tokens"


def test_a_finished_cell_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = short_problems(1)
    cells = plan_cells(["full"], [])
    first = list(run_cells(cells, problems, ENGINE, 200, tmp_path))
    assert [found for _, found in first] == [False]

    def never(*_: object) -> CellResult:
        raise AssertionError("ran again")

    monkeypatch.setattr(subject, "run_cell", never)
    again = list(run_cells(cells, problems, ENGINE, 200, tmp_path))
    assert [found for _, found in again] == [True]
    assert again[0][0].answers == first[0][0].answers
    with pytest.raises(AssertionError, match="ran again"):
        list(run_cells(cells, problems, ENGINE, 201, tmp_path))


def test_all_options_are_checked_before_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "run_cell", lambda *_: pytest.fail("ran"))
    cells = plan_cells(["zipage"], [64, 65])
    with pytest.raises(ConfigError, match="kv_budget=65"):
        list(run_cells(cells, short_problems(1), ENGINE, 200, tmp_path))


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "run_cell", None)
    monkeypatch.setattr(subject.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=r"out=.* is not permitted"):
        list(run_cells([Cell(FULL, None)], short_problems(1), ENGINE, 200, tmp_path))


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    problems, cell = short_problems(1), Cell(FULL, None)
    path = subject.cell_path(tmp_path, cell, cell_settings(cell, problems, ENGINE, 200))
    path.write_text("{}")
    with pytest.raises(ConfigError, match=path.name):
        list(run_cells([cell], problems, ENGINE, 200, tmp_path))


# ---------------------------------------------------------------------- the command


def test_command(tmp_path: Path) -> None:
    records = [
        {"prompt": p.prompt, "answer": p.answer, "cot_tokens": p.cot_tokens, "family": p.family}
        for p in short_problems(2)
    ]
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    arguments = [
        "eval", "--problems", str(file), "--policies", "full,streaming", "--budgets", "32",
        "--block-size", "16", "--num-kv-blocks", "64", "--max-tokens", "200",
        "--out", str(tmp_path / "cells"), "--json", str(tmp_path / "r.json"),
        "--markdown", str(tmp_path / "r.md"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "full: 2/2 right" in done.output and "streaming 32: 0/2 right" in done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert [cell["right"] for cell in report["cells"]] == [2, 0]
    assert "| full | 2/2 (100.0 %) |" in (tmp_path / "r.md").read_text()
    again = CliRunner().invoke(app, arguments)
    assert again.output.count("finished earlier") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "many"], "budgets='many'"),
        (["--budgets", "100"], "kv_budget=100"),
        (["--policies", "no_such"], "no_such"),
        (["--problems", "no_such.jsonl"], "no_such.jsonl"),
        (["--count", "0"], "count=0"),
        (["--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["--policies", "full", "--out", f"{__file__}/x"], "out="),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["eval", *arguments])
    assert done.exit_code == 2
    assert message in done.output
