"""The way that KV takes from node to node, and a request that lost its KV there."""

from __future__ import annotations

import pytest

from protocol import NoHealthyNode
from router.facts import RequestFacts
from router.path import path_between
from router.policies.eligible import find_eligible
from router.prediction import Prediction
from tests.router.nodes import make_node, make_view


def _on(host: str) -> dict[str, str]:
    return {"endpoint": f"shm:{host}/name+nixl:10.0.0.{host}:4711/name"}


_P1, _P2 = make_node("p1", info=_on("1")), make_node("p2", info=_on("2"))
_Q1, _D2 = make_node("p3", info=_on("1")), make_node("d2", info=_on("2"))
_D1 = make_node("d1", info=_on("1"))


def test_all_nodes_of_two_hosts_share_a_path() -> None:
    assert path_between(_P1.info, _D2.info) == path_between(_Q1.info, _D2.info)
    assert path_between(_P1.info, _D2.info) != path_between(_P2.info, _D1.info)


def test_each_pair_of_one_host_has_its_own() -> None:
    assert path_between(_P1.info, _D1.info) != path_between(_Q1.info, _D1.info)


def test_an_address_is_a_host_whatever_the_port() -> None:
    near, other = (
        make_node("p1", info={"endpoint": f"nixl:10.0.0.1:{port}/n"}).info for port in (1, 2)
    )
    far = make_node("d1", info={"endpoint": "nixl:10.0.0.2:3/n"}).info
    assert path_between(near, far) == path_between(other, far)


def test_kv_goes_on_no_path_where_it_was_lost() -> None:
    view = make_view(_P1, _Q1, _P2, _D2)
    facts = RequestFacts(100, 10, broken=frozenset({path_between(_P1.info, _D2.info)}))
    eligible = find_eligible(facts, view, Prediction(facts, view))
    assert [node.node_id for node in eligible.partners["d2"]] == ["p2"]


def test_without_another_path_nobody_is_eligible() -> None:
    view = make_view(_P1, _Q1, _D2)
    facts = RequestFacts(100, 10, broken=frozenset({path_between(_P1.info, _D2.info)}))
    with pytest.raises(NoHealthyNode):
        find_eligible(facts, view, Prediction(facts, view))


def test_without_another_path_a_decode_node_that_recomputes_is_alone() -> None:
    view = make_view(_P1, _Q1, _D2, decode_recomputes=True)
    facts = RequestFacts(100, 10, broken=frozenset({path_between(_P1.info, _D2.info)}))
    assert find_eligible(facts, view, Prediction(facts, view)).partners == {"d2": ()}


def test_another_path_is_better_than_to_recompute() -> None:
    view = make_view(_P1, _P2, _D2, decode_recomputes=True)
    facts = RequestFacts(100, 10, broken=frozenset({path_between(_P1.info, _D2.info)}))
    eligible = find_eligible(facts, view, Prediction(facts, view))
    assert [node.node_id for node in eligible.partners["d2"]] == ["p2"]
