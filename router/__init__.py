"""Which nodes serve this request, and is it admitted at all?"""

from router.admission import Admission, Lease
from router.config import RouterConfig
from router.decision import Candidate, RouteKind, RoutingDecision
from router.dispatch import Dispatcher
from router.facts import RequestFacts, reusable_hashes
from router.load import LoadTracker
from router.policies import POLICIES, RoutingPolicy, get_policy
from router.prefix_index import PrefixIndex
from router.view import NodeLoad, NodeView, RouterView

__all__ = [
    "POLICIES",
    "Admission",
    "Candidate",
    "Dispatcher",
    "Lease",
    "LoadTracker",
    "NodeLoad",
    "NodeView",
    "PrefixIndex",
    "RequestFacts",
    "RouteKind",
    "RouterConfig",
    "RouterView",
    "RoutingDecision",
    "RoutingPolicy",
    "get_policy",
    "reusable_hashes",
]
