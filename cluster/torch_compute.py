"""Makes what computes on a node with torch. Importing this takes seconds."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import LocalConfig
from cluster.node_compute import NodeCompute, RunnerFactory
from cluster.pool_memory import pool_memory
from engine import EngineConfig
from engine.core_share import Cores, CoreShare, FixedCores
from engine.kernels import Kernels, choose_kernels
from engine.models import CausalLM, load_model
from engine.runner_factory import make_model_runner
from engine.weights import ModelFiles
from protocol import Role


@dataclass(frozen=True)
class TorchModel:
    """Weights in memory, and what they are computed with."""

    model: CausalLM
    kernels: Kernels

    @classmethod
    def load(cls, files: ModelFiles, engine: EngineConfig) -> TorchModel:
        """Raises as `torch_compute` does."""
        kernels = choose_kernels(engine)
        return cls(load_model(files.directory, kernels, quantization=engine.quantization), kernels)


def torch_compute(
    files: ModelFiles, config: LocalConfig, loaded: TorchModel | None = None
) -> RunnerFactory:
    """One copy of the weights for all nodes; each call makes a runner for a node of a role, with a
    KV pool of its own. `loaded`: by `config.engine`, by whoever has more than one cluster.

    Raises:
        ModelError: the weights cannot be loaded.
        ConfigError: the pool is too small for one request, or too large for this machine, or it
            cannot be computed here as it should.
    """
    if config.engine.is_cuda:
        from cluster.cuda_compute import cuda_compute

        return cuda_compute(files, config)
    return _cpu_compute(files, config, loaded)


def _cpu_compute(
    files: ModelFiles, config: LocalConfig, loaded: TorchModel | None
) -> RunnerFactory:
    pools = {role: config.kv_cache(files.config, role) for role in Role}
    shared_model = loaded or TorchModel.load(files, config.engine)
    shared = CoreShare()  # of all nodes that have no cores of their own: they compute together

    def make(role: Role) -> NodeCompute:
        kv_cache = pools[role]
        memory = pool_memory(config, kv_cache.num_bytes)
        runner = make_model_runner(
            shared_model.model,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            kv_cache_dtype=kv_cache.dtype,
            kernels=shared_model.kernels,
            cores=_cores(config.cores(role).threads) or shared,
            memory=None if memory is None else memory.buffer,
        )
        cache = runner.kv_cache
        fd = None if memory is None else memory.fd
        return NodeCompute(runner, cache.config, cache.base_address, (cache, memory), fd)

    return make


def _cores(threads: int | None) -> Cores | None:
    return None if threads is None else FixedCores(threads)
