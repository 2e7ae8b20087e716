"""What the server asks of an engine: the surface of `AsyncLLM`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from zipage.config import EngineConfig
from zipage.engine.engine import Prompt
from zipage.engine.stats import EngineStats
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams


class Engine(Protocol):
    """An engine on another thread or in another process.

    See `AsyncLLM` for what the methods do. Beside `RequestError` and `EngineDeadError`,
    `generate` may raise what `zipage.server.errors.from_exception` knows.
    """

    config: EngineConfig

    @property
    def is_running(self) -> bool:
        """Whether it accepts requests."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""

    @property
    def vocab_size(self) -> int:
        """Token ids the model has logits for."""

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling options the model asks for."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, after every step that added to it; closing it aborts the request."""

    def stats(self) -> EngineStats:
        """Counters and gauges."""

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer; raises `ModelError` if there is none."""

    def shutdown(self) -> None:
        """Stop it."""
