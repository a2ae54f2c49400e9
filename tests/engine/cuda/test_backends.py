"""Which attention is chosen, and what is said if there is none."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
import torch

from engine.cuda import CudaStream
from engine.cuda.backends import AttentionChoice, choose_backend, windows_of
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.weights import ModelConfig
from protocol import ConfigError
from tests.engine.cuda import reference_kernels
from tests.engine.cuda.deferred_stream import DeferredStream
from tests.hash_model import HASH_MODEL


def model_with(head_dim: int = 64, **fields: Any) -> ModelConfig:
    return msgspec.structs.replace(HASH_MODEL, head_dim=head_dim, **fields)


def choose(
    stream: DeferredStream,
    choice: AttentionChoice = AttentionChoice.AUTO,
    *,
    dtype: str = "bfloat16",
    block_size: int = 256,
    head_dim: int = 64,
) -> str:
    cache = KVCache(KVCacheConfig(3, block_size, 1, 1, head_dim, dtype))
    model = model_with(head_dim)
    return choose_backend(choice, stream, cache, model, 512).name


@pytest.fixture
def with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", reference_kernels)


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "flashinfer":
                raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")

    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.mark.usefixtures("with_flashinfer")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashinfer_if_it_is_there(stream: DeferredStream, dtype: str) -> None:
    assert choose(stream, dtype=dtype) == "flashinfer"
    assert choose(stream, dtype=dtype, block_size=16) == "flashinfer"
    assert choose(stream, AttentionChoice.VARLEN, dtype=dtype) == "varlen"
    assert choose(stream, head_dim=96) == "varlen"  # for which flashinfer has no kernels


@pytest.mark.usefixtures("without_flashinfer")
def test_varlen_if_blocks_are_large_enough(stream: DeferredStream) -> None:
    assert choose(stream) == "varlen"
    with pytest.raises(ConfigError, match=r"kvrelay\[cuda\].*multiple of 256, not 16") as caught:
        choose(stream, block_size=16)
    assert caught.value.field == "attention"
    with pytest.raises(ConfigError, match="not installed") as caught:
        choose(stream, AttentionChoice.FLASHINFER)
    assert "varlen" not in str(caught.value)


@pytest.mark.usefixtures("with_flashinfer")
def test_half_precision_only(stream: DeferredStream) -> None:
    with pytest.raises(ConfigError, match="float16 or bfloat16, not float32") as caught:
        choose(stream, dtype="float32")
    assert caught.value.field == "dtype"


@pytest.mark.usefixtures("without_flashinfer")
@pytest.mark.parametrize("head_dim", [60, 264])
def test_heads_that_no_kernel_takes(stream: DeferredStream, head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"not {head_dim}; varlen.*not {head_dim}"):
        choose(stream, head_dim=head_dim)


def test_windows_of_a_model() -> None:
    assert windows_of(model_with(num_layers=3)) == (None,)
    some = model_with(num_layers=3, sliding_window=8, sliding_layers=(1,))
    assert windows_of(some) == (None, 8)
    every = model_with(num_layers=2, sliding_window=8, sliding_layers=(0, 1))
    assert windows_of(every) == (8,)


@pytest.mark.parametrize("device", ["cuda:x", "cpu", "tpu:0", "cuda0"])
def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(ConfigError, match="neither cuda nor cuda:N") as caught:
        CudaStream(device)
    assert caught.value.field == "device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_that_is_said() -> None:
    with pytest.raises(ConfigError, match="has no CUDA") as caught:
        CudaStream("cuda:0")
    assert caught.value.field == "device"
