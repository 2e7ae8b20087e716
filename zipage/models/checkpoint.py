"""Checkpoints: named tensors in safetensors files."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zipage.errors import ModelError
from zipage.models.config_values import MALFORMED

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


class Checkpoint(ABC):
    """Tensors by the names and in the layout of a Hugging Face checkpoint.

    Attributes:
        path: file or directory, for messages.
        shapes: shapes of all tensors by name, in the order of the files.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Part of a tensor, in a floating-point dtype on the CPU.

        Args:
            name: one of `shapes`.
            index: a slice for each of the first dimensions; the others are taken whole.

        Raises:
            ModelError: the tensor cannot be read, or is not floating-point.
        """


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open the weights of a model.

    Args:
        path: a GGUF file, or a directory. In a directory, the files that
            model.safetensors.index.json names are opened, or model.safetensors if there is no
            index; other files are ignored.

    Raises:
        ModelError: files are missing, truncated or damaged.
    """
    if is_gguf(path):
        from zipage.models.gguf import GGUFCheckpoint, GGUFFile

        yield GGUFCheckpoint(GGUFFile(path))
        return
    with contextlib.ExitStack() as stack:
        yield _SafetensorsCheckpoint(path, stack)


class _SafetensorsCheckpoint(Checkpoint):
    """Memory-mapped safetensors files."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._found: dict[str, tuple[Path, Any]] = {}
        for file, names in _weight_files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                absent = sorted((names or set()) - set(opened.keys()))
                if absent:
                    raise ModelError(
                        f"{path / INDEX_FILE} says that {absent[0]} is in {file.name}, which has "
                        f"no such tensor ({len(absent)} of its names are missing)"
                    )
                for name in opened.keys():  # noqa: SIM118  (a file, not a dict)
                    if names is None or name in names:
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                        self._found[name] = file, opened
            except (SafetensorError, OSError) as error:
                raise _damaged(file, error) from error

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        file, opened = self._found[name]
        try:
            whole = opened.get_slice(name)
            if whole.get_dtype() not in _FLOAT_DTYPES:
                raise ModelError(
                    f"{file}: {name} has dtype {whole.get_dtype()}; "
                    f"only {', '.join(_FLOAT_DTYPES)} can be loaded"
                )
            tensor: torch.Tensor = whole[index]
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
        return tensor


def _damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} cannot be read (truncated or damaged?): {error}")


def _weight_files(path: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield the weight files of a directory, each with the tensors to take (None for all)."""
    index = path / INDEX_FILE
    if index.is_file():
        by_file: dict[str, set[str]] = {}
        try:
            for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
                # Files outside the directory are not part of the model.
                if (
                    not isinstance(file, str)
                    or file in ("", "..")
                    or file != Path(file).name
                    or "\\" in file
                ):
                    raise ModelError(
                        f"{index}: the file of {name} must be the plain name of a file beside the "
                        f"index, got {file!r}"
                    )
                by_file.setdefault(file, set()).add(name)
        except ModelError:
            raise
        except (OSError, RecursionError, *MALFORMED) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        for file, names in sorted(by_file.items()):
            if not (path / file).is_file():
                raise ModelError(f"{index} names {file}, which is not there")
            yield path / file, names
        return
    if not (path / SINGLE_FILE).is_file():
        raise ModelError(f"{path} holds neither {INDEX_FILE} nor {SINGLE_FILE}; {_advice(path)}")
    yield path / SINGLE_FILE, None


def _advice(path: Path) -> str:
    pickled = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{pickled[0]} is a pickle, which can run code and is not loaded: convert it with "
            f"transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    return "weights in other formats must be converted to safetensors first"
