"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping

from protocol import ConfigError
from router.policies.kv_aware import kv_aware
from router.policies.policy import RoutingPolicy
from router.policies.round_robin import round_robin

POLICIES: Mapping[str, RoutingPolicy] = {"kv_aware": kv_aware, "round_robin": round_robin}


def get_policy(name: str) -> RoutingPolicy:
    """The policy called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError("policy", f"{name!r} is unknown; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
