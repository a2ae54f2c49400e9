"""An end whose transport has a plan of faults that is empty, for the conformance suite."""

from __future__ import annotations

from kv_transfer import FaultPlan, FaultyTransport
from tests.kv_transfer import shm_end
from tests.kv_transfer.conformance_end import EndSpec, Parts


def make_parts(spec: EndSpec) -> Parts:
    inner, pool = shm_end.make_parts(spec)
    return Parts(FaultyTransport(inner, FaultPlan(), spec.name), pool)
