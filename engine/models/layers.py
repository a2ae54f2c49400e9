"""The layers that decoder-only models are made of. All take packed tokens `[num_tokens, ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.engine_config import Quantization
from engine.kernels import Kernels, LinearWeight
from engine.models.mapped_weights import MappedWeights
from engine.models.quantization import quantized


@dataclass(frozen=True)
class Linear:
    """A projection, or several that read the same input."""

    kernels: Kernels
    weight: LinearWeight  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[num_tokens, in]` → `[num_tokens, out]`, plus `residual` of that shape."""
        return self.kernels.linear(x, self.weight, self.bias, residual)


@dataclass(frozen=True)
class GatedLinear:
    """A projection to gates and what they let through: SwiGLU."""

    kernels: Kernels
    weight: LinearWeight  # [gate | up, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, in]` → `[num_tokens, gate]`: silu(gate(x)) * up(x)."""
        return self.kernels.gated_linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RMSNorm:
    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension: hidden states, or each of several heads."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Embedding:
    weight: Tensor  # [vocab_size, hidden_size]

    def __call__(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


@dataclass(frozen=True)
class Rotation:
    """Rotates the heads of the tokens that it was made for; the same in every layer."""

    kernels: Kernels
    cos: Tensor  # [num_tokens, head_dim / 2]
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate `[num_tokens, num_heads, head_dim]` in place, and return it."""
        return self.kernels.rotate(heads, self.cos, self.sin)


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) in the half-split layout.

    Number i of a head is rotated together with number i + head_dim / 2, by `position *
    inverse_frequencies[i]`. `attention_factor` scales what is rotated (YaRN).
    """

    kernels: Kernels
    inverse_frequencies: Tensor  # float32 [head_dim / 2]
    dtype: torch.dtype
    attention_factor: float = 1.0

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of the tokens at `positions` `[num_tokens]`."""
        angles = positions[:, None].to(torch.float32) * self.inverse_frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(self.kernels, cos.to(self.dtype), sin.to(self.dtype))


class Layers:
    """Makes layers of a checkpoint's tensors, by their Hugging Face names."""

    def __init__(
        self, weights: MappedWeights, kernels: Kernels, quantization: Quantization | None = None
    ) -> None:
        self._weights = weights
        self._kernels = kernels
        self._quantization = quantization

    def embedding(self, name: str) -> Embedding:
        return Embedding(self._weights.tensor(f"{name}.weight"))

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One projection, or several that read the same input, as one."""
        return Linear(self._kernels, *self._stacked(names, bias))

    def gated_linear(self, gate: str, up: str, *, bias: bool = False) -> GatedLinear:
        return GatedLinear(self._kernels, *self._stacked((gate, up), bias))

    def _stacked(self, names: Sequence[str], bias: bool) -> tuple[LinearWeight, Tensor | None]:
        weight: LinearWeight | None = self._weights.packed(*(f"{name}.weight" for name in names))
        if weight is None:
            full = self._weights.stacked(*(f"{name}.weight" for name in names))
            weight = full if self._quantization is None else quantized(full, self._quantization)
        return weight, self._weights.stacked(*(f"{name}.bias" for name in names)) if bias else None

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self._kernels, self._weights.tensor(f"{name}.weight"), eps)

    def rotary(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> RotaryEmbedding:
        """`inverse_frequencies` is float32 `[head_dim / 2]`."""
        weights = self._weights
        frequencies = inverse_frequencies.to(weights.device)
        return RotaryEmbedding(self._kernels, frequencies, weights.dtype, attention_factor)
