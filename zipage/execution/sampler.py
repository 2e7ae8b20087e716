"""Choosing the next token of every sequence of a batch.

Order, as in vLLM: minimum length, bias, penalties; then temperature, min-p, top-k and top-p; then
one draw. R rows, V token ids, all on the logits' device.

A draw inverts the cumulative distribution: one uniform number picks a token. Compared with
``argmax(p / Exp(1))`` it needs one random number for a row in place of V, and a seeded number can
come from a hash of (seed, count), equal on every device and free of generator state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from zipage.execution.categorical import draw, draw_filtered
from zipage.execution.logprobs import PromptLogprobs, token_logprobs
from zipage.execution.transfer import to_device
from zipage.outputs import Logprob
from zipage.sampling_params import SamplingParams

_MASK64 = 2**64 - 1


class SamplingState:
    """What the sampling of one sequence depends on: parameters, tokens seen, number of draws.

    Made once per sequence; it outlives preemptions, whose recomputed tokens are not drawn again.

    Args:
        params: checked parameters.
        prompt_token_ids: the prompt.
        output_token_ids: tokens generated so far; kept by reference, the engine appends to it.
        eos_token_ids: end-of-sequence tokens of the model.
        vocab_size: V.
        device: device of the logits.
        sample_index: which of the n completions; added to the seed.

    Attributes:
        plain: whether the token is the most likely one of the unchanged logits, always.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        device: torch.device | str,
        sample_index: int = 0,
    ) -> None:
        self.params = params
        self.greedy = params.greedy
        self.num_sampled = len(output_token_ids)
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.logit_bias:
            self.bias = (
                torch.tensor(list(params.logit_bias), device=device),
                torch.tensor(list(params.logit_bias.values()), device=device, dtype=torch.float32),
            )
        self.ending_token_ids: torch.Tensor | None = None
        if params.min_tokens:
            ending = params.stop_token_id_set.union(eos_token_ids)
            self.ending_token_ids = torch.tensor(
                sorted(token_id for token_id in ending if token_id < vocab_size),
                device=device,
                dtype=torch.int64,
            )
        self.seen: _SeenTokens | None = None
        if params.has_penalties:
            self.seen = _SeenTokens(prompt_token_ids, output_token_ids)
        self.plain = (
            self.greedy
            and self.bias is None
            and self.ending_token_ids is None
            and self.seen is None
            and params.logprobs is None
        )
        self._stream = None if params.seed is None else _mix(params.seed + sample_index)

    @property
    def below_min_tokens(self) -> bool:
        """Whether the next token must not end the sequence."""
        return self.ending_token_ids is not None and self.num_sampled < self.params.min_tokens

    @property
    def edits(self) -> bool:
        """Whether the next token's logits are changed before anything is chosen."""
        return self.bias is not None or self.seen is not None or self.below_min_tokens

    def uniform(self, generator: random.Random) -> float:
        """The number in [0, 1) that decides the next draw; unseeded ones are `generator`'s."""
        if self._stream is None:
            return generator.random()
        # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), entered at the draw's number.
        bits = _mix(self._stream + self.num_sampled * 0x9E3779B97F4A7C15)
        return float(bits >> 11) * 2.0**-53


@dataclass(slots=True)
class SamplerOutput:
    """What was chosen for each row.

    Attributes:
        token_ids: one a row; -1 where there is an error.
        logprobs: one a row, None where none were asked for: the sampled token first, then the
            most likely ones.
        errors: row to why nothing could be chosen.
        prompt_logprobs: request id to what the step told about its prompt; added by the runner.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


class LaunchedSample:
    """Tokens chosen on the device, on their way to the host.

    Attributes:
        token_ids: ``[R]`` int64 on the device.
    """

    def __init__(self, token_ids: torch.Tensor, peaks: torch.Tensor) -> None:
        self.token_ids = token_ids
        self._event: torch.cuda.Event | None = None
        # Exact: fp64 holds every token id.
        packed = torch.stack((token_ids.double(), peaks.double()))
        if token_ids.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = packed

    def wait(self) -> SamplerOutput:
        """What was chosen, once the device has got there."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, peaks = self._host.tolist()
        return _checked([int(token) for token in token_ids], peaks, [None] * len(token_ids))


class Sampler:
    """Samples batches.

    Args:
        seed: of the generator that all requests without a seed of their own draw from.
        device: of the logits.
    """

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._generator = random.Random(seed)
        self._device = torch.device(device)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Chooses the next token of each row.

        The result of a row depends on its own logits and state only (and, without a seed, on
        the generator). A row whose logits are unusable gets an error, the others are not affected.

        Args:
            logits: ``[R, V]`` float32; not changed.
            states: one a row.
        """
        if all(state.plain for state in states):
            values, indices = logits.max(dim=-1)
            return _checked(indices.tolist(), values.tolist(), [None] * len(states))
        rows = [row for row, state in enumerate(states) if state.edits or not state.greedy]
        if len(rows) < len(states):
            values, indices = logits.max(dim=-1)
            token_ids, peaks = indices.tolist(), values.tolist()
        else:
            token_ids, peaks = [0] * len(states), [0.0] * len(states)
        if rows:
            chosen = self._choose(logits, rows, [states[row] for row in rows])
            for row, token_id, peak in zip(rows, *chosen, strict=True):
                token_ids[row], peaks[row] = token_id, peak
        logprobs: list[dict[int, Logprob] | None] = [None] * len(states)
        rows = [
            row
            for row, state in enumerate(states)
            if state.params.logprobs is not None and math.isfinite(peaks[row])
        ]
        if rows:
            wanted = [states[row].params.logprobs or 0 for row in rows]
            entries = token_logprobs(logits[rows], [token_ids[row] for row in rows], wanted)
            for row, entry in zip(rows, entries, strict=True):
                logprobs[row] = entry
        # Last, so that a step that failed can be repeated with the same draws.
        for state in states:
            state.num_sampled += 1
        return _checked(token_ids, peaks, logprobs)

    @staticmethod
    def can_launch(states: Sequence[SamplingState], vocab_size: int) -> bool:
        """Whether `launch` can sample these: no edits, no log-probabilities, no cut draws."""
        return all(
            state.plain
            or (
                not state.edits
                and state.params.logprobs is None
                and (state.greedy or not _is_filtered(state.params, vocab_size))
            )
            for state in states
        )

    @torch.inference_mode()
    def launch(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> LaunchedSample:
        """Like `sample` where `can_launch`, without waiting for the device.

        Args:
            logits: ``[R, V]`` in any dtype; not changed.
            states: one a row.
            best: ``[R]`` largest logit of each row and its token, if they are known.
        """
        peaks, token_ids = logits.max(dim=-1) if best is None else best
        rows = [row for row, state in enumerate(states) if not state.greedy]
        if rows:
            table = torch.tensor(
                [
                    [1.0 / states[row].params.temperature for row in rows],
                    [states[row].uniform(self._generator) for row in rows],
                ],
                dtype=torch.float64,
            )
            inverse_temperatures, uniforms = to_device(table, self._device)
            temperatures = inverse_temperatures.float()
            if len(rows) == len(states):
                token_ids = draw(logits.float(), peaks.float(), temperatures, uniforms)
            else:
                index = to_device(torch.tensor(rows), self._device)
                drawn = draw(logits[index].float(), peaks[index].float(), temperatures, uniforms)
                token_ids = token_ids.index_copy(0, index, drawn)
            # Unusable logits are reported later; until then the token must be one.
            token_ids = token_ids.clamp(0, logits.shape[1] - 1)
        launched = LaunchedSample(token_ids, peaks)
        for state in states:
            state.num_sampled += 1
        return launched

    def _choose(
        self, logits: torch.Tensor, rows: list[int], states: list[SamplingState]
    ) -> tuple[list[int], list[float]]:
        """Token and largest logit of rows that are drawn or have edited logits."""
        edited = [index for index, state in enumerate(states) if state.edits]
        if len(rows) < len(logits):
            logits = logits[rows]
        elif edited:
            logits = logits.clone()
        if edited:
            _edit(logits, states)
        values, indices = logits.max(dim=-1)
        token_ids, peaks = indices.tolist(), values.tolist()
        drawn = [
            index
            for index, state in enumerate(states)
            if not state.greedy and math.isfinite(peaks[index])
        ]
        vocab_size = logits.shape[1]
        for filtered in (False, True):
            part = [i for i in drawn if _is_filtered(states[i].params, vocab_size) is filtered]
            if not part:
                continue
            every = len(part) == len(logits)
            picked = self._draw(
                logits if every else logits[part],
                values if every else values[part],
                [states[index] for index in part],
                filtered,
            )
            for index, token_id in zip(part, picked, strict=True):
                token_ids[index] = token_id
        return token_ids, peaks

    def _draw(
        self,
        logits: torch.Tensor,
        peaks: torch.Tensor,
        states: list[SamplingState],
        filtered: bool,
    ) -> list[int]:
        params = [state.params for state in states]
        vocab_size = logits.shape[1]
        # One transfer for all numbers; fp64 holds every one of them exactly enough.
        table = torch.tensor(
            [
                [1.0 / p.temperature for p in params],
                [state.uniform(self._generator) for state in states],
                [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params],
                [float(min(p.top_k or vocab_size, vocab_size)) for p in params],
                [p.top_p for p in params],
            ],
            dtype=torch.float64,
        ).to(self._device)
        inverse_temperatures, uniforms = table[0].float(), table[1]
        if filtered:
            picked = draw_filtered(
                logits,
                peaks,
                inverse_temperatures,
                uniforms,
                log_min_p=table[2].float(),
                top_k=table[3].long(),
                top_p=table[4],
            )
        else:
            picked = draw(logits, peaks, inverse_temperatures, uniforms)
        token_ids: list[int] = picked.tolist()
        return token_ids


class _SeenTokens:
    """The distinct tokens of a prompt and its growing output, with their counts in the output."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: list[int]) -> None:
        self._output_token_ids = output_token_ids
        self._read = 0
        self._token_ids = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._size = len(self._token_ids)
        self._index = {token_id: index for index, token_id in enumerate(self._token_ids.tolist())}

    def read(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, and how often each is in the output; valid until the next call."""
        for token_id in self._output_token_ids[self._read :]:
            index = self._index.get(token_id)
            if index is None:
                index = self._add(token_id)
            self._counts[index] += 1.0
        self._read = len(self._output_token_ids)
        return self._token_ids[: self._size], self._counts[: self._size]

    def _add(self, token_id: int) -> int:
        if self._size == len(self._token_ids):
            capacity = max(64, 2 * self._size)
            self._token_ids = np.resize(self._token_ids, capacity)
            self._counts = np.concatenate(
                (self._counts, np.zeros(capacity - self._size, dtype=np.float32))
            )
        index = self._index[token_id] = self._size
        self._token_ids[index] = token_id
        self._size += 1
        return index


def _edit(logits: torch.Tensor, states: list[SamplingState]) -> None:
    """Applies minimum lengths, biases and penalties to ``[R, V]`` logits in place."""
    for row, state in enumerate(states):
        if state.below_min_tokens and state.ending_token_ids is not None:
            logits[row].index_fill_(0, state.ending_token_ids, -torch.inf)
        if state.bias is not None:
            logits[row].index_add_(0, *state.bias)
    _penalise(logits, [(row, s) for row, s in enumerate(states) if s.seen is not None])


def _penalise(logits: torch.Tensor, rows: list[tuple[int, SamplingState]]) -> None:
    """Applies penalties; only the tokens seen are touched, all rows at once."""
    if not rows:
        return
    cells, counts, options, sizes = [], [], [], []
    for row, state in rows:
        assert state.seen is not None
        token_ids, count = state.seen.read()
        params = state.params
        cells.append(token_ids + row * logits.shape[1])
        counts.append(count)
        sizes.append(len(token_ids))
        options.append(
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        )
    device = logits.device
    cell = torch.from_numpy(np.concatenate(cells)).to(device)
    times = torch.from_numpy(np.concatenate(counts)).to(device)
    spread = np.repeat(np.array(options, dtype=np.float32), sizes, axis=0)
    repetition, frequency, presence = torch.from_numpy(spread).to(device).unbind(1)
    flat = logits.view(-1)
    values = flat[cell]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[cell] = values - frequency * times - presence * (times > 0)


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def _checked(
    token_ids: list[int], peaks: list[float], logprobs: list[dict[int, Logprob] | None]
) -> SamplerOutput:
    """Output with errors for the rows whose largest logit is not finite."""
    errors: dict[int, str] = {}
    # A sum of fp32 numbers is finite in fp64 if all of them are.
    if not math.isfinite(sum(peaks)):
        for row, peak in enumerate(peaks):
            if not math.isfinite(peak):
                token_ids[row] = -1
                errors[row] = f"no token can be chosen: {_fault(peak)} (row {row} of the batch)"
    return SamplerOutput(token_ids, logprobs, errors)


def _fault(peak: float) -> str:
    if math.isnan(peak):
        return "the model's logits contain NaN"
    return "a logit is +inf" if peak > 0 else "every logit is -inf"


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers that scatters near ones."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
