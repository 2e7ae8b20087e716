"""Every option by flag, by file and by environment variable, and the example of a file.

`python -m tests.server.test_options > deploy/zipage.yaml` writes the example again.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import yaml
from hypothesis import strategies as st
from rich.text import Text
from typer.main import get_command

from tests.cli.invoke import invoke
from zipage.cli import app
from zipage.cli.serve import _ELSEWHERE
from zipage.config import EngineConfig
from zipage.server.settings import ServerSettings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "zipage.yaml"
SERVE: Any = get_command(app).commands["serve"]  # type: ignore[attr-defined]
OPTIONS = {p.name: p for p in SERVE.params if p.name not in ("config", "help", "model_option")}

NAMES = st.text(st.sampled_from("aZ0-_./:=é"), min_size=1, max_size=9).map("x".__add__)
LISTS = st.lists(NAMES, min_size=1, max_size=3)
COUNT = st.integers(1, 2**31 - 1)
FILE = st.just(__file__)
#: Legal values; None stands beside them where it is the default.
LEGAL: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        (
            "host",
            "uds",
            "ssl_keyfile_password",
            "model",
            "tokenizer",
            "revision",
        ),
        NAMES,
    ),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template"), FILE),
    **dict.fromkeys(("api_keys", "allowed_origins", "served_model_names"), LISTS),
    **dict.fromkeys(("max_body_size", "kv_cache_memory"), st.sampled_from(["2GiB", "10000000"])),
    "otlp_traces_endpoint": st.just("http://localhost:4318/v1/traces"),
    "port": st.integers(0, 65535),
    "reasoning_parser": st.sampled_from(["think", "none"]),
    "tool_call_parser": st.sampled_from(["hermes", "llama3_json", "none"]),
    "on_engine_death": st.just("restart"),
    "max_prompts": st.integers(1, 16_384),
    "max_logprobs": st.integers(0, 20),
    "max_kv_budget": st.integers(128, 2**31 - 1),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "kv_cache_dtype": st.just("fp8"),
    "quantization": st.just("fp8"),
    "device": st.sampled_from(["cpu", "cuda:1"]),
    "load_format": st.just("dummy"),
    "model_shape": st.just("qwen3-8b"),
    "model_impl": st.just("zipage"),
    "seed": st.integers(0, 2**63 - 1),
    "block_size": st.sampled_from([16, 32]),
    "memory_utilization": st.floats(0.01, 1),
    "kv_budget": st.integers(1, 100).map((128).__mul__),
    "compression": st.just("snapkv"),
    "policy_options": st.just({"pooling": 3}),
    "window": st.integers(1, 16),
    "compaction": st.just("stable"),
    "num_sinks": st.integers(0, 64),
    "protect_prompt": st.floats(0, 1),
    "max_num_seqs": st.integers(1, 1 << 16),
    "max_model_len": st.integers(2, 2**31 - 1),
    "admission": st.just("optimistic"),
    "attention_backend": st.just("torch"),
    "log_level": st.sampled_from(["debug", "error"]),
    "log_format": st.just("json"),
}
#: What an option needs beside it; None for its default.
NEEDS: dict[str, dict[str, Any]] = {
    "ssl_keyfile": {"ssl_certfile": __file__},
    "ssl_ca_certs": {"ssl_certfile": __file__},
    "policy_options": {"compression": "snapkv"},
    "model_shape": {"load_format": "dummy", "model": None},
    "num_kv_blocks": {"kv_cache_memory": None},
    "max_kv_budget": {"kv_budget": 128},
}


def fields_of(cls: type) -> dict[str, tuple[str, Any]]:
    """Types and defaults of the options of a dataclass."""
    usual = dataclasses.asdict(cls())
    return {field.name: (str(field.type), usual[field.name]) for field in dataclasses.fields(cls)}


FIELDS = fields_of(ServerSettings) | fields_of(EngineConfig)


def values_of(name: str) -> st.SearchStrategy[Any]:
    kind, usual = FIELDS.get(name, ("", ""))
    found = LEGAL.get(name)
    if found is None:
        plain = {"bool": st.booleans(), "int": COUNT, "float": st.floats(0.001, 1e6)}
        found = plain[kind.removesuffix(" | None")]
    return st.none() | found if usual is None and "bool" not in kind else found


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Some options with legal values that go together."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=8, unique=True))
    chosen = {name: draw(values_of(name)) for name in names}
    for name, needed in NEEDS.items():
        if chosen.get(name) is not None:
            chosen |= needed
    if chosen.get("uds") is not None:  # in place of host and port
        chosen = {name: value for name, value in chosen.items() if name not in ("host", "port")}
    return {name: value for name, value in chosen.items() if value is not None or name in names}


def started(*arguments: str, **environment: str) -> dict[str, Any]:
    """The options that `zipage serve` starts with."""
    seen: dict[str, Any] = {}

    def run(engine: dict[str, Any], settings: ServerSettings, say: Any) -> int:
        seen.update(engine | dataclasses.asdict(settings))
        return 0

    with (
        mock.patch("zipage.server.run.check_listening", lambda settings: None),
        mock.patch("zipage.server.run.run_server", run),
        mock.patch(
            "zipage.engine.process_client.EngineProcessClient",
            lambda model, **given: {"model": model, **given},
        ),
        mock.patch("zipage.cli.logs.configure_logging", lambda **given: seen.update(given)),
        mock.patch.dict(os.environ, environment),
    ):
        result = invoke("serve", *arguments)
    assert result.exit_code == 0, f"{arguments} {environment} {result.output}"
    return seen


def refused(*arguments: str, command: tuple[str, ...] = ("serve",)) -> str:
    """The message of a command that ends with exit code 2."""
    result = invoke(*command, *arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def as_flags(name: str, value: Any) -> list[str]:
    if name == "model":
        return [] if value is None else [value]
    option = OPTIONS[name]
    if isinstance(value, bool):
        return [option.opts[0] if value else option.secondary_opts[0]]
    if isinstance(value, dict):
        return [f"{option.opts[0]}={key}={entry}" for key, entry in value.items()]
    if value is None and name in ("api_keys", "allowed_origins", "served_model_names"):
        return []
    values = value if isinstance(value, list) else [value]
    return [f"{option.opts[0]}={'none' if entry is None else entry}" for entry in values]


def as_variable(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, dict):
        return " ".join(f"{name}={entry}" for name, entry in value.items())
    return "none" if value is None else str(value)


@hypothesis.given(chosen=options(), like_flags=st.booleans())
@hypothesis.settings(max_examples=40, deadline=None)
def test_three_ways_to_say_the_same(
    chosen: dict[str, Any], like_flags: bool, tmp_path_factory: Any
) -> None:
    flags = [flag for name, value in chosen.items() for flag in as_flags(name, value)]
    by_flags = started(*flags)
    assert {name: by_flags[name] for name in chosen} == chosen
    path = tmp_path_factory.getbasetemp() / "options.yaml"
    names = {name: OPTIONS[name].opts[0].lstrip("-") if like_flags else name for name in chosen}
    text = yaml.safe_dump({names[name]: value for name, value in chosen.items()})
    path.write_text(text, encoding="utf-8")
    assert started("--config", str(path)) == by_flags
    variables = {f"ZIPAGE_{name.upper()}": as_variable(value) for name, value in chosen.items()}
    lists = {"ZIPAGE_API_KEYS", "ZIPAGE_ALLOWED_ORIGINS", "ZIPAGE_SERVED_MODEL_NAMES"}
    unset = {name for name in (*lists, "ZIPAGE_MODEL") if variables.get(name) == "none"}
    assert started(**{n: v for n, v in variables.items() if n not in unset}) == by_flags


def test_the_model_as_an_option(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("model: file")
    for arguments in (["--model", "one"], ["--model=one", "one"], ["one"]):
        assert started("--config", str(path), *arguments, ZIPAGE_MODEL="two")["model"] == "one"
    assert started("--config", str(path))["model"] == "file"
    assert (
        refused("--model", "one", "two") == "Error: model='two' and --model 'one' are two "
        "models: give one"
    )


def test_options_of_vllm_are_explained() -> None:
    for flag, hint in _ELSEWHERE.items():
        assert all(flag not in option.opts for option in SERVE.params), f"{flag} exists"
        assert refused(flag, "2") == f"Error: {flag} is not an option here: {hint}"
    assert "--device" in refused("--tensor_parallel_size=2")
    assert "think is for <think>" in refused("--reasoning-parser", "deepseek_r1")
    assert "hermes is for <tool_call>" in refused("--tool-call-parser", "qwen3_coder")


def test_options_that_would_be_ignored(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("{compression: full, port: 1, kv_budget: 128}")
    assert "kv_budget=128 has no meaning" in refused("--config", str(path))
    for command in (("serve",), ("generate", "text"), ("info",), ("bench", "offline")):
        told = refused("--compression", "full", "--kv-budget", "64", command=command)
        assert told.startswith("Error: kv_budget=64 has no meaning with compression='full'")
    assert refused("--uds", "x", "--port", "1").startswith("Error: uds='x' and port=1 are two")
    assert refused("--host", "a", "--uds", "x").startswith("Error: uds='x' and host='a' are two")
    # One in another place is overridden.
    path.write_text("{compression: full, port: 1}")
    assert started("--config", str(path), "--kv-budget", "128", "--uds", "x")["uds"] == "x"
    assert started("--uds", "x", ZIPAGE_PORT="1")["uds"] == "x"
    assert started("--kv-budget", "none", "--compression", "full")["kv_budget"] is None


def test_an_illegal_variable_is_named() -> None:
    for name, value in [
        ("PORT", "many"),
        ("PORT", "70000"),
        ("KV_BUDGET", "much"),
        ("BLOCK_SIZE", "7"),
        ("CONFIG", "/none"),
    ]:
        with mock.patch.dict(os.environ, {f"ZIPAGE_{name}": value}):
            assert f"(from the environment variable ZIPAGE_{name})" in refused()
    with mock.patch.dict(os.environ, {"ZIPAGE_PORT": "70000"}):
        assert "environment" not in refused("--port", "80000")


def test_the_port_that_kubernetes_sets_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("port: 9000")
    assert started(ZIPAGE_PORT="tcp://10.0.0.1:80")["port"] == 8000
    assert started("--config", str(path), ZIPAGE_PORT="tcp://10.0.0.1:80")["port"] == 9000


def test_every_option_is_drawn() -> None:
    assert set(OPTIONS) == {*FIELDS, "log_level", "log_format"}
    for name in OPTIONS:
        assert isinstance(values_of(name), st.SearchStrategy), f"{name} has no legal values here"


def example() -> str:
    """A file of all options with their defaults, described as --help does."""
    lines = [
        "# Options of `zipage serve --config zipage.yaml`, each with its default. Flags and",
        "# environment variables (ZIPAGE_ and the option's name in capitals) come before the file.",
    ]
    panels: dict[str, list[Any]] = {}
    for name, option in OPTIONS.items():
        panel = "Model" if name == "model" else option.rich_help_panel
        panels.setdefault(panel, []).append(option)
    for panel, members in panels.items():
        lines += ["", f"# ---- {panel}"]
        for option in members:
            told = " ".join(Text.from_markup(option.help).plain.split())
            lines += ["", *textwrap.wrap(told, 98, initial_indent="# ", subsequent_indent="# ")]
            usual = FIELDS.get(option.name, ("", getattr(option.default, "value", None)))[1]
            lines.append("#" + yaml.safe_dump({option.name: usual}).strip())
    return "\n".join(lines) + "\n"


def test_the_example_says_the_defaults(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text == example(), "write it again: python -m tests.server.test_options"
    given = [
        line[1:] for line in text.splitlines() if line[:1] == "#" and line[1:2] not in (" ", "")
    ]
    assert len(given) == len(OPTIONS)
    path = tmp_path / "zipage.yaml"
    path.write_text("\n".join(given), encoding="utf-8")
    assert started("--config", str(path)) == started("--config", str(EXAMPLE)) == started()


if __name__ == "__main__":
    print(example(), end="")
