"""What all tests need of their process."""

import os
import signal

import torch

# Triton's kernels run under its interpreter where there is no CUDA device. Before anything imports
# triton, which reads it once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background has SIGINT ignored, which children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
