"""Problems for zipage-tiny with exact answers and known chains of thought, and their scoring.

Three families, in the wording the model was trained on. Every step of a chain of thought needs a
fact of the prompt or of an earlier step, often from more than a thousand tokens back:

* ``ledger``: people with balances and numbered transactions; the balance of one at the end, or
  the total of two;
* ``addition``: numbered numbers, added up with a running total;
* ``lookup``: a shuffled table followed hop by hop; the last word, or the sum of the numbers passed.

A prompt that ends with ``Check every step.`` asks for every calculation to be repeated backwards,
which is text that no later step needs.
"""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zipage.errors import ConfigError
from zipage.json_lines import read_json_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FAMILIES = ("ledger", "addition", "lookup")

_NAMES = (
    "Anna Bob Carl Dora Emil Fay Gus Hana Ivan Jane Kurt Lea "
    "Max Nina Otto Pia Quin Rosa Sam Tina Umar Vera Walt Zoe"
)
_WORDS = (
    "fox owl cat dog cow hen pig bee ant bat elk emu ram rat yak cod oak elm fig nut pea rye tea "
    "jam egg oil ice fog sun sky sea bay cup pan pot jar lid mug box bag hat cap bow fan key map "
    "net oar pen pin rug saw axe bus car van jet tram drum harp bell lamp ring rope"
)
#: Words of the model's vocabulary for people and for table keys.
NAMES, WORDS = tuple(_NAMES.split()), tuple(_WORDS.split())

#: Most steps of a problem, by family.
MAX_STEPS = {"ledger": 70, "addition": 60, "lookup": 70}
#: The largest number the model knows.
MAX_VALUE = 9999
#: Most keys of a lookup table.
MAX_KEYS = 60
#: Share of the problems that ask for checks.
CHECKED_SHARE = 0.4
#: Longest conversation the model was trained on, in tokens.
MAX_CONVERSATION = 4608

_TOKENIZER = Path(__file__).parents[1] / "assets" / "zipage-tiny" / "tokenizer.json"
_MAX_TRIES = 500


@dataclass(frozen=True)
class Problem:
    """A problem to be answered and scored.

    Attributes:
        problem_id: unique in its set.
        family: one of `FAMILIES`, or any name in a file.
        prompt: the user turn.
        answer: the content of the last ``\\boxed{...}`` of a correct reply.
        cot_tokens: tokens of the reference chain of thought; 0 when unknown.
    """

    problem_id: str
    family: str
    prompt: str
    answer: str
    cot_tokens: int = 0


class Solved(NamedTuple):
    """A prompt, the reference chain of thought (without the think tags) and the answer."""

    prompt: str
    chain: str
    answer: str


def reference_reply(solved: Solved) -> str:
    """What a perfect model writes after the generation prompt."""
    return f"{solved.chain}</think>\n\nThe answer is \\boxed{{{solved.answer}}}."


# ---------------------------------------------------------------------- the three families


def _calculation(left: int, sign: str, right: int, check: bool) -> str:
    result = left + right if sign == "+" else left - right
    text = f"{left} {sign} {right} = {result}."
    if check:
        inverse = "-" if sign == "+" else "+"
        text += f" Check: {result} {inverse} {right} = {left} ok."
    return text


def _closing(check: bool) -> str:
    return "Check every step." if check else "No checks."


def solve_ledger(rng: random.Random, steps: int, check: bool) -> Solved | None:
    """Draw and solve a ledger problem; None if a number exceeds the model's range."""
    people = rng.sample(NAMES, rng.randint(3, 8))
    scale = rng.choice((20, 99, 99, 400, 999, 5000))
    top = min(scale, rng.choice((9, 50, 99, 99, 300, 999)))
    # In half of the problems a few people act most of the time and others go unmentioned for long.
    skew = rng.choice((1.0, rng.uniform(1.0, 3.0)))
    balances = {name: rng.randint(1, scale) for name in people}
    last_seen = dict.fromkeys(people, 0)
    opening = " ".join(f"{name} has {money}." for name, money in balances.items())
    transactions, chain = [], []
    for step in range(1, steps + 1):
        actor = people[int(len(people) * rng.random() ** skew)]
        verb = rng.choices(("gives", "loses", "wins"), (0.6, 0.2, 0.2))[0]
        if not balances[actor]:
            verb = "wins"
        limit = top if verb == "wins" else min(top, balances[actor])
        amount = rng.randint(1, limit)
        others = [name for name in people if name != actor]
        partner = others[int(len(others) * rng.random() ** skew)]
        receiver = {"gives": partner, "wins": actor, "loses": None}[verb]
        line = f"#{step} {actor} {verb} " + (f"{partner} " if verb == "gives" else "") + str(amount)
        parts = [f"{line}."]
        changes = [] if verb == "wins" else [(actor, "-")]
        if receiver is not None:
            changes.append((receiver, "+"))
        for name, sign in changes:
            parts.append(f"{name} {_calculation(balances[name], sign, amount, check)}")
            balances[name] += amount if sign == "+" else -amount
            last_seen[name] = step
            if balances[name] > MAX_VALUE:
                return None
        transactions.append(f"{line}.")
        chain.append(" ".join(parts))
    # Half of the time the question is about the person unmentioned for longest.
    asked = rng.choice(people) if rng.random() < 0.5 else min(people, key=last_seen.__getitem__)
    total = balances[asked]
    final = f"Answer: {asked} {total}."
    question = f"How much does {asked} have at the end"
    if rng.random() < 0.4:
        other = rng.choice([name for name in people if name != asked])
        total += balances[other]
        if total > MAX_VALUE:
            return None
        question = f"How much do {asked} and {other} have in total at the end"
        calculation = _calculation(balances[asked], "+", balances[other], False)
        final += f" {other} {balances[other]}. {calculation}"
    prompt = "\n".join(
        [f"Start: {opening}", *transactions, f"{question} (#1-#{steps})? {_closing(check)}"]
    )
    return Solved(prompt, "\n".join([*chain, final]) + "\n", str(total))


def solve_addition(rng: random.Random, steps: int, check: bool) -> Solved | None:
    """Draw and solve an addition problem; `steps` is how many numbers there are."""
    top = min(rng.choice((9, 30, 99, 99, 200, 999)), MAX_VALUE // steps)
    numbers = [rng.randint(1, top) for _ in range(steps)]
    total, chain = 0, []
    for step, number in enumerate(numbers, start=1):
        chain.append(f"#{step} {number}. {_calculation(total, '+', number, check)}")
        total += number
    lines = [f"#{step} {number}" for step, number in enumerate(numbers, start=1)]
    question = f"What is the sum (#1-#{steps})? {_closing(check)}"
    prompt = "\n".join(["Add these numbers.", *lines, question])
    return Solved(prompt, "\n".join([*chain, f"Answer: {total}."]) + "\n", str(total))


def solve_lookup(rng: random.Random, steps: int, check: bool) -> Solved | None:
    """Draw and solve a lookup problem; `steps` is how many hops there are."""
    with_sum = rng.random() < 0.5
    # A cycle through some keys, walked about once, and a few keys leading into it.
    cycle_length = min(MAX_KEYS, max(2, int(steps * rng.uniform(0.8, 1.3))))
    keys = rng.sample(WORDS, min(MAX_KEYS, cycle_length + rng.randint(0, 7)))
    cycle, strays = keys[:cycle_length], keys[cycle_length:]
    following = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    following.update((key, rng.choice(keys)) for key in strays)
    top = min(rng.choice((9, 30, 99, 99, 200)), MAX_VALUE // steps)
    numbers = {key: rng.randint(1, top) for key in keys}
    start = here = cycle[0]
    rng.shuffle(keys)
    rows = [
        f"{key} {numbers[key]} -> {following[key]}" if with_sum else f"{key} -> {following[key]}"
        for key in keys
    ]
    total, chain = 0, []
    for step in range(1, steps + 1):
        after = following[here]
        if with_sum:
            calculation = _calculation(total, "+", numbers[here], check)
            chain.append(f"#{step} {here} {numbers[here]} -> {after}. {calculation}")
            total += numbers[here]
        else:
            checked = f" Check: {here} -> {after} ok." if check else ""
            chain.append(f"#{step} The next of {here} is {after}.{checked}")
        here = after
    answer = str(total) if with_sum else here
    question = "What is the sum of the numbers?" if with_sum else "Which word is last?"
    prompt = (
        f"Table: {', '.join(rows)}.\n"
        f"Start at {start} and follow the table (#1-#{steps}). {question} {_closing(check)}"
    )
    return Solved(prompt, "\n".join([*chain, f"Answer: {answer}."]) + "\n", answer)


_SOLVERS = {"ledger": solve_ledger, "addition": solve_addition, "lookup": solve_lookup}


# ---------------------------------------------------------------------- sets of problems


@functools.cache
def _tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(_TOKENIZER))


def count_tokens(text: str) -> int:
    """Tokens of a text in zipage-tiny's vocabulary."""
    return len(_tokenizer().encode(text, add_special_tokens=False).ids)


def generate_problems(
    count: int,
    seed: int = 0,
    *,
    min_tokens: int = 0,
    max_tokens: int = MAX_CONVERSATION,
    families: Sequence[str] = FAMILIES,
    check: bool | None = None,
) -> list[Problem]:
    """Make a set of problems, cycling through the families; equal arguments give equal problems.

    Args:
        count: how many.
        seed: any integer; the model's training problems and public evaluation set use another
            kind of seed, so these are not among them except by coincidence.
        min_tokens: shortest reference chain of thought, in tokens.
        max_tokens: longest one.
        families: which of `FAMILIES`.
        check: whether the prompts ask for checks; None for `CHECKED_SHARE` of them.

    Raises:
        ConfigError: an argument is illegal, or no problem of a family has a length in this range.
    """
    if count < 1:
        raise ConfigError(f"count={count} must be at least 1 problem")
    for family in families:
        if family not in _SOLVERS:
            raise ConfigError(f"family {family!r} is unknown; legal are {', '.join(FAMILIES)}")
    if not families:
        raise ConfigError(f"families is empty; legal are {', '.join(FAMILIES)}")
    if min_tokens > max_tokens:
        raise ConfigError(f"min_tokens={min_tokens} exceeds max_tokens={max_tokens}")
    return [
        _draw(families[i % len(families)], f"{seed}-{i:04d}", min_tokens, max_tokens, check)
        for i in range(count)
    ]


def _draw(
    family: str, problem_id: str, min_tokens: int, max_tokens: int, check: bool | None
) -> Problem:
    # A string seed is hashed with SHA-512, which gives the same draws on every platform.
    rng = random.Random(f"zipage-evals/{family}/{problem_id}")
    for _ in range(_MAX_TRIES):
        steps = rng.randint(2, MAX_STEPS[family])
        drawn = rng.random() < CHECKED_SHARE
        solved = _SOLVERS[family](rng, steps, drawn if check is None else check)
        if solved is None:
            continue
        length = count_tokens(solved.chain)
        if not min_tokens <= length <= max_tokens:
            continue
        # 32 exceeds the tokens of the chat template and the final sentence.
        if length + count_tokens(solved.prompt) + 32 <= MAX_CONVERSATION:
            return Problem(problem_id, family, solved.prompt, solved.answer, length)
    raise ConfigError(
        f"no {family} problem with min_tokens={min_tokens} and max_tokens={max_tokens} was found: "
        "chains of thought reach about 3600 tokens for ledger, 2000 for addition and 2400 for "
        "lookup"
    )


def load_problems(path: str | os.PathLike[str], min_tokens: int = 0) -> list[Problem]:
    """Read problems from a JSONL file.

    A record has ``prompt`` (or ``problem``) and ``answer``, and may have ``id``, ``family`` and
    ``cot_tokens``.

    Args:
        path: the file.
        min_tokens: leave out records whose ``cot_tokens`` is less, or unknown if this is not 0.

    Raises:
        ConfigError: the file cannot be read, a record is malformed, or none is left.
    """
    problems = []
    for number, (where, record) in enumerate(read_json_lines("problems", path), start=1):
        prompt = record.get("prompt", record.get("problem"))
        answer = record.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str | int):
            raise ConfigError(f"{where} needs 'prompt' (or 'problem') and 'answer'")
        cot_tokens = record.get("cot_tokens", 0)
        if not isinstance(cot_tokens, int):
            raise ConfigError(f"{where} has cot_tokens={cot_tokens!r}: must be an integer")
        if cot_tokens < min_tokens:
            continue
        problems.append(
            Problem(
                str(record.get("id", number)),
                str(record.get("family", "all")),
                prompt,
                str(answer),
                cot_tokens,
            )
        )
    if not problems:
        raise ConfigError(
            f"problems={os.fspath(path)!r} has no record with cot_tokens >= {min_tokens}"
        )
    return problems


# ---------------------------------------------------------------------- scoring


def extract_answer(text: str) -> str | None:
    """The content of a reply's last ``\\boxed{...}``, nested braces included; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for found in re.finditer(r"[{}]", text[start:]):
        depth += 1 if found.group() == "{" else -1
        if not depth:
            return text[start + len("\\boxed{") : start + found.start()].strip()
    return None


def is_correct(text: str, answer: str) -> bool:
    """Whether a reply's boxed answer is exactly the reference."""
    return extract_answer(text) == answer.strip()
