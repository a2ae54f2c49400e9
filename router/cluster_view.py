"""What the router knows of the cluster: nodes and statuses, cached prefixes, its own promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from directory import Directory, Gap, NodeRecord
from protocol import GenerationRequest, NodeInfo
from router.config import RouterConfig
from router.facts import RequestFacts, reusable_hashes
from router.load import LoadTracker
from router.pace import Pace
from router.path import Path
from router.prefix_index import PrefixIndex
from router.view import Contact, NodeView, RouterView


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
        self._pace = Pace()
        self._records: dict[str, tuple[NodeRecord, float]] = {}  # the last ones, and of when
        self._subscription = directory.subscribe()
        self.load = LoadTracker(clock)
        self.index = PrefixIndex(max_entries=config.max_index_entries)

    def refresh(self) -> tuple[NodeRecord, ...]:
        """Take in what the directory has heard since the last time; its records of now."""
        for news in self._subscription.drain():
            if isinstance(news, Gap):
                self.index.mark_gap(news.node_id, news.sequence)
            else:
                self.index.apply(news)
        now = self._clock()
        records = self._directory.nodes()  # later than `drain`: it drops older generations
        for record in records:
            self._take_in(record, now)
        return records

    def _take_in(self, record: NodeRecord, now: float) -> None:
        node_id = record.info.node_id
        taken_at = now - record.heartbeat_age_s
        self._records[node_id] = (record, taken_at)
        self.index.add_node(record.info)
        if record.status is not None:
            self.load.observed(record.status, taken_at=taken_at)
            self._pace.observed(record.status, taken_at=taken_at)

    def look(self, contacts: Mapping[str, Contact] | None = None) -> RouterView:
        """The cluster now, for a decision. Each look is a turn of its own."""
        view = RouterView(
            nodes=self.nodes(contacts),
            fingerprint=self._fingerprint,
            config=self._config,
            turn=self._turn,
        )
        self._turn += 1
        return view

    def nodes(self, contacts: Mapping[str, Contact] | None = None) -> tuple[NodeView, ...]:
        """All nodes, with what our connections to them tell; None: all of them are connected.

        A node that the directory has forgotten is still here while we are connected to it: its
        record was lost there, and it will register again.
        """
        records = self.refresh()
        listed = {record.info.node_id for record in records}
        kept = [
            self._records[node_id][0]
            for node_id, contact in (contacts or {}).items()
            if node_id not in listed and self._knows(contact.info)
        ]
        for node_id in self._records.keys() - listed - (contacts or {}).keys():
            self.forget_node(node_id)
        views = [self._view(record, contacts, kept=False) for record in records]
        views += [self._view(record, contacts, kept=True) for record in kept]
        return tuple(sorted(views, key=lambda view: view.node_id))

    def _knows(self, info: NodeInfo) -> bool:
        record, _ = self._records.get(info.node_id, (None, 0.0))
        return record is not None and record.info.generation == info.generation

    def _view(
        self, record: NodeRecord, contacts: Mapping[str, Contact] | None, *, kept: bool
    ) -> NodeView:
        node_id, now = record.info.node_id, self._clock()
        age_s = now - self._records[node_id][1]
        silence_s, connected = age_s, True
        if contacts is not None:
            contact = contacts.get(node_id)
            connected = contact is not None and contact.info.generation == record.info.generation
            if connected and contact is not None:
                silence_s = min(age_s, contact.heard_age_s)
        return NodeView(
            info=record.info,
            status=record.status,
            load=self.load.load(node_id),
            status_age_s=age_s,
            alive=kept or silence_s <= record.ttl_s,
            connected=connected,
            silence_s=0.0 if kept else silence_s,
            ttl_s=record.ttl_s,
            step_s=self._pace.step_s(node_id, now),
        )

    def facts(
        self,
        request: GenerationRequest,
        emitted: Sequence[int] = (),
        avoid: frozenset[str] = frozenset(),
        prefer: frozenset[str] = frozenset(),
        broken: frozenset[Path] = frozenset(),
        siblings_at: frozenset[str] = frozenset(),
    ) -> RequestFacts:
        """What a policy may know of the next attempt at the request."""
        hits = self.index.longest_prefix(reusable_hashes(request, emitted))
        return RequestFacts.of(
            request,
            prefix_hits=hits,
            emitted=emitted,
            avoid=avoid,
            prefer=prefer,
            broken=broken,
            siblings_at=siblings_at,
        )

    def forget_node(self, node_id: str) -> None:
        self.index.remove_node(node_id)
        self.load.forget_node(node_id)
        self._pace.forget_node(node_id)
        self._records.pop(node_id, None)

    def close(self) -> None:
        self._subscription.close()
