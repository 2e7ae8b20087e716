"""The files of deploy/: what can be told of them without Docker and without systemd's manager."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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
            assert (
                yaml.safe_load(COMPOSE["configs"][config["source"]]["content"])["apiVersion"] == 1
            )
    assert len(named) == 3
    assert [path for path in named if not path.is_file()] == []
    assert seconds(services["zipage"]["stop_grace_period"]) > DRAIN


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
