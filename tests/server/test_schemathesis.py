"""schemathesis asks what the OpenAPI document allows, and what it does not: the server never fails,
and never answers what the document does not tell of."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.conftest import CHAT, Process, listening
from zipage import AsyncLLM

#: Short answers, few at a time.
LIMITS = {"max_n": 4, "max_prompts": 4, "max_body_size": "256KiB"}
SIZES = {"block_size": 16, "num_kv_blocks": 400, "kv_budget": 64, "max_model_len": 256}
CONFIG = Path(__file__).with_name("schemathesis.toml")
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
#: The share of legal requests that must be answered. It is not 1 as some values are legal only
#: beside others: `stream_options` needs `stream`, for one.
ANSWERED = {
    "POST /v1/completions": 0.2,
    "POST /v1/chat/completions": 0.1,
    "POST /v1/responses": 0.1,
    "POST /tokenize": 0.2,
    "POST /detokenize": 0.2,
    "GET /v1/models": 1.0,
    "GET /v1/models/{model}": 0.0,
    "GET /health": 1.0,
    "GET /version": 1.0,
    "GET /metrics": 1.0,
}


@pytest.fixture(scope="module")
def schema() -> Iterator[schemathesis.BaseSchema]:
    engine = AsyncLLM(**SIZES)
    with listening(engine, **LIMITS) as (url, _):
        config = schemathesis.Config.from_path(CONFIG)
        yield schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)
    engine.shutdown()


def ask(
    schema: schemathesis.BaseSchema, label: str, mode: GenerationMode, count: int
) -> Counter[int]:
    """Send requests for an operation, and check every answer; the statuses of the answers."""
    operation = schema.find_operation_by_label(label)
    assert operation is not None
    statuses: Counter[int] = Counter()

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def send(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
        statuses[answer.status_code] += 1

    send()
    return statuses


def test_operations(schema: schemathesis.BaseSchema) -> None:
    found = [operation.ok().label for operation in schema.get_all_operations()]
    assert sorted(found) == sorted(ANSWERED)


@pytest.mark.parametrize("label", list(ANSWERED))
def test_legal_requests(schema: schemathesis.BaseSchema, label: str) -> None:
    statuses = ask(schema, label, POSITIVE, 15)
    assert statuses[200] >= ANSWERED[label] * statuses.total(), statuses


@pytest.mark.parametrize("label", [label for label in ANSWERED if label.startswith("POST")])
def test_illegal_requests(schema: schemathesis.BaseSchema, label: str) -> None:
    statuses = ask(schema, label, NEGATIVE, 15)
    assert statuses[200] == 0 and statuses.total() >= 15


@pytest.mark.parametrize(
    "label", [label for label in ANSWERED if "/v1/" in label and "POST" in label]
)
def test_streams(schema: schemathesis.BaseSchema, label: str) -> None:
    operation = schema.find_operation_by_label(label)
    assert operation is not None
    # Fields of other operations are ignored.
    body = {"prompt": "Add", "messages": CHAT, "input": "Add", "stream": True}
    case = operation.Case(body=body, media_type="application/json")
    answer = case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
    assert answer.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.slow
def test_all_phases(tmp_path: Path) -> None:
    """schemathesis' own command, thousands of requests to a server that asks for a key."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (LIMITS | SIZES).items()]
    server = Process("--port", "0", "--api-key", "first", "--log-level", "warning", *flags)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
    options = [f"{server.url}/openapi.json", "--exclude-checks", "positive_data_acceptance"]
    options += ["--suppress-health-check", "all"]
    options += ["-H", "Authorization: Bearer first", "-n", "300", "--continue-on-failure"]
    options += ["--request-timeout", "60"]
    try:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=1800
        )
        print(done.stdout[-4000:])
        assert done.returncode == 0, done.stdout[-20000:]
    finally:
        assert server.stop() == 0
    assert not [line for line in server.lines if " ERROR " in line], server.lines
