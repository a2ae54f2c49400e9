"""The ways in which the same logits can come about.

reference    one request at a time, its whole prompt in a step, each step planned after the last
others       in company, in pieces, from caches, again, elsewhere, along other paths …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cluster.config import CacheSize, LocalConfig, NodeCores, Topology
from cluster.exactness import evidence
from cluster.exactness.asking import (
    Manner,
    at_once,
    one_by_one,
    twice,
    while_nodes_leave,
    while_running_ones_make_room,
)
from cluster.exactness.evidence import FindEvidence, all_of
from cluster.exactness.prompts import ExactnessConfig, Prompt
from cluster.transfer_config import TransferConfig, TransportChoice
from router import RouterConfig
from scheduler import SchedulerKnobs

_BLOCK_SIZE = 16
_BUDGETS = (16, 48, 100)  # tokens of a step: one block, several, and no whole number of them
_SEATS = 64
_STEP_S = 0.01  # a small model would have answered before anybody hears of it


@dataclass(frozen=True, kw_only=True)
class Way:
    """A cluster, how it is asked, and what must have happened then."""

    name: str
    config: LocalConfig
    manner: Manner = at_once
    find_evidence: FindEvidence
    step_s: float = 0.0  # a step takes at least so long, so that something can happen meanwhile
    watches_layers: bool = False  # of a cluster whose transport is memory
    optional: bool = False  # it needs what is not on every machine


@dataclass(frozen=True)
class _Plan:
    """What all clusters have in common."""

    config: ExactnessConfig
    prompts: Sequence[Prompt]

    @property
    def longest(self) -> int:
        return max(prompt.num_tokens for prompt in self.prompts)

    @property
    def total(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def room(self) -> int:
        """Blocks for all requests at once, and for what is cached of them."""
        return sum(_blocks(prompt.num_tokens) + 1 for prompt in self.prompts)

    @property
    def little_room(self) -> int:
        """Blocks for the longest request, but not for all that would like to run."""
        return max(_blocks(self.longest) + 1, self.room // 6)

    def knobs(self, **changes: Any) -> SchedulerKnobs:
        usual = {"max_num_seqs": _SEATS, "max_num_batched_tokens": max(512, self.longest)}
        return SchedulerKnobs(**(usual | {"async_scheduling": False} | changes))

    def unified(self, knobs: SchedulerKnobs | None = None, **changes: Any) -> LocalConfig:
        return self._cluster(knobs, topology=Topology.UNIFIED, **changes)

    def disaggregated(
        self,
        knobs: SchedulerKnobs | None = None,
        transport: TransportChoice = TransportChoice.MEMORY,
        *,
        layerwise: bool = False,
        **changes: Any,
    ) -> LocalConfig:
        transfer = TransferConfig(transport=transport, layerwise=layerwise)
        return self._cluster(knobs, transfer=transfer, **changes)

    def _cluster(self, knobs: SchedulerKnobs | None, **changes: Any) -> LocalConfig:
        cores = NodeCores(threads=self.config.threads)
        usual: dict[str, Any] = {
            "prefill_cores": cores,
            "decode_cores": cores,
            "block_size": _BLOCK_SIZE,
            "num_blocks": self.room,
            "max_model_len": self.longest,
            "enable_prefix_caching": False,
            "scheduler": knobs or self.knobs(),
            "engine": self.config.invariant_engine,
        }
        return LocalConfig(**(usual | changes))


def reference_way(config: ExactnessConfig, prompts: Sequence[Prompt]) -> Way:
    """Undisturbed. Raises ConfigError: an engine cannot be batch-invariant as it should."""
    plan = _Plan(config, prompts)
    knobs = plan.knobs(max_num_seqs=1, max_num_batched_tokens=plan.longest)
    return Way(
        name="reference",
        config=plan.unified(knobs),
        manner=one_by_one,
        find_evidence=evidence.alone,
    )


def all_ways(config: ExactnessConfig, prompts: Sequence[Prompt]) -> list[Way]:
    """All but the reference."""
    plan = _Plan(config, prompts)
    return [*_in_one_node(plan), *_through_hand_offs(plan)]


def _in_one_node(plan: _Plan) -> Iterator[Way]:
    yield Way(name="batched", config=plan.unified(), find_evidence=evidence.batched)
    for budget in _BUDGETS:
        knobs = plan.knobs(max_num_seqs=budget, max_num_scheduled_tokens=budget)
        yield Way(
            name=f"chunks of {budget}",
            config=plan.unified(knobs),
            find_evidence=evidence.in_pieces,
        )
    yield Way(
        name="async scheduling",
        config=plan.unified(plan.knobs(async_scheduling=True)),
        find_evidence=evidence.planned_ahead,
    )
    yield Way(
        name="prefix cache",
        config=plan.unified(enable_prefix_caching=True),
        manner=twice,
        find_evidence=evidence.cached,
    )
    # Who is amid a prompt may have to make room, too.
    crowded = plan.knobs(max_num_scheduled_tokens=_SEATS, scheduler_reserve_full_isl=False)
    yield Way(
        name="preempted",
        config=plan.unified(crowded, num_blocks=plan.little_room),
        find_evidence=evidence.preempted,
    )
    yield Way(
        name="all preempted at once",
        config=plan.unified(),
        manner=while_running_ones_make_room,
        step_s=_STEP_S,
        find_evidence=evidence.all_preempted,
    )
    usual = plan.config.threads or torch.get_num_threads()
    other = 1 if usual > 1 else 2
    yield Way(
        name=f"{other} thread{'s' * (other > 1)}",
        config=plan.unified(decode_cores=NodeCores(threads=other)),
        find_evidence=evidence.threads_other_than(usual),
    )
    yield Way(
        name="blocks of 64",
        config=plan.unified(block_size=64),
        find_evidence=evidence.blocks_of([64]),
    )


def _through_hand_offs(plan: _Plan) -> Iterator[Way]:
    yield Way(name="handed off", config=plan.disaggregated(), find_evidence=evidence.handed_off)
    for transport in (TransportChoice.SHM, TransportChoice.NIXL):
        yield Way(
            name=f"handed off by {transport}",
            config=plan.disaggregated(transport=transport),
            find_evidence=all_of(evidence.handed_off, evidence.over(transport)),
            optional=transport is TransportChoice.NIXL,
        )
    # Whole prompts, so that KV that leaves before the end of a step is of that very step.
    knobs = plan.knobs(max_num_batched_tokens=plan.total)
    yield Way(
        name="layer by layer",
        config=plan.disaggregated(knobs, layerwise=True),
        find_evidence=all_of(evidence.handed_off, evidence.layer_by_layer),
        watches_layers=True,
    )
    sizes = [32, 48]
    caches = [CacheSize(block_size=size, num_blocks=plan.room) for size in sizes]
    yield Way(
        name="to other blocks",
        config=plan.disaggregated(prefill_cache=caches[0], decode_cache=caches[1]),
        find_evidence=all_of(evidence.handed_off, evidence.blocks_of(sizes)),
    )
    little = plan.little_room
    yield Way(
        name="handed off, preempted",
        config=plan.disaggregated(
            # No headroom is kept for running requests: they have to make room for each other.
            plan.knobs(max_parked_blocks=little),
            decode_cache=CacheSize(block_size=_BLOCK_SIZE, num_blocks=little),
        ),
        manner=while_running_ones_make_room,
        step_s=_STEP_S,
        find_evidence=all_of(evidence.handed_off, evidence.preempted_after_hand_off),
    )
    yield Way(
        name="migrated",
        config=plan.disaggregated(
            num_decode=2,
            router=RouterConfig(policy="round_robin", retry_burst=len(plan.prompts)),
        ),
        manner=while_nodes_leave,
        step_s=_STEP_S,
        find_evidence=all_of(evidence.handed_off, evidence.migrated),
    )
    crowded = plan.disaggregated(
        plan.knobs(async_scheduling=True, max_num_scheduled_tokens=_SEATS + _BLOCK_SIZE),
        num_prefill=2,
        num_decode=2,
        enable_prefix_caching=True,
    )
    yield Way(
        name="2 P and 2 D, all at once",
        config=replace(crowded, router=RouterConfig(policy="round_robin")),
        manner=twice,
        find_evidence=all_of(
            evidence.handed_off, evidence.spread, evidence.in_pieces, evidence.planned_ahead
        ),
    )


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)
