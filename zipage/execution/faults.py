"""Classifies exceptions from model steps."""

from __future__ import annotations

import torch

#: Parts of messages of plain RuntimeErrors from torch and CUDA libraries.
_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
_ACCELERATOR_ERROR: type[BaseException] | tuple[()] = getattr(torch, "AcceleratorError", ())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller step might have worked: host or device memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(words in message for words in _MEMORY_WORDS)


def is_beyond_repair(error: BaseException) -> bool:
    """Whether the device is lost: after such an error every CUDA call of the process fails."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, _ACCELERATOR_ERROR) or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    )


def without_frames(error: BaseException) -> BaseException:
    """The error, and those it was raised from, without tracebacks: they keep tensors alive."""
    link: BaseException | None = error
    while link is not None and link.__traceback__ is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def release_memory(device: torch.device) -> None:
    """Return cached device memory, so that free memory is contiguous."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
