"""Names for KV blocks that mean the same on every node and in every process.

A block's hash covers everything that its KV depends on: all token ids up to its end and, in
front of them, the extra keys (LoRA name, cache salt). It is chained, so one hash names a whole
prefix:

    tokens   | 0 ........ 15 | 16 ....... 31 | 32 ....... 47 |
    hash       h0 = H(extra    h1 = H(h0,      h2 = H(h1,
                 , t0..t15)      t16..t31)       t32..t47)

Hashes are made per `hash_block_size` tokens. A node whose blocks hold k pieces of that size
names a block by the hash of its last piece, which covers the pieces before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes

HASH_BLOCK_SIZE = 16  # tokens
_DIGEST_SIZE = 16  # bytes; 128 bits, so an accidental collision is out of reach
_ROOT = b"kvrelay.block.v1"


def root_hash(*, lora_name: str | None = None, cache_salt: str | None = None) -> BlockHash:
    """The parent of the first block of a chain; equal keys give equal chains."""
    digest = hashlib.blake2b(_ROOT, digest_size=_DIGEST_SIZE)
    for key in (lora_name, cache_salt):
        # Length in front, so that ("ab", "") and ("a", "b") differ; absent differs from empty.
        encoded = b"" if key is None else key.encode()
        digest.update(len(encoded).to_bytes(4, "little") + bytes([key is None]) + encoded)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that follows `parent` and holds `token_ids` (each below 2**32)."""
    return hashlib.blake2b(parent + _token_bytes(token_ids), digest_size=_DIGEST_SIZE).digest()


def extend_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int
) -> None:
    """Append to `hashes` one hash for each full block of `token_ids` that has none yet."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)


def hash_chain(
    token_ids: Sequence[int],
    block_size: int = HASH_BLOCK_SIZE,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> list[BlockHash]:
    """One hash for each full block of `token_ids`."""
    hashes: list[BlockHash] = []
    root = root_hash(lora_name=lora_name, cache_salt=cache_salt)
    extend_hashes(hashes, root, token_ids, block_size)
    return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    assert packed.itemsize == 4
    return packed.tobytes()
