"""A model step that fails: whom it touches, and what out-of-memory does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.small_model import make_small_llm
from tests.engine.workload import assert_empty, tokens_of
from zipage import LLM, EngineDeadError, RequestOutput, SamplingParams
from zipage.compression.policies.zipage import ZipagePolicy
from zipage.engine.request import Request
from zipage.engine.scheduler import ScheduledTokens, StepPlan
from zipage.engine.split import halve_requests, halve_tokens, largest
from zipage.execution import model_runner, swap
from zipage.execution.faults import is_beyond_repair, is_out_of_memory, without_frames

PROMPTS = [[7 + i] * (3 + i) for i in range(6)]


def params_of(index: int, length: int = 70) -> SamplingParams:
    """Greedy and seeded requests by turns."""
    options: dict[str, Any] = {"temperature": 0.0}
    if index % 2:
        options = {"temperature": 1.3, "seed": index}
    return SamplingParams(max_tokens=length, ignore_eos=True, **options)


def solo(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    with make_small_llm(path, enable_prefix_caching=False) as llm:
        return [tokens_of(llm.generate([p], params_of(i))[0]) for i, p in enumerate(prompts)]


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    outputs = llm.generate(list(prompts), [params_of(i) for i in range(len(prompts))])
    assert_empty(llm)
    return outputs


def guard(llm: LLM, check: Callable[[StepPlan], None], after: bool = False) -> list[StepPlan]:
    """Let `check` see each plan before it is executed, or after; returns all that succeeded."""
    runner = llm.engine.core.runner
    done: list[StepPlan] = []

    def guarded(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(plan: StepPlan, *args: Any) -> Any:
            if not after:
                check(plan)
            output = inner(plan, *args)
            if after:
                check(plan)
            done.append(plan)
            return output

        return call

    runner.execute = guarded(runner.execute)  # type: ignore[method-assign]
    runner.launch = guarded(runner.launch)  # type: ignore[method-assign]
    return done


def count_launches(llm: LLM) -> list[Any]:
    """What steps that run while the next one is planned give, in a list that grows."""
    runner = llm.engine.core.runner
    inner, launched = runner.launch, []

    def launch(plan: StepPlan, read_tokens: Callable[[], object]) -> Any:
        launched.append(inner(plan, read_tokens))
        return launched[-1]

    runner.launch = launch  # type: ignore[method-assign]
    return launched


def decodes_only(plan: StepPlan) -> bool:
    return plan.num_tokens == len(plan.scheduled)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("poisoned", [0, 3, 5])
def test_poisoned_request_fails_alone(
    small_model: Path, poisoned: int, ahead: bool, after: bool
) -> None:
    """Whoever makes the step fail is found, whether it fails before or after the tokens were
    drawn; the others get their text, the seeded ones too."""

    def check(plan: StepPlan) -> None:
        for item in plan.scheduled:
            request = item.request
            if request.prompt_token_ids == PROMPTS[poisoned] and request.num_output_tokens == 9:
                raise ValueError("bad row")

    expected = solo(small_model, PROMPTS)
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        guard(llm, check, after)
        outputs = run(llm, PROMPTS)
    for i, output in enumerate(outputs):
        if i == poisoned:
            assert output.error == "model step failed: ValueError: bad row"
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].token_ids == expected[i][:9]
        else:
            assert tokens_of(output) == expected[i]


@pytest.mark.parametrize("ahead", [False, True])
def test_failure_that_does_not_come_back_harms_nobody(small_model: Path, ahead: bool) -> None:
    calls = 0

    def check(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 9, 10, 30):
            raise RuntimeError("hiccup")

    expected = solo(small_model, PROMPTS)
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        guard(llm, check, after=True)
        launched = count_launches(llm)
        assert [tokens_of(o) for o in run(llm, PROMPTS)] == expected
        assert llm.stats().generated_tokens == 70 * len(PROMPTS), "no token is drawn twice"
        assert bool(launched) is ahead


def test_failure_of_every_attempt_fails_the_steps_requests_only(small_model: Path) -> None:
    broken = True

    def check(plan: StepPlan) -> None:
        if broken:
            raise RuntimeError("no kernel for this device")

    with make_small_llm(small_model, max_num_seqs=2) as llm:
        done = guard(llm, check)
        names = [llm.engine.add_request(p, params_of(i)) for i, p in enumerate(PROMPTS[:4])]
        outputs = {o.request_id: o for o in llm.engine.step()}
        broken = False
        while llm.engine.has_unfinished:
            outputs |= {o.request_id: o for o in llm.engine.step()}
        assert_empty(llm)
    assert done, "the engine went on"
    message = "model step failed: RuntimeError: no kernel for this device"
    assert [outputs[n].error for n in names] == [message, message, None, None]
    expected = solo(small_model, PROMPTS)
    assert [tokens_of(outputs[n]) for n in names[2:]] == expected[2:4]


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_out_of_memory_shrinks_the_step(
    small_model: Path, fault: Exception, ahead: bool, after: bool
) -> None:
    """Halves fit: nobody fails, nothing is sampled twice."""

    def check(plan: StepPlan) -> None:
        if plan.num_tokens > (4 if decodes_only(plan) else 32):
            raise fault

    prompts = [*PROMPTS, [50 + i for i in range(60)]]
    expected = solo(small_model, prompts)
    with make_small_llm(small_model, async_scheduling=ahead) as llm:
        done = guard(llm, check, after)
        assert [tokens_of(o) for o in run(llm, prompts)] == expected
        assert max(plan.num_tokens for plan in done) == 32
        assert max(plan.num_tokens for plan in filter(decodes_only, done)) == 4
        assert llm.stats().generated_tokens == 70 * len(prompts)
        assert llm.stats().compressions > 0


def test_out_of_memory_in_halves_too_fails_the_largest_request(small_model: Path) -> None:
    """The long prompt ends with the cause, all others go on."""

    def check(plan: StepPlan) -> None:
        if plan.num_tokens > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    prompts = [*PROMPTS[:3], [50 + i for i in range(45)], *PROMPTS[3:]]
    expected = solo(small_model, prompts)
    with make_small_llm(small_model) as llm:
        guard(llm, check)
        outputs = run(llm, prompts)
    failed = outputs.pop(3)
    assert failed.error == "model step failed: OutOfMemoryError: CUDA out of memory"
    assert failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
    assert [tokens_of(o) for o in outputs] == expected[:3] + expected[4:]


def test_out_of_memory_of_a_single_token_fails_its_request(small_model: Path) -> None:
    def check(plan: StepPlan) -> None:
        if any(item.request.num_computed >= 20 for item in plan.scheduled):
            raise MemoryError

    with make_small_llm(small_model) as llm:
        guard(llm, check)
        outputs = run(llm, PROMPTS)
    assert {o.error for o in outputs} == {"model step failed: MemoryError: "}
    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) > 20 for o in outputs)


def test_lost_device_stops_the_engine_and_tells_everybody(small_model: Path) -> None:
    def check(plan: StepPlan) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with make_small_llm(small_model, max_num_seqs=2) as llm:
        guard(llm, check)
        names = [llm.engine.add_request(p, params_of(i)) for i, p in enumerate(PROMPTS)]
        with pytest.raises(EngineDeadError, match="illegal memory access") as caught:
            llm.engine.step()
        outputs = llm.engine.fail_all(caught.value.__cause__)  # type: ignore[arg-type]
        assert [o.request_id for o in outputs] == names
        assert all("illegal memory access" in str(o.error) for o in outputs)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            llm.generate([PROMPTS[0]])


@pytest.mark.parametrize("refuses", ["compression stream", "memory"])
def test_shutdown_after_a_lost_device_gives_up_what_it_can(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """It hides no error of the step, though the device refuses to give memory back; only then."""
    failures = 0

    def fail(*_: object) -> None:
        nonlocal failures
        failures += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for lost in (True, False):
        llm = make_small_llm(small_model, async_compression=False)
        core, failures = llm.engine.core, 0
        with monkeypatch.context() as patch:
            if refuses == "memory":
                patch.setattr(model_runner, "release_memory", fail)
            else:
                patch.setattr(core._executor, "shutdown", fail)
            if lost:
                patch.setattr(core.runner, "execute", fail)
                with pytest.raises(EngineDeadError, match="illegal memory access"), llm:
                    llm.generate(PROMPTS[0])
            else:
                with pytest.raises(RuntimeError, match="illegal memory access"), llm:
                    pass
        assert failures == 1 + lost and not hasattr(core.runner, "cache")


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_out_of_memory_in_a_swap_fails_its_request(small_model: Path, direction: str) -> None:
    expected = solo(small_model, PROMPTS[:2])
    with make_small_llm(small_model) as llm:
        core = llm.engine.core
        for i, prompt in enumerate(PROMPTS[:2]):
            llm.engine.add_request(prompt, params_of(i), str(i))
        while core.scheduler.counters.compressions < 2 and llm.engine.has_unfinished:
            llm.engine.step()

        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("no host memory")

        setattr(core.runner.swap, direction, fail)
        core.scheduler._preempt(core.scheduler.running[1])
        done: dict[str, RequestOutput] = {}
        while llm.engine.has_unfinished:
            done |= {o.request_id: o for o in llm.engine.step()}
        assert done["1"].error == "swap failed: OutOfMemoryError: no host memory"
        assert tokens_of(done["0"]) == expected[0]
        assert_empty(llm)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_out_of_memory_in_the_compression_workspace(small_model: Path, asynchronous: bool) -> None:
    expected = solo(small_model, PROMPTS)
    with make_small_llm(small_model, async_compression=asynchronous) as llm:
        compressor = llm.engine.core.runner.compressor
        assert compressor is not None
        inner = compressor.run

        def run_job(job: Any) -> None:
            if job.prompt_len == len(PROMPTS[2]):
                raise torch.OutOfMemoryError("no workspace")
            inner(job)

        compressor.run = run_job  # type: ignore[method-assign]
        outputs = run(llm, PROMPTS)
    assert outputs[2].error == "compression failed: OutOfMemoryError: no workspace"
    outputs.pop(2), expected.pop(2)
    assert [tokens_of(o) for o in outputs] == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_compression_that_fits_by_single_layers_loses_nobody(
    small_model: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = solo(small_model, PROMPTS)
    short = 0
    scores = ZipagePolicy.scores

    def scarce(policy: ZipagePolicy, view: Any) -> Any:
        nonlocal short
        if view.num_layers > 1:
            short += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return scores(policy, view)

    monkeypatch.setattr(ZipagePolicy, "scores", scarce)
    with make_small_llm(small_model, async_compression=asynchronous) as llm:
        assert [tokens_of(o) for o in run(llm, PROMPTS)] == expected
        assert llm.stats().compressions == short > 0


def test_swaps_by_single_layers_lose_nothing(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_STAGING_BYTES", 1)
    with make_small_llm(small_model) as llm:
        cache, host = llm.engine.core.runner.cache, llm.engine.core.runner.swap
        tensors = (cache.kv, cache.scores, cache.positions, cache.queries)
        for tensor in tensors:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
        before = [tensor.clone() for tensor in tensors]
        host.swap_out("r", (7, 3, 9), 1)
        for tensor, blocks in zip(tensors, ([7, 3, 9],) * 3 + ([1],), strict=True):
            tensor[:, blocks] = 0
        host.swap_in("r", (3, 9, 7), 2)
    for tensor, old in zip(tensors[:3], before, strict=False):
        assert torch.equal(tensor[:, [3, 9, 7]], old[:, [7, 3, 9]])
    assert torch.equal(cache.queries[:, 2], before[3][:, 1])


# ---------------------------------------------------------------------- the parts


def item(tokens: int, length: int = 0, samples: bool = True) -> ScheduledTokens:
    request = Request(f"r{tokens}", [1] * tokens, max_tokens=5, block_size=16)
    request.length = length
    return ScheduledTokens(request, tokens, samples)


@pytest.mark.parametrize("sizes", [[1], [1, 1], [1, 1, 1], [5], [1, 9], [9, 1], [4, 4], [2, 7, 3]])
def test_halves_hold_every_token_once_and_in_order(sizes: list[int]) -> None:
    part = [item(n, samples=n % 2 == 1) for n in sizes]
    first, second = halve_tokens(part)
    counts = [sum(i.num_tokens for i in half) for half in (first, second)]
    assert sum(counts) == sum(sizes) and abs(counts[0] - counts[1]) <= 1
    computed: dict[int, int] = {}
    for piece in [*first, *second]:
        computed[id(piece.request)] = computed.get(id(piece.request), 0) + piece.num_tokens
        whole = computed[id(piece.request)] == piece.request.prompt_len
        assert piece.samples == (whole and piece.request.prompt_len % 2 == 1)
    assert list(computed.values()) == sizes
    first, second = halve_requests(part)
    assert first + second == part and 0 <= len(second) - len(first) <= 1


def test_the_largest_computes_most_tokens_then_reads_most() -> None:
    small, wide, deep = item(1), item(7), item(7, length=90)
    assert largest([small, deep, wide]) is deep and largest([small, wide]) is wide


@pytest.mark.parametrize(
    ("error", "short", "lost"),
    [
        (MemoryError(), True, False),
        (torch.OutOfMemoryError("x"), True, False),
        (RuntimeError("CUDA out of memory"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, True),
        (RuntimeError("shape mismatch"), False, False),
        (ValueError("out of memory lane"), False, False),
    ],
)
def test_kinds_of_failures(error: Exception, short: bool, lost: bool) -> None:
    assert (is_out_of_memory(error), is_beyond_repair(error)) == (short, lost)


def test_errors_keep_no_frames_alive() -> None:
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as error:
        kept = without_frames(error)
    assert kept.__traceback__ is None and kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None
