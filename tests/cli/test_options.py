"""The command line says the same as EngineConfig and SamplingParams."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from tests.cli.invoke import invoke
from zipage.cli import app
from zipage.cli.options import (
    ENGINE_OWNS,
    engine_options,
    field_docs,
    parse_assignments,
    sampling_options,
    with_options,
)
from zipage.config import EngineConfig
from zipage.sampling_params import SamplingParams


def params_of(*path: str) -> dict[str, Any]:
    command: Any = get_command(app)
    for name in path:
        command = command.commands[name]
    return {param.name: param for param in command.params}


def engine_defaults() -> dict[str, Any]:
    config = EngineConfig()
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def parsed_engine_options(*args: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    probe = typer.Typer()

    @probe.command()
    @with_options("engine", engine_options())
    def command(*, engine: dict[str, Any]) -> None:
        seen.update(engine)

    result = invoke(*args, command=probe)
    assert result.exit_code == 0, result.output
    return seen


@pytest.mark.parametrize("path", [("generate",), ("bench", "offline")])
def test_every_engine_field_is_an_option_of_that_name_and_default(path: tuple[str, ...]) -> None:
    params = params_of(*path)
    for name, default in engine_defaults().items():
        assert name in params, f"EngineConfig.{name} has no option"
        flag = "--policy-option" if name == "policy_options" else "--" + name.replace("_", "-")
        assert flag in params[name].opts
        if name != "policy_options":
            assert params[name].default == default, name


def test_a_command_line_without_options_is_the_default_config() -> None:
    assert parsed_engine_options() == engine_defaults()
    assert EngineConfig.from_options(parsed_engine_options()) == EngineConfig()


def test_every_sampling_field_is_an_option_of_generate() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert names - {o.name for o in sampling_options()} == ENGINE_OWNS
    assert {f.name for f in dataclasses.fields(EngineConfig)} >= ENGINE_OWNS
    params = params_of("generate")
    for name in names - ENGINE_OWNS:
        assert params[name].default is None, f"{name} must be None when it is not given"


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_option_has_help_from_the_docstring(cls: type) -> None:
    docs = field_docs(cls)
    assert list(docs) == [f.name for f in dataclasses.fields(cls)]
    for name, text in docs.items():
        assert len(text) > 10, f"{cls.__name__}.{name} is not documented"
        assert "\n" not in text and "Raises" not in text


def test_values_are_read_as_the_fields_types() -> None:
    values = parsed_engine_options(
        *("--kv-budget", "none", "--max-model-len", "4096", "--memory-utilization", "0.25"),
        *("--kv-cache-memory", "2GiB", "--no-enable-prefix-caching", "--async-compression"),
        *("--bounded-prefill", "--policy-option", "decay=0.5", "--policy-option", "pool=none"),
        *("--policy-option", "kind=mean", "--policy-option", "on=true", "--window", "32"),
    )
    assert values["kv_budget"] is None
    assert values["max_model_len"] == 4096
    assert values["memory_utilization"] == 0.25
    assert values["kv_cache_memory"] == "2GiB"
    assert values["enable_prefix_caching"] is False
    assert values["async_compression"] is True
    assert values["bounded_prefill"] is True
    assert values["policy_options"] == {"decay": 0.5, "pool": None, "kind": "mean", "on": True}
    assert values["window"] == 32


@pytest.mark.parametrize("assignment", ["decay", "=1", " =1"])
def test_an_assignment_without_name_or_value_is_refused(assignment: str) -> None:
    with pytest.raises(typer.BadParameter, match="name=value"):
        parse_assignments("--policy-option", [assignment])


def test_an_assignment_given_twice_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="twice"):
        parse_assignments("--policy-option", ["a=1", "a=2"])


def test_a_value_that_is_no_number_is_a_usage_error() -> None:
    result = invoke("generate", "x", "--kv-budget", "many")
    assert result.exit_code == 2
    assert "kv-budget" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--kv-budget", "100"], ["kv_budget=100", "block_size=64"]),
        (["--compression", "zipaje"], ["zipaje", "zipage"]),
        (["--policy-option", "lamda=1"], ["lamda"]),
        (["--dtype", "int4"], ["dtype='int4'", "bfloat16"]),
        (["--model", "./no-such-model"], ["no-such-model"]),
        (["--temperature", "-1"], ["temperature=-1", "0"]),
        (["--max-tokens", "0"], ["max_tokens=0"]),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(
    args: list[str], words: list[str]
) -> None:
    result = invoke("generate", "hello", *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, zipage.cli\n"
        "from typer.testing import CliRunner\n"
        "for args in ([], ['generate'], ['bench', 'offline'], ['info']):\n"
        "    result = CliRunner().invoke(zipage.cli.app, [*args, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    # A few tenths of a second on an idle machine; importing torch alone takes longer than this
    # on a busy one.
    assert time.perf_counter() - started < 5


def test_version() -> None:
    from zipage import __version__

    result = invoke("--version")
    assert result.output == f"zipage {__version__}\n"
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'\nversion = "{__version__}"\n' in project.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [("generate",), ("bench", "offline"), ("eval",), ("demo",)])
def test_commands_that_run_an_engine_have_log_options(path: tuple[str, ...]) -> None:
    params = params_of(*path)
    assert params["log_level"].envvar == "ZIPAGE_LOG_LEVEL"
    assert params["log_format"].envvar == "ZIPAGE_LOG_FORMAT"


def test_structured_outputs_are_given_as_json() -> None:
    seen: dict[str, Any] = {}
    probe = typer.Typer()

    @probe.command()
    @with_options("sampling", sampling_options())
    def command(*, sampling: dict[str, Any]) -> None:
        seen.update(sampling)

    given = '{"regex": "[0-9]+"}'
    assert invoke("--structured-outputs", given, command=probe).exit_code == 0
    params = SamplingParams.from_dict({"structured_outputs": seen["structured_outputs"]})
    assert params.structured_outputs is not None and params.structured_outputs.regex == "[0-9]+"
    for bad in ("[0-9]+", "[]"):
        result = invoke("--structured-outputs", bad, command=probe)
        assert result.exit_code == 2 and "JSON object" in result.output
