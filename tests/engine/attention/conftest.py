"""Attention in each way that there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.attention import Attention, AttentionMetadata, attend_with
from engine.kernels import CompiledKernels, Kernels, KernelsUnavailable, TorchKernels
from engine.kv_cache import KVCache

MakeAttention = Callable[..., Attention]


def attention_with(kernels: Kernels) -> MakeAttention:
    """Makes the attention of a step of a cache, its metadata and perhaps an `on_layer`."""

    def make(
        cache: KVCache, metadata: AttentionMetadata, on_layer: Callable[[int], None] | None = None
    ) -> Attention:
        return attend_with(kernels, cache)(metadata, on_layer)

    return make


@pytest.fixture(scope="session")
def compiled() -> MakeAttention:
    try:
        return attention_with(CompiledKernels(batch_invariant=True))
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["torch", "compiled"])
def attention(request: pytest.FixtureRequest) -> MakeAttention:
    if request.param == "torch":
        return attention_with(TorchKernels())
    made: MakeAttention = request.getfixturevalue("compiled")
    return made
