"""The server's options."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zipage.config import EngineConfig, is_real, parse_bytes
from zipage.errors import ConfigError, shown

REASONING_PARSERS = ("auto", "think", "none")
MOST_PROMPTS = 16_384
"""Most prompts of a request; checking a million of them would hold up all other requests."""
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")


@dataclass(frozen=True)
class ServerSettings:
    """Every option of the server other than those of the engine.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which is printed.
        uds: path of a Unix socket to listen on instead of host and port.
        ssl_certfile: PEM certificate chain; with it the server speaks HTTPS.
        ssl_keyfile: its private key, if it is not in the same file.
        ssl_keyfile_password: password of the private key.
        ssl_ca_certs: PEM file of certificate authorities; clients must then present a certificate
            signed by one of them.
        api_keys: clients must send one of these keys as ``Authorization: Bearer KEY`` to
            ``/v1``, ``/tokenize``, ``/detokenize`` and the dashboard's figures. None: no key is
            required.
        allowed_origins: origins whose web pages may use the server (CORS), ``*`` for all.
        served_model_names: names of the model in requests; answers to requests that name no model
            show the first. None for its hub id, or the name of its directory and its path.
        chat_template: file with a Jinja chat template that replaces the model's.
        trust_chat_templates: let requests bring their own chat template. Templates are programs:
            only for trusted clients.
        reasoning_parser: ``think`` splits off the text in <think>...</think>, ``none`` leaves it
            in place, ``auto`` decides by the chat template and the vocabulary.
        tool_call_parser: how the model writes tool calls: ``hermes``
            (<tool_call>{...}</tool_call>; Qwen), ``llama3_json``, ``none``, or ``auto`` to decide
            by the chat template.
        structured_outputs_disable_any_whitespace: JSON of structured outputs has no whitespace
            between its parts, unless a request says otherwise (vLLM's
            ``structured_outputs_config.disable_any_whitespace``).
        request_timeout: seconds after which a request is aborted; None for no limit.
        stall_timeout: seconds a client may leave a streamed event unread before its request is
            aborted.
        max_queued_requests: answers that may wait for the engine in addition to those running;
            further requests get 429. None for no limit.
        on_engine_death: ``exit`` (the server stops with code 1, for a supervisor to restart it)
            or ``restart`` (the engine's process is restarted).
        start_timeout: seconds that the engine may take to start or restart, including a download
            of its model, before it is killed.
        heartbeat_timeout: seconds without a sign of life after which the engine counts as dead.
        step_timeout: seconds that a step may take before the engine counts as dead.
        drain_timeout: seconds that running requests get to finish after SIGTERM or SIGINT.
        max_body_size: largest request body (``"32MiB"``).
        max_n: most choices per prompt.
        max_prompts: most prompts per request.
        max_stop: most stop strings, and most stop token ids, per request.
        max_logprobs: most alternatives per token.
        max_kv_budget: largest `kv_budget` of a request, in tokens; `compression` "off" is then
            refused too. The engine's own `kv_budget` must not be larger. None for no limit.
        dashboard: serve the page at /dashboard.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that receives a span for every
            request, by OTLP over HTTP.
        log_prompts: log the bodies of requests (level info).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    api_keys: Sequence[str] | None = None
    allowed_origins: Sequence[str] | None = None
    served_model_names: Sequence[str] | None = None
    chat_template: str | None = None
    trust_chat_templates: bool = False
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    structured_outputs_disable_any_whitespace: bool = False
    request_timeout: float | None = None
    stall_timeout: float = 60.0
    max_queued_requests: int | None = 2048
    on_engine_death: str = "exit"
    start_timeout: float = 1800.0
    heartbeat_timeout: float = 30.0
    step_timeout: float = 300.0
    drain_timeout: float = 30.0
    max_body_size: int | str = "32MiB"
    max_n: int = 128
    max_prompts: int = 1024
    max_stop: int = 64
    max_logprobs: int = 20
    max_kv_budget: int | None = None
    dashboard: bool = True
    otlp_traces_endpoint: str | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
            ConfigError: one is illegal.
        """
        for name in ("max_n", "max_stop"):
            self._check_int(name, 1, 2**31 - 1)
        self._check_int("max_prompts", 1, MOST_PROMPTS)
        self._check_int("max_logprobs", 0, 20)
        self._check_int("port", 0, 65535)
        for name in ("max_queued_requests", "max_kv_budget"):
            if getattr(self, name) is not None:
                self._check_int(name, 1, 2**31 - 1)
        for name in (
            "request_timeout",
            "stall_timeout",
            "start_timeout",
            "heartbeat_timeout",
            "step_timeout",
            "drain_timeout",
        ):
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            least = "from 0" if name == "drain_timeout" else "above 0"
            legal = is_real(value) and math.isfinite(value) and value >= 0
            if not legal or (value == 0 and name != "drain_timeout"):
                raise ConfigError(f"{name}={shown(value)} must be a number of seconds {least}")
        self._check_choice("on_engine_death", ("exit", "restart"))
        hint = "; think is for <think>...</think>, auto decides by the chat template"
        self._check_choice("reasoning_parser", REASONING_PARSERS, hint)
        hint = "; hermes is for <tool_call>{...}</tool_call>, auto decides by the chat template"
        self._check_choice("tool_call_parser", TOOL_CALL_PARSERS, hint)
        for name in ("api_keys", "served_model_names", "allowed_origins"):
            texts = getattr(self, name)
            if texts is not None and (
                isinstance(texts, str) or not all(isinstance(t, str) and t for t in texts)
            ):
                raise ConfigError(f"{name} must be a list of texts, none of them empty")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host={shown(self.host)} must be an address; 0.0.0.0 stands for all")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={shown(path)} is not a file")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", str(endpoint)):
            raise ConfigError(
                f"otlp_traces_endpoint={shown(endpoint)} must be a URL like "
                "http://localhost:4318/v1/traces"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
        parse_bytes("max_body_size", self.max_body_size)

    def check_engine(self, config: EngineConfig) -> None:
        """Check that requests without options of their own stay within `max_kv_budget`.

        Raises:
            ConfigError: the engine's budget is larger, or it keeps the full KV cache.
        """
        most = self.max_kv_budget
        if most is None:
            return
        if not config.compresses or config.kv_budget is None:
            option = "kv_budget=None" if config.compresses else "compression='full'"
            raise ConfigError(f"max_kv_budget={most} needs an engine that compresses, not {option}")
        if config.kv_budget > most:
            raise ConfigError(
                f"kv_budget={config.kv_budget} must be at most max_kv_budget={most}: it applies to "
                "requests that name no budget"
            )

    @property
    def body_limit(self) -> int:
        """`max_body_size` in bytes."""
        return parse_bytes("max_body_size", self.max_body_size)

    def _check_int(self, name: str, least: int, most: int) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{name}={shown(value)} must be an integer from {least} to {most}")

    def _check_choice(self, name: str, legal: tuple[str, ...], hint: str = "") -> None:
        if getattr(self, name) not in legal:
            value = shown(getattr(self, name))
            raise ConfigError(f"{name}={value}: legal are {', '.join(legal)}{hint}")
