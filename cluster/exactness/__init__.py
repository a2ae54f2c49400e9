"""Is it the same to the last bit, whichever way it is computed?

Importing this takes seconds: it computes with torch.
"""

from cluster.exactness.comparison import Difference
from cluster.exactness.evidence import Evidence
from cluster.exactness.prompts import ExactnessConfig
from cluster.exactness.verification import MakeCompute, Verification, WayResult
from cluster.exactness.ways import Way, all_ways

__all__ = [
    "Difference",
    "Evidence",
    "ExactnessConfig",
    "MakeCompute",
    "Verification",
    "Way",
    "WayResult",
    "all_ways",
]
