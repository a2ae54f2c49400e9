"""The way from a prefill node to a decode node: it may be broken although both of them live."""

from __future__ import annotations

from protocol import NodeInfo

Path = tuple[str, str]  # of two hosts, which all their nodes share; or of two nodes


def path_between(prefill: NodeInfo, decode: NodeInfo) -> Path:
    """On one host, each pair of nodes has its own."""
    places = _place_of(prefill), _place_of(decode)
    return (prefill.node_id, decode.node_id) if len(set(places)) == 1 else places


def _place_of(info: NodeInfo) -> str:
    """What endpoints of one host have in common: `scheme:host/name` or `scheme:address:port/name`.

    The first part is of the transport that knows most about hosts.
    """
    place = info.endpoint.partition("+")[0].partition(":")[2].partition("/")[0]
    address, _, port = place.rpartition(":")
    return address if address and port.isdecimal() else place
