"""Models in transformers' own code with paged attention: logits, loading, what is refused late."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from zipage.bench.roofline import weight_bytes_per_step
from zipage.errors import ModelError
from zipage.models.config import ModelConfig
from zipage.models.decoder import Decoder
from zipage.models.implementation import load_weights, read_config
from zipage.models.loader import resolve_model_path
from zipage.models.transformers_config import TESTED, TransformersConfig
from zipage.models.transformers_model import TransformersModel

from . import fallback_checkpoints
from .checkpoints import CASES as DECODER_CASES
from .fallback_checkpoints import CASES
from .paged_run import BACKENDS, BackendFactory, PagedRun

Checkpoint = Callable[..., tuple[Path, transformers.PreTrainedModel]]

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="in older transformers some of these architectures lack the attention interface",
)

# In transformers' code, these two turn all tokens of a step by the longest text; refused there.
COVERED = [case for case in DECODER_CASES if "dynamic" not in case and "longrope" not in case]

LENGTH = 75
TOLERANCE = 1e-4
TOKENS = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
WHOLE = [LENGTH]
CHUNKED = [7, 1, 16, 5, 30] + [1] * 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Make, once, the directory and the transformers model of a case."""
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}

    def make(case: str) -> tuple[Path, transformers.PreTrainedModel]:
        if case not in made:
            path = tmp_path_factory.mktemp(case)
            made[case] = path, fallback_checkpoints.save(path, *CASES[case])
        return made[case]

    return make


def load(
    path: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", seed: int = 0
) -> TransformersModel:
    model = load_weights(read_config(path, "transformers"), path, dtype, CPU, load_format, seed)
    assert isinstance(model, TransformersModel)
    return model


def reference_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()


@pytest.mark.parametrize("case", CASES)
def test_fp32_logits(case: str, fallback: Checkpoint) -> None:
    path, reference = fallback(case)
    expected = reference_logits(reference)
    assert expected.std() > 0.3, "the logits are too flat for the tolerance to mean anything"
    config = read_config(path)
    assert isinstance(config, TransformersConfig) and config.architecture in TESTED
    model = load(path)
    for backend in BACKENDS.values():
        for chunks in (WHOLE, CHUNKED):
            logits = PagedRun(model, backend).logits(TOKENS, chunks)
            assert logits.dtype == torch.float32
            assert (logits - expected).abs().max().item() <= TOLERANCE


def test_every_tested_architecture_is_tested(fallback: Checkpoint) -> None:
    assert sorted(TESTED) == sorted(type(fallback(case)[1]).__name__ for case in CASES)


@pytest.mark.parametrize("case", COVERED)
def test_equal_to_the_decoder(case: str, checkpoint: Checkpoint, backend: BackendFactory) -> None:
    path, _ = checkpoint(case)
    config = read_config(path)
    assert isinstance(config, ModelConfig)
    decoder = load_weights(config, path, torch.float32, CPU, "auto", 0)
    assert isinstance(decoder, Decoder)
    model = load(path)
    assert model.num_parameters == model.config.num_parameters == decoder.num_parameters
    assert model.weight_bytes == decoder.weight_bytes
    assert weight_bytes_per_step(model) == weight_bytes_per_step(decoder)
    assert model.config.head_dim == config.head_dim
    assert model.config.num_kv_heads == config.num_kv_heads
    assert model.scale == pytest.approx(decoder.scale)
    expected = PagedRun(decoder, backend).logits(TOKENS, CHUNKED)
    logits = PagedRun(model, backend).logits(TOKENS, CHUNKED)
    assert (logits - expected).abs().max().item() <= TOLERANCE


def test_bfloat16_is_transformers_own(checkpoint: Checkpoint) -> None:
    """RoPE frequencies and other fp32 buffers must not be rounded by a change of dtype."""
    path, reference = checkpoint("qwen3", torch.bfloat16)
    assert read_config(path, "transformers").dtype == torch.bfloat16
    model = load(path, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    frequencies = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies and all(b.dtype == torch.float32 for b in frequencies)
    exact = reference_logits(checkpoint("qwen3")[1])
    reloaded = type(reference).from_pretrained(path, torch_dtype=torch.bfloat16)
    theirs = (reference_logits(reloaded) - exact).pow(2).mean().sqrt()
    ours = (PagedRun(model, BACKENDS["torch"]).logits(TOKENS, CHUNKED) - exact).pow(2).mean().sqrt()
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize("case", sorted(set(CASES) - {"olmoe"}))
def test_rows_do_not_depend_on_the_batch(case: str, fallback: Checkpoint) -> None:
    """Bitwise, in fp32 on one thread, alone or in a crowd. (Experts are computed in groups of
    the rows that choose them, so that a mixture of experts is equal to rounding only.)"""
    if "native" not in BACKENDS:
        pytest.skip("needs the native kernels")
    model = load(fallback(case)[0])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = PagedRun(model, BACKENDS["native"])
        crowd = PagedRun(model, BACKENDS["native"], num_sequences=7)
        for begin, count in ((0, 37), (37, 1), (38, 2), (40, 1)):
            new = TOKENS[begin : begin + count]
            others = {s: TOKENS[s : s + 1 + (5 * s) % 4] for s in range(1, 7)}
            single = alone.step({0: new}, padding=8)[0]
            assert torch.equal(crowd.step({**others, 0: new})[0], single)
    finally:
        torch.set_num_threads(before)


def test_two_models_take_turns(fallback: Checkpoint, checkpoint: Checkpoint) -> None:
    paths = [fallback("granite")[0], fallback("gpt2")[0], checkpoint("qwen3")[0]]
    models = [load(path) for path in paths]
    runs = [PagedRun(model, BACKENDS["torch"]) for model in models]
    rows: list[list[torch.Tensor]] = [[] for _ in runs]
    for begin in range(0, LENGTH, 5):
        for run, found in zip(runs, rows, strict=True):
            found.append(run.step({0: TOKENS[begin : begin + 5]})[0])
    references = [fallback("granite")[1], fallback("gpt2")[1], checkpoint("qwen3")[1]]
    for model, found, reference in zip(models, rows, references, strict=True):
        with torch.inference_mode():
            logits = model.compute_logits(torch.cat(found))
        assert (logits - reference_logits(reference)).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9])
def test_any_number_of_logit_rows(rows: int, fallback: Checkpoint) -> None:
    model = load(fallback("cohere")[0])
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model.compute_logits(hidden[:rows])
        assert torch.equal(logits, model.compute_logits(hidden)[:rows])
    assert logits.shape == (rows, 97)


def test_learned_positions_limit_the_text(fallback: Checkpoint) -> None:
    for case in ("gpt2", "opt"):
        path, _ = fallback(case)
        assert read_config(path).max_position_embeddings == 512
        assert read_config(path, max_model_len=100).max_position_embeddings == 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["gpt2", "cohere", "olmo2"])
def test_logits_on_cuda(case: str, fallback: Checkpoint) -> None:
    from zipage import LLM, SamplingParams

    path, reference = fallback(case)
    with LLM(
        model=str(path),
        tokenizer=str(resolve_model_path(None)),
        device="cuda",
        dtype="float32",
        block_size=16,
        kv_budget=64,
        num_kv_blocks=64,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        (output,) = llm.generate([TOKENS[:9]], params)
        llm.engine.core.check_integrity()
    assert output.error is None and output.metrics.compressions >= 1
    text = output.outputs[0].token_ids[:60]  # within the budget
    with torch.inference_mode():
        logits = reference(torch.tensor([TOKENS[:9] + text])).logits[0, 8:-1]
    chosen = logits[torch.arange(len(text)), text]
    assert (logits.max(dim=-1).values - chosen).max().item() <= 1e-2


# ---------------------------------------------------------------------- weights


def test_dummy_weights_follow_the_seed(fallback: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((fallback("olmo2")[0] / "config.json").read_text())
    state = torch.random.get_rng_state()
    first, again, other = (load(tmp_path, load_format="dummy", seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.embed_weight, again.embed_weight)
    assert not torch.equal(first.embed_weight, other.embed_weight)


def edited_weights(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(NAME), f"missing: {NAME}"),
        (lambda t: t.update({"model.extra.weight": torch.ones(3)}), "surplus: model.extra.weight"),
        (lambda t: t.update({NAME: torch.ones(5, 64)}), NAME),
    ],
)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, Any]], None], complaint: str, fallback: Checkpoint, tmp_path: Path
) -> None:
    path = edited_weights(fallback("olmo2")[0], tmp_path, change)
    with pytest.raises(ModelError, match=complaint.replace(".", r"\.")):
        load(path)


def test_missing_and_truncated_files(fallback: Checkpoint, tmp_path: Path) -> None:
    source = fallback("olmo2")[0]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(tmp_path)
    whole = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(tmp_path)


# ---------------------------------------------------------------------- refused with weights


def broken(fallback: Checkpoint, spoil: Callable[[Any], None]) -> None:
    """Wrap a GPT-NeoX whose code does something else."""
    path, _ = fallback("gpt-neox")
    model = transformers.GPTNeoXForCausalLM.from_pretrained(path, attn_implementation="zipage")
    spoil(model)
    TransformersModel(read_config(path), model)


def test_a_layer_that_mixes_tokens_is_noticed(fallback: Checkpoint) -> None:
    def spoil(model: Any) -> None:
        def mix(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + 0.1 * output.roll(1, dims=1)

        model.gpt_neox.layers[1].mlp.register_forward_hook(mix)

    with pytest.raises(ModelError, match="a token depends on other tokens"):
        broken(fallback, spoil)


def test_ignored_positions_are_noticed(fallback: Checkpoint) -> None:
    def spoil(model: Any) -> None:
        def count(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            kwargs["position_ids"] = torch.arange(kwargs["position_ids"].shape[1])[None]
            return args, kwargs

        model.gpt_neox.register_forward_pre_hook(count, with_kwargs=True)

    with pytest.raises(ModelError, match="a token depends on other tokens"):
        broken(fallback, spoil)


def test_another_head_is_noticed(fallback: Checkpoint) -> None:
    def spoil(model: Any) -> None:
        inner = model.forward

        def forward(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            output = inner(*args, input_ids=input_ids, **kwargs)
            output.logits = output.logits + input_ids[..., None]
            return output

        model.forward = forward

    with pytest.raises(ModelError, match="give other logits"):
        broken(fallback, spoil)


def test_rope_that_depends_on_the_longest_text_is_noticed(tmp_path: Path) -> None:
    family, options = "Phi3", dict(CASES["olmo2"][1])
    factors = [float(i + 1) for i in range(8)]
    options |= {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": factors,
            "original_max_position_embeddings": 64,
        },
    }
    fallback_checkpoints.save(tmp_path, family, options)
    with pytest.raises(ModelError, match="longrope"):
        load(tmp_path)


def test_the_scale_and_options_are_checked_in_every_step(fallback: Checkpoint) -> None:
    model = load(fallback("phi")[0])
    attention = next(m for m in model.modules() if type(m).__name__ == "PhiAttention")
    attention.scaling = 0.5
    with pytest.raises(ModelError, match=r"layer 0 changed the scale of its attention to 0\.5"):
        PagedRun(model).step({0: TOKENS})


def test_the_comparison_notices_a_wrong_option(fallback: Checkpoint, tmp_path: Path) -> None:
    path, reference = fallback("granite")
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "logits_scaling": 3.1}))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    logits = PagedRun(load(tmp_path)).logits(TOKENS, WHOLE)
    assert (logits - reference_logits(reference)).abs().max().item() > 30 * TOLERANCE
