"""The settings of how nodes compute arrive where it is done, and KV goes from node to node."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster import LocalCluster, LocalConfig, NodeCompute, NodeCores, Topology
from cluster.torch_compute import torch_compute
from engine import EngineConfig, KernelsChoice, Quantization
from engine.attention import Attention
from engine.kernels import CompiledKernels, KernelsUnavailable
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.weights import ModelFiles, ModelStore
from protocol import GenerationRequest, Role, SamplingParams
from tests.engine.tiny import VOCAB_SIZE, tiny_model_dir

ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "torch": {"kernels": KernelsChoice.TORCH},
    "bfloat16 KV": {"kv_cache_dtype": "bfloat16"},
    "bfloat16 KV with torch": {"kv_cache_dtype": "bfloat16", "kernels": KernelsChoice.TORCH},
    "int8": {"quantization": Quantization.INT8},
    "int8 with torch": {"quantization": Quantization.INT8, "kernels": KernelsChoice.TORCH},
    "batch-invariant": {
        "batch_invariant": True,
        "kv_cache_dtype": "bfloat16",
        "quantization": Quantization.INT8,
    },
}
PROMPTS = [random.Random(n).choices(range(256), k=n) for n in (3, 16, 33, 70, 150)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = tiny_model_dir(tmp_path_factory.mktemp("tiny"), seed=2)
    return ModelStore(tmp_path_factory.mktemp("cache")).resolve(str(directory))


def config_of(engine: EngineConfig, **settings: Any) -> LocalConfig:
    return LocalConfig(engine=engine, max_model_len=256, num_blocks=64, **settings)


@contextlib.asynccontextmanager
async def serving(
    files: ModelFiles, config: LocalConfig
) -> AsyncIterator[tuple[LocalCluster, list[KVCache]]]:
    """A cluster, and the pools of its nodes."""
    make = torch_compute(files, config)
    pools: list[KVCache] = []

    def make_compute(role: Role) -> NodeCompute:
        compute = make(role)
        assert isinstance(compute.owner, tuple)
        pools.append(compute.owner[0])
        pools[-1].tensor.fill_(torch.nan)  # reading what was not written shows
        return compute

    cluster = LocalCluster(config, files, make_compute)
    await cluster.start()
    try:
        yield cluster, pools
    finally:
        await cluster.stop()


async def outputs(cluster: LocalCluster) -> list[list[int]]:
    """What all prompts are answered with, all at once."""

    async def answer(number: int, prompt: Sequence[int]) -> list[int]:
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=12),
            arrival_time=time.time(),
        )
        stream = await cluster.dispatcher.submit(request)
        return [token async for chunk in stream for token in chunk.token_ids]

    return await asyncio.gather(*(answer(n, prompt) for n, prompt in enumerate(PROMPTS)))


@pytest.mark.parametrize("name", ENGINES)
async def test_what_is_handed_off_is_what_one_node_computes_alone(
    files: ModelFiles, name: str
) -> None:
    engine = EngineConfig(**ENGINES[name])
    if engine.batch_invariant:
        _needs_compiler()
    async with serving(files, config_of(engine, topology=Topology.UNIFIED)) as (cluster, _):
        expected = await outputs(cluster)
    assert [len(tokens) for tokens in expected] == [12] * len(PROMPTS)
    assert all(0 <= token < VOCAB_SIZE for tokens in expected for token in tokens)
    async with serving(files, config_of(engine)) as (cluster, pools):
        assert await outputs(cluster) == expected
        assert [node.info.role for node in cluster.nodes] == [Role.PREFILL, Role.DECODE]
        for pool in pools:
            assert pool.dtype_name == engine.cache_dtype
            assert pool.tensor.dtype == getattr(torch, engine.cache_dtype)
            assert pool.tensor.isfinite().any()


async def test_half_the_memory_of_a_block(files: ModelFiles) -> None:
    sizes = []
    for dtype in ("float32", "bfloat16"):
        engine = EngineConfig(kv_cache_dtype=dtype)
        async with serving(files, config_of(engine)) as (_, pools):
            sizes.append(pools[0].bytes_per_block)
    assert sizes[0] == 2 * sizes[1]


async def test_nodes_with_other_weights_serve_another_model(files: ModelFiles) -> None:
    """They would not find each other, nor exchange KV."""
    fingerprints = set()
    for quantization in (None, Quantization.INT8):
        engine = EngineConfig(quantization=quantization)
        async with serving(files, config_of(engine)) as (cluster, _):
            (fingerprint,) = {node.info.fingerprint for node in cluster.nodes}
            fingerprints.add(fingerprint)
    assert fingerprints == {files.fingerprint, f"{files.fingerprint}-int8"}


async def test_nodes_of_one_process_have_as_many_threads_as_they_are_given(
    files: ModelFiles,
) -> None:
    seen: dict[Role, set[int]] = {Role.PREFILL: set(), Role.DECODE: set()}
    cores = {"prefill_cores": NodeCores(threads=3), "decode_cores": NodeCores(threads=2)}
    make = torch_compute(files, config := config_of(EngineConfig(), **cores))

    def make_compute(role: Role) -> NodeCompute:
        compute = make(role)
        assert isinstance(compute.runner, ModelRunner)
        compute.runner.model = Watched(compute.runner.model, seen[role])
        return compute

    cluster = LocalCluster(config, files, make_compute)
    await cluster.start()
    try:
        await outputs(cluster)
    finally:
        await cluster.stop()
    assert seen == {Role.PREFILL: {3}, Role.DECODE: {2}}


class Watched:
    """A model that notes with how many threads it computes."""

    def __init__(self, model: CausalLM, seen: set[int]) -> None:
        self.config = model.config
        self._model = model
        self._seen = seen

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        self._seen.add(torch.get_num_threads())
        return self._model.forward(input_ids, positions, attend, wanted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


def _needs_compiler() -> None:
    try:
        CompiledKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
