"""The routing policies, by the name that a configuration gives them."""

from router.policies.kv_aware import kv_aware
from router.policies.policy import RoutingPolicy
from router.policies.registry import POLICIES, get_policy
from router.policies.round_robin import round_robin

__all__ = ["POLICIES", "RoutingPolicy", "get_policy", "kv_aware", "round_robin"]
