"""How OpenMP's threads wait in the commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import os, sys
from zipage.cli import app
assert "torch" not in sys.modules, "OpenMP has read its variables already"
app(["info"], standalone_mode=False)
print("spins", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_briefly_unless_the_user_chose(chosen: dict[str, str], expected: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    told = subprocess.run(
        [sys.executable, "-c", SHOW],
        env=environment | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"spins {expected}" in told.stdout
