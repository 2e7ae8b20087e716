"""Offline use: `LLM` answers batches of prompts."""

from __future__ import annotations

import contextlib
import numbers
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from zipage.config import EngineConfig
from zipage.engine.engine import LLMEngine, Prompt
from zipage.engine.interrupt import deferred_interrupt
from zipage.engine.stats import EngineStats
from zipage.errors import RequestError, shown
from zipage.observe.trace import DEFAULT_MAX_EVENTS, TraceRecorder
from zipage.outputs import RequestOutput
from zipage.sampling_params import SamplingParams
from zipage.tokenizer import apply_chat

#: Called after every engine step with the engine's counters and gauges.
StepCallback = Callable[[EngineStats], None]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; text, a mapping or a list of token ids is a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a prompt or a list, got {type(prompts).__name__}")
    if prompts and all(isinstance(p, numbers.Integral) for p in prompts):
        return [cast(Prompt, prompts)]
    return cast("list[Prompt]", list(prompts))


class LLM:
    """A model ready to answer.

    Methods may be called from any thread: one engine step or submission runs at a time, and the
    thread that reads outputs runs the engine for all. Ctrl-C takes effect between two steps: it
    ends the requests of the interrupted call, and the engine stays usable. An `LLM` that is
    dropped without `shutdown` is cleaned up by garbage collection.

    Args:
        model: local Hugging Face directory or hub id; None for the embedded zipage-tiny.
        **options: any option of `EngineConfig`.

    Raises:
        ConfigError: an option is unknown, illegal or does not fit the others.
        ModelError: the model cannot be loaded.

    Example:
        >>> llm = LLM(kv_budget=512)  # doctest: +SKIP
        >>> outputs = llm.chat([{"role": "user", "content": "..."}])  # doctest: +SKIP
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        self.engine = LLMEngine(self.config)
        self._streams: weakref.WeakValueDictionary[str, OutputStream]
        self._streams = weakref.WeakValueDictionary()
        #: Requests of streams that were garbage-collected, possibly in the middle of a step.
        self._dropped: deque[str] = deque()
        self._lock = threading.Lock()
        #: Held by the next thread in line, so that one running step after step lets it in.
        self._turn = threading.Lock()
        self._holder: int | None = None

    # ------------------------------------------------------------------ answering

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        on_step: StepCallback | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; returns their outputs in the same order.

        Args:
            prompts: a prompt or a list of them; a prompt is text, a list of token ids, or
                ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``.
            sampling_params: one for all, or one each; None for `get_default_sampling_params`.
            priority: one for all, or one each; lower runs earlier.
            on_step: called after every step with `EngineStats`, whose `last_step` says what
                happened in it. An exception from it ends the requests of this call and is raised
                here.

        Raises:
            RequestError: a prompt or its parameters are illegal; nothing was run.
            EngineDeadError: the engine failed.
        """
        stream = self._submit(prompts, sampling_params, priority, on_step, streams=False)
        ids = stream.request_ids
        outputs = {output.request_id: output for output in stream}
        return [outputs[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> OutputStream:
        """Like `generate`, but yields each request's output so far after every new token.

        Closing the iterator aborts unfinished requests.
        """
        return self._submit(prompts, sampling_params, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        on_step: StepCallback | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template.

        Args:
            messages: a conversation, ``[{"role": ..., "content": ...}, ...]``, or a list of them.
            sampling_params: one for all, or one each; None for the model's own, see
                `get_default_sampling_params`.
            add_generation_prompt: end the prompt with the tokens that open the assistant's turn.
            chat_template_kwargs: variables of the chat template.
            priority, on_step: as in `generate`.

        Raises:
            RequestError: a conversation or its parameters are illegal; nothing was run.
            EngineDeadError: the engine failed.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self.generate(
            self.chat_prompts(messages, add_generation_prompt, chat_template_kwargs),
            sampling_params,
            priority=priority,
            on_step=on_step,
        )

    def chat_prompts(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Token ids of one conversation or a list of them.

        Raises:
            RequestError: `messages` is malformed, there is no chat template, or
                `chat_template_kwargs` has an illegal key.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                'messages must be a list of {"role": ..., "content": ...} or a list of such '
                f"lists, not {type(messages).__name__}"
            )
        _check_template_options(chat_template_kwargs)
        if not messages:
            raise RequestError("messages is empty: give at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        with self._exclusive():
            return [
                apply_chat(
                    self.engine.tokenizer,
                    conversation,  # type: ignore[arg-type]
                    add_generation_prompt=add_generation_prompt,
                    **(chat_template_kwargs or {}),
                )
                for conversation in conversations
            ]

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        on_step: StepCallback | None = None,
        streams: bool = True,
    ) -> OutputStream:
        todo = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _each("sampling_params", sampling_params, todo)
        priorities = _each("priority", priority, todo)
        stream = OutputStream(self, on_step)
        try:
            with self._exclusive():
                for prompt, one, prio in zip(todo, params, priorities, strict=True):
                    name = self.engine.add_request(prompt, one, priority=prio, stream=streams)
                    stream.expect(name)
        except BaseException:
            stream.close()
            raise
        return stream

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the engine for this thread, and defer interrupts until it is released."""
        me = threading.get_ident()
        if self._holder == me:
            raise RuntimeError(
                "an LLM was used inside one of its own steps, for example by a signal handler: "
                "let the handler set a flag, or raise"
            )
        with deferred_interrupt():
            with self._turn:
                self._lock.acquire()
            try:
                self._holder = me
                self._abort_dropped()
                yield
            finally:
                self._holder = None
                self._lock.release()

    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._streams.pop(request_id, None)
            self.engine.abort(request_id)

    def _abort(self, ids: Iterable[str]) -> None:
        with self._exclusive():
            for request_id in ids:
                self._streams.pop(request_id, None)
                self.engine.abort(request_id)

    def _drop(self, ids: Iterable[str]) -> None:
        """Abort requests of a collected stream: now if the engine is free, else with the next
        call. The garbage collector may run this on any thread.
        """
        self._dropped.extend(ids)
        if self._lock.acquire(blocking=False):
            try:
                self._holder = threading.get_ident()
                self._abort_dropped()
            finally:
                self._holder = None
                self._lock.release()

    def _advance(self) -> None:
        """Run one engine step and hand its outputs to their streams."""
        for output in self.engine.step():
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    # ------------------------------------------------------------------ around it

    @contextlib.contextmanager
    def trace(self, max_events: int = DEFAULT_MAX_EVENTS) -> Iterator[TraceRecorder]:
        """Record the life of the requests submitted inside the ``with`` block.

        Answers stay the same. Compressions of traced requests are a little slower, because the
        positions they keep are read back.

        Args:
            max_events: see `TraceRecorder`.

        Raises:
            RequestError: a trace is being recorded already.

        Example:
            >>> with llm.trace() as trace:  # doctest: +SKIP
            ...     llm.generate("...")
            >>> trace.save("trace.json")  # doctest: +SKIP
        """
        recorder = TraceRecorder(max_events)
        with self._exclusive():
            self.engine.start_trace(recorder)
        try:
            yield recorder
        finally:
            with self._exclusive():
                self.engine.stop_trace()

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for; greedy unless it says ``do_sample``.

        `dataclasses.replace` changes single options.
        """
        return SamplingParams.from_dict(self.engine.core.runner.model_config.default_sampling())

    def stats(self) -> EngineStats:
        """Counters since the start, current gauges, and what happened in the last step."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Abort everything; release threads and memory. Also done on leaving a ``with`` block."""
        with self._exclusive():
            self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class OutputStream(Iterator[RequestOutput]):
    """Outputs of a call's requests, as the engine produces them.

    Several streams of one `LLM` may be read in turn: reading any of them runs the engine for all.
    Closing or dropping a stream aborts its unfinished requests.

    Attributes:
        request_ids: ids of its requests, in the order of the prompts.
    """

    def __init__(self, llm: LLM, on_step: StepCallback | None = None) -> None:
        self.request_ids: list[str] = []
        self._left: set[str] = set()
        self._llm = llm
        self._ready: deque[RequestOutput] = deque()
        self._on_step = on_step

    def expect(self, request_id: str) -> None:
        """Outputs of this request are coming."""
        self.request_ids.append(request_id)
        self._left.add(request_id)
        self._llm._streams[request_id] = self

    def put(self, output: RequestOutput) -> None:
        """Take an output of one of the requests."""
        self._ready.append(output)
        if output.finished:
            self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        self._left.discard(request_id)
        self._llm._streams.pop(request_id, None)

    def __next__(self) -> RequestOutput:
        try:
            while True:
                # In this order: another thread may add the last output between the two.
                over = not self._left
                if self._ready:
                    break
                if over:
                    raise StopIteration
                with self._llm._exclusive():
                    if not self._ready:  # another thread may have run the engine meanwhile
                        self._llm._advance()
                    for request_id in self._left - self._llm.engine.live_requests:
                        self._forget(request_id)  # aborted elsewhere
                if self._on_step is not None:
                    self._on_step(self._llm.stats())
        except BaseException:
            self.close()
            raise
        return self._ready.popleft()

    def close(self) -> None:
        """Abort unfinished requests."""
        left, self._left = self._left, set()
        if left:
            self._llm._abort(left)

    def __del__(self) -> None:
        if self._left:
            self._llm._drop(self._left)


def _check_template_options(options: Mapping[str, Any] | None) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise RequestError(f"chat_template_kwargs must be a mapping, not {type(options).__name__}")
    for key in options:
        if not isinstance(key, str):
            raise RequestError(f"chat_template_kwargs has the key {shown(key)}: must be a string")
        if key in ("messages", "conversation", "tokenizer", "add_generation_prompt"):
            raise RequestError(
                f"chat_template_kwargs has the key {key!r}, which is not the template's: "
                "messages and add_generation_prompt are arguments of their own"
            )


def _each(name: str, value: Any, prompts: Sequence[Any]) -> list[Any]:
    """One value for all prompts, or one each."""
    if isinstance(value, Sequence):
        if len(value) != len(prompts):
            raise RequestError(
                f"{name} has {len(value)} entries for {len(prompts)} prompts: give one, or one each"
            )
        return list(value)
    return [value] * len(prompts)
