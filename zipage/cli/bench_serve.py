"""`zipage bench serve`: how fast an OpenAI-compatible server answers under load."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from zipage.bench.workloads import PRESETS
from zipage.cli.serving_report import print_report
from zipage.cli.writing import check_writable, write_json
from zipage.errors import ConfigError

if TYPE_CHECKING:
    from zipage.bench.arrivals import ServingRequest

_DEFAULT_WORKLOAD = "short"
_WARM_UP_TOKENS = 32
_LOAD, _ASK, _OUT = "Load", "Requests", "Results"


def serve(
    *,
    url: Annotated[
        str, typer.Option(help="URL of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str,
        typer.Option(
            help="completions (takes token ids) or chat (random words in place of ids).",
            rich_help_panel=_ASK,
        ),
    ] = "completions",
    model: Annotated[
        str | None, typer.Option(help="Name of the model; default: the first the server lists.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            help=f"Random prompts and fixed lengths: {', '.join(PRESETS)}. "
            f"Default: {_DEFAULT_WORKLOAD}.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of prompts instead: prompt, prompt_token_ids or messages, and "
            "optionally max_tokens.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of arrival_s, input_tokens and output_tokens instead: random prompts "
            "of these lengths, sent at these times.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Number of requests; default: all.", rich_help_panel=_LOAD)
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            help="max_tokens of every request, or of prompts that don't set it.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(
            help="Factor for lengths of a workload or trace, at most 1.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Leave out requests with more tokens than this, prompt and answer together.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Random token ids are below this.", rich_help_panel=_LOAD)
    ] = 32000,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second; inf sends all at once. Default: a trace's times, or inf.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Arrival process at that rate: poisson (default), constant or gamma (bursty).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Shape of the gamma distribution: 1 is Poisson, less is burstier. Default: 0.5.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    speedup: Annotated[
        float, typer.Option(help="Replay a trace this many times faster.", rich_help_panel=_LOAD)
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Keep this many requests in flight instead of a rate.", rich_help_panel=_LOAD
        ),
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Short uncounted requests sent first.", rich_help_panel=_LOAD)
    ] = 1,
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals and random prompts.", rich_help_panel=_LOAD)
    ] = 0,
    temperature: Annotated[float, typer.Option(rich_help_panel=_ASK)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for answers of full length; not every server supports it.",
            rich_help_panel=_ASK,
        ),
    ] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(
            help='Further fields of each request, such as {"kv_budget": 512}.', rich_help_panel=_ASK
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=_ASK)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Most seconds per request.", rich_help_panel=_ASK)
    ] = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives in milliseconds, such as ttft:500 tpot:50 (also e2el); shows the "
            "requests per second that meet them all.",
            rich_help_panel=_OUT,
        ),
    ] = None,
    more_objectives: Annotated[
        list[str] | None, typer.Argument(hidden=True, metavar="MORE")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write settings, summary and all requests here.", rich_help_panel=_OUT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot latencies to this .svg or .png; needs matplotlib.", rich_help_panel=_OUT
        ),
    ] = None,
) -> None:
    """Load a server with streaming requests and measure what its clients see.

    Requests are sent on schedule, however slow the answers are, and latencies count from the
    scheduled send time. TTFT: time to first token; TPOT: mean time per token after the first, per
    request; ITL: time per token, over all tokens; E2EL: time to the last token.
    Exit code 1 if no request was completed.
    """
    from zipage.bench.openai_client import CHAT, COMPLETIONS, Endpoint
    from zipage.bench.serving import parse_objectives, records, summarize

    if more_objectives and not goodput:
        raise ConfigError(f"unexpected argument {more_objectives[0]!r}")
    objectives = parse_objectives([*(goodput or ()), *(more_objectives or ())])
    if plot is not None:
        from zipage.bench.plots import check_plotting

        check_plotting(plot)
    paths = {"completions": COMPLETIONS, "chat": CHAT}
    if endpoint not in paths:
        raise ConfigError(f"endpoint={endpoint!r}: legal are completions, chat")
    for name, value in (("warm_up", warm_up), ("num_requests", num_requests)):
        if value is not None and value < (name == "num_requests"):
            raise ConfigError(f"{name}={value} must be at least {int(name == 'num_requests')}")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout} must be positive")
    requests, source, left_out = _choose(
        workload, prompts, trace, num_requests, output_len, scale, max_len, vocab_size, seed
    )
    schedule = _Schedule(rate, arrivals, burstiness, speedup, concurrency, seed)
    requests = schedule.apply(requests, has_times=trace is not None)
    warm = [_short(request) for request in requests[:warm_up]]
    if endpoint == "chat":
        requests, warm = _as_chat(requests, seed), _as_chat(warm, seed)
    body = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    where = Endpoint(
        url=_server(url),
        path=paths[endpoint],
        model=model or "",
        body={**body, **_extra(extra_body)},
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
    )
    check_writable("--json", json_file, {"--prompts": prompts, "--trace": trace})
    check_writable("--plot", plot, {"--json": json_file})
    run, where = asyncio.run(_run(where, requests, concurrency, warm))
    summary = summarize(run, objectives)
    setting = {
        "url": where.url,
        "endpoint": where.path,
        "model": where.model,
        "requests": source,
        "left_out": left_out,
        "load": schedule.text(trace is not None),
        "seed": seed,
        "body": dict(where.body),
    }
    report = {"serving": setting, "summary": summary, "requests": records(run)}
    try:
        print_report(setting, summary)
    finally:  # also after `| head`
        write_json(json_file, report)
    if plot is not None:
        from zipage.bench.plots import plot_serving

        plot_serving(report, plot)
    if not summary["completed"]:
        raise typer.Exit(1)


async def _run(
    where: Any,
    requests: Sequence[ServingRequest],
    concurrency: int | None,
    warm: Sequence[ServingRequest],
) -> Any:
    from zipage.bench.openai_client import Connections, first_model
    from zipage.bench.serving import run_serving

    if not where.model:
        async with Connections() as connections:
            where = replace(where, model=await first_model(connections, where.url, where.headers))
    shown = _Counter(len(requests))
    run = await run_serving(where, requests, concurrency, warm, shown)
    shown.clear()
    return run, where


class _Counter:
    """Shows on a terminal how many requests have ended, at most twice a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = 0.0
        self._shows = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, ended: int) -> None:
        if self._shows and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.5
            print(f"\r{ended} of {self._total} requests", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class _Schedule:
    """When requests are sent, according to the options."""

    def __init__(
        self,
        rate: float | None,
        process: Any,
        burstiness: float | None,
        speedup: float,
        concurrency: int | None,
        seed: int,
    ) -> None:
        if rate is not None and concurrency is not None:
            raise ConfigError("rate and concurrency both set when requests are sent: give one")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency={concurrency} must be at least 1")
        if not 0 < speedup < math.inf:
            raise ConfigError(f"speedup={speedup} must be positive")
        if process is not None and (rate is None or rate == math.inf):
            raise ConfigError(f"arrivals={process!r} has no meaning without a finite rate")
        process = process or "poisson"
        if burstiness is not None and process in ("poisson", "constant"):
            raise ConfigError(
                f"burstiness={burstiness} has no meaning with arrivals={process!r}: it is the "
                "shape of 'gamma'"
            )
        self.rate, self.process = rate, process
        self.burstiness = 0.5 if burstiness is None else burstiness
        self.speedup, self.concurrency, self.seed = speedup, concurrency, seed

    def apply(self, requests: list[ServingRequest], has_times: bool) -> list[ServingRequest]:
        """The requests with their times."""
        from zipage.bench.arrivals import arrival_times, at

        timed = has_times and self.rate is None and self.concurrency is None
        if self.speedup != 1 and not timed:
            raise ConfigError(f"speedup={self.speedup} has no meaning without a trace's own times")
        if self.concurrency is not None:
            return at(requests, [None] * len(requests))
        if timed:
            return at(requests, [(r.arrival or 0.0) / self.speedup for r in requests])
        rate = math.inf if self.rate is None else self.rate
        return at(
            requests,
            arrival_times(self.process, rate, len(requests), self.burstiness, self.seed),
        )

    def text(self, has_times: bool) -> str:
        """In words."""
        if self.concurrency is not None:
            return f"{self.concurrency} in flight"
        if self.rate is None and has_times:
            faster = f", {self.speedup:g} times as fast" if self.speedup != 1 else ""
            return f"the trace's times{faster}"
        if self.rate is None or self.rate == math.inf:
            return "all at once"
        shape = f" of shape {self.burstiness:g}" if self.process == "gamma" else ""
        return f"{self.rate:g} requests/s, {self.process} gaps{shape}"


def _choose(
    workload: str | None,
    prompts: Path | None,
    trace: Path | None,
    num_requests: int | None,
    output_len: int | None,
    scale: float,
    max_len: int | None,
    vocab_size: int,
    seed: int,
) -> tuple[list[ServingRequest], str, int]:
    """The requests, a description of them, and how many were too long."""
    from zipage.bench.arrivals import read_prompts, read_trace, workload_requests

    if sum(given is not None for given in (workload, prompts, trace)) > 1:
        raise ConfigError("workload, prompts and trace all set the requests: give one")
    if vocab_size < 1:
        raise ConfigError(f"vocab_size={vocab_size} must be at least 1")
    if prompts is not None:
        if scale != 1:
            raise ConfigError(f"scale={scale} has no meaning with prompts")
        requests, source = read_prompts(prompts, num_requests, output_len), prompts.name
    elif trace is not None:
        if output_len is not None:
            raise ConfigError(f"output_len={output_len} has no meaning with a trace")
        requests = read_trace(trace, vocab_size, num_requests, scale, seed)
        source = trace.name
    else:
        name = workload or _DEFAULT_WORKLOAD
        requests, source = (
            workload_requests(name, vocab_size, num_requests, output_len, scale),
            name,
        )
    fitting = [r for r in requests if max_len is None or _length(r) <= max_len]
    if not fitting:
        raise ConfigError(f"max_len={max_len}: every request is longer")
    scaled = f", lengths scaled by {scale:g}" if scale != 1 else ""
    return fitting, f"{len(fitting)} requests of {source}{scaled}", len(requests) - len(fitting)


def _length(request: ServingRequest) -> int:
    """Tokens of the answer, and of the prompt if known."""
    ids = isinstance(request.prompt, list) and isinstance(request.prompt[0], int)
    return (len(request.prompt) if ids else 0) + (request.output_len or 0)


def _short(request: ServingRequest) -> ServingRequest:
    """A short request of this kind for the warm-up, useless to the server's prefix cache."""
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = prompt[::-1]
    length = min(request.output_len or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    return replace(request, prompt=prompt, output_len=length)


def _as_chat(requests: Sequence[ServingRequest], seed: int) -> list[ServingRequest]:
    from zipage.bench.arrivals import as_messages

    return [as_messages(request, seed) for request in requests]


def _server(url: str) -> str:
    bare = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(bare)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"url={url!r} must be a URL such as http://127.0.0.1:8000")
    return bare


def _extra(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"extra_body={text!r} must be a JSON object")
    return body
