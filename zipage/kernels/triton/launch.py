"""What launches have in common."""

from __future__ import annotations

import torch

#: Options of kernels that hand sums of products from thread to thread. Fused into the first
#: addition, a product leaves a sum other last bits in each of the threads that share it, and
#: Triton lets any of them write it.
UNFUSED = {"enable_fp_fusion": False}


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 of a CPU, where Triton's interpreter stands in for it."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
