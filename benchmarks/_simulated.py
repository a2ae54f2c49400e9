"""Steps that take a given time and no CPU, so that what is left is what everything else costs."""

import time
from collections.abc import Callable

import numpy as np

from cluster import LocalConfig, NodeCompute, RunnerFactory
from cluster.pool_memory import pool_memory
from engine.weights import ModelFiles
from protocol import Role
from scheduler import ModelRunnerOutput, SchedulerOutput

STEP_S = 0.02


class SimulatedRunner:
    """Sleeps, and samples one token for each request whose tokens are all computed."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._missing: dict[str, int] = {}  # tokens of each request that are not computed

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._missing.pop(request_id, None)
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            self._missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        if step.num_scheduled_tokens:
            time.sleep(self._step_s)
        sampled = {}
        for request_id, count in step.num_scheduled_tokens.items():
            left = self._missing[request_id] - count
            if not left:
                sampled[request_id] = [1000]
            self._missing[request_id] = left or 1
        return ModelRunnerOutput(sampled)


def simulated_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    """A `RunnerFactory` for nodes of any kind, with pools of the model's own size."""
    return _factory(files, config, STEP_S)


def instant_compute(files: ModelFiles, config: LocalConfig) -> RunnerFactory:
    return _factory(files, config, 0.0)


def _factory(
    files: ModelFiles, config: LocalConfig, step_s: float
) -> Callable[[Role], NodeCompute]:
    def make(role: Role) -> NodeCompute:
        kv_cache = config.kv_cache(files.config, role)
        memory = pool_memory(config, kv_cache.num_bytes)
        runner = SimulatedRunner(step_s)
        if memory is None:
            pool = np.zeros(kv_cache.num_bytes, np.uint8)
            return NodeCompute(runner, kv_cache, pool.ctypes.data, pool)
        return NodeCompute(runner, kv_cache, memory.address, memory, memory.fd)

    return make
