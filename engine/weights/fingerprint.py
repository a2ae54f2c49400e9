"""One short digest that tells whether two nodes hold the same weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from engine.weights.config import ModelConfig
from engine.weights.safetensors_dir import TensorLocation, WeightIndex

_SAMPLE_BYTES = 4096
_DIGEST_BYTES = 16


def fingerprint(config: ModelConfig, index: WeightIndex) -> str:
    """A hex digest over the model's shape, and name, dtype, shape and two samples of each tensor.

    The same for the same weights wherever they lie and however they are sharded. It reads the first
    4 KiB and 4 KiB from the middle of each tensor, not all of it, so that a start stays cheap: it
    tells models, fine-tunes and dtypes apart, but proves nothing about a file that was forged.
    Stop tokens are left out: two nodes that differ in them still compute the same KV.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    identity = msgspec.structs.replace(config, bos_token_id=None, eos_token_ids=())
    digest.update(msgspec.json.encode(identity, order="sorted"))
    samples: dict[str, bytes] = {}
    for path, names in index.files().items():
        samples |= _samples(path, {name: index.location(name) for name in names})
    for name in index.names:
        digest.update(msgspec.json.encode((name, index.dtype(name), index.shape(name))))
        digest.update(samples[name])
    return digest.hexdigest()


def _samples(path: Path, locations: dict[str, TensorLocation]) -> dict[str, bytes]:
    with path.open("rb") as file:
        return {name: _sample(file.fileno(), where) for name, where in locations.items()}


def _sample(descriptor: int, where: TensorLocation) -> bytes:
    half = where.nbytes // 2
    first = os.pread(descriptor, min(_SAMPLE_BYTES, half), where.offset)
    middle = os.pread(descriptor, min(_SAMPLE_BYTES, where.nbytes - half), where.offset + half)
    return first + middle
