"""What all tests need of their process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Triton's kernels run under its interpreter where there is no CUDA device. Before anything imports
# triton, which reads it once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background has SIGINT ignored, which children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Commands set the log up for their process, which is that of the tests here."""
    logger = logging.getLogger("zipage")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
