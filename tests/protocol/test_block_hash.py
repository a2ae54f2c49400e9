"""A block has one name, wherever it is made, and no two contents have the same."""

from __future__ import annotations

from array import array

import pytest

from protocol import HASH_BLOCK_SIZE, extend_hashes, hash_chain, root_hash

TOKENS = [7 * n % 50_000 for n in range(100)]


def test_names_are_those_of_every_process_and_version() -> None:
    """Nodes, routers and stores of several processes compare them."""
    assert [block.hex() for block in hash_chain(TOKENS[:40])] == NAMES
    assert root_hash().hex() == ROOT


def test_one_for_each_full_block() -> None:
    for length in (0, 15, 16, 17, 31, 32, 100):
        assert len(hash_chain(TOKENS[:length])) == length // HASH_BLOCK_SIZE


def test_a_chain_grows_as_it_would_have_been_made_at_once() -> None:
    packed, hashes = array("I"), []  # type: ignore[var-annotated]
    for token in TOKENS:
        packed.append(token)
        extend_hashes(hashes, root_hash(), packed, HASH_BLOCK_SIZE)
        assert hashes == hash_chain(list(packed))


def test_a_name_covers_all_that_is_in_front() -> None:
    other = [*TOKENS]
    other[3] += 1
    assert not set(hash_chain(TOKENS)) & set(hash_chain(other))
    other = [*TOKENS]
    other[20] += 1
    assert hash_chain(TOKENS)[:1] == hash_chain(other)[:1]
    assert not set(hash_chain(TOKENS)[1:]) & set(hash_chain(other)[1:])


def test_adapters_and_salts_part_whole_chains() -> None:
    keys: list[dict[str, str]] = [
        {},
        {"lora_name": "a"},
        {"lora_name": ""},
        {"cache_salt": "a"},
        {"cache_salt": ""},
        {"lora_name": "ab", "cache_salt": ""},
        {"lora_name": "a", "cache_salt": "b"},
    ]
    chains = [
        hash_chain(TOKENS, lora_name=key.get("lora_name"), cache_salt=key.get("cache_salt"))
        for key in keys
    ]
    assert len({block for chain in chains for block in chain}) == len(keys) * 6


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_are_32_bits(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_chain([token] * 16)


ROOT = "0c9533b594024b7e7b6d24a39e1a41e4"
NAMES = ["b97b7998b98b23f3ecf3e818578f2763", "990cf267640906f1b5c871c3f83ae1d5"]
