"""What the kernels of a GPU are documented to compute, written down plainly, for a CPU.

`varlen_attn` is `torch.nn.attention.varlen.varlen_attn` with a block table. `Library` is as much
of `flashinfer` as is used: a plan notes what it is given, and in graph mode copies it into the
buffers of the wrapper; a run sees nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, left: int, right: int) -> Tensor:
    """`query` `[len_q, heads, dim]` are the last of the `[len_k, kv_heads, dim]` of the context.

    A query at position p sees those from p - left to p + right; -1: without an end.
    """
    len_q, len_k = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys).float() / math.sqrt(query.shape[2])
    at = torch.arange(len_k - len_q, len_k)[:, None]
    seen = torch.arange(len_k)[None]
    hidden = torch.zeros(len_q, len_k, dtype=torch.bool)
    if left >= 0:
        hidden |= seen < at - left
    if right >= 0:
        hidden |= seen > at + right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", weights, values)


def _starts(starts: Tensor, name: str) -> list[int]:
    assert starts.dtype == torch.int32, name
    return starts.tolist()


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None = None,
) -> Tensor:
    starts, ends_k = _starts(cu_seq_q, "cu_seq_q"), _starts(cu_seq_k, "cu_seq_k")
    assert seqused_k.dtype == block_table.dtype == torch.int32
    assert len(starts) == len(ends_k) == len(seqused_k) + 1 == len(block_table) + 1
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.shape[1] == key.shape[2] or enable_gqa
    output = torch.full_like(query, torch.nan)
    page_size = key.shape[1]
    for index, used in enumerate(seqused_k.tolist()):
        start, end = starts[index], starts[index + 1]
        assert end - start <= max_q
        assert used <= max_k
        assert ends_k[index + 1] - ends_k[index] == used
        pages = block_table[index, : -(-used // page_size)].long()
        keys, values = key[pages].flatten(0, 1)[:used], value[pages].flatten(0, 1)[:used]
        output[start:end] = attend(query[start:end], keys, values, *window_size)
    return output


class _Wrapper:
    """What the two wrappers have in common."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self._left = -1
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None

    def _note(
        self,
        starts: Tensor,
        pages: Tensor,
        last_lens: Tensor,
        heads: tuple[int, ...],
        options: dict[str, Any],
    ) -> None:
        assert starts.dtype == pages.dtype == last_lens.dtype == torch.int32
        assert int(starts[-1]) == len(pages)
        assert set(options) == {
            "window_left",
            "q_data_type",
            "kv_data_type",
            "non_blocking",
            "disable_split_kv",
        }
        self._left = options["window_left"]
        self._heads = heads
        self._dtypes = options["q_data_type"], options["kv_data_type"]

    def _attend(self, query: Tensor, cache: tuple[Tensor, Tensor], query_starts: list[int]) -> Any:
        assert self._tables is not None
        key, value = cache
        num_heads, num_kv_heads, head_dim, page_size = self._heads
        assert query.shape[1:] == (num_heads, head_dim)
        assert key.shape[1:] == value.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert key.stride() == value.stride()
        assert (query.dtype, key.dtype) == self._dtypes
        starts, pages, last_lens = self._tables
        output = torch.full_like(query, torch.nan)
        for index, last in enumerate(last_lens.tolist()):
            own = pages[int(starts[index]) : int(starts[index + 1])].long()
            used = (len(own) - 1) * page_size + last
            keys, values = key[own].flatten(0, 1)[:used], value[own].flatten(0, 1)[:used]
            rows = slice(query_starts[index], query_starts[index + 1])
            output[rows] = attend(query[rows], keys, values, self._left, 0)
        return output


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *heads: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        self._note(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, options)
        # Copied at the time of the plan, except what is on the device already.
        self._tables = paged_kv_indptr.clone(), paged_kv_indices, paged_kv_last_page_len.clone()
        self._query_starts = qo_indptr.tolist()

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self._attend(query, cache, self._query_starts)
        return result


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
        backend: str,
    ) -> None:
        super().__init__(workspace, layout, backend=backend)
        assert use_cuda_graph
        assert use_tensor_cores
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        assert len(buffers[0]) == len(buffers[2]) + 1
        self._tables = buffers

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *heads: int, **options: Any
    ) -> None:
        self._note(indptr, indices, last_page_len, heads, options)
        assert self._tables is not None
        starts, pages, last_lens = self._tables
        assert len(last_page_len) == len(last_lens), "the batch size is fixed"
        assert len(indices) <= len(pages)
        starts.copy_(indptr)
        pages[: len(indices)].copy_(indices)
        last_lens.copy_(last_page_len)

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self._attend(query, cache, list(range(len(query) + 1)))
        return result


class Library:
    """In place of the module `flashinfer`."""

    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
