"""How a node computes: on which device, in which numbers, with which kernels. Knows no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from protocol import ConfigError


class Quantization(StrEnum):
    """Weights in fewer bits than they are computed with."""

    INT8 = "int8"


class KernelsChoice(StrEnum):
    """What a CPU computes with."""

    AUTO = "auto"  # compiled, where there is a compiler
    COMPILED = "compiled"
    TORCH = "torch"


_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_CPU_DTYPES = ("float32",)
_CUDA_DTYPES = ("bfloat16", "float16")
_CPU_KV_DTYPES = ("float32", "bfloat16")
_ATTENTION = ("auto", "flashinfer", "varlen")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The same for all nodes of a cluster, whose KV could not be exchanged otherwise.

    Raises:
        ConfigError: a value is none of those that there are, or two do not go together.
    """

    device: str = "cpu"  # or cuda, or one of several: cuda:1
    dtype: str = "auto"  # of weights and hidden states; auto: float32 on cpu, bfloat16 on cuda
    kv_cache_dtype: str = "auto"  # of keys and values; auto: as dtype
    quantization: Quantization | None = None
    kernels: KernelsChoice = KernelsChoice.AUTO  # on cpu
    attention: str = "auto"  # on cuda: flashinfer or varlen
    batch_invariant: bool = False  # a token's logits are bitwise the same in any batch

    def __post_init__(self) -> None:
        if _DEVICE.fullmatch(self.device) is None:
            raise ConfigError("device", f"must be cpu, cuda or cuda:N, not {self.device!r}")
        _check("attention", self.attention, _ATTENTION)
        _check("dtype", self.dtype, ("auto", *(_CUDA_DTYPES if self.is_cuda else _CPU_DTYPES)))
        kv_dtypes = (self.model_dtype,) if self.is_cuda else _CPU_KV_DTYPES
        _check("kv_cache_dtype", self.kv_cache_dtype, ("auto", *kv_dtypes))
        if self.is_cuda:
            self._check_cuda()
        elif self.attention != "auto":
            raise ConfigError("attention", f"{self.attention} is for device cuda; leave it at auto")
        elif self.batch_invariant and self.kernels is KernelsChoice.TORCH:
            raise ConfigError("batch_invariant", "needs the compiled kernels, not torch")

    def _check_cuda(self) -> None:
        if self.quantization is not None:
            raise ConfigError("quantization", f"{self.quantization} is for device cpu only")
        if self.kernels is not KernelsChoice.AUTO:
            raise ConfigError("kernels", f"{self.kernels} is for device cpu; leave it at auto")
        if self.batch_invariant:
            raise ConfigError(
                "batch_invariant", "is for device cpu: cuBLAS looks at the size of a batch"
            )

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def model_dtype(self) -> str:
        """What `dtype` stands for."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.is_cuda else "float32"

    @property
    def cache_dtype(self) -> str:
        """What `kv_cache_dtype` stands for."""
        return self.model_dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def fingerprint(self, model: str) -> str:
        """Of a model with this fingerprint, as this engine computes it: KV differs as they do."""
        return model if self.quantization is None else f"{model}-{self.quantization}"


def _check(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(field, f"must be one of {', '.join(known)}, not {value!r}")
