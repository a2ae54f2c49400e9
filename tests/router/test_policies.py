from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import (
    BlockCounts,
    GenerationRequest,
    HandoffTicket,
    NoHealthyNode,
    PromptTooLong,
    SamplingParams,
)
from router import (
    POLICIES,
    LoadTracker,
    NodeLoad,
    NodeView,
    RequestFacts,
    RouteKind,
    RouterView,
    RoutingDecision,
    RoutingPolicy,
    get_policy,
    reusable_hashes,
)
from tests.router.nodes import make_node, make_view

kv_aware, round_robin = POLICIES["kv_aware"], POLICIES["round_robin"]
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def request(
    num_tokens: int = 512, *, max_new_tokens: int = 64, **cached_tokens: int
) -> RequestFacts:
    return RequestFacts(num_tokens, max_new_tokens, cached_tokens)


def nodes(*node_ids: str, **changes: Any) -> list[NodeView]:
    return [make_node(node_id, **changes) for node_id in node_ids]


def send(
    policy: RoutingPolicy, view: RouterView, facts: RequestFacts, count: int
) -> list[RoutingDecision]:
    """Requests one after the other; no node reports anything meanwhile."""
    tracker = LoadTracker()
    decisions = []
    for number in range(count):
        loaded = [replace(node, load=tracker.load(node.node_id)) for node in view.nodes]
        decision = policy(facts, replace(view, nodes=tuple(loaded), turn=number))
        tracker.sent(HandoffTicket(f"r{number}", 0), decision.loads)
        decisions.append(decision)
    return decisions


def spread(counts: Counter[str | None]) -> int:
    return max(counts.values()) - min(counts.values())


# Who may serve at all.


@EVERY_POLICY
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"healthy": False}, "unhealthy"),
        ({"draining": True}, "draining"),
        ({"admitting": False}, "too many KV blocks in quarantine"),
        ({"alive": False}, "heartbeats"),
        ({"info": {"fingerprint": "other"}}, "fingerprint"),
        ({"info": {"max_model_len": 512}}, "holds at most 511"),
        ({"info": {"num_blocks": 32}}, "holds at most 511"),
    ],
)
@pytest.mark.parametrize("role", ["p", "d", "u"])
def test_an_unfit_node_is_no_candidate(
    policy: RoutingPolicy, role: str, changes: dict[str, Any], reason: str
) -> None:
    others = nodes("p1", "d1") if role in "pd" else nodes("u1")
    view = make_view(make_node(f"{role}0", **changes), *others)
    for decision in send(policy, view, request(), 6):
        assert f"{role}0" not in (decision.prefill_node_id, decision.decode_node_id)
        assert reason in decision.explain()


@EVERY_POLICY
def test_a_node_without_status_or_that_failed_before_is_no_candidate(
    policy: RoutingPolicy,
) -> None:
    view = make_view(*nodes("p1", "p2", "d0"), replace(make_node("p0"), status=None))
    decision = policy(replace(request(), avoid=frozenset({"p1"})), view)
    assert decision.prefill_node_id == "p2"
    assert "no status yet" in decision.explain()
    assert "failed this request before" in decision.explain()


@EVERY_POLICY
@pytest.mark.parametrize(
    ("present", "role"),
    [
        ([], "decode"),
        (["p0"], "decode"),
        (["d0"], "prefill"),
        (["p0", "d0-sick"], "decode"),
        (["p0-sick", "d0"], "prefill"),
        (["u0-sick"], "unified"),
    ],
)
def test_the_missing_role_is_named(policy: RoutingPolicy, present: list[str], role: str) -> None:
    members = [make_node(name[:2], healthy="sick" not in name) for name in present]
    with pytest.raises(NoHealthyNode, match=f"no healthy {role} node") as caught:
        policy(request(), make_view(*members))
    assert all(name[:2] in str(caught.value) for name in present if "sick" in name)


@EVERY_POLICY
@pytest.mark.parametrize("role", ["p", "d", "u"])
def test_nobody_takes_a_request_while_blocks_are_in_quarantine(
    policy: RoutingPolicy, role: str
) -> None:
    partners = nodes("d1") if role == "p" else nodes("p1") if role == "d" else []
    view = make_view(make_node(f"{role}0", admitting=False), *partners)
    with pytest.raises(NoHealthyNode, match=f"{role}0: too many KV blocks in quarantine"):
        policy(request(), view)


@EVERY_POLICY
def test_nodes_that_cannot_talk_to_each_other_make_no_pair(policy: RoutingPolicy) -> None:
    shm = {"endpoint": "shm:pool"}
    view = make_view(*nodes("p0", "d0"), *nodes("p1", "d1", info=shm))
    for decision in send(policy, view, request(), 8):
        assert (decision.prefill_node_id, decision.decode_node_id) in {("p0", "d0"), ("p1", "d1")}
    with pytest.raises(NoHealthyNode, match="p0: can hand off to no decode node"):
        policy(request(), make_view(make_node("p0"), make_node("d0", info=shm)))
    both = make_node("d0", info={"endpoint": "nixl:pool+shm:pool"})
    assert policy(request(), make_view(*nodes("p1", info=shm), both)).decode_node_id == "d0"


@EVERY_POLICY
def test_blocks_of_a_pair_may_be_of_different_sizes(policy: RoutingPolicy) -> None:
    large = make_node("d0", info={"block_size": 32})
    assert policy(request(), make_view(make_node("p0"), large)).prefill_node_id == "p0"


@EVERY_POLICY
def test_a_prompt_that_no_node_can_ever_hold_is_not_a_matter_of_health(
    policy: RoutingPolicy,
) -> None:
    view = make_view(*nodes("p0", "p1", "d0"))
    with pytest.raises(PromptTooLong, match=r"8192 tokens.*at most 8191") as caught:
        policy(request(8192), view)
    assert (caught.value.num_tokens, caught.value.limit) == (8192, 8191)
    policy(request(8191), view)


@EVERY_POLICY
def test_a_prompt_that_only_a_sick_node_could_hold_is_one(policy: RoutingPolicy) -> None:
    large = make_node("p0", info={"max_model_len": 16384}, healthy=False)
    decode = make_node("d0", info={"max_model_len": 16384, "num_blocks": 2000})
    with pytest.raises(NoHealthyNode):
        policy(request(10_000), make_view(large, make_node("p1"), decode))


# The default policy.


def test_a_burst_spreads_over_equal_idle_nodes() -> None:
    view = make_view(*nodes(*(f"{role}{n}" for role in "pd" for n in range(4))))
    decisions = send(kv_aware, view, request(), 20)
    prefill = Counter(decision.prefill_node_id for decision in decisions)
    decode: Counter[str | None] = Counter(decision.decode_node_id for decision in decisions)
    assert len(prefill) == len(decode) == 4
    assert spread(prefill) <= 1
    assert spread(decode) <= 1


def test_a_burst_spreads_over_unified_nodes() -> None:
    decisions = send(kv_aware, make_view(*nodes("u0", "u1", "u2", "u3")), request(), 20)
    counts: Counter[str | None] = Counter(decision.decode_node_id for decision in decisions)
    assert len(counts) == 4
    assert spread(counts) <= 1


def test_a_burst_is_shared_in_proportion_to_the_rates() -> None:
    view = make_view(make_node("p0", prefill_tokens_per_s=3000.0), *nodes("p1", "d0"))
    counts = Counter(d.prefill_node_id for d in send(kv_aware, view, request(), 40))
    assert 28 <= counts["p0"] <= 32


def test_a_prefix_sticks_to_its_holder_until_the_load_outweighs_the_gain() -> None:
    view = make_view(*nodes("p0", "p1", "d0"))
    facts = request(1040, p1=1024)
    chosen = [decision.prefill_node_id for decision in send(kv_aware, view, facts, 70)]
    # Each leaves 16 tokens on p1; 64 of them weigh as much as the 1024 that p0 would compute.
    assert chosen[:64] == ["p1"] * 64
    assert "p0" in chosen[64:66]


def test_what_the_status_shows_as_queued_shrinks_as_it_ages() -> None:
    busy = make_node("p0", queued_tokens=1000)
    other = make_node("p1", queued_tokens=400)
    assert kv_aware(request(), make_view(busy, other, make_node("d0"))).prefill_node_id == "p1"
    aged = replace(busy, status_age_s=0.9)
    assert kv_aware(request(), make_view(aged, other, make_node("d0"))).prefill_node_id == "p0"


def test_the_predicted_ttft_is_queue_and_prompt_over_rate_and_transfer() -> None:
    view = make_view(
        make_node("p0", queued_tokens=300, load=NodeLoad(200, requests=1)),
        make_node("d0"),
        transfer_tokens_per_s=10_000.0,
        handoff_latency_s=0.01,
    )
    decision = kv_aware(request(600, p0=96, d0=400), view)
    expected = (300 + 200 + 504) / 1000 + 0.01 + 200 / 10_000
    assert decision.predicted_ttft_s == pytest.approx(expected)


def test_a_node_that_has_measured_nothing_counts_as_an_average_one() -> None:
    fresh = make_node("p0", prefill_tokens_per_s=0.0)
    for rate in (10.0, 100_000.0):
        others = nodes("p1", "d0", prefill_tokens_per_s=rate)
        decisions = send(kv_aware, make_view(fresh, *others), request(), 10)
        assert Counter(decision.prefill_node_id for decision in decisions) == {"p0": 5, "p1": 5}
    alone = make_view(fresh, make_node("d0", prefill_tokens_per_s=0.0))
    assert kv_aware(request(500), alone).predicted_ttft_s == pytest.approx(0.5, abs=0.01)


def test_decode_goes_where_the_kv_cache_has_room() -> None:
    # 512 + 64 tokens need 36 blocks.
    full = make_node("d0", used_blocks=965)
    roomy = make_node("d1", used_blocks=964, num_running=50)
    assert kv_aware(request(), make_view(make_node("p0"), full, roomy)).decode_node_id == "d1"


def test_cached_blocks_without_user_are_room() -> None:
    blocks = BlockCounts(total=1000, free=0, cached=900, used=100, quarantined=0)
    cached, full = make_node("d1", blocks=blocks), make_node("d0", used_blocks=990)
    assert kv_aware(request(), make_view(make_node("p0"), full, cached)).decode_node_id == "d1"


def test_a_burst_never_promises_more_blocks_than_there_are() -> None:
    view = make_view(*nodes("p0", "d0"), make_node("d1", used_blocks=820))
    decisions = send(kv_aware, view, request(), 32)  # 27 fit on d0 and 5 on d1
    counts: Counter[str] = Counter(decision.decode_node_id for decision in decisions)
    assert counts == {"d0": 27, "d1": 5}
    assert not any("wait" in decision.reason for decision in decisions)


def test_without_room_anywhere_the_request_waits_where_it_comes_closest() -> None:
    view = make_view(
        make_node("p0"), make_node("d0", used_blocks=1000), make_node("d1", used_blocks=970)
    )
    decision = kv_aware(request(), view)
    assert decision.decode_node_id == "d1"
    assert "will wait" in decision.reason


def test_decode_wants_a_seat() -> None:
    seated = make_node("d0", num_running=64)
    free = make_node("d1", num_running=63, used_blocks=900)
    assert kv_aware(request(), make_view(make_node("p0"), seated, free)).decode_node_id == "d1"


def test_decode_prefers_its_own_prefix_hits_among_equals() -> None:
    view = make_view(*nodes("p0", "d0", "d1"))
    assert kv_aware(request(), view).decode_node_id == "d0"
    assert kv_aware(request(d1=256), view).decode_node_id == "d1"


def test_what_the_decode_node_gets_is_promised() -> None:
    decision = kv_aware(request(512, p0=112), make_view(*nodes("p0", "d0")))
    assert decision.loads == {
        "p0": NodeLoad(queued_tokens=400, requests=1),
        "d0": NodeLoad(blocks=36, requests=1),
    }


def test_a_request_for_one_token_puts_nothing_on_the_decode_node() -> None:
    decision = kv_aware(request(max_new_tokens=1), make_view(*nodes("p0", "d0")))
    assert decision.loads.keys() == {"p0"}


# Kinds.


@EVERY_POLICY
def test_local_prefill_is_off_by_default(policy: RoutingPolicy) -> None:
    decision = policy(request(1), make_view(*nodes("p0", "d0")))
    assert decision.kind is RouteKind.DISAGGREGATED


@EVERY_POLICY
@pytest.mark.parametrize(
    ("num_tokens", "cached", "local"), [(64, 0, True), (65, 0, False), (640, 576, True)]
)
def test_short_or_mostly_cached_prompts_skip_prefill(
    policy: RoutingPolicy, num_tokens: int, cached: int, local: bool
) -> None:
    view = make_view(*nodes("p0", "d0"), local_prefill_max_tokens=64)
    decision = policy(request(num_tokens, d0=cached), view)
    assert (decision.kind is RouteKind.LOCAL_PREFILL) == local
    assert (decision.prefill_node_id is None) == local
    if local:
        blocks = -(-(num_tokens + 64) // 16)
        assert decision.loads == {"d0": NodeLoad(num_tokens - cached, blocks, 1)}


@EVERY_POLICY
def test_a_prompt_that_skips_prefill_needs_no_prefill_node(policy: RoutingPolicy) -> None:
    view = make_view(make_node("d0"), local_prefill_max_tokens=64)
    assert policy(request(10), view).kind is RouteKind.LOCAL_PREFILL
    with pytest.raises(NoHealthyNode, match="prefill"):
        policy(request(100), view)


@EVERY_POLICY
def test_unified_nodes_take_a_request_alone(policy: RoutingPolicy) -> None:
    decision = policy(request(512, u0=112), make_view(make_node("u0")))
    assert decision.kind is RouteKind.UNIFIED
    assert (decision.prefill_node_id, decision.decode_node_id) == (None, "u0")
    assert decision.loads == {"u0": NodeLoad(400, 36, 1)}


def test_of_a_pair_and_a_unified_node_the_faster_wins() -> None:
    pair = nodes("p0", "d0")
    assert kv_aware(request(), make_view(*pair, make_node("u0"))).kind is RouteKind.UNIFIED
    busy = make_node("u0", queued_tokens=100)
    assert kv_aware(request(), make_view(*pair, busy)).kind is RouteKind.DISAGGREGATED
    full = make_node("u0", used_blocks=1000)
    assert kv_aware(request(), make_view(*pair, full)).kind is RouteKind.DISAGGREGATED
    sick = nodes("p0", healthy=False)
    assert kv_aware(request(), make_view(*sick, pair[1], busy)).kind is RouteKind.UNIFIED


# Round robin.


def test_every_node_has_its_turn() -> None:
    view = make_view(*nodes("p0", "p1", "p2", "d0", "d1", "u0"))
    decisions = send(round_robin, view, request(), 6)
    routes = [(decision.prefill_node_id, decision.decode_node_id) for decision in decisions]
    assert routes == [
        ("p0", "d0"), ("p1", "d1"), (None, "u0"), ("p2", "d0"), ("p0", "d1"), (None, "u0"),
    ]  # fmt: skip


# All policies.


@EVERY_POLICY
@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_decisions_are_deterministic_complete_and_printable(
    policy: RoutingPolicy, data: st.DataObject, seed: int
) -> None:
    roles = data.draw(st.lists(st.sampled_from("pdu"), min_size=1, max_size=8))
    members = [
        make_node(
            f"{role}{number}",
            healthy=data.draw(st.integers(0, 4)) > 0,
            used_blocks=data.draw(st.integers(0, 1000)),
            queued_tokens=data.draw(st.integers(0, 3000)),
            num_running=data.draw(st.integers(0, 70)),
            prefill_tokens_per_s=data.draw(st.sampled_from([0.0, 500.0, 5000.0])),
        )
        for number, role in enumerate(roles)
    ]
    cached = {node.node_id: data.draw(st.integers(0, 40)) * 16 for node in members}
    facts = RequestFacts(data.draw(st.integers(1, 700)), 10, cached)
    config = {"local_prefill_max_tokens": data.draw(st.sampled_from([0, 100]))}
    turn = data.draw(st.integers(0, 20))
    shuffled = random.Random(seed).sample(members, len(members))
    try:
        decision = policy(facts, make_view(*members, turn=turn, **config))
    except NoHealthyNode:
        with pytest.raises(NoHealthyNode):
            policy(facts, make_view(*shuffled, turn=turn, **config))
        return
    assert policy(facts, make_view(*shuffled, turn=turn, **config)) == decision
    assert sorted(c.node_id for c in decision.candidates) == sorted(n.node_id for n in members)
    chosen = {c.node_id for c in decision.candidates if decision.chose(c)}
    assert chosen == decision.loads.keys()
    assert not any(c.excluded for c in decision.candidates if decision.chose(c))
    lines = decision.explain().splitlines()
    for candidate in decision.candidates:
        row = next(line for line in lines if f" {candidate.node_id} " in line and line[0] in " *")
        assert row.startswith("*") == decision.chose(candidate)


def test_the_best_score_is_the_chosen_one() -> None:
    view = make_view(*nodes("p0", "d0"), make_node("p1", queued_tokens=10), make_node("d1"))
    decision = kv_aware(request(d1=160), view)
    scores = {candidate.node_id: candidate.score or 0.0 for candidate in decision.candidates}
    assert scores["p0"] < scores["p1"]
    assert scores["d1"] < scores["d0"]
    assert decision.predicted_ttft_s == scores["p0"]
    for candidate in decision.candidates:
        if candidate.node_id[0] == "d":
            assert candidate.score == pytest.approx(sum(candidate.terms.values()))


def test_explain_is_a_table() -> None:
    view = make_view(
        *nodes("p0", "d0"), make_node("p1", queued_tokens=512), make_node("d1", draining=True)
    )
    assert kv_aware(request(), view).explain() == (
        "disaggregated: p0 → d0, predicted TTFT 0.519 s\n"
        "prefill node with the least predicted TTFT\n"
        "   role     node  score  terms\n"
        "*  prefill  p0    0.519  queued_tokens=0 uncached_tokens=512 tokens_per_s=1000 "
        "transfer_s=0.00712\n"
        "   prefill  p1    1.031  queued_tokens=512 uncached_tokens=512 tokens_per_s=1000 "
        "transfer_s=0.00712\n"
        "*  decode   d0    0.552  batch=0.01562 kv=0.036 transfer=0.5 slowness=0\n"
        "   decode   d1    -      excluded: draining"
    )


def test_the_facts_of_a_retry_count_what_was_emitted() -> None:
    retried = GenerationRequest(
        request_id="r",
        prompt_token_ids=tuple(range(30)),
        sampling=SamplingParams(max_tokens=10),
        arrival_time=0.0,
    )
    emitted = (1, 2, 3)
    assert len(reusable_hashes(retried, emitted)) == 2
    assert len(reusable_hashes(retried, emitted[:2])) == 1  # the last token is computed anyway
    facts = RequestFacts.of(retried, prefix_hits={"p0": 2}, emitted=emitted)
    assert (facts.num_tokens, facts.max_new_tokens) == (33, 7)
    assert (facts.uncached_tokens("p0"), facts.uncached_tokens("p1")) == (1, 33)


def test_salted_and_plain_prompts_share_nothing() -> None:
    plain = GenerationRequest(
        request_id="r",
        prompt_token_ids=tuple(range(33)),
        sampling=SamplingParams(),
        arrival_time=0.0,
    )
    salted = GenerationRequest(
        request_id="r",
        prompt_token_ids=tuple(range(33)),
        sampling=SamplingParams(),
        arrival_time=0.0,
        cache_salt="s",
    )
    assert not set(reusable_hashes(plain)) & set(reusable_hashes(salted))


def test_policies_are_known_by_name() -> None:
    assert all(get_policy(name) is policy for name, policy in POLICIES.items())


# ---------------------------------------------------------------------- slow rather than dead


def why_not(decision: RoutingDecision) -> dict[str, str | None]:
    return {c.node_id: c.excluded for c in decision.candidates if c.excluded is not None}


@EVERY_POLICY
def test_a_silent_node_is_used_only_if_there_is_nobody_else(policy: RoutingPolicy) -> None:
    silent, slow = make_node("d0", silence_s=4.0), make_node("p0", silence_s=9.0)
    for turn in range(3):
        view = make_view(silent, make_node("d1"), slow, make_node("p1"), turn=turn)
        decision = policy(request(), view)
        assert (decision.prefill_node_id, decision.decode_node_id) == ("p1", "d1")
        assert why_not(decision) == {"d0": "silent for 4.0 s", "p0": "silent for 9.0 s"}
        assert "excluded: silent for 4.0 s" in decision.explain()
    decision = policy(request(), make_view(silent, slow, make_node("p1")))
    assert (decision.prefill_node_id, decision.decode_node_id) == ("p1", "d0")
    decision = policy(request(), make_view(silent, slow))
    assert (decision.prefill_node_id, decision.decode_node_id) == ("p0", "d0")


def test_silence_that_is_usual_says_nothing() -> None:
    ages = {"p0": 8.0, "d0": 12.0, "d1": 11.0}
    view = make_view(*(make_node(node_id, silence_s=age) for node_id, age in ages.items()))
    assert why_not(kv_aware(request(), view)) == {}


def test_a_silent_node_stands_in_for_one_that_has_failed_the_request() -> None:
    view = make_view(make_node("d0", silence_s=4.0), *nodes("d1", "p0"))
    facts = replace(request(), avoid=frozenset({"d1"}))
    assert kv_aware(facts, view).decode_node_id == "d0"


def test_a_node_that_is_not_connected_is_excluded() -> None:
    decision = kv_aware(request(), make_view(make_node("d0", connected=False), *nodes("d1", "p0")))
    assert why_not(decision) == {"d0": "not connected"}


def test_a_decode_node_with_longer_steps_gets_less() -> None:
    """But a little longer says nothing, nor does a slow node lose what only it has room for."""

    def chosen(slow_s: float, **fast: Any) -> str:
        slow = make_node("d0", step_s=slow_s)
        view = make_view(slow, make_node("d1", step_s=0.02, **fast), make_node("p0"))
        return kv_aware(request(), view).decode_node_id

    assert chosen(0.02) == "d0"
    assert chosen(0.03) == "d0"
    assert chosen(0.1) == "d1"
    assert chosen(0.0) == "d0"  # not measured
    assert chosen(0.1, num_running=32) == "d1"
    assert chosen(0.1, num_running=64) == "d0"


def test_the_decode_node_that_has_had_a_part_is_kept() -> None:
    view = make_view(make_node("d0"), make_node("d1", num_running=63), *nodes("p0", "u0"))
    facts = replace(request(), prefer=frozenset({"d1"}))
    decision = kv_aware(facts, view)
    assert decision.decode_node_id == "d1"
    assert "the decode node stays the same" in decision.reason
    assert kv_aware(replace(facts, avoid=frozenset({"d1"})), view).decode_node_id != "d1"
