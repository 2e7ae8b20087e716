"""Log messages about requests, and how they are written."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small_model import make_small_llm
from tests.engine.workload import greedy
from tests.observe.test_trace import TIGHT, prompts
from zipage import RequestError
from zipage.observe.logs import JsonFormatter, TextFormatter, configure_logging

SECRET = "a prompt nobody may read in a log"


def run_all_kinds(llm: Any) -> None:
    """Requests that end, are preempted, swapped, compressed, refused, aborted and fail."""
    llm.generate(prompts(7), [greedy(130, compression="off")] + [greedy(100)] * 6)
    with pytest.raises(RequestError):
        llm.generate(prompts(1), greedy(10**4))
    with pytest.raises(RequestError):
        llm.engine.add_request({"prompt_token_ids": SECRET}, greedy(3), "spoilt")
    stream = llm.stream(SECRET, greedy(90))
    next(stream)
    stream.close()

    def fail(job: Any) -> None:
        raise MemoryError("no workspace")

    llm.engine.core.runner.compress = fail
    llm.generate(prompts(1), greedy(90))


def test_events_carry_the_request_id(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_small_llm(small_model, **TIGHT) as llm, caplog.at_level(logging.DEBUG, "zipage"):
        run_all_kinds(llm)
    text = caplog.text
    assert SECRET not in text
    about_requests = [r for r in caplog.records if r.getMessage().startswith("request ")]
    for record in about_requests:
        name = record.request_id  # type: ignore[attr-defined]
        assert name is None or str(name) in record.getMessage()

    def find(part: str) -> list[Any]:
        return [r for r in about_requests if part in r.getMessage()]

    assert len(find("is queued")) == len(find("is scheduled")) == 9
    assert {r.levelname for r in find("is queued")} == {"INFO"}
    assert (find("is queued")[0].prompt_tokens, find("is queued")[0].n) == (24, 1)
    assert (find("is queued")[0].kv_budget, find("is queued")[1].kv_budget) == (None, 32)
    finished = find("finished (length)")
    assert len(finished) == 7 and {r.generated_tokens for r in finished} == {100, 130}
    assert all(r.e2e_time > r.time_to_first_token > 0 for r in finished)
    for record in finished:
        told = f"{record.compressions} compressions ({record.evicted_tokens} tokens evicted)"
        assert told in record.getMessage()
    assert any(r.compressions and r.evicted_tokens for r in finished)
    assert len(find("refused")) == 2
    assert "its prompt is not legal" in find("request 'spoilt'")[0].getMessage()
    assert "max_tokens=10000" in find("request without id")[0].getMessage()
    assert len(find("aborted")) == 1
    (failed,) = find("failed after")
    assert failed.levelname == "WARNING" and "no workspace" in failed.getMessage()
    (broken,) = (r for r in caplog.records if r.getMessage().startswith("compression of request"))
    assert broken.exc_info and broken.request_id == failed.request_id  # type: ignore[attr-defined]
    kinds = [r.preemption for r in find("is preempted")]
    assert {"swap", "recompute"} == set(kinds)
    assert len(find("blocks swapped")) == 2 * kinds.count("swap")
    compressed = find("compressed from 48 to 32")
    assert compressed and {r.levelname for r in compressed} == {"DEBUG"}
    assert all((r.length, r.kept) == (48, 32) and r.seconds > 0 for r in compressed)


def test_a_refused_id_is_quoted(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No handler need be able to write what was refused."""
    with make_small_llm(small_model) as llm, caplog.at_level(logging.INFO, "zipage"):
        caplog.clear()
        with pytest.raises(RequestError, match="request_id"):
            llm.engine.add_request(prompts(1)[0], greedy(3), "a\n\ud800")
    (message,) = caplog.messages
    assert message.startswith(r"request 'a\n\ud800' is refused: ")
    message.encode()


def test_info_is_a_few_lines_a_request(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_small_llm(small_model) as llm, caplog.at_level(logging.INFO, "zipage"):
        caplog.clear()
        llm.generate(prompts(3), greedy(90))
    assert len(caplog.records) == 2 * 3


def test_json_lines_hold_fields_and_exceptions() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("zipage.test")
    logger.addHandler(handler)
    logger.info("request %s\nis done", "r\u2028\ud800", extra={"request_id": "r", "seconds": 0.5})
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed", extra={"path": Path("/x")})
    first, second = stream.getvalue().splitlines()
    entry = json.loads(first)
    assert entry.pop("time")[-1] == "Z"
    assert entry == {
        "level": "info",
        "logger": "zipage.test",
        "message": "request r\u2028\ud800\nis done",
        "request_id": "r",
        "seconds": 0.5,
    }
    entry = json.loads(second)
    assert entry["path"] == "/x" and "KeyError: 'lost'" in entry["exception"]
    assert entry["exception"].startswith("Traceback")


def test_a_text_message_is_one_line() -> None:
    """Whatever a client put in it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger = logging.Logger("zipage.test")
    logger.addHandler(handler)
    logger.info("GET /%s é", "a\n2026 INFO zipage: forged\x1b[2J\u2028\ud800")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("GET /a\\n2026 INFO zipage: forged\\x1b[2J\\u2028\\ud800 é")
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed")
    assert stream.getvalue().endswith("KeyError: 'lost'\n")


def test_configuring_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", "json")
    configure_logging("info", "text")
    logging.getLogger("zipage.engine.core").info("heard")
    logging.getLogger("zipage.engine.core").debug("not heard")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("INFO zipage.engine.core: heard")
    with pytest.raises(ValueError, match="log_level='loud'"):
        configure_logging("loud")
    with pytest.raises(ValueError, match="log_format='xml'"):
        configure_logging("info", "xml")  # type: ignore[arg-type]


def test_importing_configures_nothing() -> None:
    code = (
        "import logging, zipage.llm, zipage.engine.async_llm, zipage.cli\n"
        "logger = logging.getLogger('zipage')\n"
        "assert not logger.handlers and logger.level == logging.NOTSET\n"
        "assert not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
