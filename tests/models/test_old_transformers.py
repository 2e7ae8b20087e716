"""Without transformers' interfaces for attention and masks nothing falls back, and it says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from zipage.errors import ModelError
from zipage.models.implementation import read_config


def test_a_transformers_without_the_interfaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ModelError, match=r"GPTNeoXForCausalLM .*needs transformers >= 4\.53"):
        read_config(tmp_path)
