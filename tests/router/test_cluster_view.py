from __future__ import annotations

import pytest

from directory import MemoryDirectory
from protocol import (
    BlockEventBatch,
    BlockRemoved,
    BlockStored,
    CacheSnapshot,
    GenerationRequest,
    HandoffTicket,
    NodeInfo,
    Role,
    SamplingParams,
    hash_chain,
)
from router import NodeLoad, RouterConfig
from router.cluster_view import ClusterView
from router.view import Contact
from tests.router.nodes import FINGERPRINT, make_info, make_status

PROMPT = tuple(range(100))
HASHES = tuple(hash_chain(PROMPT))  # six full blocks
LOAD = NodeLoad(queued_tokens=100, requests=1)
TICKET = HandoffTicket("r", 0)


class Watched:
    """A directory with a router that looks at it, on one clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.directory = MemoryDirectory(clock=lambda: self.now)
        self.view = ClusterView(self.directory, FINGERPRINT, RouterConfig(), clock=lambda: self.now)

    def register(self, node_id: str = "p0", *, generation: int = 0) -> NodeInfo:
        info = make_info(node_id, Role.PREFILL, generation=generation)
        self.directory.register(info, ttl_s=3.0)
        return info

    def publish(self, sequence: int, *events: BlockStored | BlockRemoved) -> None:
        self.directory.publish(BlockEventBatch("p0", sequence, events), generation=0)

    def snapshot(self, sequence: int, hashes: tuple[bytes, ...] = ()) -> None:
        parents = (None, *hashes[:-1])[: len(hashes)]
        self.view.index.apply_snapshot(CacheSnapshot("p0", sequence, hashes, parents))

    def hits(self, emitted: tuple[int, ...] = ()) -> int:
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=20),
            arrival_time=0.0,
        )
        self.view.refresh()
        facts = self.view.facts(request, emitted)
        assert facts.num_tokens == len(PROMPT) + len(emitted)
        assert facts.max_new_tokens == 20 - len(emitted)
        return facts.cached_tokens.get("p0", 0)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nodes_are_seen_with_what_they_said(watched: Watched) -> None:
    info = watched.register()
    (node,) = watched.view.look().nodes
    assert (node.info, node.status, node.alive) == (info, None, True)
    watched.directory.heartbeat(make_status(info, num_running=3), generation=0)
    watched.now += 2.0
    (node,) = watched.view.look().nodes
    assert node.status is not None
    assert (node.status.num_running, node.status_age_s, node.alive) == (3, 2.0, True)
    watched.now += 2.0
    assert not watched.view.look().nodes[0].alive
    watched.directory.deregister("p0", generation=0)
    assert watched.view.look().nodes == ()


def test_each_look_is_a_turn_of_its_own(watched: Watched) -> None:
    assert [watched.view.look().turn for _ in range(3)] == [0, 1, 2]


def test_promises_count_until_a_status_shows_them(watched: Watched) -> None:
    info = watched.register()
    watched.directory.heartbeat(make_status(info), generation=0)
    watched.now += 1.0
    watched.view.load.sent(TICKET, {"p0": LOAD})
    assert watched.view.look().nodes[0].load == LOAD
    watched.now += 1.0
    watched.view.load.taken(TICKET, "p0")
    watched.now += 1.0
    assert watched.view.look().nodes[0].load == LOAD  # the status is from before
    watched.directory.heartbeat(make_status(info), generation=0)
    assert watched.view.look().nodes[0].load == NodeLoad()


def test_cached_prefixes_are_followed(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    assert watched.view.index.needs_snapshot() == {"p0"}
    watched.snapshot(0)
    watched.publish(1, BlockStored(HASHES[:4], None))
    assert watched.hits() == 64
    watched.publish(2, BlockRemoved(HASHES[3:4]))
    assert watched.hits() == 48
    assert watched.view.index.needs_snapshot() == frozenset()


def test_emitted_tokens_belong_to_the_prefix(watched: Watched) -> None:
    emitted = tuple(range(500, 508))
    watched.register()
    watched.view.refresh()
    watched.snapshot(0, tuple(hash_chain([*PROMPT, *emitted, *range(20)])))
    assert watched.hits() == 96
    assert watched.hits((*emitted, *range(4), 0)) == 112


def test_the_last_token_is_never_taken_from_a_cache(watched: Watched) -> None:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=PROMPT[:96],
        sampling=SamplingParams(),
        arrival_time=0.0,
    )
    watched.register()
    watched.view.refresh()
    watched.snapshot(0, HASHES)
    assert watched.view.facts(request).cached_tokens == {"p0": 80}


def test_a_gap_asks_for_a_snapshot(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    watched.snapshot(0)
    watched.publish(1, BlockStored(HASHES[:2], None))
    watched.publish(3, BlockStored(HASHES[3:4], HASHES[2]))
    assert watched.hits() == 32  # the last that is known, as a hint
    assert watched.view.index.needs_snapshot() == {"p0"}
    watched.snapshot(2, HASHES[:3])
    assert watched.hits() == 64


def test_a_subscriber_that_was_too_slow_asks_for_a_snapshot(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    watched.snapshot(0)
    watched.publish(1, BlockStored(HASHES[:1], None))
    for sequence in range(2, 5000):
        watched.publish(sequence, BlockRemoved((b"other",)))
    watched.view.refresh()
    assert watched.view.index.needs_snapshot() == {"p0"}


def test_a_restarted_node_has_nothing_cached(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    watched.snapshot(0, HASHES)
    assert watched.hits() == 96
    watched.register(generation=1)
    assert watched.hits() == 0
    assert watched.view.index.needs_snapshot() == {"p0"}


def test_a_forgotten_node_has_nothing(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    watched.snapshot(0, HASHES)
    watched.view.load.sent(TICKET, {"p0": LOAD})
    watched.directory.deregister("p0", generation=0)
    watched.view.forget_node("p0")
    assert watched.hits() == 0
    assert watched.view.load.load("p0") == NodeLoad()


def test_nothing_is_heard_after_close(watched: Watched) -> None:
    watched.register()
    watched.view.refresh()
    watched.snapshot(0)
    watched.view.close()
    watched.publish(1, BlockStored(HASHES, None))
    assert watched.hits() == 0


# ---------------------------------------------------------------------- connections


def contact(info: NodeInfo, heard_age_s: float = 100.0) -> dict[str, Contact]:
    return {info.node_id: Contact(info, heard_age_s)}


def test_a_node_is_connected_in_its_generation_only(watched: Watched) -> None:
    info = watched.register()
    assert not watched.view.nodes({})[0].connected
    assert watched.view.nodes(contact(info))[0].connected
    watched.register(generation=1)
    assert not watched.view.nodes(contact(info))[0].connected


def test_a_node_is_alive_while_it_is_heard_anywhere(watched: Watched) -> None:
    info = watched.register()
    watched.now += 2.0
    (node,) = watched.view.nodes(contact(info))
    assert (node.alive, node.silence_s, node.ttl_s) == (True, 2.0, 3.0)
    watched.now += 2.0
    (node,) = watched.view.nodes(contact(info))
    assert (node.alive, node.silence_s) == (False, 4.0)
    (node,) = watched.view.nodes(contact(info, heard_age_s=0.5))
    assert (node.alive, node.silence_s, node.status_age_s) == (True, 0.5, 4.0)


def test_a_connected_node_outlives_its_record(watched: Watched) -> None:
    info = watched.register()
    watched.directory.heartbeat(make_status(info, num_running=3), generation=0)
    watched.view.refresh()
    watched.directory.deregister("p0", generation=0)
    watched.now += 5.0
    (node,) = watched.view.nodes(contact(info))
    assert node.status is not None
    assert (node.status.num_running, node.alive, node.status_age_s) == (3, True, 5.0)
    assert watched.view.nodes({}) == ()
    assert watched.view.nodes(contact(info)) == ()  # nothing is known of it any more


def test_what_is_gone_is_forgotten(watched: Watched) -> None:
    watched.register()
    watched.snapshot(0)
    assert watched.view.index.needs_snapshot() == frozenset()
    watched.view.nodes({})
    watched.directory.deregister("p0", generation=0)
    watched.view.nodes({})
    watched.register()
    watched.view.nodes({})
    assert watched.view.index.needs_snapshot() == {"p0"}  # as if it had never been here
