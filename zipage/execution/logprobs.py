"""Log-probabilities: of the tokens sampled in a step, and of the prompt tokens it computed.

They are the model's own, the log-softmax of its logits before penalties, bias, temperature and
filters. R rows, V token ids, E hidden size, all on the logits' device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zipage.outputs import Logprob

#: Most logits computed at once for prompt tokens: 64 MiB in fp32, 110 rows of Qwen3's vocabulary.
MAX_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one step whose logits a request wants for its prompt tokens.

    Attributes:
        request_id: whose prompt it is.
        first_row: the first row of the step's hidden states; the others follow it.
        position: prompt position of the first row; it predicts the token at ``position + 1``.
        token_ids: the predicted tokens, one per row.
        top: number of most likely tokens wanted at every position.
    """

    request_id: str
    first_row: int
    position: int
    token_ids: Sequence[int]
    top: int


@dataclass(slots=True)
class PromptLogprobs:
    """What one step reported about one prompt.

    Attributes:
        next_position: the first prompt position whose row has not been read.
        entries: token id to `Logprob` for each token predicted by the rows read: the prompt's
            own token first, then the most likely ones.
        fault: why the log-probabilities cannot be reported; None if they can.
    """

    next_position: int
    entries: list[dict[int, Logprob]]
    fault: str | None = None


def describe_tokens(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    """Log-probabilities of each row's token and of its most likely ones, on the device.

    Ranks follow probability, then token id.

    Args:
        logits: ``[R, V]``.
        token_ids: ``[R]`` int64.
        top: most likely tokens, up to V.

    Returns:
        ``[R, 2 + 2 * top]`` float64: log-probability and rank of the token, then the `top` largest
        log-probabilities, then their tokens.
    """
    size = max(1, MAX_LOGITS // logits.shape[1])
    parts = [
        _describe(logits[start : start + size].float(), token_ids[start : start + size], top)
        for start in range(0, len(logits), size)
    ]
    return torch.cat(parts)


def _describe(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    vocab_size = logits.shape[1]
    # On CUDA the order of a row's sum depends on its address, unless rows are aligned.
    aligned = F.pad(logits, (0, -vocab_size % 4), value=-math.inf) if logits.is_cuda else logits
    logprobs = aligned.log_softmax(dim=-1)[:, :vocab_size] + 0.0  # no -0.0
    chosen = token_ids.unsqueeze(1)
    value = logprobs.gather(1, chosen)
    ids = torch.arange(vocab_size, device=logits.device)
    rank = 1 + ((logprobs > value) | ((logprobs == value) & (ids < chosen))).sum(-1, keepdim=True)
    # The bits of a float as an integer of the same order, then the id, so that ties are ordered.
    bits = logprobs.view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    best = (keys + (vocab_size - 1 - ids)).topk(top, dim=-1).values
    tokens = vocab_size - 1 - (best & 0xFFFFFFFF)
    return torch.cat((value, rank, logprobs.gather(1, tokens), tokens), dim=1).double()


def read_descriptions(
    rows: Sequence[Sequence[float]], token_ids: Sequence[int], wanted: Sequence[int]
) -> list[dict[int, Logprob]]:
    """Entries from the result of `describe_tokens`.

    Args:
        rows: its result, on the host.
        token_ids: R token ids; each is the first entry of its row.
        wanted: R numbers of most likely tokens, at most `top`; tokens of probability zero are left
            out.
    """
    entries: list[dict[int, Logprob]] = []
    for row, token_id, count in zip(rows, token_ids, wanted, strict=True):
        top = len(row) // 2 - 1
        entry = {token_id: Logprob(row[0], int(row[1]))}
        for position in range(min(count, top)):
            logprob, other = row[2 + position], int(row[2 + top + position])
            if other != token_id and logprob > -math.inf:
                entry[other] = Logprob(logprob, position + 1)
        entries.append(entry)
    return entries


def prompt_logprobs(
    parts: Sequence[PromptRows],
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> dict[str, PromptLogprobs]:
    """Reads the log-probabilities of prompt tokens off a step's hidden states.

    However long the prompts are, at most `MAX_LOGITS` logits exist at a time (or one row of
    them), and a row's result does not depend on how rows are grouped.

    Args:
        parts: what to read, one entry per request.
        hidden: ``[T, E]`` hidden states of the step.
        compute_logits: the model's output head, ``[R, E]`` to ``[R, V]`` float32.
        vocab_size: V.

    Returns:
        Result by request id.
    """
    rows = [row for part in parts for row in range(part.first_row, part.first_row + _count(part))]
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    wanted = [part.top for part in parts for _ in part.token_ids]
    entries = _entries(rows, token_ids, wanted, hidden, compute_logits, vocab_size)
    return {part.request_id: _collect(part, entries) for part in parts}


def _count(part: PromptRows) -> int:
    return len(part.token_ids)


def _entries(
    rows: list[int],
    token_ids: list[int],
    wanted: list[int],
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> Iterator[dict[int, Logprob]]:
    size = max(1, MAX_LOGITS // vocab_size)
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        logits = compute_logits(hidden[torch.tensor(rows[chunk], device=hidden.device)])
        tokens = torch.tensor(token_ids[chunk], device=hidden.device)
        described = describe_tokens(logits, tokens, min(max(wanted[chunk]), vocab_size))
        yield from read_descriptions(described.tolist(), token_ids[chunk], wanted[chunk])


def _collect(part: PromptRows, entries: Iterator[dict[int, Logprob]]) -> PromptLogprobs:
    found = [next(entries) for _ in part.token_ids]
    fault = None
    for position, (token_id, entry) in enumerate(
        zip(part.token_ids, found, strict=True), start=part.position
    ):
        # A row with NaN or +inf, or with only -inf, has no softmax.
        if math.isnan(entry[token_id].logprob):
            fault = f"no prompt_logprobs: the logits of prompt token {position} are not usable"
            break
    return PromptLogprobs(part.position + len(found), found, fault)
