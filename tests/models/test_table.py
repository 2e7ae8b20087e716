"""docs/models.md is what the registry says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zipage.models.registry import ARCHITECTURES, REFUSED
from zipage.models.table import render

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_page_is_up_to_date() -> None:
    command = [sys.executable, "-m", "zipage.models.table"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text() == written, f"run: {' '.join(command[1:])} > docs/models.md"


def test_page_names_everything() -> None:
    text = render()
    for name in (*ARCHITECTURES, *REFUSED):
        assert f"`{name}`" in text
