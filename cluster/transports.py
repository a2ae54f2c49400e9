"""The transport of a node, as configured."""

from __future__ import annotations

from cluster.config import LocalConfig
from cluster.transfer_config import TransferConfig, TransportChoice
from kv_transfer import AutoTransport, FaultyTransport, MemoryHub, MemoryTransport, Transport
from kv_transfer.peering import ClusterToken
from protocol import ConfigError


def make_transport(config: LocalConfig, node_id: str, *, hub: MemoryHub, token: str) -> Transport:
    """`hub` is where the nodes of this process meet, `token` what those of the cluster share.

    Raises:
        ConfigError: it needs something that is not here.
    """
    transport, faults = _make_sound(config, node_id, hub, token), config.transfer.faults
    return transport if faults is None else FaultyTransport(transport, faults, node_id)


def _make_sound(config: LocalConfig, node_id: str, hub: MemoryHub, token: str) -> Transport:
    match config.transport:
        case TransportChoice.SHM:
            near = _make_shm(node_id, token)
            if config.transfer.may_have_remote_peers:
                return AutoTransport([near, _make_nixl(config.transfer.bound(), node_id, token)])
            return near
        case TransportChoice.NIXL:
            return _make_nixl(config.transfer.bound(), node_id, token)
        case _:
            return MemoryTransport(hub, node_id)


def _make_shm(node_id: str, token: str) -> Transport:
    from kv_transfer.transports.shm import ShmTransport

    return ShmTransport(node_id, ClusterToken(token))


def _make_nixl(transfer: TransferConfig, node_id: str, token: str) -> Transport:
    from kv_transfer.transports.nixl import NixlTransport
    from kv_transfer.transports.nixl_agent import NixlConfig

    nixl = NixlConfig(
        bind=transfer.bind, device=transfer.nixl_device, transports=transfer.nixl_transports
    )
    try:
        return NixlTransport(node_id, ClusterToken(token), nixl)
    except ConfigError as error:
        if error.field in ("host", "advertise"):  # what `bind` is called there
            raise ConfigError("bind", error.problem) from error
        raise
