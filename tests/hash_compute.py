"""Hash-model nodes in processes of their own: what such a process imports to make its runner."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time

from cluster import LocalConfig, NodeCompute, RunnerFactory
from cluster.pool_memory import pool_memory
from engine.weights import ModelFiles
from protocol import ModelError, Role
from tests.hash_model import HashRunner, hash_kv_cache


def hash_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    return _factory(config, step_s=0.0)


def slow_hash_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """Steps as long as those of a small model."""
    return _factory(config, step_s=0.02)


def broken_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    logging.getLogger(__name__).warning("about to fail")
    raise ModelError(f"{files.name} is broken", path="nowhere")


def cores_told_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """Says by way of an error what torch would find."""
    threads, cpus = os.environ["OMP_NUM_THREADS"], sorted(os.sched_getaffinity(0))
    raise ModelError(f"{threads} threads on {cpus}")


def dying_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    os._exit(7)


def babbling_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """Writes what is no message to its cluster, as soon as the node runs."""
    number = int(sys.argv[sys.argv.index("--fd") + 1])

    def babble() -> None:
        with socket.socket(fileno=os.dup(number)) as end:
            end.sendall(b"\xff" * 64)

    threading.Timer(0.5, babble).start()
    return _factory(config, step_s=0.0)


def endless_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """As one that loads a large model when the cluster is stopped."""
    while True:
        time.sleep(1.0)


def _factory(config: LocalConfig, step_s: float) -> RunnerFactory:
    def make(role: Role) -> NodeCompute:
        size = config.cache_size(role)
        assert size.num_blocks is not None
        kv_cache = hash_kv_cache(size.num_blocks + 1, size.block_size)
        memory = pool_memory(config, kv_cache.num_bytes)
        if memory is None:
            runner = HashRunner(kv_cache, step_s)
            return NodeCompute(runner, kv_cache, runner.pool.ctypes.data, runner.pool)
        runner = HashRunner(kv_cache, step_s, memory.buffer)
        return NodeCompute(runner, kv_cache, memory.address, memory, memory.fd)

    return make
