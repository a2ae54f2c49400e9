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
        kernels = self._module
        use_amx = self._use_amx(x)
        if isinstance(weight, Int8Weight):
            multiply = kernels.linear_int8_of_many_rows if use_amx else kernels.linear_int8
            return multiply(x, weight.values, weight.scales, bias, residual)  # type: ignore[no-any-return]
        if isinstance(weight, PackedWeight):
            multiply = kernels.linear_packed_of_many_rows if use_amx else kernels.linear_packed
            return multiply(x, weight.values, weight.scales, bias, residual)  # type: ignore[no-any-return]
        if use_amx:
            return kernels.linear_of_many_rows(x, weight, bias, residual)  # type: ignore[no-any-return]
        if len(x) < _MANY_ROWS or self.batch_invariant:
            return kernels.linear(x, weight, bias, residual)  # type: ignore[no-any-return]
        product = F.linear(x, weight, bias)
        return product if residual is None else product.add_(residual)

    def gated_linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Int8Weight) and self._use_amx(x):
            if isinstance(weight, PackedWeight):
                multiply = self._module.gated_linear_packed_of_many_rows
                return multiply(x, weight.values, weight.scales, bias)  # type: ignore[no-any-return]
            return self._module.gated_linear_of_many_rows(x, weight, bias)  # type: ignore[no-any-return]
        return self.silu_and_mul(self.linear(x, weight, bias))

    def _use_amx(self, x: Tensor) -> bool:
        return (
            not self.batch_invariant and len(x) >= _MANY_ROWS_OF_AMX and bool(self._module.has_amx)
        )

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
