"""Compiles the compression kernels for an H100/H200 (sm_90), on a machine that need not have one.

    python -m tests.kernels.compile_compression bfloat16 128 4 24 256 [fp8]

takes dtype, head_dim, query heads per KV head, window, block size and whether the cache is
quantised, and prints a line of JSON
for each distinct kernel that `TritonKernels` would launch. A process of its own, since Triton
decides at import whether it compiles or interprets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.compression.cached_request import make_cache, make_job, quantised
from zipage.compression.triton_kernels import TritonKernels

Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def launches(
    dtype: torch.dtype, dim: int, group: int, window: int, block_size: int, fp8: bool
) -> Iterator[Launch]:
    """Kernel, arguments and keyword arguments of what the methods launch, nothing being run."""
    made: list[Launch] = []

    def record(
        kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> None:
        made.append((kernel, args, kwargs))

    JITFunction.run = record
    cache = make_cache(
        blocks=6, block_size=block_size, layers=1, group=group, dim=dim, window=window, dtype=dtype
    )
    kernels = TritonKernels(quantised(cache) if fp8 else cache)
    for length in (3 * block_size, 5000):
        blocks = -(-length // block_size)
        job = make_job(
            make_cache(blocks=blocks, block_size=block_size, layers=1, kv_heads=1),
            length=length,
            num_targets=1,
        )
        scores = torch.zeros(1, 2, length)
        for group_by, window_by in (("max", "max"), ("max", "mean"), ("mean", "mean")):
            kernels.attention(job, 1.0, group_by, window_by)
        for local in (True, False):
            kernels.redundancy(job, local, 0.4, 0.5)
        kernels.value_norms(job)
        kernels.select_and_compact(job, scores, scores, window, 0, False)
        kernels.select_and_compact(job, scores, None, window, 4, True)
    yield from made


def compile_launch(
    kernel: JITFunction[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, object]:
    """Compile one launch; the resources it takes."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = _TYPES[value.dtype if tensor else type(value)]
        if tensor:
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            assert type(value) is float or parameter.do_not_specialize, parameter.name
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=values)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    return {
        "kernel": kernel.__name__,
        "shared_memory": compiled.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "tensor_cores": "mma" in compiled.asm["ptx"],
        "options": values,
        "constants": {kernel.arg_names[i]: value for (i,), value in constants.items()},
    }


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    seen = set()
    for launch in launches(dtype, *map(int, sys.argv[2:6]), fp8=sys.argv[6:] == ["fp8"]):
        kernel, _, kwargs = launch
        key = (kernel.__name__, *sorted(kwargs.items()))
        if key not in seen:
            seen.add(key)
            print(json.dumps(compile_launch(*launch)), flush=True)


if __name__ == "__main__":
    main()
