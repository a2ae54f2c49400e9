"""Hash-model nodes that listen, in this process or as `python -m tests.service_node`.

    node STEP_S PING_S SILENCE_S    says its info in a line, and serves until its input is closed
    caller                          reads an info, has a long job done, and says when it has begun

Both read the cluster's token from their first line of input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec

from cluster.connected_node import ConnectedNode, connect_node
from cluster.engine_node import EngineNode
from cluster.keepalive import KeepaliveConfig
from cluster.node_builder import NodeBuilder, stop_node
from cluster.node_service import NodeService
from cluster.service_config import ServiceConfig
from cluster.transports import make_transport
from kv_transfer import MemoryHub
from kv_transfer.peering import ClusterToken
from protocol import (
    BlockEventBatch,
    DecodeJob,
    GenerationRequest,
    NodeInfo,
    NodeStatus,
    OutputBatch,
    PrefillJob,
    Role,
    SamplingParams,
)
from tests.hash_compute import _factory
from tests.hash_model import hash_files, prompt_of
from tests.process_cluster import process_config

ROOT = Path(__file__).parents[1]
SECRET = "a token of this test"
TOKEN = ClusterToken(SECRET)

_numbers = itertools.count()


class Deaf:
    """A `Listener` for nodes that nobody follows."""

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None: ...

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None: ...


def build_node(role: Role = Role.UNIFIED, step_s: float = 0.0, generation: int = 7) -> EngineNode:
    config, files, hub = process_config(), hash_files(), MemoryHub()
    builder = NodeBuilder(
        config=config,
        files=files,
        make_compute=_factory(config, step_s),
        make_transport=lambda name: make_transport(config, name, hub=hub, token=SECRET),
        listener=Deaf(),
    )
    return builder.build(role, f"{role}-0", generation)


@contextlib.contextmanager
def built_node() -> Iterator[EngineNode]:
    """One that does not serve."""
    node = build_node()
    try:
        yield node
    finally:
        stop_node(node)


@contextlib.asynccontextmanager
async def serving(
    role: Role = Role.UNIFIED, step_s: float = 0.0, config: ServiceConfig | None = None
) -> AsyncIterator[tuple[EngineNode, NodeService]]:
    """A node of this process; afterwards neither a task nor a socket is left."""
    gc.collect()
    before = resources()
    node = build_node(role, step_s)
    node.start()
    service = NodeService(node, TOKEN, config=config or ServiceConfig())
    try:
        await service.start()
        yield node, service
    finally:
        await service.stop()
        await asyncio.to_thread(stop_node, node)
    gc.collect()
    assert resources() == before, "tasks or sockets are left"


def resources() -> tuple[int, int]:
    """Tasks and sockets. (A pool lives as long as anything refers to its node.)"""
    tasks = len([task for task in asyncio.all_tasks() if not task.done()])
    links = (_target(Path("/proc/self/fd") / name) for name in os.listdir("/proc/self/fd"))
    return tasks, sum(link.startswith("socket:") for link in links)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # it was the listing itself
        return ""


@contextlib.asynccontextmanager
async def connected(
    info: NodeInfo, keepalive: KeepaliveConfig | None = None
) -> AsyncIterator[ConnectedNode]:
    node = await connect_node(info, TOKEN, keepalive=keepalive or KeepaliveConfig())
    try:
        yield node
    finally:
        await node.close()


def only(info: NodeInfo, scheme: str) -> NodeInfo:
    """As if it were reached by this kind of socket only."""
    (endpoint,) = (part for part in info.service.split("+") if part.startswith(f"{scheme}:"))
    return msgspec.structs.replace(info, service=endpoint)


def request_of(prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"s{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_time=0.0,
    )


def decode_job(prompt: Sequence[int], max_tokens: int = 20, caller: str = "test") -> DecodeJob:
    return DecodeJob(request=request_of(prompt, max_tokens), caller=caller)


def prefill_job(prompt: Sequence[int], caller: str = "test") -> PrefillJob:
    return PrefillJob(request=request_of(prompt, 1), caller=caller)


async def tokens_of(outputs: AsyncIterator[OutputBatch], count: int) -> list[int]:
    """All that come, up to so many."""
    tokens: list[int] = []
    async for batch in outputs:
        tokens += [token for delta in batch.deltas for token in delta.token_ids]
        if len(tokens) >= count:
            break
    return tokens


# ---------------------------------------------------------------------- processes


class ServiceProcess:
    """A child that runs this module. Its first answer is a line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.service_node", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.say(SECRET.encode())

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> bytes:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the process has failed"
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def service_process(*arguments: str) -> Iterator[ServiceProcess]:
    process = ServiceProcess(*arguments)
    try:
        yield process
    finally:
        process.close()


async def _node(role: Role, step_s: float, keepalive: KeepaliveConfig) -> None:
    node = build_node(role, step_s)
    node.start()
    service = NodeService(node, ClusterToken(SECRET), config=ServiceConfig(keepalive=keepalive))
    await service.start()
    _say(msgspec.json.encode(service.info))
    await asyncio.to_thread(sys.stdin.read)
    await service.stop()
    stop_node(node)


async def _caller(token: ClusterToken, keepalive: KeepaliveConfig) -> None:
    info = msgspec.json.decode(sys.stdin.readline(), type=NodeInfo)
    node = await connect_node(info, token, keepalive=keepalive)
    outputs = node.outputs("of a process")
    await node.decode(decode_job(prompt_of(100), 400, "of a process"))
    await anext(outputs)
    _say(b"begun")
    await node.wait_lost()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    what, *rest = sys.argv[1:]
    token = ClusterToken(sys.stdin.readline().strip())
    if what == "caller":
        asyncio.run(_caller(token, _keepalive(rest)))
    else:
        asyncio.run(_node(Role(what), float(rest[0]), _keepalive(rest[1:])))


def _keepalive(numbers: Sequence[str]) -> KeepaliveConfig:
    return KeepaliveConfig(ping_s=float(numbers[0]), silence_s=float(numbers[1]))


if __name__ == "__main__":
    main()
