"""What do we count?"""

from telemetry.metrics import Metrics

__all__ = ["Metrics"]
