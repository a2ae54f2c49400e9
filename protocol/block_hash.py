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
import struct
from array import array
from collections.abc import Sequence

BlockHash = bytes

HASH_BLOCK_SIZE = 16  # tokens
_DIGEST_SIZE = 16  # bytes; 128 bits, so an accidental collision is out of reach
_BYTES_PER_TOKEN = 4
_ROOT = b"kvrelay.block.v1"


def root_hash(*, lora_name: str | None = None, cache_salt: str | None = None) -> BlockHash:
    """The parent of the first block of a chain; equal keys give equal chains."""
    digest = hashlib.blake2b(_ROOT, digest_size=_DIGEST_SIZE)
    for key in (lora_name, cache_salt):
        # Length in front, so that ("ab", "") and ("a", "b") differ; absent differs from empty.
        encoded = b"" if key is None else key.encode()
        digest.update(len(encoded).to_bytes(4, "little") + bytes([key is None]) + encoded)
    return digest.digest()


def extend_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int
) -> None:
    """Append to `hashes` one hash for each full block of `token_ids` that has none yet."""
    parent = hashes[-1] if hashes else root
    start = len(hashes) * block_size
    num_blocks = (len(token_ids) - start) // block_size
    packed = _token_bytes(token_ids[start : start + num_blocks * block_size])
    blake2b = hashlib.blake2b
    for (block,) in struct.iter_unpack(f"{block_size * _BYTES_PER_TOKEN}s", packed):
        # A digest cut short is as strong as a short one, and takes half the time to make.
        parent = blake2b(parent + block).digest()[:_DIGEST_SIZE]
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
    packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    assert packed.itemsize == _BYTES_PER_TOKEN
    return packed.tobytes()
