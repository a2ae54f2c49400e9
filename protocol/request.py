"""A request as the gateway parsed it: only valid values, nothing of HTTP left."""

from __future__ import annotations

import msgspec

from protocol.sampling import SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    `prompt_token_ids` is not empty and, with one output token, fits `max_model_len`.
    `arrival_time` is in seconds of the wall clock; it orders requests in every queue that
    they pass, and does not change when a request is tried again. `follows` is another request with
    the same prompt, submitted before: whoever routes may let this one wait for that one's KV.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0  # smaller is more urgent
    cache_salt: str | None = None
    lora_name: str | None = None
    session_id: str | None = None
    follows: str | None = None
