"""The seam between models and attention kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Paged attention over the ragged batch of one step.

    An implementation is made once per step, knows the step's metadata and the KV cache, and is
    called once per layer.
    """

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None
    ) -> Tensor:
        """Write the keys and values, then let each query see its sequence up to itself.

        All are packed: `query` is `[num_tokens, num_heads, head_dim]`, `key` and `value` are
        `[num_tokens, num_kv_heads, head_dim]`; head h of the query sees KV head
        `h // (num_heads // num_kv_heads)`. They may be parts of wider tensors. With a `window` a
        query sees itself and the `window - 1` tokens before it only. The result has the shape of
        `query` and is contiguous.
        """
