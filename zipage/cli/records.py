"""JSONL in and out: a line is a request, and later its answer."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from zipage.errors import RequestError
from zipage.outputs import CompletionOutput, Logprob, RequestOutput
from zipage.sampling_params import SamplingParams

_INPUTS = ("prompt", "messages", "prompt_token_ids")
_OTHERS = ("id", "metadata")
_MAX_NESTING = 64
_TOO_DEEP = f"lists and objects are nested deeper than {_MAX_NESTING}"
_SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams))


@dataclass(frozen=True)
class InputRecord:
    """One request to be made.

    Attributes:
        index: its position in the input, from 0.
        line: its line, from 1; None if it did not come from a JSONL file.
        kind: ``prompt`` (text), ``messages`` or ``prompt_token_ids``.
        content: the value of that key.
        id: as given, else the index.
        sampling: sampling options of this record.
        metadata: copied to the output.
        error: what is wrong with the line, which is then not run; else None.
    """

    index: int
    line: int | None = None
    kind: str = "prompt"
    content: Any = None
    id: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Any = None
    error: str | None = None

    @property
    def place(self) -> str:
        """Its position in the input, for messages."""
        return f"prompt {self.index}" if self.line is None else f"line {self.line}"


def read_records(lines: Iterable[str]) -> list[InputRecord]:
    """Read JSONL; empty lines are skipped, and a bad line becomes a record with an error."""
    records: list[InputRecord] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            records.append(_read(line, len(records), number))
    return records


def _read(line: str, index: int, number: int) -> InputRecord:
    record_id: Any = index
    try:
        try:
            line.encode()
        except UnicodeEncodeError:
            raise RequestError("not valid UTF-8") from None
        try:
            record = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except ValueError as error:
            raise RequestError(f"not JSON: {error}") from None
        except RecursionError:
            raise RequestError(_TOO_DEEP) from None
        # Values that can barely be parsed may fail to be written, and messages show values.
        if _is_deeper(record, _MAX_NESTING):
            raise RequestError(_TOO_DEEP)
        if not isinstance(record, dict):
            raise RequestError(f"must be a JSON object, not {type(record).__name__}")
        record_id = record.get("id", index)
        kinds = [kind for kind in _INPUTS if record.get(kind) is not None]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise RequestError(f"needs exactly one of {', '.join(_INPUTS)}; found {found}")
        kind = kinds[0]
        sampling = {k: v for k, v in record.items() if k not in (*_INPUTS, *_OTHERS)}
        unknown = [name for name in sampling if name not in _SAMPLING]
        if unknown:
            near = difflib.get_close_matches(unknown[0], (*_INPUTS, *_OTHERS, *_SAMPLING))
            hint = f"did you mean {' or '.join(near)}?" if near else "own data goes in 'metadata'"
            raise RequestError(
                f"unknown field {unknown[0]!r}; {hint} (legal: {', '.join((*_INPUTS, *_OTHERS))} "
                "and sampling options)"
            )
        content = record[kind]
        _check_content(kind, content)
    except RequestError as error:
        return InputRecord(index, number, id=record_id, error=str(error))
    return InputRecord(index, number, kind, content, record_id, sampling, record.get("metadata"))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:32]} is too large for a number")
    return number


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested in more than `limit` levels."""
    level = [value]
    for _ in range(limit + 1):
        nested = [v for v in level if isinstance(v, (list, dict))]
        if not nested:
            return False
        level = [child for v in nested for child in (v.values() if isinstance(v, dict) else v)]
    return True


def _check_content(kind: str, content: Any) -> None:
    legal = str if kind == "prompt" else list
    if not isinstance(content, legal):
        wanted = "text" if legal is str else "a list"
        raise RequestError(f"{kind} must be {wanted}, not {type(content).__name__}")


def error_record(record: InputRecord, error: str) -> dict[str, Any]:
    """The output line of a record that was not run or failed."""
    output: dict[str, Any] = {"id": record.id}
    if record.line is not None:
        output["line"] = record.line
    if record.metadata is not None:
        output["metadata"] = record.metadata
    output["error"] = error
    return output


def output_record(
    record: InputRecord, output: RequestOutput, token_ids: bool = False
) -> dict[str, Any]:
    """The output line of a record.

    With ``n`` = 1, `text`, `finish_reason` and so on are fields of the record itself, otherwise of
    the entries of its list `outputs`. A failed request has an `error` beside what it generated.
    """
    result: dict[str, Any] = {"id": record.id, record.kind: record.content}
    completions = [_completion(c, token_ids) for c in output.outputs]
    if len(completions) == 1:
        result |= completions[0]
    else:
        result["outputs"] = [{"index": i, **c} for i, c in enumerate(completions)]
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in output.prompt_logprobs
        ]
    result["usage"] = {
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "total_tokens": output.usage.total_tokens,
    }
    result["metrics"] = dataclasses.asdict(output.metrics)
    if record.metadata is not None:
        result["metadata"] = record.metadata
    if output.error is not None:
        result["error"] = output.error
    return result


def _completion(completion: CompletionOutput, token_ids: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"text": completion.text}
    if token_ids:
        result["token_ids"] = completion.token_ids
    result["finish_reason"] = completion.finish_reason
    if completion.stop_reason is not None:
        result["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        result["cumulative_logprob"] = completion.cumulative_logprob
        result["logprobs"] = [_logprobs(position) for position in completion.logprobs]
    if completion.kv_stats is not None:
        result["kv_stats"] = [record.as_json() for record in completion.kv_stats]
    return result


def _logprobs(position: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    # JSON has no infinity; -9999 stands for it, as in vLLM's server.
    return {
        token: dataclasses.asdict(entry) | {"logprob": max(entry.logprob, -9999.0)}
        for token, entry in position.items()
    }


class OrderedWriter:
    """Writes output lines in input order, each as soon as all before it are written.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._failed = False

    def put(self, index: int, record: dict[str, Any]) -> None:
        """The output of record `index` is known."""
        self._held[index] = record
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        self._write(ready)

    def close(self) -> None:
        """Write the lines still held back, with gaps; write nothing after a failure."""
        self._write([self._held.pop(index) for index in sorted(self._held)])

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._failed:
            return
        self._failed = True
        for record in records:
            line = json.dumps(record, ensure_ascii=False)
            if not line.isascii() and any("\ud800" <= c <= "\udfff" for c in line):
                # Lone surrogates, which JSON can escape but no file can hold.
                line = json.dumps(record)
            self._stream.write(line + "\n")
        if records:
            self._stream.flush()
        self._failed = False
