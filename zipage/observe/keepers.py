"""Counts by text position as one short line."""

from __future__ import annotations


def encode_runs(keepers: list[int]) -> str:
    """Counts by position as one line: ``"0-15:8 16:3"`` means 8 keepers of each of the positions
    0 to 15 and 3 of position 16; positions nobody holds are left out."""
    runs = []
    start = 0
    for i in range(1, len(keepers) + 1):
        if i < len(keepers) and keepers[i] == keepers[start]:
            continue
        if keepers[start]:
            span = str(start) if i == start + 1 else f"{start}-{i - 1}"
            runs.append(f"{span}:{keepers[start]}")
        start = i
    return " ".join(runs)


def decode_runs(runs: str, num_tokens: int) -> list[int]:
    """Counts by position from `encode_runs`."""
    keepers = [0] * num_tokens
    for run in runs.split():
        span, _, count = run.partition(":")
        first, _, last = span.partition("-")
        for position in range(int(first), int(last or first) + 1):
            keepers[position] = int(count)
    return keepers
