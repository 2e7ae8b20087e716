"""Checkpoints made once per session."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.small_model import save_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the small random model."""
    return save_small_model(tmp_path_factory.mktemp("small-model"))


@pytest.fixture
def no_retries(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step that fails and is tried in parts gives the right tokens: it must not go unnoticed."""
    with caplog.at_level(logging.WARNING, logger="zipage"):
        yield
    records = caplog.get_records("call")
    hidden = [r.getMessage() for r in records if r.name == "zipage.engine.steps"]
    assert not hidden, hidden
