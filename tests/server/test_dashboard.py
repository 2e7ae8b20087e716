"""The dashboard's page and figures, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.server.conftest import SUM, Client, listening
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage import AsyncLLM
from zipage.config import EngineConfig
from zipage.engine.stats import EngineStats, StepStats
from zipage.evals.problems import MAX_CONVERSATION
from zipage.server.dashboard.examples import examples
from zipage.server.dashboard.feed import HISTORY, RECENT, Feed, RecentTimes


def scripted() -> ScriptedEngine:
    return ScriptedEngine(["Add", "."], tiny_tokenizer())


def read_stream(url: str, count: int, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """The first events of the dashboard's stream: name and data."""
    found: list[tuple[str, dict[str, Any]]] = []
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=10, **options) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, json.loads(line[6:])))
            if len(found) == count:
                break
    return found


def test_the_page_loads_nothing_from_elsewhere() -> None:
    answer = Client(scripted(), api_keys=["key"]).get("/dashboard")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy
    addresses = set(re.findall(r"https?://[^\s'\"]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG"
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"'](?!data:)", answer.text)
    assert not re.search(r"\sstyle=|\son\w+=\"", answer.text), "the policy forbids them"


def test_it_can_be_left_out() -> None:
    client = Client(scripted(), dashboard=False)
    assert client.get("/dashboard").status_code == 404
    assert client.get("/dashboard/events").status_code == 404
    assert client.get("/metrics").status_code == 200


def test_figures_need_the_key() -> None:
    with listening(scripted(), api_keys=["key"]) as (url, _):
        with httpx.stream("GET", f"{url}/dashboard/events") as refused:
            assert refused.status_code == 401
            assert json.loads(refused.read())["error"]["code"] == "invalid_api_key"
        ((name, hello),) = read_stream(url, 1, headers={"Authorization": "Bearer key"})
        assert name == "hello" and hello["model"] == "zipage-tiny"


def test_figures_of_known_traffic(engine: AsyncLLM) -> None:
    with listening(engine) as (url, _):
        ((name, hello),) = read_stream(url, 1)
        assert name == "hello" and hello["block_size"] == 16 and hello["is_chat"]
        assert hello["window"] == engine.config.resolved_window
        body = {"prompt": SUM, "max_tokens": 150, "kv_budget": 64, "ignore_eos": True}
        before = engine.stats()
        usage = httpx.post(f"{url}/v1/completions", json=body).json()["usage"]
        events = read_stream(url, 3)
        assert [name for name, _ in events] == ["hello", "sample", "sample"]
        samples = [*events[0][1]["samples"], *(sample for _, sample in events[1:])]
        times = [sample["time"] for sample in samples]
        assert times == sorted(set(times)), "each second once"

        def total(field: str) -> float:
            return sum(sample[field] * sample["seconds"] for sample in samples)

        assert total("generated") == pytest.approx(usage["completion_tokens"])
        after = engine.stats()
        evicted = after.evicted_tokens - before.evicted_tokens
        assert evicted > 0 and total("evicted") == pytest.approx(evicted)
        last = samples[-1]
        assert last["owned"] + last["cached"] + last["free"] == 600
        assert last["totals"]["generated"] == after.generated_tokens
        assert 0 < last["inter_token_p50"] <= last["inter_token_p95"] < 5
        assert last["running"] == 0 and last["up"] is True


def test_an_open_page_does_not_hold_up_the_end() -> None:
    with (
        listening(scripted()) as (url, app),
        httpx.stream("GET", f"{url}/dashboard/events", timeout=10) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "event: hello"
        app.state.serving.draining = True
        begun = time.monotonic()
        assert all(line is not None for line in lines)
        assert time.monotonic() - begun < 5


def test_recent_times_are_exact_enough() -> None:
    recent = RecentTimes()
    assert recent.percentiles((0.5,)) == [None]
    values = [0.001 * (i + 1) for i in range(1000)]
    recent.observe(values)
    recent.tick()
    p50, p95 = recent.percentiles((0.5, 0.95))
    assert p50 == pytest.approx(0.5, rel=0.02) and p95 == pytest.approx(0.95, rel=0.02)
    for _ in range(RECENT - 1):
        recent.tick()
    assert recent.percentiles((0.5,)) != [None]
    recent.tick()
    assert recent.percentiles((0.5,)) == [None], "a minute later they are forgotten"


def test_the_feed_is_bounded_and_told_to_all() -> None:
    class Engine(ScriptedEngine):
        steps = 0

        def stats(self) -> EngineStats:
            self.steps += 1
            return EngineStats(generated_tokens=10 * self.steps)

    feed = Feed(Engine([], tiny_tokenizer()), interval=0.001)
    feed.observe(EngineStats(last_step=StepStats(first_token_seconds=[0.25])))

    async def main() -> None:
        task = asyncio.create_task(feed.run())
        ended = False

        async def follow() -> list[dict[str, Any]]:
            batches = [batch async for batch in feed.follow(lambda: ended)]
            return [sample for batch in batches for sample in batch]

        readers = [asyncio.create_task(follow()) for _ in range(2)]
        while len(feed._samples) < HISTORY:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        ended = True
        one, other = await asyncio.gather(*readers)
        task.cancel()
        assert len(feed._samples) == HISTORY < len(one)
        assert one == other[: len(one)] or other == one[: len(other)]
        assert all(sample["generated"] > 0 for sample in one)
        assert one[0]["ttft_p50"] == pytest.approx(0.25, rel=0.02)

    asyncio.run(main())


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_examples_fit(block_size: int) -> None:
    config = EngineConfig(block_size=block_size)
    for example in examples(config):
        config.check_budget(example["kv_budget"])
        assert example["answer"] and len(example["prompt"]) < MAX_CONVERSATION * 4
    others = examples(EngineConfig(model="other", block_size=block_size))
    for example in others:
        config.check_budget(example["kv_budget"])
        assert "answer" not in example
