"""The generated problems: format, answers worked out again from the prompt, and scoring."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zipage.errors import ConfigError
from zipage.evals import problems as subject
from zipage.evals.problems import (
    FAMILIES,
    MAX_VALUE,
    Solved,
    count_tokens,
    extract_answer,
    generate_problems,
    is_correct,
    load_problems,
    reference_reply,
)

SOLVERS = {
    "ledger": subject.solve_ledger,
    "addition": subject.solve_addition,
    "lookup": subject.solve_lookup,
}


def samples(family: str, count: int = 150) -> Iterator[Solved]:
    """Problems of all lengths, with and without checks."""
    for i in range(count):
        rng = random.Random(i)
        steps = rng.randint(2, subject.MAX_STEPS[family])
        solved = SOLVERS[family](rng, steps, rng.random() < 0.5)
        if solved is not None:
            yield solved


def ledger_answer(prompt: str) -> str:
    """Play the transactions of a prompt."""
    lines = prompt.split("\n")
    balances = {name: int(v) for name, v in re.findall(r"(\w+) has (\d+)\.", lines[0])}
    for number, line in enumerate(lines[1:-1], start=1):
        label, rest = line.rstrip(".").split(" ", 1)
        assert label == f"#{number}"
        actor, verb, *receiver, amount = rest.split()
        assert verb in ("gives", "wins", "loses") and len(receiver) == (verb == "gives")
        balances[actor] += int(amount) if verb == "wins" else -int(amount)
        if receiver:
            balances[receiver[0]] += int(amount)
        assert all(0 <= v <= MAX_VALUE for v in balances.values())
    asked = re.fullmatch(
        r"How much (?:does (\w+) have|do (\w+) and (\w+) have in total) at the end "
        rf"\(#1-#{len(lines) - 2}\)\? (?:Check every step|No checks)\.",
        lines[-1],
    )
    assert asked, lines[-1]
    return str(sum(balances[name] for name in asked.groups() if name))


def addition_answer(prompt: str) -> str:
    """Add the numbers of a prompt."""
    lines = prompt.split("\n")
    assert lines[0] == "Add these numbers."
    numbers = []
    for i, line in enumerate(lines[1:-1], start=1):
        label, number = line.split(" ")
        assert label == f"#{i}"
        numbers.append(int(number))
    assert lines[-1].startswith(f"What is the sum (#1-#{len(numbers)})? ")
    return str(sum(numbers))


def lookup_answer(prompt: str) -> str:
    """Follow the table of a prompt."""
    table, question = prompt.split("\n")
    rows = re.findall(r"(\w+)(?: (\d+))? -> (\w+)[,.]", table)
    assert len(rows) == table.count("->")
    following = {key: after for key, _, after in rows}
    start, hops = re.match(
        r"Start at (\w+) and follow the table \(#1-#(\d+)\)\.", question
    ).groups()
    here, total = start, 0
    values = {key: int(value or 0) for key, value, _ in rows}
    for _ in range(int(hops)):
        total += values[here]
        here = following[here]
    return here if "Which word is last?" in question else str(total)


ORACLES = {"ledger": ledger_answer, "addition": addition_answer, "lookup": lookup_answer}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_from_the_prompt(family: str) -> None:
    answers = set()
    for solved in samples(family):
        assert solved.answer == ORACLES[family](solved.prompt)
        answers.add(solved.answer)
    assert len(answers) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_every_calculation_of_the_chain_is_right(family: str) -> None:
    checked = 0
    for solved in samples(family):
        lines = solved.chain.rstrip("\n").split("\n")
        steps = int(re.search(r"\(#1-#(\d+)\)", solved.prompt).group(1))
        assert [line.split(" ")[0] for line in lines[:-1]] == [f"#{i + 1}" for i in range(steps)]
        assert lines[-1].startswith("Answer: ") and solved.answer in lines[-1]
        for left, sign, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", solved.chain):
            assert int(left) + int(sign + right) == int(result)
        wants_checks = solved.prompt.endswith("Check every step.")
        assert wants_checks or solved.prompt.endswith("No checks.")
        assert ("Check:" in solved.chain) == wants_checks
        checked += wants_checks
    assert checked > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_in_the_models_vocabulary(family: str) -> None:
    tokenizer = subject._tokenizer()
    unknown = tokenizer.token_to_id("<unk>")
    for solved in samples(family, 60):
        for text in (solved.prompt, reference_reply(solved)):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert unknown not in ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chain_wording() -> None:
    """The exact text the model was trained on."""
    assert subject._calculation(372, "-", 44, False) == "372 - 44 = 328."
    assert subject._calculation(52, "+", 44, True) == "52 + 44 = 96. Check: 96 - 44 = 52 ok."
    for solved in samples("ledger", 40):
        first = solved.prompt.split("\n")[1]
        assert solved.chain.startswith(first + " ")
    assert count_tokens("#12 Umar gives Zoe 44.\n") == 7


def test_reference_reply_scores_as_right() -> None:
    for family in FAMILIES:
        for solved in samples(family, 20):
            assert is_correct(reference_reply(solved), solved.answer)


def test_sets_are_deterministic_balanced_and_in_range() -> None:
    one = generate_problems(12, seed=5, min_tokens=400, max_tokens=900)
    assert one == generate_problems(12, seed=5, min_tokens=400, max_tokens=900)
    assert one[:3] == generate_problems(3, seed=5, min_tokens=400, max_tokens=900)
    other = generate_problems(12, seed=6, min_tokens=400, max_tokens=900)
    assert not {p.prompt for p in one} & {p.prompt for p in other}
    assert [p.family for p in one] == list(FAMILIES) * 4
    assert all(400 <= p.cot_tokens <= 900 for p in one)
    assert len({p.problem_id for p in one}) == 12


def test_the_same_problems_everywhere() -> None:
    """Pins the draws: a change of the generator changes every published number."""
    text = "".join(p.prompt + p.answer for p in generate_problems(12, seed=0, min_tokens=300))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0ea4157641e6fffb"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"count": 1, "families": ["chess"]}, "'chess'"),
        ({"count": 1, "families": []}, "families"),
        ({"count": 2, "min_tokens": 4000}, "min_tokens=4000"),
        ({"count": 1, "min_tokens": 300, "max_tokens": 200}, "max_tokens=200"),
    ],
)
def test_illegal_sets(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate_problems(**arguments)


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_load_problems(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"id": "a", "family": "x", "prompt": "one", "answer": "1", "cot_tokens": 50},
        "",
        {"problem": "two", "answer": 2},
    )
    first, second = load_problems(path)
    assert (first.problem_id, first.family, first.cot_tokens) == ("a", "x", 50)
    assert (second.prompt, second.answer, second.family) == ("two", "2", "all")
    assert load_problems(path, min_tokens=10) == [first]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ({"prompt": "x"}, "'answer'"),
        ({"answer": "x"}, "'prompt'"),
        ({"prompt": "x", "answer": "1", "cot_tokens": "many"}, "cot_tokens"),
        ("", "no record"),
    ],
)
def test_malformed_files(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_problems(write_lines(tmp_path / "p.jsonl", record))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_problems(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\boxed{42}.", "42"),
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{ 7 }", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("no box", None),
        ("\\boxed{4", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_is_correct_is_exact() -> None:
    assert is_correct("\\boxed{42}", "42")
    assert is_correct("\\boxed{42}", " 42 ")
    assert not is_correct("\\boxed{042}", "42")
    assert not is_correct("\\boxed{42} \\boxed{41}", "42")
    assert not is_correct("42", "42")
    assert not is_correct("", "")
