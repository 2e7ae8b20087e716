"""Messages and frames between the engine process and its client."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage import EngineConfig, SamplingParams
from zipage.engine.channel import Channel
from zipage.engine.core_io import EngineRequest, ModelInfo, TokenUpdate
from zipage.engine.messages import (
    Abort,
    Failure,
    Ping,
    Pong,
    Ready,
    Reply,
    Shutdown,
    Start,
    StepReport,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from zipage.engine.stats import EngineStats, FinishedCompletion, StepStats
from zipage.execution.memory import MemoryPlan
from zipage.outputs import CompressionRecord, Logprob, RequestMetrics

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False)
COUNTS = st.integers(0, 2**62)
REASONS = st.sampled_from(["stop", "length", "abort", "error"])


def records(kind: Any, **fields: Any) -> st.SearchStrategy[Any]:
    """A dataclass whose every field varies; those that are not given are numbers by their type."""
    for field in dataclasses.fields(kind):
        if field.name not in fields and field.init:
            optional = "None" in str(field.type)
            numbers = NUMBERS if "float" in str(field.type) else COUNTS
            fields[field.name] = st.none() | numbers if optional else numbers
    return st.builds(kind, **fields)


METRICS = records(RequestMetrics)
LOGPROBS = st.lists(
    st.dictionaries(
        st.integers(0, 2**31 - 1), records(Logprob, decoded_token=st.none() | TEXT), max_size=3
    ),
    max_size=3,
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 10),
    top_p=st.floats(0.1, 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.none() | st.lists(TEXT.filter(bool), max_size=3),
    stop_token_ids=st.none() | TOKENS,
    logprobs=st.none() | st.integers(0, 5),
    prompt_logprobs=st.none() | st.integers(0, 20),
    kv_budget=st.none() | st.just(64),
    return_kv_stats=st.booleans(),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=TEXT,
    sequence_ids=st.lists(TEXT, min_size=1, max_size=4),
    prompt_token_ids=TOKENS,
    params=PARAMS,
    max_tokens=COUNTS,
    max_blocks=st.none() | COUNTS,
    priority=st.integers(-(2**62), 2**62),
    cache_salt=TEXT,
    stream=st.booleans(),
    arrival_time=NUMBERS,
)
KV_STATS = st.lists(
    records(
        CompressionRecord,
        keepers=TOKENS,
        layer_positions=TOKENS,
        layer_keepers=st.none() | st.binary(max_size=9),
    ),
    max_size=2,
)
UPDATES = st.builds(
    TokenUpdate,
    sequence_id=TEXT,
    token_ids=TOKENS,
    logprobs=st.none() | LOGPROBS,
    prompt_logprobs=st.none() | LOGPROBS,
    finish_reason=st.none() | REASONS,
    stop_reason=st.none() | st.integers(0, 2**31 - 1),
    error=st.none() | TEXT,
    metrics=st.none() | METRICS,
    kv_stats=st.none() | KV_STATS,
)
FINISHED = records(FinishedCompletion, request_id=TEXT, finish_reason=REASONS, metrics=METRICS)
SECONDS = st.lists(NUMBERS, max_size=5)
STEPS = records(
    StepStats,
    first_token_seconds=SECONDS,
    inter_token_seconds=SECONDS,
    compression_seconds=SECONDS,
    finished=st.lists(FINISHED, max_size=2),
)
STATS = records(EngineStats, last_step=STEPS, memory=st.none() | records(MemoryPlan))
CONFIGS = st.builds(
    EngineConfig,
    model=st.none() | TEXT.filter(bool),
    kv_cache_memory=st.none() | st.integers(1, 2**40) | st.just("2GiB"),
    policy_options=st.just({}) | st.fixed_dictionaries({"lam": st.floats(0, 1)}),
    memory_utilization=st.none() | st.floats(0.1, 1),
    async_scheduling=st.none() | st.booleans(),
)
MODELS = st.builds(
    ModelInfo,
    max_model_len=COUNTS,
    vocab_size=COUNTS,
    eos_token_ids=TOKENS.map(tuple),
    num_kv_blocks=COUNTS,
    tokenizer=st.none() | TEXT,
    default_sampling=st.dictionaries(TEXT, NUMBERS | COUNTS | st.lists(COUNTS), max_size=3),
)
TO_ENGINE = (
    st.builds(Start, CONFIGS, st.none() | TEXT, TEXT, NUMBERS)
    | st.builds(Submit, REQUESTS)
    | st.builds(Abort, st.lists(TEXT))
    | st.builds(Ping)
    | st.builds(Shutdown)
)
FROM_ENGINE = (
    st.builds(Ready, MODELS)
    | st.builds(Failure, TEXT, TEXT)
    | st.builds(Reply, TEXT, st.none() | TEXT, TEXT)
    | st.builds(
        StepReport, st.lists(UPDATES, max_size=3), COUNTS, st.none() | STATS, st.lists(STEPS)
    )
    | st.builds(Pong, NUMBERS)
)


@settings(max_examples=40, deadline=None)
@given(message=TO_ENGINE)
def test_messages_to_the_engine_arrive_as_they_are(message: Any) -> None:
    assert decode_to_engine(encode(message)) == message


@settings(max_examples=40, deadline=None)
@given(message=FROM_ENGINE)
def test_messages_from_the_engine_arrive_as_they_are(message: Any) -> None:
    assert decode_from_engine(encode(message)) == message


def test_a_model_given_as_a_path() -> None:
    start = decode_to_engine(encode(Start(EngineConfig(model=Path("/m")), None, "text", 0.1)))  # type: ignore[arg-type]
    assert isinstance(start, Start) and start.config == EngineConfig(model="/m")


def test_a_prompt_of_100k_tokens_is_small_on_the_way() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(150_000) for _ in range(100_000)]
    request = EngineRequest("big", ["big#0@0"], prompt, SamplingParams(), max_tokens=5)
    frame = encode(Submit(request))
    assert len(frame) < 6 * len(prompt)
    received = decode_to_engine(frame)
    assert isinstance(received, Submit) and received.request == request


def test_frames_survive_any_cut() -> None:
    rng = random.Random(1)
    frames = [rng.randbytes(rng.choice((0, 1, 3, 4, 5, 1000, 300_000))) for _ in range(60)]
    wire = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    ours, theirs = socket.socketpair()
    channel = Channel(ours)

    def write() -> None:
        start = 0
        while start < len(wire):
            end = start + rng.choice((1, 2, 3, 7, 5000, 200_000))
            theirs.sendall(wire[start:end])
            start = end
        theirs.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert [channel.receive() for _ in frames] == frames
    with pytest.raises(EOFError):
        channel.receive()
    writer.join()
    channel.close()


def test_frames_of_several_threads_are_not_mixed() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    threads = [
        threading.Thread(target=lambda i=i: [sender.send(bytes([i]) * 50_000) for _ in range(20)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    frames = [receiver.receive(5.0) for _ in range(80)]
    assert all(frame is not None and len(set(frame)) == 1 for frame in frames)
    assert receiver.receive(0.01) is None
    for thread in threads:
        thread.join()
    sender.close()
    receiver.close()
