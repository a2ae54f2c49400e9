"""ggml's quantised blocks, packed and read one number at a time.

Written from the description of the blocks in ggml's `ggml-common.h`, independently of the `gguf`
package that the engine reads them with. A block is scales in half precision (d, m) and integers:

    Q8_0   32 numbers   d · q                q of 8 bits, signed
    Q4_0   32 numbers   d · (q - 8)          q of 4 bits; byte j holds numbers j and j + 16
    Q4_1   32 numbers   d · q + m
    Q4_K   256 numbers  d·s · q - m·z        s and z of 6 bits for each 32 numbers
    Q6_K   256 numbers  d·s · (q - 32)       q of 6 bits; s of 8 bits, signed, for each 16 numbers
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

Decoder = Callable[[bytes], list[float]]


def _half(content: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", content, offset)[0])


def decode_q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def decode_q4_0(block: bytes) -> list[float]:
    d, packed = _half(block, 0), block[2:]
    numbers = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    return [d * (q - 8) for q in numbers]


def decode_q4_1(block: bytes) -> list[float]:
    d, m, packed = _half(block, 0), _half(block, 2), block[4:]
    numbers = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
    return [d * q + m for q in numbers]


def decode_q4_k(block: bytes) -> list[float]:
    d, m, scales, packed = _half(block, 0), _half(block, 2), block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            s, z = scales[group] & 63, scales[group + 4] & 63
        else:
            s = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
            z = scales[group + 4] >> 4 | scales[group] >> 6 << 4
        for j in range(32):
            byte = packed[group // 2 * 32 + j]
            q = byte >> 4 if group % 2 else byte & 15
            values.append(d * s * q - m * z)
    return values


def decode_q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, d = struct.unpack_from("<16b", block, 192), _half(block, 208)
    values = []
    for number in range(256):
        half, within = divmod(number, 128)
        quarter, j = divmod(within, 32)
        byte = low[half * 64 + quarter % 2 * 32 + j]
        q = byte >> 4 if quarter >= 2 else byte & 15
        q |= (high[half * 32 + j] >> 2 * quarter & 3) << 4
        values.append(d * scales[number // 16] * (q - 32))
    return values


DECODERS: dict[Type, Decoder] = {
    Type.Q8_0: decode_q8_0,
    Type.Q4_0: decode_q4_0,
    Type.Q4_1: decode_q4_1,
    Type.Q4_K: decode_q4_k,
    Type.Q6_K: decode_q6_k,
}


def decoded(rows: np.ndarray, kind: Type) -> np.ndarray:
    """`[..., bytes]` → `[..., numbers]` in float64, block by block."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block_bytes)
    numbers = [number for block in blocks for number in DECODERS[kind](block.tobytes())]
    return np.array(numbers).reshape(*rows.shape[:-1], -1)


def pack_q4_k(d: float, m: float, s: list[int], z: list[int], q: list[int]) -> bytes:
    """Scales `s` and `z` (8 each, below 64), and 256 numbers `q` below 16."""
    low = [s[i] | s[i + 4] >> 4 << 6 for i in range(4)]
    middle = [z[i] | z[i + 4] >> 4 << 6 for i in range(4)]
    high = [s[i + 4] & 15 | (z[i + 4] & 15) << 4 for i in range(4)]
    packed = [q[pair * 64 + j] | q[pair * 64 + 32 + j] << 4 for pair in range(4) for j in range(32)]
    return struct.pack("<2e", d, m) + bytes([*low, *middle, *high, *packed])


def pack_q6_k(d: float, s: list[int], q: list[int]) -> bytes:
    """Scales `s` (16 signed bytes), and 256 numbers `q` below 64."""
    low, high = bytearray(128), bytearray(64)
    for number, value in enumerate(q):
        half, within = divmod(number, 128)
        quarter, j = divmod(within, 32)
        low[half * 64 + quarter % 2 * 32 + j] |= (value & 15) << (4 if quarter >= 2 else 0)
        high[half * 32 + j] |= value >> 4 << 2 * quarter
    return bytes(low) + bytes(high) + struct.pack("<16b", *s) + struct.pack("<e", d)


def quantized(values: np.ndarray, kind: Type) -> np.ndarray:
    """Blocks of `kind` whose numbers are close to `values` `[..., columns]`."""
    if kind not in (Type.Q4_K, Type.Q6_K):
        return gguf.quants.quantize(values, kind)
    pack = _nearest_q4_k if kind == Type.Q4_K else _nearest_q6_k
    blocks = [pack(block) for block in values.reshape(-1, 256)]
    packed = np.frombuffer(b"".join(blocks), np.uint8)
    return packed.reshape(*values.shape[:-1], -1).copy()


def _nearest_q4_k(block: np.ndarray) -> bytes:
    groups = block.reshape(8, 32)
    lowest, highest = groups.min(axis=1).clip(max=0.0), groups.max(axis=1)
    d = max(float((highest - lowest).max()) / 15 / 63, 1e-6)
    m = max(float(-lowest.min()) / 63, 1e-6)
    s = ((highest - lowest) / 15 / d).round().clip(1, 63).astype(int)
    z = (-lowest / m).round().clip(0, 63).astype(int)
    q = ((groups + (m * z)[:, None]) / (d * s)[:, None]).round().clip(0, 15).astype(int)
    return pack_q4_k(d, m, s.tolist(), z.tolist(), q.flatten().tolist())


def _nearest_q6_k(block: np.ndarray) -> bytes:
    groups = block.reshape(16, 16)
    largest = np.abs(groups).max(axis=1)
    d = max(float(largest.max()) / 31 / 127, 1e-6)
    s = (largest / 31 / d).round().clip(1, 127).astype(int)
    q = ((groups / (d * s)[:, None]).round().astype(int) + 32).clip(0, 63)
    return pack_q6_k(d, s.tolist(), q.flatten().tolist())
