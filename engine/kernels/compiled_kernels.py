"""The kernels of `kernels.cpp`: for CPUs, in float32."""

from __future__ import annotations

from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from engine.kernels.build import build
from engine.kernels.kernels import Int8Weight, LinearWeight

# With so many rows the library that torch multiplies with is faster: it can spend time on bringing
# both sides into an order of its own, which changes the order of the sums with the number of rows.
_MANY_ROWS = 96


class CompiledKernels:
    """See `engine.kernels.Kernels`. Inputs are float32 on the CPU.

    All kernels give each row the same bits in any batch, so that only what is not computed by them
    has to be left out for `batch_invariant`.
    """

    name = "compiled"

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
        if isinstance(weight, Int8Weight):
            values, scales = weight.values, weight.scales
            return self._module.linear_int8(x, values, scales, bias, residual)  # type: ignore[no-any-return]
        if len(x) < _MANY_ROWS or self.batch_invariant:
            return self._module.linear(x, weight, bias, residual)  # type: ignore[no-any-return]
        if self._module.has_amx:
            return self._module.linear_of_many_rows(x, weight, bias, residual)  # type: ignore[no-any-return]
        product = F.linear(x, weight, bias)
        return product if residual is None else product.add_(residual)

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
