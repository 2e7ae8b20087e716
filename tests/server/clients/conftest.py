"""A server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Process

FLAGS = ["--block-size", "16", "--num-kv-blocks", "600", "--kv-budget", "none"]


@pytest.fixture(scope="package")
def server() -> Iterator[Process]:
    """`zipage serve` with the embedded model."""
    process = Process("--port", "0", "--max-model-len", "2048", *FLAGS)
    try:
        yield process
    finally:
        assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line], process.lines


@pytest.fixture(scope="package")
def served(server: Process) -> str:
    """Its URL."""
    return server.url
