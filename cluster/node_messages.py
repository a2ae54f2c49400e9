"""What a node and its callers in other processes say to each other.

       caller                          node
       ── OpenStream, Call(Decode) ──►
       ◄─── Answered, or Refused ────    to each call, by its number
       ◄─── Outputs … StreamEnded ───    one frame a step
       ◄─── Ping ──── Ping ──────────►   where nothing else was said, between strangers

A cluster and the child process that is to become its node say more than that:

       parent                          child
       ── Setup ─────────────────────►   build the node
       ◄──────────────── Built ──────    or SetupFailed, and it ends
       ── StartNode ─────────────────►   and from here on as above
       ◄─── News ────────────────────    the newest status, and what changed in the cache
       ── Stop ──────────────────────►   it ends

If either end is closed, the child ends.
"""

from __future__ import annotations

import msgspec

from cluster.channel import envelopes_of
from cluster.config import LocalConfig
from cluster.secret import Secret
from cluster.wire_error import WireError
from engine.weights import ModelFiles
from protocol import (
    BlockEventBatch,
    CacheSnapshot,
    DecodeJob,
    NodeInfo,
    NodeStatus,
    OutputBatch,
    PauseMode,
    PrefillJob,
    Role,
)


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """All that a child needs to become a node."""

    role: Role
    node_id: str
    generation: int
    config: LocalConfig
    files: ModelFiles
    compute: str  # `module:function`, called with files and config; gives a RunnerFactory
    token: Secret  # of the cluster
    threads: int
    cpus: tuple[int, ...] | None
    module_path: tuple[str, ...]  # where Python finds `compute`
    log_level: int
    roles_change: bool = False  # as of NodeBuilder


# ---------------------------------------------------------------------- questions to a node


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    job: PrefillJob


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    job: DecodeJob


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    pass


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    timeout_s: float | None


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    pass


class ChangeRole(msgspec.Struct, frozen=True, tag="role"):
    role: Role


class AskSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    pass


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    pass


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    reset_running_requests: bool


Question = (
    Prefill
    | Decode
    | Cancel
    | AskStatus
    | Drain
    | Undrain
    | ChangeRole
    | AskSnapshot
    | Pause
    | Resume
    | ResetPrefixCache
)


class Call(msgspec.Struct, frozen=True, tag="call"):
    number: int
    question: Question


class OpenStream(msgspec.Struct, frozen=True, tag="open"):
    stream: int
    caller: str


class CloseStream(msgspec.Struct, frozen=True, tag="close"):
    stream: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Whoever says so lives."""


Request = Call | OpenStream | CloseStream
ToService = Request | Ping


class StartNode(msgspec.Struct, frozen=True, tag="start"):
    """Numbered and answered like a call."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


ToNode = Setup | StartNode | Request | Stop


# ---------------------------------------------------------------------- what a node says


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """Whatever was asked for; a mere "done" is none of these."""

    number: int
    flag: bool = False
    status: NodeStatus | None = None
    info: NodeInfo | None = None
    snapshot: CacheSnapshot | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    number: int
    error: WireError


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    stream: int
    batch: OutputBatch


class StreamEnded(msgspec.Struct, frozen=True, tag="ended"):
    stream: int


Reply = Answered | Refused | Outputs | StreamEnded
FromService = Reply | Ping


class Built(msgspec.Struct, frozen=True, tag="built"):
    info: NodeInfo


class SetupFailed(msgspec.Struct, frozen=True, tag="failed"):
    error: WireError


class News(msgspec.Struct, frozen=True, tag="news"):
    status: NodeStatus
    blocks: tuple[BlockEventBatch, ...]


FromNode = Built | SetupFailed | Reply | News

envelopes_to_node = envelopes_of(ToNode)
envelopes_from_node = envelopes_of(FromNode)
envelopes_to_service = envelopes_of(ToService)
envelopes_from_service = envelopes_of(FromService)
