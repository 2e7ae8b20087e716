"""Where kernels are tested: on a GPU, or under Triton's interpreter where there is none; and how
much, under a sanitizer."""

from __future__ import annotations

import os

import pytest
import torch

#: Set by tests/sanitize.py, where every program takes a thousand times as long: large cases have
#: fewer programs then, of the same kernels with the same tiles and branches.
SANITIZED = os.environ.get("TEST_SANITIZED") == "1"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
