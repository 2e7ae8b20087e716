"""`zipage bench serve`: schedules, what is measured against a scripted server, its report."""

import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_openai import FakeServer, serving
from tests.cli.invoke import Invocation, invoke
from zipage import ConfigError, ZipageError
from zipage.bench.arrivals import (
    ServingRequest,
    arrival_times,
    as_messages,
    at,
    read_prompts,
    read_trace,
    workload_requests,
)
from zipage.bench.openai_client import CHAT, COMPLETIONS, Endpoint, Exchange
from zipage.bench.serving import (
    ServingRun,
    distribution,
    meets,
    parse_objectives,
    run_serving,
    summarize,
)

#: How much later than it was sent a chunk may be seen, in seconds, on a busy machine.
SLACK = 0.5
#: And in the median.
TYPICAL = 0.05


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def run(
    server: FakeServer, requests: list[ServingRequest], script: Any = None, **options: Any
) -> ServingRun:
    endpoint = Endpoint(
        server.url,
        options.pop("path", COMPLETIONS),
        "fake-model",
        body={"script": script or {}},
        timeout=options.pop("timeout", 20.0),
    )
    return asyncio.run(run_serving(endpoint, requests, **options))


def some(count: int, output_len: int = 5) -> list[ServingRequest]:
    return [ServingRequest([1, 2, 3], output_len) for _ in range(count)]


# ---------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("process", "burstiness", "variation"),
    [("constant", 1.0, 0.0), ("poisson", 9.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_arrivals_have_the_rate_and_the_variation_asked_for(
    process: Any, burstiness: float, variation: float
) -> None:
    times = arrival_times(process, 20.0, 20_000, burstiness, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, abs=0.06)
    assert times == arrival_times(process, 20.0, 20_000, burstiness, seed=3)
    assert (times != arrival_times(process, 20.0, 20_000, burstiness, seed=4)) == (variation > 0)


def test_all_at_once_and_illegal_arrivals() -> None:
    assert arrival_times("poisson", math.inf, 3) == [0, 0, 0]
    for options in ({"rate": 0.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"process": "weibull"}):
        arguments: dict[str, Any] = {"process": "gamma", "rate": 1.0, "count": 2, **options}
        with pytest.raises(ConfigError, match=next(iter(options)).replace("process", "arrivals")):
            arrival_times(**arguments)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_traces(tmp_path: Path) -> None:
    records = [
        {"arrival_s": 0.591, "input_tokens": 270, "output_tokens": 616, "client": "a"},
        {"arrival_s": 1.591, "input_tokens": 8, "output_tokens": 1, "reason_tokens": 0},
        {"arrival_s": 1.591, "input_tokens": 3, "output_tokens": 44},
    ]
    file = write(tmp_path / "t.jsonl", records)
    requests = read_trace(file, vocab_size=320, scale=0.5)
    assert [(len(r.prompt), r.output_len, r.arrival) for r in requests] == [
        (135, 308, 0.0),
        (4, 1, 1.0),
        (1, 22, 1.0),
    ]
    assert all(10 <= i < 320 for r in requests for i in r.prompt)  # type: ignore[operator]
    assert read_trace(file, 320, 2, 0.5) == requests[:2]
    assert read_trace(file, 320, scale=0.5, seed=1) != requests


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"arrival_s": 0, "input_tokens": 5}, "line 2 needs"),
        ({"arrival_s": 0, "input_tokens": 0, "output_tokens": 1}, "line 2 needs"),
        ({"arrival_s": math.nan, "input_tokens": 1, "output_tokens": 1}, "line 2 needs"),
        ({"arrival_s": -1, "input_tokens": 1, "output_tokens": 1}, "before the record above"),
        ([], "not a JSON object"),
    ],
)
def test_malformed_traces(tmp_path: Path, record: Any, word: str) -> None:
    good = {"arrival_s": 0.0, "input_tokens": 1, "output_tokens": 1}
    with pytest.raises(ConfigError, match=word):
        read_trace(write(tmp_path / "t.jsonl", [good, record]), 320)
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(write(tmp_path / "e.jsonl", []), 320)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl", 320)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    records = [
        {"prompt": "One", "max_tokens": 3},
        {"prompt_token_ids": [4, 5]},
        {"messages": messages},
    ]
    file = write(tmp_path / "p.jsonl", records)
    requests = read_prompts(file, num_requests=4, output_len=9)
    assert [(r.prompt, r.output_len) for r in requests] == [
        ("One", 3),
        ([4, 5], 9),
        (messages, 9),
        ("One", 3),
    ]
    assert as_messages(requests[2], 0) == requests[2]
    assert as_messages(requests[0], 0).prompt == [{"role": "user", "content": "One"}]
    content = as_messages(requests[1], 0).prompt[0]["content"]  # type: ignore[index,call-overload]
    assert len(content.split()) == 2
    with pytest.raises(ConfigError, match="line 1 needs prompt"):
        read_prompts(write(file, [{"text": "One"}]))
    with pytest.raises(ConfigError, match="max_tokens"):
        read_prompts(write(file, [{"prompt": "One", "max_tokens": 0}]))


# ---------------------------------------------------------------------- arithmetic


def exchange(times: list[float], tokens: int | None, **more: Any) -> Exchange:
    request = ServingRequest([1, 2], 10)
    return Exchange(
        request,
        intended=10.0,
        sent=10.5,
        ended=times[-1],
        chunk_times=times,
        chunk_tokens=more.pop("counts", [None] * len(times)),
        output_tokens=tokens,
        **more,
    )


def test_latencies_count_from_the_intended_time() -> None:
    one = exchange([12.0, 12.2, 13.0], 3)
    assert one.ttft == pytest.approx(2.0) and one.e2el == pytest.approx(3.0)
    assert one.tpot == pytest.approx(0.5)
    assert exchange([12.0], 1).tpot is None


@pytest.mark.parametrize(
    ("tokens", "counts", "expected"),
    [
        (3, [None] * 3, [(0.2, 1), (0.8, 1)]),
        (None, [None] * 3, [(0.2, 1), (0.8, 1)]),
        (6, [None] * 3, [(0.1, 2), (0.4, 2)]),
        (7, [1, 5, 7], [(0.05, 4), (0.4, 2)]),
        # Only the last chunk says: the answer's tokens are spread evenly.
        (6, [None, None, 6], [(0.1, 2), (0.4, 2)]),
    ],
)
def test_tokens_of_a_chunk_share_its_time(
    tokens: int | None, counts: list[int | None], expected: list[tuple[float, float]]
) -> None:
    found = exchange([12.0, 12.2, 13.0], tokens, counts=counts).inter_token_latencies()
    assert found == [(pytest.approx(gap), pytest.approx(n)) for gap, n in expected]


def test_percentiles_weigh_values() -> None:
    told = distribution([(float(i), 1) for i in range(1, 101)])
    assert told == {
        "mean": pytest.approx(50.5), "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100
    }  # fmt: skip
    told = distribution([(1.0, 98), (50.0, 2)])
    assert told is not None
    assert (told["p50"], told["p95"], told["p99"]) == (1, 1, 50)
    assert told["mean"] == pytest.approx(1.98)
    assert distribution([]) is None


def test_goodput() -> None:
    objectives = parse_objectives(["ttft:2500", "tpot:400,e2el:9000"])
    assert objectives == {"ttft": 2500, "tpot": 400, "e2el": 9000}
    good = exchange([12.0, 12.2, 12.5], 3)
    assert meets(good, objectives)
    assert not meets(good, {"ttft": 1999})
    assert not meets(exchange([12.0, 13.0], 2), objectives)
    assert not meets(exchange([12.0, 12.2], 2, failure="timeout"), objectives)
    assert meets(exchange([12.0], 1), objectives)
    run = ServingRun([good, exchange([12.0, 15.0], 2, failure="disconnected")], 10.0, [0.01])
    summary = summarize(run, objectives)
    assert summary["goodput"]["share"] == 0.5
    assert summary["goodput"]["requests_per_second"] == pytest.approx(1 / 5)
    assert summary["failures"] == {"disconnected": 1}
    assert summary["output_tokens"] == 3 and summary["shorter_than_asked"] == 1
    assert summary["sent_late_ms"]["p50"] == pytest.approx(500)
    assert summary["peak_in_flight"] == 2
    assert summary["mean_in_flight"] == pytest.approx((2.5 + 5) / 5)
    for text in ("ttft", "speed:5", "ttft:-1", "ttft:x", "ttft:nan"):
        with pytest.raises(ConfigError, match="goodput="):
            parse_objectives([text])


# ---------------------------------------------------------------------- against a server


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_measured_is_what_the_server_did(server: FakeServer, path: str) -> None:
    requests = at(some(6, output_len=8), arrival_times("constant", 20, 6))
    if path == CHAT:
        requests = [as_messages(r, 0) for r in requests]
    result = run(server, requests, {"first": 0.15, "gap": 0.05}, path=path)
    sent = [t for times in server.sent for t in times]
    seen = sorted(t for e in result.exchanges for t in e.chunk_times)
    delays = [a - b for a, b in zip(seen, sorted(sent), strict=True)]
    assert min(delays) > -0.001 and max(delays) < SLACK
    assert statistics.median(delays) < TYPICAL
    for exchange in result.exchanges:
        assert exchange.failure is None and exchange.tokens == 8 and exchange.prompt_tokens == 3
        assert 0.15 <= exchange.ttft < 0.15 + SLACK
        assert exchange.tpot is not None and 0.05 <= exchange.tpot < 0.05 + SLACK / 7
        assert 0 <= exchange.sent - exchange.intended < SLACK
    intended = [e.intended - result.started for e in result.exchanges]
    assert intended == pytest.approx([i / 20 for i in range(6)])
    summary = summarize(result)
    assert summary["output_tokens"] == 48 and summary["failures"] == {}
    assert summary["ttft_ms"]["p50"] == pytest.approx(150, abs=1000 * TYPICAL)
    assert summary["itl_ms"]["p50"] == pytest.approx(50, abs=1000 * TYPICAL / 2)


def test_chunks_of_several_tokens(server: FakeServer) -> None:
    script = {"gap": 0.1, "tokens": 4, "behave": "counts"}
    (one,) = run(server, some(1, 16), script).exchanges
    assert one.chunk_tokens == [4, 8, 12, 16]
    assert all(gap == pytest.approx(0.025, abs=0.02) for gap, _ in one.inter_token_latencies())
    assert [count for _, count in one.inter_token_latencies()] == [4, 4, 4]


def test_a_slow_server_does_not_slow_the_schedule(server: FakeServer) -> None:
    server.serial = True
    requests = at(some(8, output_len=1), arrival_times("constant", 40, 8))
    result = run(server, requests, {"first": 0.1})
    ttfts = sorted(e.ttft for e in result.exchanges)
    # The i-th answer comes after i + 1 tenths, its request was to be sent i fortieths before.
    for i, ttft in enumerate(ttfts):
        assert 0.1 + 0.075 * i - 0.001 <= ttft < 0.1 + 0.075 * i + SLACK
    assert max(e.sent - result.started for e in result.exchanges) < 0.175 + SLACK
    assert summarize(result)["peak_in_flight"] >= 5


def test_a_client_that_is_late_says_so_and_counts_it(server: FakeServer) -> None:
    requests = at(some(3, output_len=1), [0.0, 0.3, 0.35])

    def block(ended: int) -> None:
        if ended == 1:
            time.sleep(0.8)

    result = run(server, requests, {}, on_end=block)
    late = result.exchanges[1]
    assert late.sent - late.intended > 0.3
    assert late.ttft > late.sent - late.intended
    summary = summarize(result)
    assert summary["sent_late_ms"]["max"] > 300 and summary["client_delay_ms"]["max"] > 500


def test_fixed_concurrency(server: FakeServer) -> None:
    requests = at(some(9, output_len=2), [None] * 9)
    result = run(server, requests, {"first": 0.05, "gap": 0.02}, concurrency=3)
    assert summarize(result)["peak_in_flight"] == 3
    assert all(e.failure is None and e.ttft >= 0.05 for e in result.exchanges)
    assert all(e.sent - e.intended < SLACK for e in result.exchanges)


@pytest.mark.parametrize(
    ("behave", "failure"),
    [
        ("refuse", "HTTP 429"),
        ("json", "not a stream"),
        ("half", "disconnected"),
        ("end", "disconnected"),
        ("garbage", "malformed chunk"),
        ("error", "error in the stream"),
        ("empty", "empty answer"),
        ("hang", "timeout"),
    ],
)
def test_failures_are_told_apart(server: FakeServer, behave: str, failure: str) -> None:
    bad = run(server, some(2), {"behave": behave}, timeout=1.0 if behave == "hang" else 20)
    assert [e.failure for e in bad.exchanges] == [failure] * 2
    summary = summarize(bad, {"ttft": 1e9})
    assert summary["failures"] == {failure: 2} and summary["failure_details"][failure]
    assert summary["completed"] == 0 and summary["ttft_ms"] is None
    assert summary["goodput"]["share"] == 0
    assert all(e.ended > e.sent > 0 for e in bad.exchanges)


def test_no_server() -> None:
    endpoint = Endpoint("http://127.0.0.1:9", COMPLETIONS, "m")
    result = asyncio.run(run_serving(endpoint, some(2)))
    assert [e.failure for e in result.exchanges] == ["no connection"] * 2
    with pytest.raises(ZipageError, match="warm-up request failed: no connection"):
        asyncio.run(run_serving(endpoint, some(2), warm_up=some(1)))


def test_odd_but_legal_streams(server: FakeServer) -> None:
    (pieces,) = run(server, some(1), {"behave": "comments"}).exchanges
    assert pieces.failure is None and len(pieces.chunk_times) == pieces.tokens == 5
    silent = run(server, some(2), {"behave": "no usage", "tokens": 1})
    assert [e.output_tokens for e in silent.exchanges] == [None] * 2
    summary = summarize(silent)
    assert summary["without_usage"] == 2
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (10, 6)


# ---------------------------------------------------------------------- the command


def bench(server: FakeServer, *args: str) -> Invocation:
    return invoke("bench", "serve", "--url", server.url + "/v1/", *args)


def test_the_command(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    result = bench(
        server, "-w", "short", "--num-requests", "5", "--scale", "0.01", "--rate", "50",
        "--extra-body", '{"script": {"first": 0.02}, "kv_budget": 64}', "--api-key", "sesame",
        "--goodput", "ttft:100000", "tpot:100000",
        "--json", str(report), "--plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in (
        f"fake-model at {server.url}/v1/completions",
        "5 requests of short, lengths scaled by 0.01, 50 requests/s, poisson gaps",
        "5 of 5 completed",
        "100.0% of the requests",
        "time to first token",
        "client: sent late by",
    ):
        assert words in result.output, words
    assert len(server.bodies) == 6
    work = workload_requests("short", 32000, 5, scale=0.01)
    warm, *others = server.bodies
    assert warm["prompt"] == work[0].prompt[::-1]
    by_prompt = {tuple(b["prompt"]): b for b in others}
    for request in work:
        body = by_prompt[tuple(request.prompt)]  # type: ignore[arg-type]
        assert body["max_tokens"] == request.output_len
        assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0
        assert body["kv_budget"] == 64
    assert {h["authorization"] for h in server.headers} == {"Bearer sesame"}
    record = json.loads(report.read_text())
    assert "sesame" not in report.read_text()
    assert record["summary"]["completed"] == 5 and len(record["requests"]) == 5
    assert record["summary"]["ttft_ms"]["p50"] >= 20
    assert record["requests"][0]["failure"] is None
    assert picture.stat().st_size > 10_000
    again = invoke("bench", "plot", str(report))
    assert again.exit_code == 0 and "<svg" in (tmp_path / "r.svg").read_text()


def test_a_trace_through_chat_with_failures(server: FakeServer, tmp_path: Path) -> None:
    records = [
        {"arrival_s": 5 + 0.2 * i, "input_tokens": 4, "output_tokens": 3 + 100 * (i == 2)}
        for i in range(4)
    ]
    trace = write(tmp_path / "t.jsonl", records)
    options = ["--trace", str(trace), "--endpoint", "chat", "--max-len", "50", "--speedup", "2"]
    result = bench(server, *options, "--no-ignore-eos", "--warm-up", "0")
    assert result.exit_code == 0, result.output
    assert "3 requests of t.jsonl (1 longer ones left out)" in result.output
    assert "the trace's times, 2 times as fast" in result.output
    assert "ignore_eos" not in server.bodies[0]
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 4
    extra = '{"script": {"behave": "refuse"}}'
    result = bench(server, *options, "--extra-body", extra, "--warm-up", "0")
    assert result.exit_code == 1
    assert "failed, HTTP 429: 3. For example: " in result.output
    assert "too many requests" in result.output


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--rate", "1", "--concurrency", "2"], "rate and concurrency"),
        (["--rate", "0"], "rate=0.0"),
        (["--concurrency", "0"], "concurrency=0"),
        (["--arrivals", "weekly", "--rate", "1"], "legal are poisson"),
        (["--arrivals", "gamma"], "arrivals='gamma' has no meaning without a finite rate"),
        (["--burstiness", "0.25", "--rate", "1"], "burstiness=0.25 has no meaning with arrivals="),
        (["--speedup", "2", "--rate", "1"], "speedup=2.0 has no meaning without a trace's own"),
        (["--endpoint", "embeddings"], "legal are completions"),
        (["--url", "localhost:8000"], "http://"),
        (["--url", "http://a:99999"], "http://"),
        (["--workload", "tiny", "--trace", "x"], "give one"),
        (["--workload", "huge"], "legal are tiny"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--goodput", "fast"], "goodput='fast'"),
        (["surplus"], "unexpected argument 'surplus'"),
        (["--max-len", "10"], "every request is longer"),
        (["--num-requests", "0"], "num_requests=0"),
        (["--warm-up", "-1"], "warm_up=-1"),
        (["--timeout", "0"], "timeout"),
        (["--url", "http://127.0.0.1:9"], "does a server run there?"),
    ],
)
def test_errors(args: list[str], word: str) -> None:
    result = invoke("bench", "serve", *args)
    assert result.exit_code == 2
    assert word in result.stderr


def test_a_missing_httpx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    result = invoke("bench", "serve", "--model", "m")
    assert result.exit_code == 2
    assert "zipage[serve]" in result.stderr


def test_warm_up_requests_are_short_and_no_prefix_of_others() -> None:
    from zipage.cli.bench_serve import _short

    assert _short(ServingRequest([1, 2, 3], 500)) == ServingRequest([3, 2, 1], 32)
    assert _short(ServingRequest("ab", None)).prompt == "ba"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert _short(replace(ServingRequest([1], 5), prompt=messages)).prompt == messages
