"""Choosing the next token of every sequence of a batch.

Order, as in vLLM: minimum length, bias, penalties, required form; then temperature, min-p, top-k
and top-p; then one draw. R rows, V token ids, all on the logits' device.

A draw inverts the cumulative distribution: one uniform number picks a token. Compared with
``argmax(p / Exp(1))`` it needs one random number per row instead of V, and a seeded number can be
a hash of (seed, count), equal on every device and without generator state.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zipage.execution.answer_form import AnswerForm, allowed_bits
from zipage.execution.categorical import draw_rows
from zipage.execution.logprobs import (
    MAX_LOGITS,
    PromptLogprobs,
    describe_tokens,
    read_descriptions,
)
from zipage.execution.penalties import TokenCounts, penalise
from zipage.execution.transfer import to_device
from zipage.outputs import Logprob
from zipage.sampling_params import SamplingParams

_MASK64 = 2**64 - 1


class SamplingState:
    """The state that sampling a sequence depends on: parameters, tokens seen, number of draws.

    Made once per sequence. It survives preemptions: recomputed tokens are not drawn again.

    Args:
        params: checked parameters.
        prompt_token_ids: the prompt.
        output_token_ids: tokens generated so far; kept by reference, the engine appends to it.
        eos_token_ids: end-of-sequence tokens of the model.
        vocab_size: V.
        sample_index: which of the n completions; added to the seed.
        form: the required form of the answer, if any.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        sample_index: int = 0,
        form: AnswerForm | None = None,
    ) -> None:
        self.params = params
        self.form = form
        self.greedy = params.greedy
        self.num_sampled = len(output_token_ids)
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.ending_token_ids: list[int] = []
        if params.min_tokens:
            ending = params.stop_token_id_set.union(eos_token_ids)
            self.ending_token_ids = [token_id for token_id in ending if token_id < vocab_size]
        self._stream = None if params.seed is None else _mix(params.seed + sample_index)

    @property
    def below_min_tokens(self) -> bool:
        """Whether the next token must not end the sequence."""
        return bool(self.ending_token_ids) and self.num_sampled < self.params.min_tokens

    @property
    def edits(self) -> bool:
        """Whether the next token's logits are changed before anything is chosen."""
        params = self.params
        return (
            self.form is not None
            or bool(params.logit_bias)
            or params.has_penalties
            or self.below_min_tokens
        )

    def uniform(self, generator: random.Random) -> float:
        """The number in [0, 1) that decides the next draw; from `generator` without a seed."""
        if self._stream is None:
            return generator.random()
        # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), jumping to the draw's number.
        bits = _mix(self._stream + self.num_sampled * 0x9E3779B97F4A7C15)
        return float(bits >> 11) * 2.0**-53


@dataclass(slots=True)
class SamplerOutput:
    """What was chosen for each row.

    Attributes:
        token_ids: one per row; -1 for a row with an error.
        logprobs: one per row, None if not requested: the sampled token first, then the most
            likely ones.
        errors: by row, why no token could be chosen.
        prompt_logprobs: request id to what the step reported about its prompt; added by the runner.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


class LaunchedSample:
    """Tokens chosen on the device, on their way to the host.

    Args:
        token_ids: ``[R]`` int64.
        peaks: ``[R]`` largest logit of each row.
        described: rows whose log-probabilities are wanted.
        wanted: for each of these, how many alternatives.
        descriptions: result of `describe_tokens` for them.
        faults: by row, why it has no token, where the host knew this before.

    Attributes:
        token_ids: ``[R]`` int64 on the device.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        peaks: torch.Tensor,
        described: Sequence[int] = (),
        wanted: Sequence[int] = (),
        descriptions: torch.Tensor | None = None,
        faults: Mapping[int, str] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self._faults = faults or {}
        self._described, self._wanted = described, wanted
        self._event: torch.cuda.Event | None = None
        # Exact: fp64 holds every token id.
        parts = [token_ids.double(), peaks.double()]
        if descriptions is not None:
            parts.append(descriptions.flatten())
        packed = torch.cat(parts)
        if token_ids.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = packed

    def wait(self) -> SamplerOutput:
        """Wait for the device; returns the chosen tokens."""
        if self._event is not None:
            self._event.synchronize()
        count = len(self.token_ids)
        token_ids = [int(token) for token in self._host[:count].tolist()]
        peaks = self._host[count : 2 * count].tolist()
        logprobs: list[dict[int, Logprob] | None] = [None] * count
        if self._described:
            rows = self._host[2 * count :].view(len(self._described), -1).tolist()
            tokens = [token_ids[row] for row in self._described]
            entries = read_descriptions(rows, tokens, self._wanted)
            for row, entry in zip(self._described, entries, strict=True):
                if math.isfinite(peaks[row]):
                    logprobs[row] = entry
        output = _checked(token_ids, peaks, logprobs)
        for row, fault in self._faults.items():
            output.token_ids[row] = -1
            output.errors[row] = fault
        return output


class Sampler:
    """Samples batches. On CUDA with Triton nothing here ever waits for the device.

    Args:
        seed: seed of the generator for all requests without a seed of their own.
        device: device of the logits.
        max_num_seqs: most sequences sampled at once.
    """

    def __init__(
        self, seed: int = 0, device: torch.device | str = "cpu", max_num_seqs: int = 256
    ) -> None:
        self._generator = random.Random(seed)
        self._device = torch.device(device)
        self._max_num_seqs = max_num_seqs
        self._counts: TokenCounts | None = None
        self._draw_rows, self._penalise = draw_rows, penalise
        if self._device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from zipage.kernels.triton import sampling

            self._draw_rows, self._penalise = sampling.draw_rows, sampling.penalise

    def warm_up(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Compiles the kernels for logits of a dtype, so that no request waits for it."""
        params = SamplingParams(seed=0, detokenize=False)
        state = SamplingState(params, [0], [], (), vocab_size)
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=self._device)
        self.launch(logits, [state]).wait()

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> SamplerOutput:
        """Chooses the next token of each row, and waits for it. See `launch`."""
        return self.launch(logits, states, best).wait()

    @torch.inference_mode()
    def launch(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
        unread: Sequence[bool] | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> LaunchedSample:
        """Chooses the next token of each row on the device.

        The result of a row depends only on its own logits and state (and, without a seed, on
        the generator). A row with unusable logits gets an error; the others are not affected.

        Args:
            logits: ``[R, V]`` in any dtype; not changed.
            states: one per row.
            best: ``[R]`` largest logit of each row and its token, if known.
            unread: for each row, whether its sequence's last token is known only on the device;
                None if there is no such row.
            last_tokens: ``[R]`` int64, those tokens.
        """
        edited = [row for row, state in enumerate(states) if state.edits]
        if edited and len(edited) == len(states):
            best = None
            changed = self._edit(logits, edited, states, unread, last_tokens)
            peaks, token_ids = changed.max(dim=-1)
        else:
            peaks, token_ids = logits.max(dim=-1) if best is None else best
            changed = logits
            if edited:
                changed = self._edit(logits, edited, states, unread, last_tokens)
                index = self._upload(edited)
                values, indices = changed.max(dim=-1)
                peaks = peaks.float().index_copy(0, index, values)
                token_ids = token_ids.index_copy(0, index, indices)
        drawn = [row for row, state in enumerate(states) if not state.greedy]
        if drawn:
            if best is not None and not edited:
                token_ids = token_ids.clone()
            self._draw(logits, changed, edited, drawn, states, peaks.float(), token_ids)
        described = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        wanted = [states[row].params.logprobs or 0 for row in described]
        descriptions = None
        if described:
            some, tokens = logits, token_ids
            if len(described) < len(states):
                index = self._upload(described)
                some, tokens = logits[index], token_ids[index]
            descriptions = describe_tokens(some, tokens, min(max(wanted), logits.shape[1]))
        forms = {row: states[row].form for row in edited}
        faults = {row: form.fault for row, form in forms.items() if form and form.fault}
        launched = LaunchedSample(token_ids, peaks, described, wanted, descriptions, faults)
        # Last, so that a step that failed can be repeated with the same draws.
        for state in states:
            state.num_sampled += 1
        return launched

    def _draw(
        self,
        logits: torch.Tensor,
        changed: torch.Tensor,
        edited: Sequence[int],
        drawn: Sequence[int],
        states: Sequence[SamplingState],
        peaks: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        """Replaces the tokens of some rows by draws from `logits`, or from `changed` logits."""
        vocab_size = logits.shape[1]
        place = {row: index for index, row in enumerate(edited)}
        tables: tuple[list[list[float]], list[list[float]]] = ([], [])
        for row in drawn:
            params = states[row].params
            tables[row in place].append(
                [
                    place.get(row, row),
                    row,
                    1.0 / params.temperature,
                    states[row].uniform(self._generator),
                    math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
                    min(params.top_k or vocab_size, vocab_size),
                    params.top_p,
                ]
            )
        for source, table in zip((logits, changed), tables, strict=True):
            if table:
                numbers = to_device(torch.tensor(table, dtype=torch.float64), self._device)
                self._draw_rows(source, peaks, numbers, token_ids)

    def _edit(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        states: Sequence[SamplingState],
        unread: Sequence[bool] | None,
        last_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """A copy of rows of the logits in fp32 with biases, penalties and masks applied."""
        vocab_size = logits.shape[1]
        changed = logits[self._upload(rows)].float()
        masked: list[int] = []
        biased: list[int] = []
        amounts: list[float] = []
        penalised: list[int] = []
        for index, row in enumerate(rows):
            state, start = states[row], index * vocab_size
            if state.below_min_tokens and state.form is None:  # a form masks them itself
                masked += [start + token_id for token_id in state.ending_token_ids]
            if state.params.logit_bias:
                biased += [start + token_id for token_id in state.params.logit_bias]
                amounts += state.params.logit_bias.values()
            if state.params.has_penalties:
                penalised.append(index)
        flat = changed.view(-1)
        if masked:
            flat.index_fill_(0, self._upload(masked), -torch.inf)
        if biased:
            added = to_device(torch.tensor(amounts, dtype=torch.float32), self._device)
            flat.index_add_(0, self._upload(biased), added)
        if penalised:
            if self._counts is None:
                self._counts = TokenCounts(vocab_size, self._max_num_seqs, self._device)
            chosen = [rows[index] for index in penalised]
            seen_by = [states[row] for row in chosen]
            pending = [unread is not None and unread[row] for row in chosen]
            last = None if last_tokens is None else last_tokens[self._upload(chosen)]
            slots = self._counts.update(seen_by, pending, last)
            table = [
                [index, slot, p.repetition_penalty, p.frequency_penalty, p.presence_penalty]
                for index, slot, p in zip(
                    penalised, slots, (s.params for s in seen_by), strict=True
                )
            ]
            numbers = to_device(torch.tensor(table, dtype=torch.float64), self._device)
            self._penalise(changed, self._counts.counts, numbers)
        formed = [(index, form) for index, row in enumerate(rows) if (form := states[row].form)]
        size = max(1, MAX_LOGITS // vocab_size)
        for start in range(0, len(formed), size):
            self._mask(changed, formed[start : start + size])
        return changed

    def _mask(self, changed: torch.Tensor, formed: Sequence[tuple[int, AnswerForm]]) -> None:
        """Masks tokens that the form of an answer does not allow, in place."""
        vocab_size = changed.shape[1]
        bits = torch.from_numpy(allowed_bits([form for _, form in formed], vocab_size))
        places = self._upload([index for index, _ in formed])
        shifts = torch.arange(32, dtype=torch.int32, device=self._device)
        words = to_device(bits, self._device).unsqueeze(2)
        barred = (((words >> shifts) & 1) == 0).view(len(formed), -1)[:, :vocab_size]
        changed.index_copy_(0, places, changed[places].masked_fill(barred, -torch.inf))

    def _upload(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def _checked(
    token_ids: list[int], peaks: list[float], logprobs: list[dict[int, Logprob] | None]
) -> SamplerOutput:
    """The output, with errors for rows whose largest logit is not finite."""
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
    """SplitMix64's finaliser: a bijection of 64-bit numbers that scatters neighbours."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
