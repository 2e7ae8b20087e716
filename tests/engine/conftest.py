"""Checkpoints made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.small_model import save_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the small random model."""
    return save_small_model(tmp_path_factory.mktemp("small-model"))
