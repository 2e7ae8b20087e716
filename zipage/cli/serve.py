"""`zipage serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from zipage.cli.interrupt import die_on_interrupt
from zipage.cli.logs import with_logging
from zipage.cli.options import class_options, engine_options, with_options
from zipage.cli.threads import use_idle_cores
from zipage.config import EngineConfig
from zipage.errors import ConfigError
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
    for unusable in ("config", "help"):
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


def _announce(line: str) -> None:
    # A closed pipe or a full disk is no reason not to serve; logging behaves the same.
    with contextlib.suppress(OSError):
        typer.echo(line, err=True)


def _missing(error: ImportError) -> str:
    return f"zipage serve needs {error.name}: pip install 'zipage[serve]'"
