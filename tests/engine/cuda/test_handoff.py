"""P and D over the stand-in: steps are launched ahead while blocks travel, and tokens are right.

The pools pass for memory of a GPU: whatever reads or writes them without their copier is told so.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import random
import time
from pathlib import Path

import pytest

from cluster import LocalCluster, LocalConfig, NodeCompute, Topology, TransferConfig
from engine import PipelinedEngine
from engine.cuda.runner import CudaRunner, CudaRunnerConfig
from engine.cuda.varlen_attention import VarlenBackend
from engine.kv_cache import KVCache
from engine.models import CausalLM
from engine.runner_factory import make_model_runner
from engine.weights import ModelFiles, ModelStore
from kv_transfer import Extents, Runs
from protocol import GenerationRequest, Role, SamplingParams
from scheduler import SchedulerKnobs
from tests.engine.batches import Drive, blocks, generate
from tests.engine.cuda import reference_kernels
from tests.engine.cuda.deferred_stream import DeferredStream
from tests.engine.tiny import VOCAB_SIZE

NUM_BLOCKS, BLOCK_SIZE = 40, 16


class HostCopier:
    """Of memory that the CPU can read after all."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_copied = 0
        self.num_threads = 0

    def enter_thread(self) -> None:
        self.num_threads += 1

    def read(self, address: int, runs: Runs) -> memoryview:
        self.num_read += 1
        return memoryview(b"".join(ctypes.string_at(address + at, size) for at, size in runs))

    def copy(self, extents: Extents, our_address: int, their_address: int) -> None:
        self.num_copied += 1
        for ours, theirs, size in extents.rows.tolist():
            ctypes.memmove(their_address + theirs, our_address + ours, size)


class Devices:
    """A runner on a device of its own for each node."""

    def __init__(self, model: CausalLM, config: LocalConfig) -> None:
        self._model = model
        self._config = config
        self.streams: list[DeferredStream] = []
        self.copier = HostCopier()

    def __call__(self, role: Role) -> NodeCompute:
        self.streams.append(stream := DeferredStream())
        kv_cache = KVCache(self._config.kv_cache(self._model.config, role))
        runner = CudaRunner(
            self._model,
            kv_cache,
            stream,
            VarlenBackend(kv_cache, 256, kernel=reference_kernels.varlen_attn),
            CudaRunnerConfig(
                max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, max_graph_seqs=4
            ),
        )
        runner.capture()
        device = dataclasses.replace(kv_cache.config, device="cuda:0")
        return NodeCompute(runner, device, kv_cache.base_address, (kv_cache,), copier=self.copier)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
            stream.check()


@pytest.fixture(scope="module")
def files(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelStore(tmp_path_factory.mktemp("cache")).resolve(str(tiny_dir))


@pytest.fixture
def launched_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that overlapped with the one before, whether it was launched ahead of its end.

    Read by nobody but tests.
    """
    decisions: list[bool] = []
    decide = PipelinedEngine._may_launch_ahead

    def noted(engine: PipelinedEngine, scheduled: object) -> bool:
        decisions.append(decide(engine, scheduled))  # type: ignore[arg-type]
        return decisions[-1]

    monkeypatch.setattr(PipelinedEngine, "_may_launch_ahead", noted)
    return decisions


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_handed_off_request_has_the_tokens_of_an_undisturbed_run(
    tiny_model: CausalLM,
    files: ModelFiles,
    launched_ahead: list[bool],
    async_scheduling: bool,
    layerwise: bool,
) -> None:
    config = LocalConfig(
        topology=Topology.DISAGGREGATED,
        max_model_len=256,
        num_blocks=NUM_BLOCKS,
        scheduler=SchedulerKnobs(
            max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=async_scheduling
        ),
        transfer=TransferConfig(layerwise=layerwise),
    )
    devices = Devices(tiny_model, config)
    cluster = LocalCluster(config, files, devices)
    await cluster.start()
    try:
        answers = await asyncio.gather(*(_answer(cluster, n) for n in range(7)))
        statuses = [node.host.status() for node in cluster.nodes]
    finally:
        await cluster.stop()
        devices.close()
    assert answers == [_expected(tiny_model, n) for n in range(7)]
    assert sum(status.num_prompt_tokens_loaded for status in statuses) > 0
    assert devices.copier.num_copied > 0
    assert devices.copier.num_read > 0  # for checksums
    assert devices.copier.num_threads > 0
    if async_scheduling:
        assert any(launched_ahead) is not layerwise
    else:
        assert not launched_ahead


def _prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(VOCAB_SIZE), k=20 + 17 * number)


def _sampling(number: int) -> SamplingParams:
    if number % 2:
        return SamplingParams(temperature=1.1, seed=number, max_tokens=12 + number)
    return SamplingParams(temperature=0.0, max_tokens=12 + number)


async def _answer(cluster: LocalCluster, number: int) -> list[int]:
    request = GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(_prompt(number)),
        sampling=_sampling(number),
        arrival_time=time.time(),
    )
    stream = await cluster.dispatcher.submit(request)
    return [token async for chunk in stream for token in chunk.token_ids]


def _expected(model: CausalLM, number: int) -> list[int]:
    runner = make_model_runner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    drive = Drive("a", _prompt(number), blocks(12), _sampling(number))
    generate(runner, [drive], num_tokens=_sampling(number).max_tokens)
    return drive.output
