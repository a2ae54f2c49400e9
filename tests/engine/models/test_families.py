"""Each family gives the logits of transformers in float32, however its steps are composed.

The cache is full of NaN where nothing was written, and texts are longer than windows and than the
context before rope scaling.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.attention import CompiledAttention, TorchAttention
from engine.kernels import CompiledKernels, KernelsUnavailable, TorchKernels
from engine.kv_cache import KVCache
from engine.models import CausalLM, load_model
from tests.engine.conftest import Reference, reference_for
from tests.engine.models.families import FAMILIES, OLD_CONTEXT, WINDOW
from tests.engine.paged import (
    TOLERANCE,
    AttentionFactory,
    Sequential,
    assert_close,
    compute,
    nan_cache,
    random_tokens,
)
from tests.engine.tiny import tiny_model_dir

LONG = 150


@dataclass(frozen=True)
class Backend:
    """What a model computes with."""

    load: Callable[[Path], CausalLM]
    attention: AttentionFactory


def torch_backend() -> Backend:
    return Backend(lambda directory: load_model(directory, TorchKernels()), TorchAttention)


def compiled_backend() -> Backend:
    try:
        kernels = CompiledKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    return Backend(
        lambda directory: load_model(directory, kernels),
        lambda cache, metadata: CompiledAttention(kernels, cache, metadata),
    )


@dataclass(frozen=True)
class Family:
    """One model in our code and in transformers'."""

    model: CausalLM
    reference: Reference
    attention: AttentionFactory

    def compute(self, cache: KVCache, pieces: list[tuple[Sequential, int]]) -> list[torch.Tensor]:
        return compute(self.model, cache, pieces, self.attention)


@pytest.fixture(scope="module", params=[torch_backend, compiled_backend], ids=["torch", "compiled"])
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param()
    return made


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(
    request: pytest.FixtureRequest, backend: Backend, tmp_path_factory: pytest.TempPathFactory
) -> Family:
    directory = tmp_path_factory.mktemp("family")
    tiny_model_dir(directory, seed=4, gain=1.0, **FAMILIES[request.param])
    return Family(backend.load(directory), reference_for(directory), backend.attention)


def test_prefill_at_once(family: Family) -> None:
    tokens = random_tokens(1, LONG)
    (logits,) = family.compute(nan_cache(family.model), [(Sequential(tokens, range(1, 60)), LONG)])
    assert_close(logits, family.reference(tokens))


def test_chunked_prefill_and_decode_over_scrambled_blocks(family: Family) -> None:
    """Steps end before, at and behind the window and the old context."""
    tokens = random_tokens(2, LONG)
    sequence = Sequential(tokens, random.Random(3).sample(range(1, 128), 40))
    cache = nan_cache(family.model)
    steps = [5, 1, WINDOW - 6, 1, 1, 11, 1, OLD_CONTEXT - 20, 1, 50, 1, 1]
    steps.append(LONG - sum(steps))
    logits = [family.compute(cache, [(sequence, count)])[0] for count in steps]
    assert_close(torch.cat(logits), family.reference(tokens))


def test_ragged_batch_of_chunks_and_decodes(family: Family) -> None:
    cache, lengths = nan_cache(family.model), [5, 40, WINDOW, 61, 3, OLD_CONTEXT, 110]
    block_ids = random.Random(5).sample(range(1, 128), 127)
    sequences = []
    for index, length in enumerate(lengths):
        own = [block_ids.pop() for _ in range(length // 4 + 1)]
        sequences.append(Sequential(random_tokens(index, length + 1), own))
    for sequence, length in zip(sequences, lengths, strict=True):
        family.compute(cache, [(sequence, length - 12 if length > 30 else length)])
    pieces = [(s, 12 if length > 30 else 1) for s, length in zip(sequences, lengths, strict=True)]
    for logits, (sequence, count) in zip(family.compute(cache, pieces), pieces, strict=True):
        expected = family.reference(sequence.token_ids[: sequence.num_computed])[-count:]
        assert_close(logits, expected)


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_random_steps(family: Family, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    block_ids = random.Random(data.draw(st.integers(0, 1000))).sample(range(1, 128), 127)
    sequences = [
        Sequential(random_tokens(index, length), block_ids[index * 16 :][:16])
        for index, length in enumerate(lengths)
    ]
    expected = [family.reference(sequence.token_ids) for sequence in sequences]
    cache = nan_cache(family.model)
    while missing := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        chosen = data.draw(st.lists(st.sampled_from(missing), unique_by=id, min_size=1))
        pieces = [(s, data.draw(st.integers(1, len(s.token_ids) - s.num_computed))) for s in chosen]
        starts = [s.num_computed for s in chosen]
        logits = family.compute(cache, pieces)
        for rows, (s, count), start in zip(logits, pieces, starts, strict=True):
            index = next(i for i, other in enumerate(sequences) if other is s)
            assert_close(rows, expected[index][start : start + count])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("llama3.1", {"rope_scaling": None}),
        ("llama_linear", {"rope_scaling": None}),
        ("llama_yarn", {"rope_scaling": None}),
        ("llama_yarn", {"rope_scaling": FAMILIES["llama_yarn_mscale"]["rope_scaling"]}),
        ("llama_longrope", {"rope_scaling": None}),
        ("smollm3", {"no_rope_layer_interval": 100}),
        ("smollm3_window", {"use_sliding_window": False}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": WINDOW + 1}),
        ("qwen2_window", {"max_window_layers": 2}),
        ("qwen3_window", {"use_sliding_window": False}),
    ],
)
def test_what_is_special_shows_in_the_logits(
    tmp_path: Path, name: str, plain: dict[str, object]
) -> None:
    """Or else the other tests would find nothing if it were left out."""
    logits, tokens = [], random_tokens(1, LONG)
    for folder, changes in (("special", {}), ("plain", plain)):
        overrides = FAMILIES[name] | changes
        directory = tiny_model_dir(tmp_path / folder, seed=4, gain=1.0, **overrides)
        model = load_model(directory)
        sequence = Sequential(tokens, range(1, 60))
        logits += compute(model, nan_cache(model), [(sequence, LONG)])
    assert (logits[0] - logits[1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_weights_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """They become float32 without loss; what is stored is what counts."""
    directory = tiny_model_dir(tmp_path, seed=5, gain=1.0, **FAMILIES["qwen3_biases"])
    weights = load_file(directory / "model.safetensors")
    halved = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(halved, directory / "model.safetensors", {"format": "pt"})
    model, tokens = load_model(directory), random_tokens(1, 40)
    cache, sequence = nan_cache(model), Sequential(tokens, range(1, 20))
    logits = [compute(model, cache, [(sequence, count)])[0] for count in (30, 1, 9)]
    assert_close(torch.cat(logits), reference_for(directory)(tokens))
