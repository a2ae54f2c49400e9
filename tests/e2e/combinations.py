"""The ways in which a cluster can be asked to make the same tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from cluster import LocalConfig, Topology, TransferConfig, TransportChoice
from scheduler import SchedulerKnobs

MAX_MODEL_LEN = 1600  # the longest prompt and its output
TINY_POOL = 98  # blocks; the longest request takes 97 of them
ROOMY_POOL = 800
_GOOD_ORDER = 1_006_649  # of all that were tried, it leads to the fewest and quickest ones


@dataclass(frozen=True)
class Combination:
    """One value of each factor."""

    topology: str  # unified, disaggregated (1 + 1), or 2+2
    concurrency: int
    prefix_caching: bool
    tiny_steps: bool
    tiny_pool: bool
    async_scheduling: bool
    transport: str  # memory within one process, or shm or nixl between those of the nodes
    layerwise: bool

    def __str__(self) -> str:
        return "-".join(
            [
                self.topology,
                f"{self.concurrency}at-once",
                "cache" if self.prefix_caching else "no-cache",
                *(["tiny-steps"] if self.tiny_steps else []),
                *(["tiny-pool"] if self.tiny_pool else []),
                *([] if self.async_scheduling else ["sync"]),
                *([self.transport] if self.processes else []),
                *(["layerwise"] if self.layerwise else []),
            ]
        )

    @property
    def possible(self) -> bool:
        """A request that is alone never has to make room for another one.

        A unified node hands nothing off; it is enough that it can have a process of its own.
        """
        if self.topology == "unified" and (self.layerwise or self.transport == "nixl"):
            return False
        return not (self.tiny_pool and self.concurrency == 1)

    @property
    def processes(self) -> bool:
        return self.transport != "memory"

    @property
    def must_preempt(self) -> bool:
        """Between two pools, as luck has it, all may find room."""
        return self.tiny_pool and self.topology != "2+2"

    def config(self) -> LocalConfig:
        nodes = 2 if self.topology == "2+2" else 1
        unified = self.topology == "unified"
        return LocalConfig(
            topology=Topology.UNIFIED if unified else Topology.DISAGGREGATED,
            processes=self.processes,
            num_prefill=nodes,
            num_decode=nodes,
            num_blocks=TINY_POOL if self.tiny_pool else ROOMY_POOL,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=self.prefix_caching,
            scheduler=SchedulerKnobs(
                max_num_seqs=16,
                max_num_batched_tokens=48 if self.tiny_steps else 512,
                # No headroom is kept for running requests: they have to make room for each other.
                max_parked_blocks=TINY_POOL if self.tiny_pool else None,
                async_scheduling=self.async_scheduling,
            ),
            transfer=TransferConfig(
                transport=TransportChoice(self.transport), layerwise=self.layerwise
            ),
        )


def all_combinations() -> list[Combination]:
    yes_or_no = (True, False)
    values = itertools.product(
        ("unified", "disaggregated", "2+2"),
        (1, 16),
        *[yes_or_no] * 4,
        ("memory", "shm", "nixl"),
        yes_or_no,
    )
    return [c for c in itertools.starmap(Combination, values) if c.possible]


def verified_combinations() -> list[Combination]:
    """Every way to compute the tokens, and of the ways in which KV travels a cover for each two."""
    travels = {c: c.processes or c.layerwise for c in all_combinations()}
    at_home = [c for c, does in travels.items() if not does]
    return at_home + pairwise_cover([c for c, does in travels.items() if does])


def pairwise_cover(of: Sequence[Combination] | None = None) -> list[Combination]:
    """Few combinations in which each two values of different factors meet; found greedily."""
    candidates = list(of or all_combinations())
    random.Random(_GOOD_ORDER).shuffle(candidates)
    pairs = {candidate: set(pairs_of(candidate)) for candidate in candidates}
    missing = set().union(*pairs.values())
    cover = []
    while missing:
        best = max(candidates, key=lambda candidate: len(missing & pairs[candidate]))
        cover.append(best)
        missing -= pairs[best]
    return cover


def pairs_of(combination: Combination) -> Iterator[tuple[tuple[str, object], tuple[str, object]]]:
    values = [(f.name, getattr(combination, f.name)) for f in fields(combination)]
    return itertools.combinations(values, 2)
