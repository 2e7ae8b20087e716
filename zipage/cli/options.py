"""Command-line options made from the fields of `EngineConfig` and `SamplingParams`.

A field `kv_budget` becomes `--kv-budget`, with the field's type and default; its help text is
the field's entry in the class docstring. So a new field is an option without further code, and
field, option and help can't disagree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from zipage.config import FULL, EngineConfig
from zipage.errors import ConfigError, shown
from zipage.sampling_params import SamplingParams
from zipage.structured_outputs import StructuredOutputsParams

#: Sampling fields that a command line can't set because engine options have the same names: those
#: are the defaults of all requests. A JSONL record can set them for one request.
ENGINE_OWNS = frozenset({"seed", "kv_budget", "compression"})

#: Options written once for each entry: field name -> option name.
_REPEATED = {
    "policy_options": "policy_option",
    "stop": "stop",
    "stop_token_ids": "stop_token_id",
    "logit_bias": "logit_bias",
    "api_keys": "api_key",
    "allowed_origins": "allowed_origin",
    "served_model_names": "served_model_name",
}

_PANELS = {
    "Model": "model tokenizer revision dtype device load_format model_shape model_impl "
    "quantization seed max_model_len",
    "KV cache": "kv_cache_dtype block_size kv_cache_memory num_kv_blocks memory_utilization "
    "enable_prefix_caching",
    "Compression": "kv_budget compression policy_options window num_query_slots compaction "
    "num_sinks protect_prompt bounded_prefill async_compression",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


@dataclasses.dataclass(frozen=True)
class CommandOption:
    """One option of a command.

    Attributes:
        name: the field it sets.
        annotation: its type, with typer's description of the option.
        default: its value when it is not given.
        read: converts typer's value into the field's.
    """

    name: str
    annotation: Any
    default: Any
    read: Callable[[Any], Any] = lambda value: value


def engine_options(only: Iterable[str] | None = None) -> list[CommandOption]:
    """An option for every field of `EngineConfig`, or for those named."""
    return class_options(
        EngineConfig, lambda name: _PANEL_OF.get(name, "Scheduling and execution"), only
    )


def class_options(
    cls: type, panel_of: Callable[[str], str], only: Iterable[str] | None = None
) -> list[CommandOption]:
    """An option for every field of a dataclass of options, or for those named.

    Args:
        cls: the dataclass; its docstring describes its fields.
        panel_of: the group of the help text that a field belongs to.
        only: names of fields.
    """
    hints = get_type_hints(cls)
    documented = field_docs(cls)
    options = []
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text, panel = documented[field.name], panel_of(field.name)
        options.append(_option(field.name, hints[field.name], default, text, panel))
    return options


def given_together(ctx: typer.Context, *names: str) -> bool:
    """Whether options are all given as flags, or all in the file of --config.

    Otherwise one may be meant to override another; images and their users set variables too.
    """
    sources: set[Any] = {ctx.get_parameter_source(name) for name in names}
    return len(sources) == 1 and sources.pop().name in ("COMMANDLINE", "DEFAULT_MAP")


def check_budget_is_used(ctx: typer.Context, engine: Mapping[str, Any]) -> None:
    """Refuse a `kv_budget` given together with full KV, which would ignore it.

    Raises:
        ConfigError: as said.
    """
    full = engine["compression"] == FULL and engine["kv_budget"] is not None
    if full and given_together(ctx, "compression", "kv_budget"):
        raise ConfigError(
            f"kv_budget={shown(engine['kv_budget'])} has no meaning with compression='full', which "
            "keeps every token: leave out one of them"
        )


def sampling_options() -> list[CommandOption]:
    """An option for every field of `SamplingParams` except those of `ENGINE_OWNS`.

    All are None when not given, as the model may have its own defaults.
    """
    hints = get_type_hints(SamplingParams)
    documented = field_docs(SamplingParams)
    options = []
    for field in dataclasses.fields(SamplingParams):
        if field.name not in ENGINE_OWNS:
            text = documented[field.name]
            if isinstance(field.default, bool):
                text += _says_default(field.default)
            options.append(_option(field.name, hints[field.name] | None, None, text, "Sampling"))
    return options


def with_options(
    parameter: str, options: Sequence[CommandOption]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command function `options` in place of its keyword argument `parameter`.

    The function receives a dict from field names to values there.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        kept = [p for name, p in signature.parameters.items() if name != parameter]
        added = [
            inspect.Parameter(
                o.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=o.default,
                annotation=o.annotation,
            )
            for o in options
        ]

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            values = {o.name: o.read(arguments.pop(o.name)) for o in options}
            return command(**arguments, **{parameter: values})

        # Typer asks functions for their signature and for their annotations.
        parameters = [*kept, *added]
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def field_docs(cls: type) -> dict[str, str]:
    """The entries of the Attributes section of a class docstring, each on one line.

    Empty strings if Python runs without docstrings.
    """
    docs = {field.name: "" for field in dataclasses.fields(cls)}
    _, found, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    current = None
    for line in section.splitlines() if found else ():
        if line and not line.startswith(" "):
            break
        name, colon, text = line.strip().partition(": ")
        if line.startswith("    ") and line[4:5].strip() and colon and name in docs:
            current, docs[name] = name, text
        elif current is not None and line.strip():
            docs[current] += " " + line.strip()
    return docs


def parse_assignments(option: str, assignments: Iterable[str] | None) -> dict[str, Any]:
    """Read ``name=value`` pairs; a value is JSON where it parses as such, else text.

    Raises:
        typer.BadParameter: one has no ``=``, or a name comes twice.
    """
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            message = f"{assignment!r} must be written as name=value"
            raise typer.BadParameter(message, param_hint=option)
        if name in values:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint=option)
        values[name] = _parse_value(text.strip())
    return values


def _parse_value(text: str) -> Any:
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option(name: str, hint: Any, default: Any, text: str, panel: str) -> CommandOption:
    flag = "--" + _REPEATED.get(name, name).replace("_", "-")
    described: dict[str, Any] = {
        "help": escape(text.replace("``", "")),
        "rich_help_panel": panel,
    }
    types_ = get_args(hint) if _is_union(hint) else (hint,)
    plain = [t for t in types_ if t is not type(None)]
    if name in _REPEATED:
        return _repeated_option(name, flag, described, is_mapping=_holds_mapping(plain))
    if plain == [bool]:
        described["help"] += _says_default(default)
        info = typer.Option(f"{flag}/--no-{flag[2:]}", show_default=False, **described)
        return CommandOption(name, Annotated[bool | None, info], default)
    if plain == [StructuredOutputsParams]:
        info = typer.Option(flag, parser=_json_object, metavar="JSON", **described)
        return CommandOption(name, Annotated[Any, info], default)
    if len(plain) < len(types_):
        kind = int if plain == [int] else float if plain == [float] else str
        metavar = {int: "INTEGER", float: "FLOAT", str: "TEXT"}[kind]
        if panel != "Sampling":
            metavar += "|none"
        info = typer.Option(
            flag, parser=_nullable(kind), metavar=metavar, show_default=True, **described
        )
        return CommandOption(name, Annotated[Any, info], default)
    kind = plain[0] if len(plain) == 1 else str
    return CommandOption(name, Annotated[kind, typer.Option(flag, **described)], default)


def _repeated_option(
    name: str, flag: str, described: dict[str, Any], is_mapping: bool
) -> CommandOption:
    described["help"] += " May be repeated."
    if is_mapping:
        info = typer.Option(flag, metavar="NAME=VALUE", **described)
        # A sampling option that is not given must stay None; the engine option's default is {}.
        empty: Any = {} if name == "policy_options" else None
        return CommandOption(
            name,
            Annotated[list[str] | None, info],
            None,
            lambda given: parse_assignments(flag, given) if given else empty,
        )
    kind = int if name == "stop_token_ids" else str
    info = typer.Option(flag, **described)
    return CommandOption(
        name,
        Annotated[list[kind] | None, info],  # type: ignore[valid-type]
        None,
        lambda given: list(given) if given else None,
    )


def _json_object(text: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise typer.BadParameter(f"{shown(text)} is not a JSON object")


def _holds_mapping(plain: Sequence[Any]) -> bool:
    return any(inspect.isclass(o) and issubclass(o, Mapping) for o in map(get_origin, plain))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _says_default(default: bool | None) -> str:
    return "" if default is None else f" Default: {'yes' if default else 'no'}."


def _nullable(kind: type) -> Callable[[Any], Any]:
    """A parser of `kind` for which ``none`` is None."""

    def parse(text: Any) -> Any:
        if text is None or str(text).lower() == "none":
            return None
        try:
            return kind(text)
        except ValueError:
            article = {int: "an integer", float: "a number"}[kind]
            raise typer.BadParameter(f"{text!r} is neither {article} nor 'none'") from None

    return parse
