"""What all kernel launches share."""

from __future__ import annotations

import torch
import triton

#: Options of kernels that reduce sums of products across threads. If a product is fused into the
#: first addition, the threads that share a sum hold different last bits of it, and Triton lets any
#: of them write it.
UNFUSED = {"enable_fp_fusion": False}


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter replaces the GPU."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a program may use; no limit on a CPU."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    size: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return size
