"""The kernels of `kernels.cpp`: for CPUs, in float32."""

from __future__ import annotations

from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.build import build
from engine.kernels.kernels import Int8Weight, LinearWeight, PackedWeight

# With so many rows there is time for bringing both sides into an order that suits AMX, or the
# library that torch multiplies with: sums are then in another order.
_MANY_ROWS_OF_AMX = 64
_MANY_ROWS_OF_PACKED = 32  # which are taken apart with less work
_MANY_ROWS = 96


class CompiledKernels:
    """See `engine.kernels.Kernels`. Inputs are float32 on the CPU.

    All kernels give each row the same bits in any batch, so that only what is not computed by them
    has to be left out for `batch_invariant`.
    """

    name = "compiled"
    keeps_packed = True

    def __init__(self, module: ModuleType | None = None, *, batch_invariant: bool = False) -> None:
        """Raises KernelsUnavailable: they cannot be built here."""
        self._module = module or build()
        self.batch_invariant = batch_invariant

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if self._use_amx(x, weight):
            return self._linear_of_many_rows(x, weight, bias, residual)
        if isinstance(weight, PackedWeight):
            packed = weight.values, weight.scales, weight.num_rows
            return self._module.linear_packed(x, *packed, bias, residual)  # type: ignore[no-any-return]
        if isinstance(weight, Tensor) and len(x) >= _MANY_ROWS and not self.batch_invariant:
            product = F.linear(x, weight, bias)
            return product if residual is None else product.add_(residual)
        return self._module.linear(x, *_parts_of(weight), bias, residual)  # type: ignore[no-any-return]

    def gated_linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        if self._use_amx(x, weight):
            return self._linear_of_many_rows(x, weight, bias, is_gated=True)
        return self.silu_and_mul(self.linear(x, weight, bias))

    def _linear_of_many_rows(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> Tensor:
        if isinstance(weight, PackedWeight):
            packed = weight.values, weight.scales, weight.num_rows
            multiply = self._module.linear_packed_of_many_rows
            return multiply(x, *packed, is_gated, bias, residual)  # type: ignore[no-any-return]
        multiply = self._module.linear_of_many_rows
        return multiply(x, *_parts_of(weight), is_gated, bias, residual)  # type: ignore[no-any-return]

    def _use_amx(self, x: Tensor, weight: LinearWeight) -> bool:
        is_packed = isinstance(weight, PackedWeight)
        enough = len(x) >= (_MANY_ROWS_OF_PACKED if is_packed else _MANY_ROWS_OF_AMX)
        return enough and not self.batch_invariant and bool(self._module.has_amx)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._module.rms_norm(x, weight, eps)  # type: ignore[no-any-return]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._module.silu_and_mul(gate_up)  # type: ignore[no-any-return]

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._module.rotate(heads, cos, sin)
        return heads

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        window: int | None,
    ) -> Tensor:
        """Write keys and values into the cache, and attend; see `engine.attention.Attention`.

        `layer` is `[num_blocks, 2, block_size, num_kv_heads, head_dim]` (float32 or bfloat16), the
        others int32: `[num_seqs + 1]`, `[num_seqs]` and `[num_seqs, max_blocks]`.
        """
        return self._module.attention(  # type: ignore[no-any-return]
            query, key, value, layer, query_starts, context_lens, block_tables, window or 0
        )


def _parts_of(weight: Tensor | Int8Weight) -> tuple[Tensor, Tensor | None]:
    """Its numbers, and the scales of those that are not float32."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
