"""Attention by FlashInfer (extra `[cuda]`): half precision, blocks of any size.

A layer of the KV cache is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, FlashInfer's paged
layout NHD, whose pages may lie as far apart as they like. It is told which pages a sequence has in
compressed rows:

    page_starts      0         3    4                 of each sequence in `pages`; the end at last
    pages            7  2  9 | 4  | …
    last_page_lens         5 | 1                      tokens in the last page of each

A step has to be planned on the host, which divides the work among the device's processors. Plans
read pinned memory of FlashInfer's own after they return, so that memory must not be used for the
next plan before the device has taken it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.attention_backend import DecodeAttention
from engine.cuda.kv_writer import KVWriter
from engine.cuda.packed_step import PackedStep
from engine.cuda.staging import Arrays, Staged
from engine.cuda.stream import Event, Stream
from engine.kv_cache import KVCache

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_NUM_RAGGED = 2  # wrappers in turn, as steps in flight

Windows = Iterable[int | None]


@dataclass(frozen=True)
class _Geometry:
    """What all plans of a model have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    batch_invariant: bool

    def options(self, window: int | None) -> dict[str, Any]:
        return {
            "window_left": -1 if window is None else window - 1,  # itself not counted
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "non_blocking": True,
            "disable_split_kv": self.batch_invariant,
        }

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim, self.block_size


class FlashInferBackend:
    """See `AttentionBackend`. `windows` are those of the model's layers.

    With `batch_invariant` the keys of a sequence are not split among several blocks of threads.
    """

    name = "flashinfer"

    def __init__(
        self,
        library: Any,
        stream: Stream,
        kv_cache: KVCache,
        num_heads: int,
        windows: Windows,
        max_model_len: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`library`: the module `flashinfer`."""
        config = kv_cache.config
        self._library = library
        self._stream = stream
        self._windows = tuple(windows)
        self._max_blocks = -(-max_model_len // config.block_size)
        self._geometry = _Geometry(
            num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.block_size,
            kv_cache.tensor.dtype,
            batch_invariant,
        )
        # One is enough: steps come one after the other.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=stream.device)
        self._ragged = [
            _Ragged(library, self._workspace, self._geometry) for _ in range(_NUM_RAGGED)
        ]
        self._next = 0

    def arrays(self, step: PackedStep) -> Arrays:
        block_size = self._geometry.block_size
        num_pages = -(-step.context_lens // block_size)
        width = step.block_tables.shape[1]
        own = np.arange(width) < num_pages[:, None]
        return {
            "page_starts": np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32),
            "last_page_lens": ((step.context_lens - 1) % block_size + 1).astype(np.int32),
            "pages": step.block_tables[own],
        }

    def ragged(self, step: PackedStep, staged: Staged, writer: KVWriter) -> FlashInferAttention:
        wrappers = self._ragged[self._next]
        self._next = (self._next + 1) % _NUM_RAGGED
        return FlashInferAttention(wrappers.planned(self._windows, staged), writer)

    def decode(self, num_seqs: int, staged: Staged, writer: KVWriter) -> DecodeAttention:
        max_pages = num_seqs * self._max_blocks
        wrappers = {
            window: self._decode_wrapper(num_seqs, max_pages, staged) for window in self._windows
        }
        return FlashInferDecode(self._stream, self._geometry, wrappers, writer)

    def _decode_wrapper(self, num_seqs: int, max_pages: int, staged: Staged) -> Any:
        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._stream.device)

        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,  # with several heads to a KV head it is bound by arithmetic else
            paged_kv_indptr_buffer=buffer(num_seqs + 1),
            paged_kv_indices_buffer=buffer(max_pages),
            paged_kv_last_page_len_buffer=buffer(num_seqs),
            backend="fa2",
        )


class _Ragged:
    """Wrappers for any batch, one for each window."""

    def __init__(self, library: Any, workspace: Tensor, geometry: _Geometry) -> None:
        self._library = library
        self._workspace = workspace
        self._geometry = geometry
        self._wrappers: dict[int | None, Any] = {}

    def planned(self, windows: Windows, staged: Staged) -> dict[int | None, Any]:
        return {window: self._planned(window, staged) for window in windows}

    def _planned(self, window: int | None, staged: Staged) -> Any:
        if window not in self._wrappers:
            self._wrappers[window] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        wrapper = self._wrappers[window]
        # What a plan reads on the host it is given there: to ask the device for it would wait.
        wrapper.plan(
            staged.host["query_starts"],
            staged.host["page_starts"],
            staged.device["pages"],
            staged.host["last_page_lens"],
            *self._geometry.heads,
            causal=True,
            **self._geometry.options(window),
        )
        return wrapper


class FlashInferAttention:
    """See `engine.attention.Attention`."""

    def __init__(self, wrappers: dict[int | None, Any], writer: KVWriter) -> None:
        self._wrappers = wrappers
        self._writer = writer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None
    ) -> Tensor:
        self._writer.write(layer, key, value)
        cached = self._writer.kv_cache.layer(layer)
        attended: Tensor = self._wrappers[window].run(
            query.to(cached.dtype), (cached[:, 0], cached[:, 1])
        )
        return attended.to(query.dtype)


class FlashInferDecode(FlashInferAttention):
    """See `DecodeAttention`."""

    def __init__(
        self,
        stream: Stream,
        geometry: _Geometry,
        wrappers: dict[int | None, Any],
        writer: KVWriter,
    ) -> None:
        super().__init__(wrappers, writer)
        self._stream = stream
        self._geometry = geometry
        self._planned: Event | None = None  # behind what the last plan has queued

    def plan(self, step: PackedStep, staged: Staged) -> None:
        if self._planned is not None:
            self._planned.synchronize()
        self._stream.submit(lambda: self._plan(staged))
        self._planned = self._stream.record()

    def _plan(self, staged: Staged) -> None:
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                staged.host["page_starts"],
                staged.device["pages"],
                staged.host["last_page_lens"],
                *self._geometry.heads,
                **self._geometry.options(window),
            )
