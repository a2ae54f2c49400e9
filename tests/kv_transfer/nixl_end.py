"""Ends with the nixl transport, for the conformance suite."""

from __future__ import annotations

from kv_transfer.peering import ClusterToken, passport
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import NixlConfig
from tests.kv_transfer.conformance_end import EndSpec, Parts
from tests.kv_transfer.pools import make_pool

TOKEN = ClusterToken("a secret of the tests")


def make_parts(spec: EndSpec) -> Parts:
    """By whatever UCX prefers: within a host, writers copy by themselves."""
    return _make_parts(spec, "all")


def make_tcp_parts(spec: EndSpec) -> Parts:
    return _make_parts(spec, "tcp")


def make_parts_elsewhere(spec: EndSpec) -> Parts:
    """Over TCP, in a process that believes to be on another host."""
    passport._boot_id = lambda: "another host"  # type: ignore[assignment]
    return _make_parts(spec, "tcp")


def _make_parts(spec: EndSpec, transports: str) -> Parts:
    pool = make_pool(spec.num_blocks, spec.layout)
    return Parts(NixlTransport(spec.name, TOKEN, NixlConfig(transports=transports)), pool)
