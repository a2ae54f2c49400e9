"""Keys and values of a step on their way into the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from engine.kv_cache import KVCache

OnWritten = Callable[[int], None]


class KVWriter:
    """`on_written` is called with a layer's number when its writes have been queued."""

    def __init__(
        self, kv_cache: KVCache, staged: Mapping[str, Tensor], on_written: OnWritten | None = None
    ) -> None:
        self.kv_cache = kv_cache
        self._key_rows = staged["key_rows"]
        self._value_rows = staged["value_rows"]
        self._on_written = on_written

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """`key` and `value` are `[num_tokens, num_kv_heads, head_dim]`."""
        rows = self.kv_cache.token_rows(layer)
        rows.index_copy_(0, self._key_rows, key.flatten(1).to(rows.dtype))
        rows.index_copy_(0, self._value_rows, value.flatten(1).to(rows.dtype))
        if self._on_written is not None:
            self._on_written(layer)
