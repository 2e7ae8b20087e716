"""An engine that says what it is told to, so that tests decide how text is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import zipage
from zipage.config import EngineConfig
from zipage.engine.stats import EngineStats
from zipage.errors import EngineDeadError, ModelError
from zipage.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, Usage
from zipage.sampling_params import SamplingParams
from zipage.tokenizer import load_tokenizer

TINY = str(Path(zipage.__file__).parent / "assets" / "zipage-tiny")


class ScriptedEngine:
    """Answers every request with `pieces`, one a step.

    Attributes:
        pieces: of the text; an exception among them is raised.
        finish_reason: of the answer.
        seen: prompts and parameters it got.
        texts: the prompts' texts.
        aborted: how many requests were left early.
    """

    def __init__(self, pieces: Sequence[Any], tokenizer: Any, max_model_len: int = 512) -> None:
        self.pieces = list(pieces)
        self.finish_reason: FinishReason = "stop"
        self.logprob = -0.5
        self.delay = 0.0
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.texts: list[str | None] = []
        self.aborted = self.queue_refusals = 0
        self.config = EngineConfig(model=TINY)
        self.max_model_len = max_model_len
        self.vocab_size = 320
        self.default_sampling: dict[str, Any] = {"temperature": 0.0}
        self.is_running = True
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ModelError("it has no tokenizer")
        return self._tokenizer

    def listen(self, on_step: Any) -> Any:
        return lambda: None

    def stats(self) -> EngineStats:
        return EngineStats()

    def shutdown(self) -> None:
        self.is_running = False

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        final_only: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        assert sampling_params is not None
        if not self.is_running:
            raise EngineDeadError("the engine stopped: by the test")
        ids = prompt["prompt_token_ids"]
        self.seen.append((ids, sampling_params))
        self.texts.append(prompt["prompt"])
        text, finished = "", False
        try:
            for step, piece in enumerate(self.pieces, 1):
                await asyncio.sleep(self.delay)
                if isinstance(piece, BaseException):
                    raise piece
                text += piece
                finished = step == len(self.pieces)
                logprobs = None
                if sampling_params.logprobs is not None:
                    entry = {6: Logprob(self.logprob, 1, "x"), 7: Logprob(-float("inf"), 2, "y")}
                    logprobs = [entry] * step
                outputs = [
                    CompletionOutput(
                        index=index,
                        text=text,
                        token_ids=[6] * step,
                        logprobs=logprobs,
                        finish_reason=self.finish_reason if finished else None,
                    )
                    for index in range(sampling_params.n)
                ]
                usage = Usage(len(ids), step * sampling_params.n)
                yield RequestOutput(request_id or "", None, ids, outputs, finished, usage=usage)
        finally:
            self.aborted += not finished


def tiny_tokenizer(chat_template: str | None = None) -> Any:
    """zipage-tiny's tokenizer, perhaps with another chat template."""
    tokenizer = load_tokenizer(TINY)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
