"""Turns a GGUF file into a Hugging Face directory, once, so that every start can just map it.

Knows what llama.cpp did to a model when it wrote the file, and undoes it:

* names: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`;
* quantised blocks become float32, which no later cast can make worse; those of 4 bits are kept as
  well, in a file of their own, because a kernel can compute with them as they are;
* of some families rows of q and k are permuted. Rotary embeddings pair row i of a head with row
  i + d/2 in Hugging Face, and of these families row 2i with row 2i + 1 in ggml:

      Hugging Face   a0 a1 a2 | b0 b1 b2       (pairs a_i, b_i; d = 6)
      GGUF           a0 b0 a1 b1 a2 b2

* an output projection that equals the embedding is left out, and so is `lm_head` here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.weights.config import ModelConfig
from engine.weights.gguf_config import ROPE_DIVISORS, GGUFConfig, GGUFFamily, one_or_many
from engine.weights.gguf_file import GGUFFile, GGUFTensor
from engine.weights.gguf_tokenizer import GGUFTokenizer
from engine.weights.model_tensors import Shape, from_gguf_name, tensor_shapes
from engine.weights.packed_blocks import can_pack, pack, packed_shapes, side_by_side
from engine.weights.progress import ProgressSink, Stage
from engine.weights.safetensors_dir import PACKED_FILE, SINGLE_FILE, scales_of
from engine.weights.safetensors_writer import float32_bytes, write_safetensors
from protocol import ModelError

Json = dict[str, Any]

_Number = TypeVar("_Number", np.float32, np.uint8)

# Raised when a conversion writes something else than before, so that cached ones are made anew.
CONVERTER_VERSION = 3

_SPARE_BYTES = 64 * 1024 * 1024  # for everything that is not weights


def convert_gguf(source: Path, target: Path, progress: ProgressSink) -> None:
    """Write `source` as config.json, model.safetensors (float32), packed.safetensors (if there is
    anything for it), tokenizer.json, tokenizer_config.json, generation_config.json and
    chat_template.jinja into `target`.

    `target` exists and is empty; on an error it is left half full. Raises ModelError: broken or cut
    off, another architecture, tensors that do not fit, a type that cannot be dequantised, an
    unknown tokenizer, or too little room on the disk.
    """
    file = GGUFFile(source)
    gguf_config = GGUFConfig(file)
    tokenizer = GGUFTokenizer(file)
    config_json = gguf_config.config_json(tokenizer)
    config = ModelConfig.parse(json.dumps(config_json).encode(), source)
    tensors = _tensors_by_name(file, config)
    packable = {name: tensors[name] for name in tensor_shapes(config) if _can_pack(tensors[name])}
    _check_room(config, packable, target)

    _write_json(target / "config.json", config_json)
    _write_json(target / "generation_config.json", _generation_config(tokenizer))
    _write_json(target / "tokenizer_config.json", tokenizer.tokenizer_config())
    (target / "tokenizer.json").write_text(tokenizer.tokenizer_json(), encoding="utf-8")
    if tokenizer.chat_template is not None:
        (target / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    order, metadata = _Order(config, gguf_config.family), {"format": "pt", "source": source.name}
    write_safetensors(
        target / SINGLE_FILE,
        {name: tensor.shape for name, tensor in tensors.items()},
        _converted(file, tensors, order, progress),
        metadata,
    )
    if packable:
        write_safetensors(
            target / PACKED_FILE,
            _packed_shapes(packable),
            _packed(file, packable, order),
            metadata,
            of_bytes=packable.keys(),
        )


def unpermute(rows: NDArray[_Number], num_heads: int) -> NDArray[_Number]:
    """Undo llama.cpp's order of the rows of q or k (or of their bias).

    `rows` is [num_heads * head_dim, ...]; within a head, (pair, half) becomes (half, pair).
    """
    heads = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _generation_config(tokenizer: GGUFTokenizer) -> Json:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": one_or_many(tokenizer.eos_token_ids),
    }


def _tensors_by_name(file: GGUFFile, config: ModelConfig) -> dict[str, GGUFTensor]:
    """Exactly the tensors that the model needs, by their Hugging Face names and of its shapes."""
    expected = tensor_shapes(config)
    tensors: dict[str, GGUFTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_DIVISORS:
            continue
        name = from_gguf_name(tensor.name)
        if name not in expected:
            raise file.broken(
                f"tensor {tensor.name} {list(tensor.shape)} has no place in this model"
            )
        if tensor.shape != expected[name]:
            raise file.broken(
                f"tensor {tensor.name} has shape {list(tensor.shape)}, but its metadata says"
                f" {list(expected[name])}"
            )
        tensors[name] = tensor
    missing = expected.keys() - tensors.keys()
    if missing:
        raise file.broken(f"tensor {min(missing)} {list(expected[min(missing)])} is missing")
    return tensors


def _check_room(config: ModelConfig, packable: dict[str, GGUFTensor], target: Path) -> None:
    packed = float32_bytes(_packed_shapes(packable))  # more than it is: values take a byte
    needed = float32_bytes(tensor_shapes(config)) + packed + _SPARE_BYTES
    free = shutil.disk_usage(target).free
    if free < needed:
        raise ModelError(
            f"{target.parent}: converting needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB"
            " are free; make room or choose another cache directory",
            path=str(target.parent),
        )


def _converted(
    file: GGUFFile, tensors: dict[str, GGUFTensor], order: _Order, progress: ProgressSink
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    progress.update(Stage.CONVERT, 0, len(tensors))
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        yield name, order.undone(name, file.dequantize(tensor))
        progress.update(Stage.CONVERT, done, len(tensors))


def _can_pack(tensor: GGUFTensor) -> bool:
    return len(tensor.shape) == 2 and can_pack(tensor.type)


def _packed_shapes(tensors: dict[str, GGUFTensor]) -> dict[str, Shape]:
    """All values, then all scales: what is next to each other can be mapped as one."""
    values: dict[str, Shape] = {}
    scales: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        values[name], scales[scales_of(name)] = packed_shapes(tensor.shape)
    return values | scales


def _packed(
    file: GGUFFile, tensors: dict[str, GGUFTensor], order: _Order
) -> Iterator[tuple[str, NDArray[np.float32] | NDArray[np.uint8]]]:
    for name, tensor in tensors.items():
        values, _ = pack(file.raw_rows(tensor), tensor.type)
        yield name, side_by_side(order.undone(name, values))
    for name, tensor in tensors.items():  # once more, so that memory never holds more than one
        _, scales = pack(file.raw_rows(tensor), tensor.type)
        yield scales_of(name), side_by_side(order.undone(name, scales))


@dataclass(frozen=True, slots=True)
class _Order:
    """Which rows llama.cpp has permuted."""

    config: ModelConfig
    family: GGUFFamily

    def undone(self, name: str, values: NDArray[_Number]) -> NDArray[_Number]:
        if not self.family.permutes_rows:
            return values
        if ".q_proj." in name:
            return unpermute(values, self.config.num_attention_heads)
        if ".k_proj." in name:
            return unpermute(values, self.config.num_kv_heads)
        return values


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
