"""One frozen, validated configuration of the engine."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zipage.errors import ConfigError, shown
from zipage.models.shapes import SHAPES

#: The value of `compression` that turns it off; no policy has this name.
FULL = "full"

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
#: Most sequences of a batch; their block tables are allocated at once.
_MOST_SEQUENCES = 1 << 16
_LARGEST_BLOCK = 1 << 16
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_bytes(option: str, value: int | str) -> int:
    """Read a size such as ``"2GiB"``, ``"500MB"`` or ``1073741824`` (bytes).

    Raises:
        ConfigError: it is not a positive size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", str(value).lower())
        if not found:
            raise ConfigError(
                f"{option}={shown(value)} is not a size: write bytes or for example '2GiB', '500MB'"
            )
        unit = found.group(2) or ""
        amount = float(found.group(1)) * {**_UNITS, **_BINARY_UNITS}[unit]
        size = int(min(amount, _INT64_MAX))
    if not 0 < size < _INT64_MAX:
        raise ConfigError(f"{option}={shown(value)} must be positive and below 2**63 bytes")
    return size


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine. An option has the same name in Python, CLI and docs.

    Attributes:
        model: local Hugging Face directory, GGUF file or hub id; None for the embedded
            zipage-tiny.
        tokenizer: directory or hub id of the tokenizer; None for the model's own.
        revision: hub revision of both.
        dtype: ``auto`` (the checkpoint's on CUDA, float32 on CPU), float32, bfloat16 or float16.
        kv_cache_dtype: dtype of stored keys and values: ``auto`` (the model's) or ``fp8``, also
            named ``fp8_e4m3``: half the bytes of bfloat16, with scales calibrated at start. Not
            with the ``native`` attention backend. See docs/compression.md.
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        load_format: ``auto`` (safetensors or GGUF) or ``dummy`` (random weights; config.json is
            enough).
        model_shape: with ``load_format='dummy'`` and no model, the sizes of a well-known one:
            ``qwen3-Nb`` with N 0.6, 1.7, 4, 8, 14 or 32, ``r1-llama-8b`` or ``r1-qwen-7b``. It has
            no tokenizer: prompts and answers are token ids.
        model_impl: ``zipage`` (the decoder), ``transformers`` (transformers' own model code with
            paged attention) or ``auto`` (the decoder where it covers the architecture).
        quantization: ``fp8`` runs linear layers in fp8: weights are quantised when they are
            loaded, activations token by token (GPUs from compute capability 8.9, bfloat16; slow on
            the CPU). None keeps the dtype.
        seed: seed of unseeded sampling, dummy weights and the random policy.
        max_model_len: most tokens of prompt and answer together; None for what the model was
            trained for.
        block_size: tokens per KV block, a multiple of 16.
        kv_cache_memory: bytes of the KV pool with its score store and query slots (``"2GiB"``);
            None to use `memory_utilization`.
        num_kv_blocks: blocks of the KV pool, instead of `kv_cache_memory`.
        memory_utilization: on CUDA, share of the device's memory for everything the engine needs
            there: weights, activations, workspaces, CUDA graphs and KV pool (0.9 by default); on
            the CPU, share of the available host memory for the pool.
        kv_budget: tokens kept per request, layer and KV head at a compression, a multiple of
            `block_size`; a request owns at most kv_budget / block_size + 1 blocks. None for full
            KV unless a request has its own budget.
        compression: policy that chooses the tokens to evict; ``full`` never evicts any.
        policy_options: the policy's own options, see docs/compression.md.
        window: number of last tokens whose queries score the cache; they are never evicted. At
            most `block_size`; None for the policy's default (24 for ``zipage``, 16 for the others).
        num_query_slots: requests that may collect window queries at once; None for half of
            `max_num_seqs`, at least 8.
        compaction: ``holes`` (fewest moves) or ``stable`` (kept tokens stay in order).
        num_sinks: number of first tokens of the text that are never evicted.
        protect_prompt: the prompt is never evicted if it takes up at most this share of the
            budget; 0 turns this off.
        bounded_prefill: compress between the chunks of a prompt longer than the budget, so that
            it never owns more blocks than other requests.
        async_compression: run compressions concurrently with decoding; None for yes on CUDA, no
            on CPU.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        admission: ``bounded`` (start a request when its worst case fits) or ``optimistic`` (when
            its tokens so far fit).
        async_scheduling: schedule a step while the one before it runs; tokens are reported one step
            later. None for yes on CUDA, no on CPU.
        attention_backend: ``auto``, ``torch``, ``native`` (CPU kernels) or ``triton`` (CUDA).
        enforce_eager: run decode steps without CUDA graphs: starts faster, decodes slower.
        batch_invariant: make a request's logits, text and kept tokens bit-identical whatever else
            runs. On CUDA this needs slower matrix products and attention; on the CPU, float32 with
            the ``native`` attention backend is batch-invariant anyway.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    model_shape: str | None = None
    model_impl: str = "auto"
    quantization: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 64
    kv_cache_memory: int | str | None = None
    num_kv_blocks: int | None = None
    memory_utilization: float | None = None
    kv_budget: int | None = 2048
    compression: str = "zipage"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    num_query_slots: int | None = None
    compaction: str = "holes"
    num_sinks: int = 0
    protect_prompt: float = 0.0
    bounded_prefill: bool = False
    async_compression: bool | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    admission: str = "bounded"
    async_scheduling: bool | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    batch_invariant: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build a config from names and values.

        Raises:
            ConfigError: an option is unknown or its value is illegal.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ConfigError(
                    f"unknown engine option {name!r}{hint} (legal: {', '.join(sorted(names))})"
                )
        return cls(**options)

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
            ConfigError: one is illegal, or does not fit the others.
        """
        self._check_model()
        self._check_execution()
        self._check_limits()
        self._check_compression()

    def _check_model(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (str, os.PathLike)) or not str(value)):
                raise ConfigError(f"{name}={shown(value)} must be a path, a hub name or None")
        self._check_choice("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._check_choice("load_format", ("auto", "dummy"))
        self._check_choice("model_impl", ("auto", "zipage", "transformers"))
        if self.quantization is not None:
            self._check_choice("quantization", ("fp8",))
        if self.model_shape is not None:
            self._check_choice("model_shape", tuple(SHAPES))
            if self.model_impl == "transformers":
                raise ConfigError(
                    f"model_shape={self.model_shape!r} is run by the decoder: it needs "
                    f"model_impl='auto' or 'zipage'"
                )
            if self.load_format != "dummy" or self.model is not None:
                raise ConfigError(
                    f"model_shape={self.model_shape!r} needs load_format='dummy' and no model: "
                    f"it stands for random weights"
                )

    def _check_execution(self) -> None:
        self._check_choice("admission", ("bounded", "optimistic"))
        self._check_choice("attention_backend", ("auto", "torch", "native", "triton"))
        self._check_choice("kv_cache_dtype", ("auto", "fp8", "fp8_e4m3"))
        if self.attention_backend == "native" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: attention_backend='native' stores keys "
                f"and values in float32 only; use attention_backend='auto' or 'torch'"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device={shown(self.device)}: legal are auto, cpu, cuda and cuda:N")
        for name in (
            "bounded_prefill",
            "enable_prefix_caching",
            "async_compression",
            "async_scheduling",
            "enforce_eager",
            "batch_invariant",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name.startswith("async") and value is None):
                raise ConfigError(f"{name}={shown(value)} must be True or False")

    def _check_limits(self) -> None:
        self._check_int("block_size", 16, _LARGEST_BLOCK)
        if self.block_size % 16:
            raise ConfigError(f"block_size={self.block_size} must be a multiple of 16")
        if self.window is not None:
            self._check_int("window", 1, self.block_size)
        self._check_int("max_num_seqs", 1, _MOST_SEQUENCES)
        self._check_int("max_num_batched_tokens", 1, _INT32_MAX)
        self._check_int("num_sinks", 0, _INT32_MAX)
        self._check_int("seed", 0, _INT64_MAX)
        # At least one token of prompt and one of answer.
        for name, least in (("max_model_len", 2), ("num_kv_blocks", 1), ("num_query_slots", 1)):
            if getattr(self, name) is not None:
                self._check_int(name, least, _INT32_MAX)
        share = self.memory_utilization
        if share is not None and (not is_real(share) or not 0 < share <= 1):
            raise ConfigError(f"memory_utilization={shown(share)} must lie in (0, 1]")
        if not is_real(self.protect_prompt) or not 0 <= self.protect_prompt <= 1:
            raise ConfigError(f"protect_prompt={shown(self.protect_prompt)} must lie in [0, 1]")
        if self.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)
            if self.num_kv_blocks is not None:
                raise ConfigError(
                    "kv_cache_memory and num_kv_blocks both set the pool's size: give one"
                )

    def _check_compression(self) -> None:
        self._check_choice("compaction", ("holes", "stable"))
        if not isinstance(self.policy_options, Mapping):
            raise ConfigError(f"policy_options={shown(self.policy_options)} must be a mapping")
        if not isinstance(self.compression, str) or self.compression != FULL:
            from zipage.compression.policies import make_policy, policy_names

            if not isinstance(self.compression, str) or self.compression not in policy_names():
                raise ConfigError(
                    f"compression={shown(self.compression)} is an unknown policy: legal are "
                    f"{', '.join([*policy_names(), FULL])}"
                )
            make_policy(self.compression, self.policy_options)
            self.check_budget(self.kv_budget)
        else:
            if self.policy_options:
                raise ConfigError("policy_options has no meaning with compression='full'")
            if self.kv_budget is not None:
                self._check_int("kv_budget", 1)

    def check_budget(self, kv_budget: int | None) -> None:
        """Check an engine's or a request's `kv_budget`.

        Raises:
            ConfigError: it is not a multiple of the block size, or too small.
        """
        if kv_budget is None:
            return
        b = self.block_size
        window = self.resolved_window
        smallest = -(-(window + self.num_sinks) // b) * b
        if (
            isinstance(kv_budget, bool)
            or not isinstance(kv_budget, int)
            or kv_budget % b
            or kv_budget < smallest
        ):
            raise ConfigError(
                f"kv_budget={shown(kv_budget)} must be a multiple of block_size={b}, at least "
                f"{smallest} tokens (the window of {window} and {self.num_sinks} sinks, "
                f"in whole blocks); a request then owns kv_budget/{b} + 1 blocks"
            )

    @property
    def compresses(self) -> bool:
        """Whether any request can be compressed."""
        return self.compression != FULL

    @property
    def resolved_window(self) -> int:
        """Tokens of the window."""
        if self.window is not None:
            return self.window
        from zipage.compression.policies import default_window

        return min(default_window(self.compression), self.block_size)

    @property
    def resolved_query_slots(self) -> int:
        """Number of query slots; 0 if nothing is compressed."""
        if not self.compresses:
            return 0
        if self.num_query_slots is not None:
            return self.num_query_slots
        return max(8, self.max_num_seqs // 2)

    def compresses_beside(self, device_type: str) -> bool:
        """Whether compressions run concurrently with decoding on this type of device."""
        if self.async_compression is None:
            return device_type == "cuda"
        return self.async_compression

    def schedules_ahead(self, device_type: str) -> bool:
        """Whether a step is scheduled while the one before it runs on this type of device."""
        if self.async_scheduling is None:
            return device_type == "cuda"
        return self.async_scheduling

    def max_blocks_of(self, kv_budget: int | None) -> int | None:
        """N_max of a budget."""
        return None if kv_budget is None else kv_budget // self.block_size + 1

    def _check_choice(self, name: str, legal: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in legal:
            raise ConfigError(f"{name}={shown(value)}: legal are {', '.join(legal)}")

    def _check_int(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        legal = f"an integer >= {least}" + (f" and <= {most}" if most is not None else "")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={shown(value)} must be {legal}")
        if value < least or (most is not None and value > most):
            raise ConfigError(f"{name}={shown(value)} must be {legal}")


def is_real(value: object) -> bool:
    """Whether an option's value is a number, which True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def host_memory_available() -> int:
    """Bytes of host memory available without swapping, within a container's limit."""
    available = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    for folder, limit, used, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            left = int((_CGROUP / folder / limit).read_text())
            left -= int((_CGROUP / folder / used).read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
        try:
            lines = (_CGROUP / folder / "memory.stat").read_text().splitlines()
            numbers = {name: int(value) for name, value in map(str.split, lines)}
        except (OSError, ValueError):  # not every sandbox has it
            numbers = {}
        # Cached files, such as weights that were read, count as used but make room.
        left += sum(numbers.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        available = min(available, left)
    return available
