"""The files of deploy/: what can be told of them without Docker and without systemd's manager."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.conftest import listening
from tests.server.scripted import ScriptedEngine, tiny_tokenizer
from zipage.server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "zipage.service").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
DRAIN = ServerSettings().drain_timeout


def seconds(text: str) -> int:
    assert text.removesuffix("s").isdecimal()
    return int(text.removesuffix("s"))


def test_compose_names_what_exists() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"zipage", "prometheus", "grafana"}
    named = []
    for service in services.values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            assert target.startswith("/")
            if source.startswith("."):
                named.append((DEPLOY / source).resolve())
            else:
                assert source in COMPOSE["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        if "image" in service and "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]
    assert len(named) == 2
    assert [path for path in named if not path.is_file()] == []
    assert seconds(services["zipage"]["stop_grace_period"]) > DRAIN


def test_compose_joins_its_services() -> None:
    prometheus, source, board = (
        yaml.safe_load(COMPOSE["configs"][name]["content"])
        for name in ("prometheus", "datasource", "board")
    )
    alone = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    port = re.search(r"ZIPAGE_PORT=(\d+)", DOCKERFILE)
    assert port is not None
    alone["scrape_configs"][0]["static_configs"] = [{"targets": [f"zipage:{port.group(1)}"]}]
    assert prometheus == alone
    # Containers that share another one's network lose it when that one is restarted.
    assert not any("network_mode" in service for service in COMPOSE["services"].values())
    (datasource,) = source["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    assert datasource["jsonData"]["timeInterval"] == alone["global"]["scrape_interval"]
    (provider,) = board["providers"]
    (mounted,) = (v for v in COMPOSE["services"]["grafana"]["volumes"] if "zipage.json" in v)
    assert mounted.split(":")[1] == provider["options"]["path"] + "/zipage.json"


def test_dockerfile_runs_as_a_user_and_copies_what_exists() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    base = re.search(r"^ARG BASE=(\S+)", DOCKERFILE, re.MULTILINE)
    assert base is not None and re.search(r":\d+\.\d+\.\d+-", base.group(1))
    assert set(stages) == {"${BASE}", "python", "dependencies"}
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d+$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final and 'ENTRYPOINT ["zipage", "serve"]' in final
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (DEPLOY.parent / source).exists() and f"!{source}" in kept


def test_the_wheel_is_built_of_everything_and_apart() -> None:
    """Where the dependencies' stage built an empty package, setuptools would take that again."""
    stages = {
        name: dict(re.findall(r"^(WORKDIR|COPY) (.*)$", body, re.MULTILINE))
        | {"copied": " ".join(re.findall(r"^COPY (.*) \S+$", body, re.MULTILINE)).split()}
        for name, body in re.findall(r"^FROM \S+ AS (\w+)$(.*?)(?=^FROM)", DOCKERFILE, re.M | re.S)
    }
    assert stages["wheel"]["WORKDIR"] != stages["dependencies"]["WORKDIR"]
    assert set(stages["wheel"]["copied"]) == {"pyproject.toml", "README.md", "LICENSE", "zipage"}
    assert set(stages["dependencies"]["copied"]) == {"pyproject.toml", "constraints.txt"}


def test_health_check() -> None:
    found = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    python, *arguments = json.loads(found.group(1))
    assert python == "python"
    with listening(ScriptedEngine(["."], tiny_tokenizer())) as (url, _):
        environment = {**os.environ, "ZIPAGE_PORT": url.rpartition(":")[2]}
        command = [sys.executable, *arguments]
        assert subprocess.run(command, env=environment).returncode == 0
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "zipage.service"
    unit.write_text(UNIT.replace("/opt/zipage/bin/zipage", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_unit_lets_requests_finish() -> None:
    fields = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert seconds(fields["TimeoutStopSec"]) > DRAIN
    assert fields["KillMode"] == "mixed" and fields["Restart"] == "on-failure"
