"""Zipage: LLM inference for reasoning models with constant KV memory per request."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zipage.config import EngineConfig
    from zipage.engine.async_llm import AsyncLLM
    from zipage.engine.process_client import EngineProcessClient
    from zipage.errors import (
        ConfigError,
        EngineDeadError,
        EngineOverloadedError,
        ModelError,
        RequestError,
        RequestTimeoutError,
        ZipageError,
    )
    from zipage.llm import LLM
    from zipage.outputs import (
        CompletionOutput,
        CompressionRecord,
        RequestMetrics,
        RequestOutput,
        Usage,
    )
    from zipage.sampling_params import SamplingParams
    from zipage.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "CompressionRecord",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineOverloadedError",
    "EngineProcessClient",
    "ModelError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "StructuredOutputsParams",
    "Usage",
    "ZipageError",
]

_HOME = {
    "LLM": "zipage.llm",
    "AsyncLLM": "zipage.engine.async_llm",
    "EngineConfig": "zipage.config",
    "EngineProcessClient": "zipage.engine.process_client",
    "SamplingParams": "zipage.sampling_params",
    "StructuredOutputsParams": "zipage.structured_outputs",
    **dict.fromkeys(
        ("CompletionOutput", "CompressionRecord", "RequestMetrics", "RequestOutput", "Usage"),
        "zipage.outputs",
    ),
    **dict.fromkeys(
        (
            "ConfigError",
            "EngineDeadError",
            "EngineOverloadedError",
            "ModelError",
            "RequestError",
            "RequestTimeoutError",
            "ZipageError",
        ),
        "zipage.errors",
    ),
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `zipage --help` need not wait for torch.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'zipage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
