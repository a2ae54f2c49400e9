"""What a scheduler counts since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """All but the first three are tokens. A prompt token counts each time it is computed."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_revoked_pins: int = 0
    num_revoked_reservations: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_computed: int = 0
    prompt_loaded: int = 0
    prompt_recomputed: int = 0  # part of prompt_computed, by requests that had been preempted
    generated: int = 0
