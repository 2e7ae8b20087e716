"""Triton kernels for CUDA; with ``TRITON_INTERPRET=1`` they run on CPU tensors, slowly."""
