"""One way, taken: a cluster from its start to its end, under observation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.eventually import eventually
from cluster.exactness.asking import Asking
from cluster.exactness.comparison import LogitSink
from cluster.exactness.evidence import Traces
from cluster.exactness.layer_transport import LayerTransport
from cluster.exactness.prompts import Prompt
from cluster.exactness.watched_runner import WatchedRunner
from cluster.exactness.ways import Way
from cluster.local import LocalCluster
from cluster.node_compute import NodeCompute, RunnerFactory
from engine import PipelinedEngine
from engine.model_runner import ModelRunner
from engine.weights import ModelFiles
from kv_transfer import MemoryHub
from protocol import Role

_REST_S = 10.0  # for the ends of hand-offs whose requests have ended


@dataclass(frozen=True)
class TakenWay:
    """What came out of it."""

    answers: Mapping[str, list[int]]  # tokens, by request
    traces: Traces

    @classmethod
    async def take(
        cls,
        way: Way,
        files: ModelFiles,
        make_compute: RunnerFactory,
        prompts: Sequence[Prompt],
        logits: LogitSink,
    ) -> TakenWay:
        """Returns when nothing of the cluster is left.

        Raises:
            ConfigError: it needs something that is not here.
            KvrelayError: a request could not be answered.
        """
        watched = _Watched(way, files, make_compute, logits)
        cluster = watched.cluster
        asking = Asking(cluster, prompts)
        try:
            await cluster.start()
            await way.manner(asking)
            await eventually(lambda: _at_rest(cluster), within_s=_REST_S)
            traces = await watched.traces(len(prompts))
        finally:
            await _stop(cluster)
        return cls(asking.answers, traces)


class _Watched:
    """A cluster whose runners, and maybe transports, are watched."""

    def __init__(
        self, way: Way, files: ModelFiles, make_compute: RunnerFactory, logits: LogitSink
    ) -> None:
        self._make_compute = make_compute
        self._step_s = way.step_s
        self._logits = logits
        self._runners: list[WatchedRunner] = []
        self._transports: list[LayerTransport] = []
        self.cluster = LocalCluster(
            way.config,
            files,
            self._compute,
            make_transport=self._transport if way.watches_layers else None,
        )

    def _compute(self, role: Role) -> NodeCompute:
        compute = self._make_compute(role)
        assert isinstance(compute.runner, ModelRunner)
        self._runners.append(WatchedRunner(compute.runner, role, self._logits, self._step_s))
        return replace(compute, runner=self._runners[-1])

    def _transport(self, hub: MemoryHub, node_id: str) -> LayerTransport:
        """Of the node whose runner was made last."""
        self._transports.append(LayerTransport(hub, node_id, self._runners[-1]))
        return self._transports[-1]

    async def traces(self, num_prompts: int) -> Traces:
        nodes = self.cluster.nodes
        engines = [node.host.engine for node in nodes]
        return Traces(
            num_prompts=num_prompts,
            infos=[node.info for node in nodes],
            statuses=[node.host.status() for node in nodes],
            runners=self._runners,
            planned_ahead=[e.num_planned_ahead for e in engines if isinstance(e, PipelinedEngine)],
            early_writes=[transport.num_early for transport in self._transports],
            cluster=await self.cluster.dispatcher.status(),
        )


async def _stop(cluster: LocalCluster) -> None:
    """To the end, even if we are cancelled: its threads would go on."""
    stopping = asyncio.create_task(cluster.stop())
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise


def _at_rest(cluster: LocalCluster) -> bool:
    statuses = [node.host.status() for node in cluster.nodes]
    return not any(s.transfers.active or s.num_running or s.num_waiting for s in statuses)
