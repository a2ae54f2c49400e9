from __future__ import annotations

import msgspec
import pytest

from kv_transfer import BlockLayout, LayoutMismatch
from tests.kv_transfer.pools import LAYOUT, make_pool


def test_equal_layouts_go_together() -> None:
    LAYOUT.check_compatible(msgspec.structs.replace(LAYOUT), "p", "d")


MAY_DIFFER = ("block_size", "bytes_per_block")


@pytest.mark.parametrize("field", MAY_DIFFER)
def test_blocks_may_hold_different_numbers_of_tokens(field: str) -> None:
    other = msgspec.structs.replace(LAYOUT, **{field: 2 * getattr(LAYOUT, field)})
    LAYOUT.check_compatible(other, "p", "d")


def test_rows_lie_in_layers_and_layers_in_blocks() -> None:
    layout = msgspec.structs.replace(LAYOUT, num_layers=3, bytes_per_block=1536)
    assert layout.row_bytes == 16  # one KV head of 4 float32
    assert layout.bytes_per_layer == 2 * 16 * layout.row_bytes
    assert layout.bytes_per_block == 3 * layout.bytes_per_layer


@pytest.mark.parametrize("field", [n for n in BlockLayout.__struct_fields__ if n not in MAY_DIFFER])
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    ours = getattr(LAYOUT, field)
    theirs = ours + 1 if isinstance(ours, int) else f"{ours}X"
    other = msgspec.structs.replace(LAYOUT, **{field: theirs})
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.check_compatible(other, "memory:p", "memory:d")
    assert str(caught.value) == f"{field} is {ours} on memory:p, but {theirs} on memory:d"


def test_a_pool_knows_its_blocks() -> None:
    pool = make_pool(num_blocks=4)
    pool.bytes[3] = 7
    assert bytes(pool.view(3)) == b"\x07" * LAYOUT.bytes_per_block
    assert pool.address_of(3) - pool.address_of(1) == 2 * LAYOUT.bytes_per_block
    for outside in (-1, 0, 4):  # block 0 is the null block: nobody's
        with pytest.raises(AssertionError):
            pool.address_of(outside)
