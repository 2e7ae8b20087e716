"""Checkpoints made once per session, and the attention backends they are run through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from .checkpoints import REMOVED, random_model
from .paged_run import BACKENDS, BackendFactory


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, transformers.PreTrainedModel]]:
    """Make, once, the directory and the transformers model of a case."""
    made: dict[tuple[str, torch.dtype], tuple[Path, transformers.PreTrainedModel]] = {}

    def make(
        case: str, dtype: torch.dtype = torch.float32
    ) -> tuple[Path, transformers.PreTrainedModel]:
        if (case, dtype) not in made:
            path = tmp_path_factory.mktemp(case)
            model = random_model(case, dtype)
            model.save_pretrained(path)
            made[case, dtype] = path, model
        return made[case, dtype]

    return make


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copy config.json of a checkpoint with some keys changed or REMOVED."""

    def edit(source: Path, **changes: Any) -> Path:
        raw = json.loads((source / "config.json").read_text())
        raw.update(changes)
        kept = {key: value for key, value in raw.items() if value is not REMOVED}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return tmp_path

    return edit


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> BackendFactory:
    """Every attention backend that can run here, and the plain one of these tests."""
    return BACKENDS[request.param]
