"""Makes what computes on a node with a CUDA device. Importing this takes seconds."""

from __future__ import annotations

from cluster.config import LocalConfig
from cluster.node_compute import NodeCompute, RunnerFactory
from engine.cuda import (
    AttentionChoice,
    CudaBlockCopier,
    CudaRunnerConfig,
    CudaStream,
    load_cuda_model,
    make_cuda_runner,
)
from engine.weights import ModelFiles
from protocol import Role


def cuda_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """One copy of the weights for all nodes of this process, which share the device; each call
    makes a runner for a node of a role, with a KV pool and a stream of its own.

    Raises:
        ModelError: the weights cannot be loaded.
        ConfigError: there is no such device, or nothing that computes attention there; or the pool
            is too small for one request.
    """
    engine = config.engine
    stream = CudaStream(engine.device)
    pools = {role: config.kv_cache(files.config, role) for role in Role}
    model = load_cuda_model(files.directory, stream, engine.model_dtype)
    copier = CudaBlockCopier(stream.device)

    def make(role: Role) -> NodeCompute:
        pool = pools[role]
        limits = config.scheduler_config(role, files.config, pool.num_blocks - 1)
        runner = make_cuda_runner(
            model,
            CudaStream(str(stream.device)),
            CudaRunnerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
            ),
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            dtype=pool.dtype,
            attention=AttentionChoice(engine.attention),
        )
        cache = runner.kv_cache
        return NodeCompute(runner, cache.config, cache.base_address, cache, copier=copier)

    return make
