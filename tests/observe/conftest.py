"""The small model of the engine's tests."""

from tests.engine.conftest import small_model

__all__ = ["small_model"]
