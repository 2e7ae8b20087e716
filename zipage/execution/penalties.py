"""Penalties, and the counts on the device of the tokens that penalised sequences have seen.

P penalised rows of a step, V token ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from zipage.execution.transfer import to_device

if TYPE_CHECKING:
    from zipage.execution.sampler import SamplingState


def penalise(logits: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> None:
    """Applies repetition, frequency and presence penalties in place.

    Args:
        logits: ``[E, V]`` float32.
        counts: ``[slots, V]`` int32: twice the occurrences in the output, plus one if the token is
            in the prompt.
        table: ``[P, 5]`` float64: row of `logits`, slot, and the three penalties.
    """
    rows, slots = table[:, 0].long(), table[:, 1].long()
    repetition, frequency, presence = table[:, 2:].float().unsqueeze(2).unbind(1)
    seen, values = counts[slots], logits[rows]
    times = seen >> 1
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen > 0, repeated, values)
    logits.index_copy_(0, rows, values - frequency * times - presence * (times > 0))


@dataclass
class _Slot:
    index: int
    #: Tokens of the output that are counted; -1 while the prompt is not.
    counted: int = -1


class TokenCounts:
    """One row of counts for each penalised sequence that is sampled.

    A sequence keeps its row until it ends, unless others need the row: then its tokens are counted
    again when it resumes. So all memory is allocated at once, with a known size.

    Args:
        vocab_size: V.
        num_slots: rows; P is never more.
        device: where the counts are kept.

    Attributes:
        counts: ``[num_slots, V]`` int32, see `penalise`.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.counts = torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._slots: weakref.WeakKeyDictionary[SamplingState, _Slot] = weakref.WeakKeyDictionary()

    def update(
        self,
        states: Sequence[SamplingState],
        unread: Sequence[bool],
        last_tokens: torch.Tensor | None,
    ) -> list[int]:
        """Counts the tokens that the sequences have seen since the last call; returns their slots.

        Args:
            states: the P sequences.
            unread: for each, whether its last token is known only on the device.
            last_tokens: ``[P]`` int64, those tokens; None if there are none.
        """
        vocab_size = self.counts.shape[1]
        slots = [self._slots.get(state) or self._take(state, states) for state in states]
        prompts, outputs, pending = [], [], []
        progress: dict[int, tuple[_Slot, int]] = {}
        for row, (state, slot) in enumerate(zip(states, slots, strict=True)):
            start = slot.index * vocab_size
            if slot.counted < 0:
                prompts.append(
                    np.unique(np.asarray(state.prompt_token_ids, dtype=np.int64)) + start
                )
            known, counted = len(state.output_token_ids), max(0, slot.counted)
            if slot.index not in progress and counted < known:
                outputs.append(np.asarray(state.output_token_ids[counted:], dtype=np.int64) + start)
            if unread[row] and counted <= known:
                pending.append((row, start))
            progress[slot.index] = slot, max(counted, known + unread[row])
        cells = [self._upload(np.concatenate(part)) for part in (prompts, outputs) if part]
        if pending:
            assert last_tokens is not None
            rows, starts = self._upload(np.array(pending)).unbind(1)
            cells.append(last_tokens[rows] + starts)
        # All memory is allocated before anything is counted, so a failed step can be repeated.
        twos = [torch.full_like(part, 2, dtype=torch.int32) for part in cells]
        flat = self.counts.view(-1)
        if prompts:
            flat.index_fill_(0, cells[0], 1)
        for part, two in list(zip(cells, twos, strict=True))[bool(prompts) :]:
            flat.index_add_(0, part, two)
        for slot, counted in progress.values():
            slot.counted = counted
        return [slot.index for slot in slots]

    def _upload(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self.counts.device)

    def _take(self, state: SamplingState, present: Sequence[SamplingState]) -> _Slot:
        """A row for a sequence: a free one, or that of a sequence that isn't in this step."""
        free = set(range(len(self.counts))) - {slot.index for slot in self._slots.values()}
        if free:
            slot = _Slot(min(free))
        else:
            absent = next(other for other in self._slots if other not in present)
            slot = _Slot(self._slots.pop(absent).index)
        self.counts[slot.index].zero_()
        self._slots[state] = slot
        return slot
