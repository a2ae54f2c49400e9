"""An end with several transports, for the conformance suite."""

from __future__ import annotations

from kv_transfer import AutoTransport, Transport
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from tests.kv_transfer.conformance_end import EndSpec, Parts
from tests.kv_transfer.shm_end import TOKEN, make_shared_pool


class _NearTransport(AutoTransport):
    """Tells only that part of its endpoint by which peers of this host know it (`resolve`)."""

    def __init__(self, near: Transport, far: Transport) -> None:
        super().__init__([near, far])
        self.endpoint = near.endpoint


def make_parts(spec: EndSpec) -> Parts:
    """Its peers are on this host: what they write goes through shared memory."""
    pool = make_shared_pool(spec)
    near = ShmTransport(spec.name, TOKEN, copy=pool.copy_extents)
    far = NixlTransport(spec.name, TOKEN)
    return Parts(_NearTransport(near, far), pool)
