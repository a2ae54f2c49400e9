"""Token ids that a client sends: each is to be one of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from protocol import InvalidRequest


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest, which names the first that is not from 0 to `vocab_size` - 1."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at, unknown = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    field = f"{field}[{at}]"
    message = f"{field}: token id {unknown} is not in the vocabulary of {vocab_size} tokens"
    raise InvalidRequest(field, message)
