"""What is said to actors, and what they answer: msgpack, of which Ray carries the bytes."""

from __future__ import annotations

import enum

import msgspec

from cluster.autoscaling_config import AutoscalingConfig
from cluster.channel import envelopes_of
from cluster.config import LocalConfig, ServeConfig
from cluster.directory_config import DirectoryAddress, DirectoryConfig
from cluster.ray_config import GatewayReplicas, NodeResources, RayConfig
from cluster.secret import Secret
from cluster.wire_error import WireError
from gateway import GatewayConfig
from protocol import KvrelayError, NodeInfo, NodeStatus, Role

CONTROLLER = "controller"  # the names of actors, beside those of nodes and gateways
DIRECTORY = "directory"


def namespace(name: str) -> str:
    """Where in Ray the actors of the cluster of this name are."""
    return f"kvrelay-{name}"


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag="spec"):
    """A deployment, all of it. It does not change while the cluster lives; its `Targets` do."""

    name: str
    config: LocalConfig
    serve: ServeConfig
    fingerprint: str  # of the model that all nodes have to find
    ray: RayConfig
    resources: dict[Role, NodeResources]
    gateways: GatewayReplicas
    gateway: GatewayConfig
    directory: DirectoryConfig
    directory_password: Secret | None = None  # of its url, if that has none
    autoscaling: AutoscalingConfig
    token: Secret  # of the cluster
    compute: str  # `module:function`, as for nodes in processes of their own
    module_path: tuple[str, ...]
    log_level: int


class NodePlan(msgspec.Struct, frozen=True, kw_only=True, tag="node_plan"):
    """What a node's actor is told."""

    spec: Spec
    role: Role
    node_id: str
    directory: DirectoryAddress
    nodes_on_host: int  # which share its cores


class GatewayPlan(msgspec.Struct, frozen=True, kw_only=True, tag="gateway_plan"):
    """What a gateway's actor is told."""

    spec: Spec
    gateway_id: str
    directory: DirectoryAddress
    expected: tuple[str, ...]  # nodes that it is to have met before it answers


class DirectoryPlan(msgspec.Struct, frozen=True, kw_only=True, tag="directory_plan"):
    """What the actor of an embedded directory server is told."""

    address: DirectoryAddress
    host: str
    port: int
    log_level: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: WireError

    @classmethod
    def of(cls, error: KvrelayError | TimeoutError) -> Failed:
        return cls(WireError.of(error))


class NodeStarted(msgspec.Struct, frozen=True, tag="node_started"):
    info: NodeInfo
    host: str
    pid: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    url: str
    host: str
    pid: int


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag="host_report"):
    """What a host has, as seen by a process on it."""

    address: str
    versions: dict[str, str]  # of kvrelay, python, torch and ray
    fingerprint: str
    memory_bytes: int
    pid: int


class MemberState(enum.StrEnum):
    """starting ─► ready ─► backoff ─► starting …; leaving ends all of it, failed is for good."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"  # it has died, and is started again soon
    FAILED = "failed"  # it has died too often
    LEAVING = "leaving"


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster, as its controller sees it."""

    name: str
    kind: str  # a role, gateway or directory
    state: MemberState
    host: str = ""
    pid: int = 0
    restarts: int = 0
    problem: str = ""  # what it died of last
    url: str = ""  # of a gateway
    info: NodeInfo | None = None
    status: NodeStatus | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True, tag="cluster_report"):
    name: str
    model: str
    members: tuple[MemberReport, ...]
    targets: dict[Role, int]
    directory: str  # its URL, without a password
    directory_available: bool


Answer = (
    Done
    | Failed
    | NodeStarted
    | Started
    | HostReport
    | ClusterReport
    | NodePlan
    | GatewayPlan
    | DirectoryPlan
    | Spec
)
_envelopes = envelopes_of(Answer)


def pack(message: object) -> bytes:
    return _envelopes.encode(message)


def unpack(data: bytes) -> Answer:
    """Raises BadMessage, OtherVersion: the sender is of another release."""
    answer: Answer = _envelopes.decode(data)
    return answer


def unpack_or_raise(data: bytes) -> Answer:
    """Raises what the sender could not do."""
    match unpack(data):
        case Failed(error):
            raise error.restored()
        case answer:
            return answer
