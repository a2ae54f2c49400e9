"""What the router knows of the cluster: nodes and statuses, cached prefixes, its own promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from directory import Directory, Gap
from protocol import GenerationRequest
from router.config import RouterConfig
from router.facts import RequestFacts, reusable_hashes
from router.load import LoadTracker
from router.prefix_index import PrefixIndex
from router.view import NodeView, RouterView


class ClusterView:
    """Follows the directory and makes a `RouterView` for each decision."""

    def __init__(
        self,
        directory: Directory,
        fingerprint: str,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._fingerprint = fingerprint
        self._config = config
        self._clock = clock
        self._turn = 0
        self._subscription = directory.subscribe()
        self.load = LoadTracker(clock)
        self.index = PrefixIndex(max_entries=config.max_index_entries)

    def refresh(self) -> None:
        """Take in what the directory has heard since the last time."""
        for news in self._subscription.drain():
            if isinstance(news, Gap):
                self.index.mark_gap(news.node_id, news.sequence)
            else:
                self.index.apply(news)
        now = self._clock()
        for record in self._directory.nodes():  # later than `drain`: it drops older generations
            self.index.add_node(record.info)
            if record.status is not None:
                taken_at = now - record.heartbeat_age_s
                self.load.observed(record.status, taken_at=taken_at)

    def look(self) -> RouterView:
        """The cluster now. Each look is a turn of its own."""
        self.refresh()
        view = RouterView(
            nodes=tuple(
                NodeView(
                    info=record.info,
                    status=record.status,
                    load=self.load.load(record.info.node_id),
                    status_age_s=record.heartbeat_age_s,
                    alive=record.alive,
                )
                for record in self._directory.nodes()
            ),
            fingerprint=self._fingerprint,
            config=self._config,
            turn=self._turn,
        )
        self._turn += 1
        return view

    def facts(
        self,
        request: GenerationRequest,
        emitted: Sequence[int] = (),
        avoid: frozenset[str] = frozenset(),
    ) -> RequestFacts:
        """What a policy may know of the next attempt at the request."""
        hits = self.index.longest_prefix(reusable_hashes(request, emitted))
        return RequestFacts.of(request, prefix_hits=hits, emitted=emitted, avoid=avoid)

    def forget_node(self, node_id: str) -> None:
        self.index.remove_node(node_id)
        self.load.forget_node(node_id)

    def close(self) -> None:
        self._subscription.close()
