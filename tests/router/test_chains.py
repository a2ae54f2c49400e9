from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chains import ChainSet

# A small tree of blocks: a path of letters, whose parent is the path without its last one.
PATHS = [b"a", b"ab", b"abc", b"abcd", b"abe", b"abef", b"g", b"gh"]


def parent_of(block: bytes) -> bytes | None:
    return block[:-1] or None


def prefixes(block: bytes) -> list[bytes]:
    return [block[:end] for end in range(1, len(block) + 1)]


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "leaf"]), st.sampled_from(PATHS))))
def test_complete_means_that_all_prefixes_are_held(operations: list[tuple[str, bytes]]) -> None:
    chains = ChainSet()
    held: set[bytes] = set()
    for operation, block in operations:
        if operation == "store":
            chains.store(block, parent_of(block))
            held.add(block)
        elif operation == "remove":
            chains.remove(block)
            held.discard(block)
        elif held:
            gone = chains.remove_oldest_leaf()
            assert not any(parent_of(other) == gone for other in held)
            held.remove(gone)
        chains.check_integrity()
        assert len(chains) == len(held)
        for path in PATHS:
            assert (path in chains) == (path in held)
            assert chains.is_complete(path) == all(part in held for part in prefixes(path))


def test_a_hole_breaks_what_follows_and_filling_it_repairs() -> None:
    chains = ChainSet()
    for block in PATHS:
        chains.store(block, parent_of(block))
    chains.remove(b"ab")
    assert [path for path in PATHS if chains.is_complete(path)] == [b"a", b"g", b"gh"]
    chains.store(b"ab", b"a")
    assert all(chains.is_complete(path) for path in PATHS)


def test_leaves_go_oldest_first_and_a_chain_from_its_end() -> None:
    chains = ChainSet()
    for block in PATHS:
        chains.store(block, parent_of(block))
    gone = [chains.remove_oldest_leaf() for _ in PATHS]
    assert gone == [b"abcd", b"abc", b"abef", b"abe", b"ab", b"a", b"gh", b"g"]
    with pytest.raises(StopIteration):
        chains.remove_oldest_leaf()
