"""Copies of KV in the memory of a CUDA device, beside the stream that computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kv_transfer import Extents, Runs


class CudaBlockCopier:
    """See `kv_transfer.BlockCopier`. Copies go through a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """UCX copies by the context that is current in the thread that calls it, and has none."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream(self._device).synchronize()  # makes the context current

    def read(self, address: int, runs: Runs) -> memoryview:
        total = sum(size for _, size in runs)
        host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            at = 0
            for offset, size in runs:
                source = device_bytes(address + offset, size, self._device)
                host[at : at + size].copy_(source, non_blocking=True)
                at += size
        self._stream.synchronize()
        return host.numpy().data

    def copy(self, extents: Extents, our_address: int, their_address: int) -> None:
        with torch.cuda.stream(self._stream):
            for ours, theirs, size in extents.merged().rows.tolist():
                source = device_bytes(our_address + ours, size, self._device)
                target = device_bytes(their_address + theirs, size, self._device)
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class _Extent:
    """Memory of a device, as NumPy's and CuPy's array interface describes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def device_bytes(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A view `[num_bytes]` of memory that somebody else keeps alive."""
    return torch.as_tensor(_Extent(address, num_bytes), device=device)
