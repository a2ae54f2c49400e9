"""Every node in its turn, whatever it holds or has to do: the baseline to compare with.

The turn is `RouterView.turn`, counted by whoever makes the views. With d decode and u unified
nodes, d + u turns make a round; each turn of a decode node takes the next prefill node:

    turn      0      1      2   │  3      4      5
    d=2 u=1   p0→d0  p1→d1  u0  │  p2→d0  p0→d1  u0
"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Candidate, RoutingDecision
from router.facts import RequestFacts
from router.policies.eligible import find_eligible
from router.prediction import Prediction
from router.view import NodeView, RouterView


def round_robin(facts: RequestFacts, view: RouterView) -> RoutingDecision:
    prediction = Prediction(facts, view)
    eligible = find_eligible(facts, view, prediction)
    places = [*eligible.decode, *eligible.unified]
    rounds, place = divmod(view.turn, len(places))
    decode = places[place]
    partners = eligible.partners.get(decode.node_id, ())
    pair_turn = rounds * len(eligible.decode) + place
    prefill = partners[pair_turn % len(partners)] if partners else None
    idle = [node for node in eligible.prefill if node not in partners]
    return prediction.decide(
        prediction.plan(prefill, decode),
        reason=f"turn {view.turn}; a score is how many turns a node is away from its own",
        candidates=[
            *_in_turn(partners, pair_turn),
            *_in_turn(places, place),
            *(Candidate(n.node_id, n.info.role, excluded="not in this turn") for n in idle),
            *eligible.excluded,
        ],
    )


def _in_turn(nodes: Sequence[NodeView], turn: int) -> list[Candidate]:
    return [
        Candidate(node.node_id, node.info.role, float((index - turn) % len(nodes)))
        for index, node in enumerate(nodes)
    ]
