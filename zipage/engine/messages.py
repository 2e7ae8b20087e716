"""The messages between the engine process and its client: msgspec Structs in MessagePack.

A message is an array whose first element names its type. Prompts and answers are sent as token ids;
text and stop strings are never sent.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from zipage.config import EngineConfig
from zipage.engine.core_io import EngineRequest, ModelInfo, TokenUpdate
from zipage.engine.stats import EngineStats, StepStats


class _Struct(msgspec.Struct, array_like=True, tag=True):
    """Encoded as an array that starts with the name of the class."""


# ------------------------------------------------------------------ to the engine


class Start(_Struct):
    """The first message: what to run.

    Attributes:
        config: the engine's options.
        log_level: level of the package's log, see `configure_logging`; None configures nothing.
        log_format: format of the package's log.
        stats_interval: seconds between two reports of statistics while steps run.
    """

    config: EngineConfig
    log_level: str | None
    log_format: str
    stats_interval: float


class Submit(_Struct):
    """Queue a request. Answered by a `Reply`."""

    request: EngineRequest


class Abort(_Struct):
    """End answers now; ids of answers that have ended are ignored."""

    sequence_ids: list[str]


class Ping(_Struct):
    """Answered at once by a `Pong`, even while a step runs."""


class Shutdown(_Struct):
    """End everything and exit. No message is answered after this one."""


# ------------------------------------------------------------------ from the engine


class Ready(_Struct):
    """The engine is up."""

    model: ModelInfo


class Failure(_Struct):
    """The engine could not start, or it stopped; the process exits.

    Attributes:
        kind: class of the exception.
        message: its text.
    """

    kind: str
    message: str


class Reply(_Struct):
    """The result of a submission.

    Attributes:
        sequence_id: id of the request's first answer.
        kind: class of the exception that refused it; None if it was queued.
        message: the exception's text.
    """

    sequence_id: str
    kind: str | None = None
    message: str = ""


class StepReport(_Struct):
    """What a step did, for all requests together.

    Attributes:
        updates: updates of the answers it touched.
        queued: answers that wait for blocks or for their turn after it.
        stats: a snapshot, at most every `Start.stats_interval` seconds and when the engine becomes
            idle; None in between.
        steps: with `stats`, the steps since the previous snapshot.
    """

    updates: list[TokenUpdate]
    queued: int
    stats: EngineStats | None = None
    steps: list[StepStats] = []


class Pong(_Struct):
    """The engine process is alive.

    Attributes:
        step_seconds: how long the running step has taken so far; 0 between steps.
    """

    step_seconds: float


ToEngine = Start | Submit | Abort | Ping | Shutdown
FromEngine = Ready | Failure | Reply | StepReport | Pong


def _plain(value: Any) -> Any:
    """Converts types msgspec does not know: paths, and subclasses of `str` and `int` (NumPy's)."""
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else os.fspath(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message sent to the engine.

    Raises:
        msgspec.DecodeError: `data` is not such a message.
    """
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message sent by the engine.

    Raises:
        msgspec.DecodeError: `data` is not such a message.
    """
    return _from_engine.decode(data)
