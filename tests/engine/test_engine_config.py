"""Which ways to compute there are, and which do not go together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine import EngineConfig, KernelsChoice, Quantization
from protocol import ConfigError


@pytest.mark.parametrize(
    ("wrong", "field", "problem"),
    [
        ({"device": "gpu"}, "device", "must be cpu, cuda or cuda:N, not 'gpu'"),
        ({"device": ""}, "device", "not ''"),
        ({"device": "cuda:"}, "device", "not 'cuda:'"),
        ({"device": "cuda:x"}, "device", "not 'cuda:x'"),
        ({"device": "CPU"}, "device", "not 'CPU'"),
        ({"device": "cpu:0"}, "device", "not 'cpu:0'"),
        ({"device": "cuda:1\n"}, "device", "not 'cuda:1\\n'"),
        ({"dtype": "float64"}, "dtype", "must be one of auto, float32, not 'float64'"),
        ({"dtype": "bfloat16"}, "dtype", "must be one of auto, float32, not 'bfloat16'"),
        ({"dtype": ""}, "dtype", "not ''"),
        ({"device": "cuda", "dtype": "float32"}, "dtype", "one of auto, bfloat16, float16, not"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype", "one of auto, float32, bfloat16, not"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype", "not 'float16'"),
        (
            {"device": "cuda", "kv_cache_dtype": "float16"},
            "kv_cache_dtype",
            "must be one of auto, bfloat16, not 'float16'",
        ),
        (
            {"device": "cuda", "dtype": "float16", "kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype",
            "must be one of auto, float16, not 'bfloat16'",
        ),
        ({"attention": "fast"}, "attention", "must be one of auto, flashinfer, varlen, not 'fast'"),
        ({"attention": "varlen"}, "attention", "varlen is for device cuda; leave it at auto"),
        ({"attention": "flashinfer"}, "attention", "flashinfer is for device cuda"),
        (
            {"batch_invariant": True, "kernels": KernelsChoice.TORCH},
            "batch_invariant",
            "needs the compiled kernels, not torch",
        ),
        (
            {"device": "cuda", "quantization": Quantization.INT8},
            "quantization",
            "int8 is for device cpu only",
        ),
        (
            {"device": "cuda:0", "kernels": KernelsChoice.TORCH},
            "kernels",
            "torch is for device cpu",
        ),
        (
            {"device": "cuda", "kernels": KernelsChoice.COMPILED},
            "kernels",
            "compiled is for device",
        ),
        (
            {"device": "cuda", "batch_invariant": True},
            "batch_invariant",
            "is for device cpu: cuBLAS",
        ),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**wrong)
    assert caught.value.field == field
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("settings", "model_dtype", "cache_dtype"),
    [
        ({}, "float32", "float32"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"kv_cache_dtype": "float32"}, "float32", "float32"),
        ({"device": "cuda"}, "bfloat16", "bfloat16"),
        ({"device": "cuda:3", "dtype": "float16"}, "float16", "float16"),
        ({"device": "cuda", "dtype": "float16", "kv_cache_dtype": "float16"}, "float16", "float16"),
    ],
)
def test_what_auto_stands_for(settings: dict[str, Any], model_dtype: str, cache_dtype: str) -> None:
    config = EngineConfig(**settings)
    assert (config.model_dtype, config.cache_dtype) == (model_dtype, cache_dtype)
    assert config.is_cuda == ("device" in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernels": KernelsChoice.TORCH, "quantization": Quantization.INT8},
        {"kernels": KernelsChoice.COMPILED, "batch_invariant": True},
        {"kernels": KernelsChoice.AUTO, "batch_invariant": True, "kv_cache_dtype": "bfloat16"},
        {"quantization": Quantization.INT8, "batch_invariant": True},
        {"device": "cuda", "attention": "varlen"},
        {"device": "cuda:12", "attention": "flashinfer"},
    ],
)
def test_what_goes_together(settings: dict[str, Any]) -> None:
    assert all(getattr(EngineConfig(**settings), name) == settings[name] for name in settings)


def test_only_what_changes_the_kv_of_all_nodes_is_in_the_fingerprint() -> None:
    """The type of numbers in the cache is compared by itself."""
    assert EngineConfig().fingerprint("m") == "m"
    assert EngineConfig(quantization=Quantization.INT8).fingerprint("m") == "m-int8"
    for same in (
        EngineConfig(kernels=KernelsChoice.TORCH),
        EngineConfig(batch_invariant=True),
        EngineConfig(kv_cache_dtype="bfloat16"),
    ):
        assert same.fingerprint("m") == "m"


def test_it_knows_no_torch() -> None:
    code = "import sys, engine; engine.EngineConfig(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
