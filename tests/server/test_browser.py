"""The dashboard in a headless Chromium."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.browser import CHROMIUM, DRIVER, Browser, browser
from tests.server.conftest import SUM, listening
from zipage import AsyncLLM
from zipage.evals.problems import generate_problems

pytest.importorskip("selenium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

(PROBLEM,) = (
    p.prompt for p in generate_problems(1, min_tokens=150, max_tokens=250, families=["addition"])
)
PHONE, DESKTOP = (360, 780), (1280, 900)


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with blocks of 32 tokens, so that an answer is compressed many times."""
    llm = AsyncLLM(block_size=32, num_kv_blocks=200, kv_budget=128)
    with listening(llm) as (address, _):
        yield address
    llm.shutdown()


@pytest.fixture(autouse=True)
def no_console_errors(tab: Browser) -> Iterator[None]:
    tab.size(*DESKTOP)
    yield
    assert tab.errors() == []
    tab.open("about:blank")  # ends the page's stream


def fits(tab: Browser) -> bool:
    return bool(tab.js("return document.documentElement.scrollWidth <= innerWidth"))


def test_charts_move_under_load(tab: Browser, url: str) -> None:
    tab.open(f"{url}/dashboard")
    tab.wait("document.querySelector('#status-text').textContent.startsWith('live')")
    tab.wait("document.querySelector('#live-note').textContent.includes('200 blocks')")
    assert tab.js("return !document.querySelector('#live-empty').hidden"), "nothing has come yet"
    assert "none in the last" in tab.text("#charts"), "and the charts say so"

    def load() -> None:
        body = {"prompt": SUM, "max_tokens": 400, "ignore_eos": True, "n": 2}
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200

    thread = threading.Thread(target=load)
    thread.start()
    labels = "[...document.querySelectorAll('svg.plot')].map((s) => s.getAttribute('aria-label'))"
    tab.wait(f"{labels}[0].match(/owned [1-9]/)")
    before = tab.js(f"return {labels}")
    tab.wait("document.querySelector('#live-empty').hidden")
    thread.join()
    time.sleep(2.5)
    after = dict(zip(before, tab.js(f"return {labels}"), strict=True))
    for title in ("KV pool", "Throughput", "Compressions", "Evicted tokens", "Time between tokens"):
        (changed,) = [(a, b) for a, b in after.items() if a.startswith(title)]
        assert changed[0] != changed[1], title
    stats = httpx.get(f"{url}/metrics").text
    compressions = float(stats.split("zipage:compressions_total{")[1].split()[1])
    assert f"{compressions:,.0f} compressions" in tab.text("#live-note")
    paths = tab.js("return [...document.querySelectorAll('path.area')].map((p) => p.outerHTML)")
    assert len(paths) == 3 and "NaN" not in "".join(paths)
    for size in (PHONE, DESKTOP):
        tab.size(*size)
        assert fits(tab)


def test_retention(tab: Browser, url: str) -> None:
    tab.open(f"{url}/dashboard#retention")
    tab.wait("document.querySelectorAll('#examples button').length === 4")
    tab.type("#prompt", PROBLEM)
    tab.type("#budget", "64")
    tab.type("#max-tokens", "400")
    tab.click("#run")
    tab.wait("document.querySelector('#moment').max > 1", 60)
    live_count = tab.js("return document.querySelectorAll('#tokens .t').length")
    tab.wait("/Finished|Cut/.test(document.querySelector('#summary').textContent)", 60)
    assert tab.js("return document.querySelectorAll('#tokens .t').length") > live_count, "streamed"
    body = {
        "messages": [{"role": "user", "content": PROBLEM}],
        "max_tokens": 400,
        "kv_budget": 64,
        "return_kv_stats": True,
        "kv_stats_layers": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    usage, records = answer["usage"], choice["kv_stats"]["compressions"]
    assert 0 in records[-1]["keepers"] and len(records) > 1
    assert tab.text("#summary").count(f"{len(records)} compressions")
    assert tab.js("return document.querySelectorAll('#tokens .t').length") == usage["total_tokens"]
    for moment in (len(records), 1):
        set_moment(tab, moment)
        check_moment(tab, records[moment - 1])
    set_moment(tab, 0)
    classes = "return [...document.querySelectorAll('#tokens .t')].map((t) => t.className)"
    first = tab.js(classes)
    assert all("k10" in c for c in first[: records[0]["num_tokens"]])
    assert all("future" in c for c in first[records[0]["num_tokens"] :])
    tab.js("document.querySelector('#tokens').focus()")
    tab.driver.switch_to.active_element.send_keys("\ue010")  # End
    assert "Not written yet" in tab.text("#detail")
    for size in (PHONE, DESKTOP):
        tab.size(*size)
        assert fits(tab)


def set_moment(tab: Browser, moment: int) -> None:
    tab.js(
        "const s = document.querySelector('#moment'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        moment,
    )


def check_moment(tab: Browser, record: dict[str, Any]) -> None:
    """What is shown is what the engine told."""
    classes = tab.js("return [...document.querySelectorAll('#tokens .t')].map((t) => t.className)")
    keepers, lists = record["keepers"], record["lists"]
    gone = [("gone" in names.split()) for names in classes[: len(keepers)]]
    assert gone == [count == 0 for count in keepers]
    everywhere = [("k10" in names.split()) for names in classes[: len(keepers)]]
    assert everywhere == [count == lists for count in keepers]
    assert sum("window" in names for names in classes) == 24
    text = tab.text("#moment-text")
    assert f"from {record['length']} to {record['kept']} tokens" in text
    assert f"{sum(gone)} tokens gone everywhere" in text
    position = next(i for i, count in enumerate(keepers) if 0 < count < lists)
    tab.js(
        "document.querySelectorAll('#tokens .t')[arguments[0]]"
        ".dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))",
        position,
    )
    detail = tab.text("#detail")
    assert f"Kept by {keepers[position]} of {lists} lists" in detail
    assert detail.count("layer ") == len(record["layer_positions"])
    shown = [
        int(n)
        for n in tab.js(
            "return [...document.querySelectorAll('.layers > span:nth-child(3n)')]"
            ".map((s) => s.textContent.split(' ')[0])"
        )
    ]
    assert sum(shown) == keepers[position]


def test_errors_are_shown(tab: Browser, url: str) -> None:
    tab.open(f"{url}/dashboard#retention")
    tab.wait("document.querySelectorAll('#examples button').length === 4")
    tab.js("document.querySelector('#budget').min = 1; document.querySelector('#budget').step = 1")
    tab.type("#budget", "7")
    tab.click("#run")
    tab.wait("document.querySelector('#ask-error').textContent.includes('kv_budget=7')")
    assert tab.js("return !document.querySelector('#run').disabled")


def test_the_key(tab: Browser) -> None:
    llm = AsyncLLM(num_kv_blocks=50)
    with listening(llm, api_keys=["right"]) as (url, _):
        tab.open(f"{url}/dashboard")
        tab.wait("!document.querySelector('#key-form').hidden")
        for key in ("wrong", "right"):
            tab.type("#key", key)
            tab.click("#key-form button")
            shown = "document.querySelector('#key-error').textContent" if key == "wrong" else "true"
            tab.wait(shown)
        tab.wait("document.querySelector('#status-text').textContent.startsWith('live')")
        assert tab.js("return document.querySelector('#key-form').hidden")
        assert tab.js("return localStorage.length + document.cookie.length") == 0
        tab.open("about:blank")
    llm.shutdown()


def test_it_comes_back_after_a_restart(tab: Browser) -> None:
    llm = AsyncLLM(num_kv_blocks=50)
    with listening(llm) as (url, app):
        tab.open(f"{url}/dashboard")
        tab.wait("document.querySelector('#status-text').textContent.startsWith('live')")
        serving = app.state.serving
        serving.draining = True
        tab.wait("document.querySelector('#status').className.includes('bad')")
        serving.draining = False
        tab.wait("document.querySelector('#status').className.includes('ok')")
        tab.open("about:blank")
    llm.shutdown()
