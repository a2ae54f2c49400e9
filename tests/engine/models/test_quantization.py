"""Weights in 8 bits: how far they are from the full ones, and what that does to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention import Attention, AttentionMetadata, attend_with
from engine.engine_config import Quantization
from engine.kernels import (
    INT8_GROUP,
    CompiledKernels,
    Int8Weight,
    Kernels,
    KernelsUnavailable,
    TorchKernels,
    dequantized,
)
from engine.kv_cache import KVCache
from engine.models import CausalLM, load_model
from engine.models.quantization import quantized
from engine.weights import ModelStore
from tests.engine.models.families import FAMILIES
from tests.engine.paged import Sequential, compute, nan_cache, random_tokens
from tests.engine.tiny import tiny_model_dir
from tests.reference.cases import MODEL, reference_cases

INT8 = Quantization.INT8
TINY = torch.finfo(torch.float32).tiny


def kernels_of(name: str) -> Kernels:
    if name == "torch":
        return TorchKernels()
    try:
        return CompiledKernels(batch_invariant=True)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def groups_of(weight: Tensor) -> list[Tensor]:
    """For each group of 64 numbers, those of all rows."""
    return list(weight.split(INT8_GROUP, dim=1))


def check(weight: Tensor) -> Int8Weight:
    """Nothing is further than half a step from what it was; a step is 1/127 of the largest, but no
    less than the smallest number of full precision.
    """
    small = quantized(weight, INT8)
    assert (small.shape, small.values.dtype, small.scales.dtype) == (
        tuple(weight.shape),
        torch.int8,
        torch.float32,
    )
    assert small.scales.shape == (len(weight), -(-weight.shape[1] // INT8_GROUP))
    assert small.values.is_contiguous()
    assert small.values.min() >= -127
    restored = dequantized(small, torch.float64)
    for number, (group, its) in enumerate(
        zip(groups_of(weight.double()), groups_of(restored), strict=True)
    ):
        step = (group.abs().amax(dim=1, keepdim=True) / 127).clamp(min=TINY)
        scales = small.scales[:, number : number + 1].double()
        torch.testing.assert_close(scales, step, atol=0, rtol=1e-6)
        assert ((its - group).abs() <= step * (0.5 + 1e-4)).all()
    return small


@settings(max_examples=100, deadline=None)
@given(
    out_size=st.integers(1, 20),
    in_size=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1 << 16),
)
def test_the_error_is_at_most_half_a_step(
    out_size: int, in_size: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_size, in_size, generator=generator) * 10.0**exponent
    weight *= torch.rand(out_size, in_size, generator=generator) ** 4  # of all sizes
    check(weight)


def test_the_largest_of_a_group_keeps_its_size() -> None:
    weight = torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    restored = dequantized(quantized(weight, INT8), torch.float32)
    for group, its in zip(groups_of(weight), groups_of(restored), strict=True):
        torch.testing.assert_close(its.abs().amax(dim=1), group.abs().amax(dim=1))


def test_zeros_stay_zeros() -> None:
    weight = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    weight[1], weight[0, 64:128], weight[2, 5] = 0.0, 0.0, 0.0
    small = check(weight)
    restored = dequantized(small, torch.float32)
    assert not restored[1].any()
    assert not restored[0, 64:128].any()
    assert restored[2, 5] == 0.0


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-36, 2e-36, 1e30, 3e38])
def test_numbers_at_the_ends_of_their_range(size: float) -> None:
    """What is too small for a scale becomes zero, and nothing becomes NaN or infinite."""
    weight = torch.tensor([[1.0, -1.0, 0.5, 0.0] * 20]) * size
    restored = dequantized(check(weight), torch.float32)
    assert restored.isfinite().all()
    assert (restored.abs() <= size * 1.001 + TINY / 2).all()


def test_groups_do_not_see_each_other() -> None:
    weight = torch.ones(2, 130)
    weight[0, 64:128] = 1e-3
    weight[1, 129] = 1e3
    restored = dequantized(quantized(weight, INT8), torch.float32)
    torch.testing.assert_close(restored[0], weight[0])
    torch.testing.assert_close(restored[1, :128], weight[1, :128])


# ------------------------------------------------------------------------------- whole models


def logits_of(model: CausalLM, kernels: Kernels, token_ids: list[int]) -> Tensor:
    """Of a prompt whose first half is computed at once, and then some tokens one by one."""

    def attention(cache: KVCache, metadata: AttentionMetadata) -> Attention:
        return attend_with(kernels, cache)(metadata, None)

    num_blocks = len(token_ids) // 4 + 2
    cache, sequence = nan_cache(model, num_blocks), Sequential(token_ids, range(1, num_blocks))
    steps = [len(token_ids) - 6, 1, 2, 1, 1, 1]
    return torch.cat([compute(model, cache, [(sequence, n)], attention)[0] for n in steps])


@pytest.mark.parametrize("name", ["torch", "compiled"])
@pytest.mark.parametrize("family", ["llama3", "llama_biases", "qwen2", "qwen3", "smollm3"])
def test_a_model_is_that_of_the_numbers_that_its_bytes_stand_for(
    tmp_path: Path, family: str, name: str
) -> None:
    """Bit for bit where kernels promise it, and not far from the model in full."""
    kernels, tokens = kernels_of(name), random_tokens(1, 60)
    directory = tiny_model_dir(tmp_path / "full", seed=4, gain=1.0, **FAMILIES[family])
    full = logits_of(load_model(directory, kernels), kernels, tokens)
    small = logits_of(load_model(directory, kernels, quantization=INT8), kernels, tokens)
    rounded = logits_of(_restored(directory, tmp_path / "rounded", kernels), kernels, tokens)
    assert small.isfinite().all()
    assert not torch.equal(small, full)
    assert (small - full).std() < 0.05 * full.std()
    if name == "torch":
        torch.testing.assert_close(small, rounded, atol=1e-4, rtol=0)
    else:
        assert torch.equal(small, rounded)


def _restored(directory: Path, target: Path, kernels: Kernels) -> CausalLM:
    """The model with its projections rounded to what 8 bits can say, and stored in full."""
    weights = load_file(directory / "model.safetensors")
    config = load_model(directory).config
    for name, weight in weights.items():
        if "_proj.weight" in name or name == "lm_head.weight":
            weights[name] = dequantized(quantized(weight, INT8), torch.float32)
    target.mkdir()
    if config.tie_word_embeddings:  # the embedding stays in full, the projection does not
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = dequantized(quantized(embedding, INT8), torch.float32)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    text = (directory / "config.json").read_text()
    (target / "config.json").write_text(
        text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    return load_model(target, kernels)


@pytest.mark.real_model
@pytest.mark.slow
def test_what_it_does_to_a_real_model() -> None:
    """The distribution of the next token after each of the 876 tokens of some texts and chats.

    Measured: a mean divergence of 0.0023 nats, and the same best token for 94.7% (of the other
    recorded texts: 0.0015 and 97.1%). It is another one only where two are nearly as likely: the
    best one's lead in log-probability was 0.24 at most.
    """
    kernels = kernels_of("compiled")
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)
    cases = {case.name: case for case in reference_cases()}
    names = [name for name in cases if not name.startswith("random")][:12]
    full, small = (
        load_model(files.directory, kernels, quantization=quantization)
        for quantization in (None, INT8)
    )
    divergences, agreements, leads = [], [], []
    for name in names:
        tokens = [*cases[name].prompt_token_ids, *cases[name].output_token_ids][:200]
        ours = logits_of(full, kernels, tokens).double().log_softmax(-1)
        its = logits_of(small, kernels, tokens).double().log_softmax(-1)
        divergences.append((ours.exp() * (ours - its)).sum(-1))
        agreements.append(ours.argmax(-1) == its.argmax(-1))
        best = ours.topk(2).values
        leads.append(best[:, 0] - best[:, 1])
    divergence, agrees = torch.cat(divergences), torch.cat(agreements)
    figures = f"mean {divergence.mean():.5f}, largest {divergence.max():.4f}"
    assert len(divergence) > 800
    assert 0 < divergence.mean() < 0.005, figures
    assert divergence.max() < 0.1, figures
    assert agrees.double().mean() > 0.93, agrees.double().mean()
    assert torch.cat(leads)[~agrees].max() < 0.5
