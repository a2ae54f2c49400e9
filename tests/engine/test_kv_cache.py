"""The pool's geometry, as transports and kernels see it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from engine import KVCacheConfig, blocks_within
from engine.kv_cache import KVCache
from engine.models import CausalLM
from protocol import ConfigError


def make_config(num_blocks: int = 6, dtype: str = "float32") -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks, block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_for_transports_describe_the_tensor(dtype: str) -> None:
    cache = KVCache(make_config(dtype=dtype))
    tensor = cache.tensor
    assert tensor.shape == cache.config.shape
    assert tensor.is_contiguous()
    assert cache.num_bytes == tensor.numel() * tensor.element_size()
    assert cache.bytes_per_block == tensor.stride(0) * tensor.element_size()
    assert cache.bytes_per_block * cache.num_blocks == cache.num_bytes
    assert (cache.dtype_name, cache.device_name) == (dtype, "cpu")


def test_a_block_is_one_extent_of_the_address_range() -> None:
    cache = KVCache(make_config())
    cache.tensor.zero_()
    address = cache.base_address + 2 * cache.bytes_per_block
    floats = (ctypes.c_float * (cache.bytes_per_block // 4)).from_address(address)
    floats[:] = [7.0] * len(floats)
    assert (cache.tensor[2] == 7.0).all()
    assert cache.tensor.sum() == 7.0 * len(floats)


def test_layer_is_a_view() -> None:
    cache = KVCache(make_config())
    cache.tensor.zero_()
    cache.layer(1)[3, 1] = 5.0
    assert (cache.tensor[3, 1, 1] == 5.0).all()
    assert cache.tensor.count_nonzero() == cache.tensor[3, 1, 1].numel()


def test_token_rows_find_keys_and_values_of_a_slot_in_each_layer() -> None:
    cache = KVCache(make_config())
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view(cache.config.shape))
    slots = torch.tensor([4, 7, 13, 23])  # the first of block 1, ..., the last of block 5
    rows = cache.key_rows(slots)
    for layer in range(3):
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            block, offset = divmod(slot, 4)
            expected_key, expected_value = cache.tensor[block, layer, :, offset].flatten(1)
            assert cache.token_rows(layer)[row].equal(expected_key)
            assert cache.token_rows(layer)[row + 4].equal(expected_value)


def test_allocation_touches_no_memory() -> None:
    before = resident_bytes()
    cache = KVCache(make_config(num_blocks=1_000_000))
    assert cache.num_bytes == 1_536_000_000
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_blocks_within_a_budget(tiny_model: CausalLM) -> None:
    config = KVCacheConfig.for_model(tiny_model.config, num_blocks=10, block_size=16)
    budget = config.num_bytes
    assert blocks_within(budget, tiny_model.config, block_size=16) == 10
    assert blocks_within(budget - 1, tiny_model.config, block_size=16) == 9
    assert blocks_within(budget, tiny_model.config, block_size=16, dtype="bfloat16") == 20


@pytest.mark.parametrize(
    ("field", "value"), [("num_blocks", 1), ("block_size", 0), ("dtype", "int8")]
)
def test_impossible_settings_name_their_field(field: str, value: object) -> None:
    settings = {"num_blocks": 4, "block_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ConfigError) as caught:
        KVCacheConfig(**settings | {field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
