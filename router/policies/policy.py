"""What a routing policy is."""

from __future__ import annotations

from typing import Protocol

from router.decision import RoutingDecision
from router.facts import RequestFacts
from router.view import RouterView


class RoutingPolicy(Protocol):
    """A pure function: no clock, no state, no randomness that is not in its arguments."""

    def __call__(self, facts: RequestFacts, view: RouterView, /) -> RoutingDecision:
        """Choose the nodes for a request.

        Raises:
            NoHealthyNode: a role is needed and no node can fill it now.
            PromptTooLong: no node of a needed role could ever hold the request.
        """
