"""Where kernels are tested: on a GPU, or under Triton's interpreter where there is none."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
