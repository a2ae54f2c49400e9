"""Which attention kernels a KV cache and a model can have, and what is missing for the others."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Any

import torch

from engine.cuda.attention_backend import AttentionBackend
from engine.cuda.flashinfer_attention import FlashInferBackend
from engine.cuda.stream import Stream
from engine.cuda.varlen_attention import BLOCK_SIZE_UNIT, VarlenBackend
from engine.kv_cache import KVCache
from engine.weights import ModelConfig
from protocol import ConfigError

_DTYPES = (torch.float16, torch.bfloat16)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_MAX_VARLEN_HEAD_DIM = 256


class AttentionChoice(StrEnum):
    AUTO = "auto"  # FlashInfer, if it is there, else varlen
    FLASHINFER = "flashinfer"
    VARLEN = "varlen"


def choose_backend(
    choice: AttentionChoice,
    stream: Stream,
    kv_cache: KVCache,
    model: ModelConfig,
    max_model_len: int,
    *,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Raises ConfigError, which says of each kind of kernels why it cannot be used."""
    dtype = kv_cache.tensor.dtype
    if dtype not in _DTYPES:
        known = " or ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ConfigError("dtype", f"on CUDA it has to be {known}, not {kv_cache.dtype_name}")
    problems = {}
    if choice is not AttentionChoice.VARLEN:
        problem = _flashinfer_problem(model)
        if problem is None:
            return FlashInferBackend(
                importlib.import_module("flashinfer"),
                stream,
                kv_cache,
                model.num_attention_heads,
                windows_of(model),
                max_model_len,
                batch_invariant=batch_invariant,
            )
        problems["flashinfer"] = problem
    if choice is not AttentionChoice.FLASHINFER:
        problem = _varlen_problem(kv_cache, model)
        if problem is None:
            return VarlenBackend(kv_cache, max_model_len, batch_invariant=batch_invariant)
        problems["varlen"] = problem
    raise ConfigError("attention", "; ".join(f"{name}: {why}" for name, why in problems.items()))


def windows_of(model: ModelConfig) -> tuple[int | None, ...]:
    """The windows that its layers have, each once."""
    num_sliding = len(model.sliding_layers)
    windows: list[int | None] = [] if num_sliding == model.num_layers else [None]
    return (*windows, model.sliding_window) if num_sliding else tuple(windows)


def _flashinfer_problem(model: ModelConfig) -> str | None:
    if model.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"it has kernels for heads of {_FLASHINFER_HEAD_DIMS} numbers, not {model.head_dim}"
    return None if _import("flashinfer") else "not installed; pip install 'kvrelay[cuda]'"


def _varlen_problem(kv_cache: KVCache, model: ModelConfig) -> str | None:
    block_size = kv_cache.config.block_size
    if block_size % BLOCK_SIZE_UNIT:
        return f"block_size has to be a multiple of {BLOCK_SIZE_UNIT}, not {block_size}"
    if model.head_dim % 8 or model.head_dim > _MAX_VARLEN_HEAD_DIM:
        limit = _MAX_VARLEN_HEAD_DIM
        return f"heads have a multiple of 8 numbers up to {limit}, not {model.head_dim}"
    return None


def _import(name: str) -> Any:
    """The module, or None: there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise ConfigError("attention", f"{name} cannot be loaded: {error}") from error
    except (ImportError, OSError) as error:  # a library of another CUDA
        raise ConfigError("attention", f"{name} cannot be loaded: {error}") from error
