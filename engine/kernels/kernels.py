"""The seam between models and what computes on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

INT8_GROUP = 64  # numbers of a row that share a scale
PACKED_GROUP, PACKED_ROWS = 32, 16


@dataclass(frozen=True)
class Int8Weight:
    """A weight `[out, in]` in 8 bits: number (o, i) is `values[o, i] * scales[o, i // 64]`."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out, ceil(in / 64)]

    @property
    def shape(self) -> tuple[int, int]:
        out_size, in_size = self.values.shape
        return out_size, in_size


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[out, in]` in 4 bits, as GGUF's Q4_0, Q4_1 and Q4_K have it: without any loss.

    Rows lie side by side in blocks of 16, and the numbers of a row are in groups of 32. Number
    32 g + j of row 16 b + r is `scales[b, g, 0, r] * steps + scales[b, g, 1, r]`, rounded once,
    where `steps` is the low half of `values[b, g, j, r]`, or with j of 16 and more the high half of
    `values[b, g, j - 16, r]`. Rows that fill up the last block are not looked at.
    """

    values: Tensor  # uint8 [out / 16, in / 32, 16, 16]
    scales: Tensor  # float32 [out / 16, in / 32, 2, 16]
    num_rows: int  # out

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.values.shape[1] * PACKED_GROUP


LinearWeight = Tensor | Int8Weight | PackedWeight


class Kernels(Protocol):
    """What a model computes with, besides attention. All take packed tokens `[num_tokens, ...]`."""

    @property
    def name(self) -> str:
        """Under which people know it."""

    @property
    def keeps_packed(self) -> bool:
        """Whether `PackedWeight` is worth keeping: it is computed with as fast, or faster."""

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`x` `[rows, in]` times `weight` `[out, in]` transposed, plus `bias` and `residual`."""

    def gated_linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """`silu_and_mul` of a projection to `[gate | up]`: `[rows, in]` → `[rows, out / 2]`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square normalisation (https://arxiv.org/abs/1910.07467) of the last dimension.

        `x` is `[rows, size]` or `[num_tokens, num_heads, head_dim]`, which may be part of a wider
        tensor; the result is contiguous.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (https://arxiv.org/abs/2002.05202) of `[num_tokens, gate | up]`."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate number i of each head together with number i + head_dim / 2, in place.

        `heads` `[num_tokens, num_heads, head_dim]` may be part of a wider tensor; `cos` and `sin`
        are `[num_tokens, head_dim / 2]`. Returns `heads`.
        """
