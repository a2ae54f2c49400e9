"""Quantised tensors against decoders that read one number at a time."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from engine.weights.gguf_file import GGUFFile
from tests.engine.weights.ggml_blocks import DECODERS, decoded, pack_q4_k, pack_q6_k, quantized
from tests.engine.weights.tiny_models import TinyGGUF, random_blocks


def read(path: Path, rows: np.ndarray, kind: Type) -> np.ndarray:
    TinyGGUF(metadata={}, tensors={"t": (rows, kind)}).write(path / "m.gguf")
    file = GGUFFile(path / "m.gguf")
    return file.dequantize(file.tensors["t"])


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_any_bytes(tmp_path: Path, kind: Type) -> None:
    rows = random_blocks(np.random.default_rng(int(kind)), (6, 1024), kind)
    rng = np.random.default_rng(1)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block_bytes)
    scales = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q6_K: [208]}.get(kind, [0, 2])
    halves = {byte for scale in scales for byte in (scale, scale + 1)}
    others = [byte for byte in range(block_bytes) if byte not in halves]
    blocks[:, others] = rng.integers(0, 256, size=(len(blocks), len(others)), dtype=np.uint8)
    np.testing.assert_allclose(
        read(tmp_path, rows, kind), decoded(rows, kind), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_numbers_survive_but_for_rounding(tmp_path: Path, kind: Type) -> None:
    values = np.random.default_rng(2).standard_normal((4, 512)).astype(np.float32)
    error = np.abs(read(tmp_path, quantized(values, kind), kind) - values).max()
    assert 0 < error < {Type.Q8_0: 0.02, Type.Q6_K: 0.15}.get(kind, 0.6)


def test_q4_k_by_its_parts(tmp_path: Path) -> None:
    s, z = [63, 1, 17, 40, 33, 62, 16, 5], [2, 60, 31, 0, 63, 48, 15, 21]
    q = [index * 7 % 16 for index in range(256)]
    block = pack_q4_k(0.5, 0.25, s, z, q)
    values = read(tmp_path, np.frombuffer(block, np.uint8)[None].copy(), Type.Q4_K)[0]
    expected = [0.5 * s[i // 32] * number - 0.25 * z[i // 32] for i, number in enumerate(q)]
    np.testing.assert_array_equal(values, np.array(expected, np.float32))


def test_q6_k_by_its_parts(tmp_path: Path) -> None:
    s = [127, -128, 1, 0, -1, 55, -77, 12, 3, -4, 5, -6, 99, -99, 64, -64]
    q = [index * 11 % 64 for index in range(256)]
    block = pack_q6_k(0.5, s, q)
    values = read(tmp_path, np.frombuffer(block, np.uint8)[None].copy(), Type.Q6_K)[0]
    expected = [0.5 * s[i // 16] * (number - 32) for i, number in enumerate(q)]
    np.testing.assert_array_equal(values, np.array(expected, np.float32))


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_plain_numbers(tmp_path: Path, kind: Type) -> None:
    """A bfloat16 is the upper half of a float32, a float16 what NumPy takes for one."""
    exact = [0.0, 1.0, -1.5, 0.015625, 240.0, -3.0]
    bits = [np.float32(number).view(np.uint32) >> 16 for number in exact]
    written: dict[Type, np.ndarray] = {
        Type.F32: np.array([exact], np.float32),
        Type.F16: np.array([exact], np.float16),
        Type.BF16: np.array([list(itertools.chain(bits))], np.uint16).view(np.uint8),
    }
    np.testing.assert_array_equal(read(tmp_path, written[kind], kind), [exact])
