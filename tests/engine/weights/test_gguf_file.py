from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights.gguf_file import GGUFFile
from protocol import ModelError
from tests.engine.weights.tiny_models import TinyGGUF, random_blocks

QUANTIZED = [
    Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
    Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL,
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyGGUF().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def one_tensor(path: Path, kind: Type, shape: tuple[int, ...] = (8, 512)) -> np.ndarray:
    """Write a file with one tensor of this type and give its raw blocks."""
    raw = random_blocks(np.random.default_rng(int(kind)), shape, kind)
    TinyGGUF(metadata={}, tensors={"t": (raw, kind)}).write(path)
    return raw


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    values = {
        "a.u8": (7, Kind.UINT8), "a.i8": (-7, Kind.INT8), "a.u16": (700, Kind.UINT16),
        "a.i16": (-700, Kind.INT16), "a.u32": (70_000, Kind.UINT32), "a.i32": (-1, Kind.INT32),
        "a.u64": (1 << 40, Kind.UINT64), "a.i64": (-(1 << 40), Kind.INT64),
        "a.f32": (0.5, Kind.FLOAT32), "a.f64": (0.1, Kind.FLOAT64), "a.bool": (True, Kind.BOOL),
        "a.string": ("größe", Kind.STRING), "a.ints": ([1, -2], Kind.ARRAY),
        "a.strings": (["x", ""], Kind.ARRAY),
    }  # fmt: skip
    file = GGUFFile(TinyGGUF(metadata=values).write(tmp_path / "m.gguf"))
    for key, (value, _) in values.items():
        assert file.metadata[key] == value
    assert file.metadata["general.architecture"] == "llama"


def test_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "m.gguf")
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    assert {tensor.name for tensor in reference.tensors} == file.tensors.keys()
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.offset, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(file.dequantize(ours), tensor.data)
    for key, value in file.metadata.items():
        assert reference.fields[key].contents() == value


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_dequantizes_as_the_gguf_package_does(tmp_path: Path, kind: Type) -> None:
    raw = one_tensor(tmp_path / "m.gguf", kind)
    file = GGUFFile(tmp_path / "m.gguf")
    values = file.dequantize(file.tensors["t"])
    assert values.shape == (8, 512)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, gguf.quants.dequantize(raw, kind))
    assert np.isfinite(values).all()


def test_q8_0_by_hand(tmp_path: Path) -> None:
    raw = one_tensor(tmp_path / "m.gguf", Type.Q8_0, (2, 64))
    file = GGUFFile(tmp_path / "m.gguf")
    values = file.dequantize(file.tensors["t"])
    for row in range(2):
        for block in range(2):
            scale, *numbers = struct.unpack(
                "<e32b", raw[row, block * 34 : (block + 1) * 34].tobytes()
            )
            expected = np.float32(scale) * np.array(numbers, np.float32)
            np.testing.assert_array_equal(values[row, block * 32 : (block + 1) * 32], expected)


def test_a_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    TinyGGUF(metadata={}, tensors={"t": (np.ones((2, 4), np.int16), Type.I16)}).write(
        tmp_path / "m.gguf"
    )
    file = GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="tensor t has type I16"):
        file.dequantize(file.tensors["t"])


def test_typed_access(tmp_path: Path) -> None:
    file = GGUFFile(TinyGGUF().write(tmp_path / "m.gguf"))
    assert file.get("llama.block_count", int) == 2
    assert file.get("llama.block_count", float) == 2.0
    assert file.get("llama.absent", int) is None
    assert file.get_list("llama.absent", str) is None
    assert file.get_list("tokenizer.ggml.tokens", str) is not None
    with pytest.raises(ModelError, match=r"llama.block_count is int, not str"):
        file.get("llama.block_count", str)
    with pytest.raises(ModelError, match=r"llama\.absent is missing"):
        file.require("llama.absent", int)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml.tokens is not a list of int"):
        file.get_list("tokenizer.ggml.tokens", int)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml.tokens is list, not str"):
        file.get("tokenizer.ggml.tokens", str)


def test_cut_off_anywhere(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    head = range(0, 12_000, 97)
    data = range(12_000, len(whole), 200_001)
    for length in [*head, *data, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut.gguf: .*(cut off|empty|not a GGUF)"):
            GGUFFile(path)


@settings(deadline=None)
@given(position=st.integers(0, 9_000), value=st.binary(min_size=1, max_size=8))
def test_corrupt_anywhere_in_the_head(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, position: int, value: bytes
) -> None:
    """It may still be readable, by chance, but there is no error except ModelError."""
    path = tmp_path_factory.getbasetemp() / "corrupt.gguf"
    path.write_bytes(whole[:position] + value + whole[position + len(value) :])
    with contextlib.suppress(ModelError):
        file = GGUFFile(path)
        for tensor in file.tensors.values():
            file.dequantize(tensor)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGML" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 99, 0), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sQQ", 3, 0, 1, 1, b"\xff", 0, 0), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "empty shape"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 77, 0), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "not a multiple"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 64, 0, 0), "beyond its end"),
    ],
)
def test_broken_in_one_place(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        GGUFFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "m.gguf")
