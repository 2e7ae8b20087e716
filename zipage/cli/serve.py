"""`zipage serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from zipage.cli.interrupt import die_on_interrupt
from zipage.cli.logs import with_logging
from zipage.cli.options import (
    check_budget_is_used,
    class_options,
    engine_options,
    given_together,
    with_options,
)
from zipage.cli.threads import use_idle_cores
from zipage.config import EngineConfig
from zipage.errors import ConfigError, shown
from zipage.server.settings import ServerSettings

_PANELS = {
    "Server": "host port uds ssl_certfile ssl_keyfile ssl_keyfile_password ssl_ca_certs api_keys "
    "allowed_origins",
    "Observation": "dashboard otlp_traces_endpoint log_prompts",
    "Chat": "served_model_names chat_template trust_chat_templates reasoning_parser "
    "tool_call_parser structured_outputs_disable_any_whitespace",
    "Engine process": "on_engine_death start_timeout heartbeat_timeout step_timeout",
    "Limits": "max_queued_requests request_timeout stall_timeout drain_timeout max_body_size "
    "max_n max_prompts max_stop max_logprobs max_kv_budget",
}
#: Options of the server that are passed to the engine's process.
_PROCESS = ("max_queued_requests", *_PANELS["Engine process"].split())
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


_ONE_GPU = "a server uses one GPU; start one for each, with its own --device and --port"
#: Options of `vllm serve` that this one lacks, and what takes their place.
_ELSEWHERE = {
    "--enable-auto-tool-choice": "tool calls are recognised without it, in the style of the chat "
    "template or of --tool-call-parser",
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), _ONE_GPU),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), _ONE_GPU),
    **dict.fromkeys(("--data-parallel-size", "-dp"), _ONE_GPU),
    "--trust-remote-code": "code of a model's repository is never run; docs/models.md lists the "
    "models that load",
    "--swap-space": "host memory for swapped requests is taken when it is needed",
}


class ServeCommand(TyperCommand):
    """Says what takes the place of vLLM's options, and which environment variable is illegal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            ConfigError: an option of vLLM is given that has no meaning here.
        """
        for argument in args:
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in _ELSEWHERE:
                raise ConfigError(f"{flag} is not an option here: {_ELSEWHERE[flag]}")
        if "://" in os.environ.get("ZIPAGE_PORT", ""):
            # Kubernetes sets it for a service named zipage: tcp://ADDRESS:PORT.
            del os.environ["ZIPAGE_PORT"]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None:
                error.message += _from_environment(ctx, error.param.name)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            named = re.match(r"(\w+)=", str(error))
            variable = _from_environment(ctx, named.group(1)) if named else ""
            if not variable:
                raise
            raise ConfigError(f"{error}{variable}") from None


def _from_environment(ctx: Any, option: str | None) -> str:
    """For messages: that the environment sets an option; empty if it does not."""
    source: Any = option and ctx.get_parameter_source(option)
    if not source or source.name != "ENVIRONMENT":
        return ""
    return f" (from the environment variable ZIPAGE_{str(option).upper()})"


def _load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options."""
    if path is None:
        return None
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(_missing(error)) from None
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path} must be a mapping from options to values")
    names: dict[str, Any] = {}
    for parameter in ctx.command.params:
        flags = [flag.lstrip("-").replace("-", "_") for flag in parameter.opts]
        names |= dict.fromkeys([*flags, str(parameter.name)], parameter)
    # `model` is the argument, which the option stands for.
    for unusable in ("config", "help", "model_option"):
        names.pop(unusable, None)
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        option = names.get(str(key).replace("-", "_"))
        if option is None:
            near = difflib.get_close_matches(str(key), names, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise typer.BadParameter(f"{path} has the unknown option {key!r}{hint}")
        # Not every option whose default is null can express null on the command line.
        if value is not None or option.default is not None:
            if isinstance(value, dict) and "--policy-option" not in option.opts:
                raise typer.BadParameter(f"{path} has a mapping as the value of {key!r}")
            defaults[str(option.name)] = _as_flag(value)
    ctx.default_map = defaults
    return path


def _as_flag(value: Any) -> Any:
    """A value of the file as it would be given on the command line."""
    if isinstance(value, dict):
        return [f"{name}={json.dumps(entry)}" for name, entry in value.items()]
    if isinstance(value, list):
        return [str(entry) for entry in value]
    return "none" if value is None else str(value)


@functools.partial(with_logging, level="info")
@with_options("server", class_options(ServerSettings, _PANEL_OF.__getitem__))
@with_options(
    "engine",
    engine_options(only=[f.name for f in dataclasses.fields(EngineConfig) if f.name != "model"]),
)
def serve(
    ctx: typer.Context,
    model_option: Annotated[
        str | None,
        typer.Option(
            "--model",
            allow_from_autoenv=False,
            help="The same as the argument.",
            rich_help_panel="Model",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            envvar="ZIPAGE_MODEL",
            help="Local Hugging Face directory, GGUF file or hub id. Default: the embedded "
            "zipage-tiny.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=_load_config,
            help="YAML file of options, named like the flags; flags and environment variables win.",
        ),
    ] = None,
    *,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model over an OpenAI-compatible API.

    Needs `pip install 'zipage[serve]'`. Every option may also be given as an environment variable
    ZIPAGE_NAME, or in the file of --config. SIGTERM and Ctrl-C let running requests finish for
    --drain-timeout seconds. Exit code 1 if the engine stopped.
    """
    with die_on_interrupt():
        use_idle_cores()
        if "ZIPAGE_API_KEYS" in os.environ and not server["api_keys"]:
            # An unset variable in a compose file gives this, and is not meant to open the server.
            raise ConfigError("ZIPAGE_API_KEYS is empty: give a key, or unset it to need none")
        model = _model(ctx, model, model_option)
        check_budget_is_used(ctx, engine)
        for name in ("host", "port"):
            if server["uds"] is not None and given_together(ctx, "uds", name):
                raise ConfigError(
                    f"uds={shown(server['uds'])} and {name}={shown(server[name])} are two places "
                    "to listen: give one"
                )
        settings = ServerSettings(**server)
        # Mistakes are reported before anything is loaded.
        settings.check_engine(EngineConfig.from_options({"model": model, **engine}))
        try:
            from zipage.server.run import check_listening, run_server
        except ImportError as error:
            raise ConfigError(_missing(error)) from None
        check_listening(settings)
        from zipage.engine.process_client import EngineProcessClient

        process = {name: server[name] for name in _PROCESS}
        client = EngineProcessClient(model, **process, **engine)
    code = run_server(client, settings, _announce)
    if code:
        raise typer.Exit(code)


def _model(ctx: typer.Context, argument: str | None, option: str | None) -> str | None:
    """The model named by the argument or by --model; the environment and the file come last."""
    if option is None:
        return argument
    source: Any = ctx.get_parameter_source("model")
    if source.name == "COMMANDLINE" and argument != option:
        raise ConfigError(
            f"model={shown(argument)} and --model {shown(option)} are two models: give one"
        )
    return option


def _announce(line: str) -> None:
    # A closed pipe or a full disk is no reason not to serve; logging behaves the same.
    with contextlib.suppress(OSError):
        typer.echo(line, err=True)


def _missing(error: ImportError) -> str:
    return f"zipage serve needs {error.name}: pip install 'zipage[serve]'"
