"""The geometry of a paged KV cache: what a block is and how many there are. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.weights import ModelConfig
from protocol import ConfigError

NULL_BLOCK_ID = 0  # a real block that no request ever owns; padding may name it

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVCacheConfig:
    """The shape `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` and its dtype.

        block    |  layer 0          |  layer 1          | ...    one contiguous extent
        layer    |  keys   | values  |  keys   | values  |
        keys     |  token 0 | token 1 | ... | token block_size - 1
        token    |  head 0 | head 1 | ...                         each of head_dim numbers

    `num_blocks` counts the null block, so `num_blocks - 1` can hold data.
    """

    num_blocks: int
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError("num_blocks", f"needs the null block and one more: {self.num_blocks}")
        if self.block_size < 1:
            raise ConfigError("block_size", f"must be positive: {self.block_size}")
        if self.dtype not in _DTYPE_BYTES:
            known = ", ".join(_DTYPE_BYTES)
            raise ConfigError("dtype", f"unknown KV cache dtype {self.dtype!r}; known: {known}")

    @classmethod
    def for_model(
        cls,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> KVCacheConfig:
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.num_blocks,
            self.num_layers,
            2,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
        )

    @property
    def bytes_per_block(self) -> int:
        numbers = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return numbers * _DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def blocks_within(
    budget_bytes: int, model: ModelConfig, *, block_size: int, dtype: str = "float32"
) -> int:
    """How many blocks, the null block included, a cache of at most `budget_bytes` has."""
    return budget_bytes // (block_size * model.kv_bytes_per_token(_DTYPE_BYTES[dtype]))
