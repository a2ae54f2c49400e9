from __future__ import annotations

import msgspec
import pytest

from kv_transfer import BlockLayout, LayoutMismatch
from tests.kv_transfer.pools import LAYOUT, make_pool


def test_equal_layouts_go_together() -> None:
    LAYOUT.check_same(msgspec.structs.replace(LAYOUT), "p", "d")


@pytest.mark.parametrize("field", BlockLayout.__struct_fields__)
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    ours = getattr(LAYOUT, field)
    theirs = ours + 1 if isinstance(ours, int) else f"{ours}X"
    other = msgspec.structs.replace(LAYOUT, **{field: theirs})
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.check_same(other, "memory:p", "memory:d")
    assert str(caught.value) == f"{field} is {ours} on memory:p, but {theirs} on memory:d"


def test_a_pool_knows_its_blocks() -> None:
    pool = make_pool(num_blocks=4)
    pool.bytes[3] = 7
    assert bytes(pool.view(3)) == b"\x07" * LAYOUT.bytes_per_block
    assert pool.address_of(3) - pool.address_of(1) == 2 * LAYOUT.bytes_per_block
    for outside in (-1, 0, 4):  # block 0 is the null block: nobody's
        with pytest.raises(AssertionError):
            pool.address_of(outside)
