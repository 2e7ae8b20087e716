"""The examples of docs/serving.md run."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import invoke
from tests.server.conftest import Client
from zipage import LLM
from zipage.cli.serve import serve
from zipage.config import EngineConfig
from zipage.server import unsupported
from zipage.server.settings import ServerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python|console|yaml)\n(.*?)```", PAGE, re.DOTALL)
BASH = [text for kind, text in BLOCKS if kind == "bash"]
COMMANDS = [
    line
    for kind, text in BLOCKS
    if kind == "console"
    for line in text.splitlines()
    if line.startswith("zipage serve")
]
FLAGS = re.findall(r"^\| `(--.*?)` \|", PAGE, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("example", BASH)
def test_bash(live: str, example: str) -> None:
    script = "set -e\n" + example.replace("http://localhost:8000", live)
    script = script.replace("curl -s", "curl --fail-with-body -s")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if "boxed" not in done.stdout:
        assert '"error":' not in done.stdout
        assert any(word in done.stdout for word in ("choices", "tokens", "output")), done.stdout


def test_python(live: str, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (text for kind, text in BLOCKS if kind == "python")
    exec(compile(example.replace("http://localhost:8000", live), "docs/serving.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.count("The answer is \\boxed{153}.") == 2 and "74 + 79" in shown


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `zipage serve` would run, in a folder with the files the examples name."""
    for name in ("cert.pem", "key.pem", "ca.pem", "chat.jinja"):
        (tmp_path / name).write_text("")
    (tmp_path / "config.yaml").write_text(next(text for kind, text in BLOCKS if kind == "yaml"))
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(
        "zipage.engine.process_client.EngineProcessClient",
        lambda model, **options: {"model": model, **options},
    )
    monkeypatch.setattr("zipage.server.run.check_listening", lambda settings: None)
    monkeypatch.setattr(
        "zipage.server.run.run_server",
        lambda engine, settings, say: seen.append((engine, settings)),
    )
    return seen


def test_every_flag_has_an_example(started: list[Any]) -> None:
    defaults, changed = dataclasses.asdict(ServerSettings()), set()
    for flags in FLAGS:
        result = invoke("serve", *shlex.split(flags))
        assert result.exit_code == 0, (flags, result.output)
        settings = dataclasses.asdict(started[-1][1])
        changed |= {name for name, value in settings.items() if value != defaults[name]}
    assert changed == set(defaults)
    usual = dataclasses.asdict(EngineConfig())
    options: dict[str, Any] = {}
    named = set(usual)
    for command in COMMANDS:
        result = invoke(*shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output)
        given = started[-1][0]
        options |= {name: given[name] for name in named if given[name] != usual[name]}
    assert set(options) == named
    every = {flag for line in [*FLAGS, *COMMANDS] for flag in re.findall(r"--[a-z-]+", line)}
    assert len(every) >= len(serve.__signature__.parameters) - 2  # type: ignore[attr-defined]


def test_engines_of_the_commands_start(started: list[Any]) -> None:
    """Options that are legal alone may not be so together. Those for a GPU or other models can't
    start here."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    count = 0
    for command in COMMANDS:
        assert invoke(*shlex.split(command)[1:]).exit_code == 0
        options = {name: value for name, value in started[-1][0].items() if name in names}
        if options["model"] or options["model_shape"] or options["quantization"]:
            continue
        LLM(**{**options, "num_kv_blocks": 200, "kv_cache_memory": None}).shutdown()
        count += 1
    assert count >= 6


def test_endpoints_and_statuses_are_documented(client: Client) -> None:
    document = client.get("/openapi.json").json()
    examples = " ".join(BASH)
    for path, methods in document["paths"].items():
        assert path.replace("{model}", "zipage-tiny") in examples or path in examples, path
        for operation in methods.values():
            for status in operation["responses"]:
                assert re.search(rf"\b{status}\b", PAGE), status


def test_refused_fields_are_documented() -> None:
    table = PAGE.partition("| endpoint | refused |\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", table, re.MULTILINE))
    endpoints = {
        "completions": unsupported.COMPLETIONS,
        "chat completions": unsupported.CHAT,
        "responses": unsupported.RESPONSES,
    }
    assert set(rows) == {"all three", *endpoints}
    for endpoint, fields in endpoints.items():
        for name in fields:
            told = rows["all three"] + rows[endpoint]
            assert re.search(rf"`{re.escape(name)}[`:]", told), (endpoint, name)
