"""`zipage generate`: answer one prompt or a file of them."""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from zipage.cli.interrupt import die_on_interrupt, stop_on_signal
from zipage.cli.logs import with_logging
from zipage.cli.options import (
    check_budget_is_used,
    engine_options,
    sampling_options,
    with_options,
)
from zipage.cli.progress import EngineProgress
from zipage.cli.records import (
    InputRecord,
    OrderedWriter,
    error_record,
    output_record,
    read_records,
)
from zipage.cli.threads import use_idle_cores
from zipage.cli.writing import check_writable, writing
from zipage.errors import EngineDeadError, RequestError, ZipageError
from zipage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from zipage.llm import LLM
    from zipage.outputs import RequestOutput

logger = logging.getLogger(__name__)


class InputFormat(str, enum.Enum):
    """How a file or standard input is read."""

    auto = "auto"
    text = "text"
    jsonl = "jsonl"


@with_logging
@with_options("sampling", sampling_options())
@with_options("engine", engine_options())
def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt. Standard input is read for '-', or without a prompt and --file."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="A text file, which is one prompt, or a .jsonl file with an object per line: "
            "'prompt', 'messages' or 'prompt_token_ids', and optionally 'id', 'metadata' "
            "(copied to the output) and sampling options.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write JSONL here, in input order: id, prompt, text, finish_reason, usage, "
            "metrics. Without it a single prompt's text, or the JSONL of several, goes to "
            "standard output.",
        ),
    ] = None,
    input_format: Annotated[
        InputFormat,
        typer.Option(
            "--format", help="Format of the input; auto is jsonl for .jsonl files, else text."
        ),
    ] = InputFormat.auto,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            show_default=False,
            help="Apply the chat template to text prompts. Default: if the tokenizer has one.",
        ),
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Add the generated token ids to the JSONL.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write a trace of every request to this file: scheduling, compressions and the "
            "tokens they kept, as JSON for ui.perfetto.dev and chrome://tracing.",
        ),
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer a prompt, or many.

    A record's own sampling options override those given here, and both override the model's
    generation_config.json, which applies if it asks for sampling (do_sample); else answers are
    greedy. A bad record of a JSONL file is reported and gets an output line with its 'error'; the
    others are answered, and the exit code is 1. Ctrl-C writes what is finished and exits with 130.
    """
    use_idle_cores()
    check_budget_is_used(ctx, engine)
    _check_outputs(file, output, trace)
    records, is_batch = _read_input(prompt, file, input_format)
    if not records:
        raise typer.BadParameter("there is no prompt in the input")
    given = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams.from_dict(given)  # Mistakes are reported before the model is loaded.
    options = dict(engine)
    with contextlib.ExitStack() as stack:
        with die_on_interrupt():
            from zipage.llm import LLM

            llm = stack.enter_context(LLM(options.pop("model"), **options))
        as_jsonl = is_batch or output is not None
        stream = stack.enter_context(_open_output(output, as_jsonl))
        if trace is not None:
            stack.enter_context(_traced(llm, trace))
        job = _Job(llm, records, given, chat)
        if as_jsonl:
            code = _run_batch(job, stream, token_ids, is_batch)
        else:
            code = _run_single(job, stream)
    if code:
        raise typer.Exit(code)


def _read_input(
    prompt: str | None, file: Path | None, input_format: InputFormat
) -> tuple[list[InputRecord], bool]:
    """The records, and whether they came as JSONL."""
    if prompt is not None and prompt != "-":
        if file is not None:
            raise typer.BadParameter("give a prompt or --file, not both")
        _check_utf8(prompt)
        return [InputRecord(0, content=prompt, id=0)], False
    if prompt == "-" and file is not None and str(file) != "-":
        raise typer.BadParameter("give '-' (standard input) or --file, not both")
    jsonl = input_format is InputFormat.jsonl
    try:
        if file is not None and str(file) != "-":
            jsonl = jsonl or (input_format is InputFormat.auto and file.suffix.lower() == ".jsonl")
            text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
        else:
            if sys.stdin is None:
                raise typer.BadParameter("the input can't be read: standard input is closed")
            if prompt is None and file is None and sys.stdin.isatty():
                raise typer.BadParameter(
                    "give a prompt, --file FILE, or pipe text into standard input"
                )
            if isinstance(sys.stdin, io.TextIOWrapper):  # whatever the locale
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
            text = sys.stdin.read()
    except OSError as error:
        raise typer.BadParameter(f"the input can't be read: {error}") from None
    if jsonl:
        # Not splitlines(): JSON strings may contain other line separators unescaped.
        return read_records(text.split("\n")), True
    _check_utf8(text)
    # The final newline is the shell's, not part of the prompt.
    text = text[:-1] if text.endswith("\n") else text
    return ([InputRecord(0, content=text, id=0)] if text else []), False


def _check_utf8(text: str) -> None:
    """Refuse text with surrogates, which stand for input bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the input is not valid UTF-8 at character {error.start}"
        raise typer.BadParameter(message) from None


def _check_outputs(file: Path | None, output: Path | None, trace: Path | None) -> None:
    """Report outputs that can't be written before the model is loaded."""
    if output is not None and str(output) != "-":
        check_writable("--output", output)
    if trace is not None and str(trace) != "-":
        check_writable("--trace", trace)
    if file is not None and file.is_file():
        for option, path in (("--output", output), ("--trace", trace)):
            if path is not None and path.exists() and path.samefile(file):
                message = f"{str(path)!r} is what --file reads"
                raise typer.BadParameter(message, param_hint=option)
    if trace is not None and str(trace) == "-":
        raise typer.BadParameter("the trace goes to a file, not to '-'", param_hint="--trace")
    if output is None or str(output) == "-":
        if sys.stdout is None:
            with writing("the output"):
                raise OSError("standard output is closed")
    elif trace is not None and output.resolve() == trace.resolve():
        message = f"{str(trace)!r} is also where --output goes"
        raise typer.BadParameter(message, param_hint="--trace")


@contextlib.contextmanager
def _open_output(path: Path | None, as_jsonl: bool) -> Iterator[TextIO]:
    if path is None or str(path) == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            # JSON is UTF-8 whatever the locale; a terminal shows marks for characters it lacks.
            if as_jsonl:
                sys.stdout.reconfigure(encoding="utf-8")
            else:
                sys.stdout.reconfigure(errors="replace")
        yield sys.stdout
        return
    try:
        stream = path.open("w", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"the output can't be written: {error}") from None
    with stream:
        yield stream


@contextlib.contextmanager
def _traced(llm: LLM, path: Path) -> Iterator[None]:
    """Trace the enclosed run, and write the trace however the run ends."""
    try:
        path.touch()  # A path that can't be written is reported before the work is done.
    except OSError as error:
        message = f"the trace can't be written: {error}"
        raise typer.BadParameter(message, param_hint="--trace") from None
    with llm.trace() as recorder:
        try:
            yield
        finally:
            with writing("the trace"):
                recorder.save(path)
    if recorder.dropped_events:
        typer.echo(f"The trace was full: {recorder.dropped_events} events are missing.", err=True)


class _Job:
    """Runs the records in the engine and collects their answers."""

    def __init__(
        self,
        llm: LLM,
        records: list[InputRecord],
        given: Mapping[str, Any],
        chat: bool | None,
    ) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.records = records
        self.options = {**self.engine.core.runner.model_config.default_sampling(), **given}
        self.chat = chat
        self._live: dict[str, InputRecord] = {}

    def params(self, record: InputRecord) -> SamplingParams:
        """Sampling parameters of a record."""
        return SamplingParams.from_dict({**self.options, **record.sampling})

    def submit(self, record: InputRecord, stream: bool = False) -> None:
        """Queue a record.

        Raises:
            RequestError: the record is not legal.
        """
        if record.error is not None:
            raise RequestError(record.error)
        prompt: Any = {record.kind: record.content}
        if record.kind == "messages" or (record.kind == "prompt" and self._templated()):
            messages = record.content
            if record.kind == "prompt":
                messages = [{"role": "user", "content": record.content}]
            prompt = self.llm.chat_prompts([messages])[0]
        request_id = self.engine.add_request(prompt, self.params(record), stream=stream)
        self._live[request_id] = record

    def _templated(self) -> bool:
        if self.chat is None:
            self.chat = bool(self.engine.tokenizer.chat_template)
        return self.chat

    def step(self) -> list[tuple[InputRecord, RequestOutput]]:
        """Run an engine step; returns its outputs, finished or streamed."""
        outputs = []
        for output in self.engine.step():
            record = self._live[output.request_id]
            if output.finished:
                del self._live[output.request_id]
            outputs.append((record, output))
        return outputs

    def fail_rest(self, error: EngineDeadError) -> list[tuple[InputRecord, RequestOutput]]:
        """Outputs of the records that were in the engine when it died."""
        cause = error.__cause__ or error
        return [
            (self._live.pop(output.request_id), output) for output in self.engine.fail_all(cause)
        ]


def _run_single(job: _Job, stream: TextIO) -> int:
    """Print the text of one prompt as it is generated; several completions one after another."""
    record = job.records[0]
    streams = job.params(record).n == 1
    job.submit(record, stream=streams)
    shown, last = 0, None
    with stop_on_signal() as stop:
        while job.engine.has_unfinished and stop.signal is None:
            for _, last in job.step():
                if streams:
                    text = last.outputs[0].text
                    with writing("the output", stream):
                        stream.write(text[shown:])
                        stream.flush()
                    shown = len(text)
    with writing("the output", stream):
        if last is not None and not streams:
            of = len(last.outputs)
            texts = [f"--- answer {c.index + 1} of {of} ---\n{c.text}" for c in last.outputs]
            stream.write("\n\n".join(texts))
        stream.write("\n")
        stream.flush()
    if stop.signal is not None:
        return stop.exit_code
    if last is not None and last.error is not None:
        typer.secho(f"Error: {last.error}", fg=typer.colors.RED, err=True)
        return 1
    return 0


def _run_batch(job: _Job, stream: TextIO, token_ids: bool, reports_lines: bool) -> int:
    """Answer all records, JSONL out. An error of a record is raised only if the input is a single
    prompt."""
    writer = OrderedWriter(stream)
    finished = failed = 0
    progress = EngineProgress(len(job.records))
    shares_terminal = stream is sys.stdout and stream.isatty()

    def put(record: InputRecord, line: dict[str, Any]) -> None:
        nonlocal finished, failed
        finished += 1
        failed += "error" in line
        with _paused(progress, shares_terminal or "error" in line):
            if "error" in line:
                logger.error("%s: %s", record.place, line["error"], extra={"record_id": record.id})
            with writing("the output", stream):
                writer.put(record.index, line)

    with stop_on_signal() as stop, progress:
        try:
            for record in job.records:
                try:
                    job.submit(record)
                except EngineDeadError:
                    raise
                except ZipageError as error:
                    if not reports_lines:
                        raise
                    put(record, error_record(record, str(error)))
                if stop.signal is not None:
                    break
            while job.engine.has_unfinished and stop.signal is None:
                try:
                    outputs = job.step()
                except EngineDeadError as error:
                    for record, output in job.fail_rest(error):
                        put(record, output_record(record, output, token_ids))
                    raise
                for record, output in outputs:
                    put(record, output_record(record, output, token_ids))
                if progress.due:
                    progress.update(job.engine.stats(), finished)
        finally:
            with _paused(progress, shares_terminal), writing("the output", stream):
                writer.close()
    if stop.signal is not None:
        total = len(job.records)
        typer.echo(f"Stopped: {finished} of {total} requests had ended.", err=True)
        return stop.exit_code
    return 1 if failed else 0


@contextlib.contextmanager
def _paused(progress: EngineProgress, needed: bool) -> Iterator[None]:
    if needed:
        progress.pause()
    yield
    if needed:
        progress.resume()
