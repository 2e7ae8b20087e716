"""Prompts to try in the retention view."""

from __future__ import annotations

from typing import Any

from zipage.config import EngineConfig
from zipage.evals.problems import generate_problems

#: Family, title, shortest and longest chain of thought in tokens, budget.
_EMBEDDED = (
    ("addition", "Add a list of numbers", 500, 640, 256),
    ("ledger", "Follow a ledger", 700, 900, 256),
    ("lookup", "Walk through a table", 800, 1000, 256),
    ("ledger", "A long ledger", 1500, 1900, 512),
)
_OTHERS = (
    (
        "A word problem",
        "Anna has 3 boxes with 14 apples each. She gives 9 apples to Bob, who then has twice as "
        "many as Carl. Bob had 21 before. How many apples do the three have together?",
    ),
    ("A proof", "Prove that the square root of 2 is irrational."),
    ("A count", "How many integers from 1 to 1000 are divisible by 6 or by 10, but not by 15?"),
)


def examples(config: EngineConfig) -> list[dict[str, Any]]:
    """Titles, prompts and budgets; for the embedded model, problems of its kind, with answers."""
    block = config.block_size
    if config.model is not None or config.model_shape is not None:
        budget = min(config.kv_budget or 1024, 1024) // block * block
        return [{"title": title, "prompt": text, "kv_budget": budget} for title, text in _OTHERS]
    found = []
    for family, title, least, most, budget in _EMBEDDED:
        (problem,) = generate_problems(
            1, min_tokens=least, max_tokens=most, families=[family], check=False
        )
        found.append(
            {
                "title": title,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "kv_budget": max(budget // block, 1) * block,
            }
        )
    return found
