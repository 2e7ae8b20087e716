"""Triton kernels run under its interpreter where there is no CUDA device."""

import os

import torch

# Before anything imports triton, which reads it once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
