"""Output records."""

import dataclasses
import json

from zipage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Usage


def test_usage_adds_up():
    assert Usage(3, 4).total_tokens == 7
    assert dataclasses.asdict(Usage(3, 4)) == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }


def test_aggregate_of_one_is_the_same():
    metrics = RequestMetrics(0.1, 0.2, 0.5, 30.0, 2, 256, 5, 1, 1, 64)
    assert RequestMetrics.aggregate([metrics]) == metrics


def test_aggregate():
    first = RequestMetrics(0.1, 0.4, 0.5, 30.0, 2, 256, 5, 1, 0, 0)
    second = RequestMetrics(0.2, 0.3, 0.9, 20.0, 1, 100, 7, 0, 1, 64)
    third = RequestMetrics(queue_time=0.3, e2e_time=0.3)
    assert RequestMetrics.aggregate([first, second, third]) == RequestMetrics(
        0.1, 0.3, 0.9, 50.0, 3, 356, 7, 1, 1, 64
    )
    assert RequestMetrics.aggregate([third]).time_to_first_token is None
    assert RequestMetrics.aggregate([]) == RequestMetrics()


def test_records_are_plain_data():
    completion = CompletionOutput(0, "a", [1], -0.5, [{1: Logprob(-0.5, 1, "a")}])
    assert not completion.finished
    completion.finish_reason = "stop"
    assert completion.finished
    output = RequestOutput("r", "p", [5], [completion], True, usage=Usage(1, 1))
    record = json.loads(json.dumps(dataclasses.asdict(output)))
    assert record["outputs"][0]["logprobs"][0]["1"]["decoded_token"] == "a"
    assert record["usage"]["total_tokens"] == 2
