"""Makes what computes on a node with torch. Importing this takes seconds."""

from __future__ import annotations

from cluster.config import LocalConfig
from cluster.node_compute import NodeCompute, RunnerFactory
from cluster.pool_memory import pool_memory
from engine.core_share import CoreShare
from engine.models import load_model
from engine.runner_factory import make_model_runner
from engine.weights import ModelFiles
from protocol import Role


def torch_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """One copy of the weights for all nodes; each call makes a runner for a node of a role, with a
    KV pool of its own.

    Raises:
        ModelError: the weights cannot be loaded.
        ConfigError: the pool is too small for one request, or too large for this machine.
    """
    pools = {role: config.kv_cache(files.config, role) for role in Role}
    model = load_model(files.directory)
    cores = CoreShare()  # one for all nodes, which compute at the same time

    def make(role: Role) -> NodeCompute:
        kv_cache = pools[role]
        memory = pool_memory(config, kv_cache.num_bytes)
        runner = make_model_runner(
            model,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            cores=cores,
            memory=None if memory is None else memory.buffer,
        )
        cache = runner.kv_cache
        fd = None if memory is None else memory.fd
        return NodeCompute(runner, cache.config, cache.base_address, (cache, memory), fd)

    return make
