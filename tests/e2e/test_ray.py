"""`kvrelay up` as its users have it: the real model on Ray, and what is left when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest

from cluster.connect_directory import start_directory
from cluster.directory_config import DirectoryAddress, DirectoryConfig
from cluster.free_port import free_port
from cluster.joined_cluster import JoinedCluster
from cluster.secret import Secret
from directory import EmbeddedServer
from kv_transfer.peering import ClusterToken
from protocol import NodeStatus, Role
from router import RouterConfig
from tests.e2e.reference_cluster import check_all, reference_model
from tests.e2e.serve_process import UpProcess, run_kvrelay, until
from tests.marked_processes import MarkedProcesses
from tests.reference.cases import NUM_OUTPUT_TOKENS, ReferenceCase, reference_cases

pytest.importorskip("ray", reason="needs the extra ray")

ROOT = Path(__file__).parents[2]
CASES = reference_cases()
CONCURRENCY = 8
_TOKEN = "a cluster's token for tests"
_UP_S = 240.0  # 15 s on a machine that does nothing else
_DOWN_S = 120.0
_REST_S = 30.0


@dataclass(frozen=True)
class Started:
    """A cluster that has been started; `down` ends it."""

    output: str
    url: str
    directory: EmbeddedServer


Start = Callable[[Path, Sequence[str | Path]], tuple[str, Callable[[], None]]]


def in_background(folder: Path, arguments: Sequence[str | Path]) -> tuple[str, Callable[[], None]]:
    """What `up` has printed, and how to end what it has started."""
    up = run_kvrelay("up", *arguments, timeout_s=_UP_S)
    assert (up.returncode, up.stderr) == (0, "")

    def down() -> None:
        done = run_kvrelay("down", timeout_s=_DOWN_S)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "stopped\n")

    return up.stdout, down


def in_foreground(folder: Path, arguments: Sequence[str | Path]) -> tuple[str, Callable[[], None]]:
    process = UpProcess(folder, *arguments)
    process.wait_until_printed("ready")

    def down() -> None:
        process.send(signal.SIGINT)
        assert process.wait(_DOWN_S) == 0, process.log
        assert process.output.endswith("stopped\n")

    return process.output, down


@contextlib.contextmanager
def marked() -> Iterator[MarkedProcesses]:
    """All that is started is marked, and has a short folder for all its files.

    Afterwards none of these processes is left, nor anything in the folder.
    """
    processes = MarkedProcesses()
    folder = Path(tempfile.mkdtemp(prefix="kvr"))  # short: paths of sockets are
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(processes.variable, processes.mark)
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("KVRELAY_STATE_DIR", str(folder / "state"))
        patch.setenv("KVRELAY_CLUSTER_TOKEN", _TOKEN)
        yield processes
    until(lambda: not processes.look(), "no process is left, nor their sockets", _REST_S)
    assert list(folder.iterdir()) == []
    folder.rmdir()


@contextlib.contextmanager
def started(transport: str, start: Start, output: Path) -> Iterator[Started]:
    """The deployment of the root, but for its ports. Afterwards nothing of it is left."""
    port = free_port("127.0.0.1")
    with marked() as processes, EmbeddedServer() as directory:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVRELAY_DIRECTORY_PASSWORD", directory.password)
            printed, down = start(
                output, [ROOT / "cluster.yaml", *settings(port, transport, directory.url)]
            )
        yield Started(printed, f"http://127.0.0.1:{port}/v1", directory)
        shared = segments(processes)
        down()
    assert not [path for path in shared if path.exists()]


def settings(port: int, transport: str, directory: str) -> list[str]:
    places = {
        "gateway.port": str(port),
        "transfer.transport": transport,
        "directory.url": directory,
    }
    return [text for place in places.items() for text in ("--set", "=".join(place))]


def commands(processes: MarkedProcesses) -> str:
    """How those that run call themselves."""
    names = []
    for process in processes.look():
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()))
    return "\n".join(names)


def segments(processes: MarkedProcesses) -> set[Path]:
    """Files of shared memory that these processes have mapped."""
    found = set()
    for process in processes.look():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[5]) for line in maps if "/dev/shm/" in line}
    return found


@contextlib.asynccontextmanager
async def joined(cluster: Started) -> AsyncIterator[JoinedCluster]:
    """One more gateway, in this process: it needs the directory and the token."""
    files = await asyncio.to_thread(reference_model)
    address = DirectoryAddress(cluster.directory.url, Secret(cluster.directory.password))
    gateway = JoinedCluster(
        partial(start_directory, DirectoryConfig(), "kvrelay", address, need_server=True),
        files.fingerprint,
        ClusterToken(_TOKEN),
        RouterConfig(),
    )
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def at_rest(cluster: JoinedCluster) -> dict[str, NodeStatus]:
    """Wait until no node holds anything of a request; their statuses, by their endpoints."""
    async with asyncio.timeout(_REST_S):
        while True:
            reports = (await cluster.dispatcher.status()).nodes
            statuses = {its.info.endpoint: its.status for its in reports if its.status is not None}
            if len(statuses) == len(reports) and not any(map(holds_blocks, statuses.values())):
                return statuses
            await asyncio.sleep(0.05)


def holds_blocks(status: NodeStatus) -> bool:
    assert status.blocks.balanced
    return bool(status.transfers.active or status.blocks.used or status.blocks.quarantined)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transport", "scheme", "start"),
    [("auto", "shm", in_background), ("nixl", "nixl", in_foreground)],
)
async def test_the_tokens_are_those_of_the_reference(
    real_model: str, transport: str, scheme: str, start: Start, tmp_path: Path
) -> None:
    with started(transport, start, tmp_path) as cluster:
        printed = re.search(r"ready +(\S+) +\(after (\d+\.\d) s; \S", cluster.output)
        assert printed is not None, cluster.output
        assert printed[1] == cluster.url
        await asyncio.to_thread(ask_a_question, cluster.url)
        async with joined(cluster) as gateway:
            await check_all(gateway, CASES, CONCURRENCY, whole)
            statuses = await at_rest(gateway)
    assert {endpoint.partition(":")[0] for endpoint in statuses} == {scheme}
    check_handoffs(list(statuses.values()))


@pytest.mark.slow
@pytest.mark.real_model
def test_ctrl_c_amid_the_start_leaves_nothing(real_model: str, tmp_path: Path) -> None:
    with marked() as processes:
        arguments = ("--set", f"gateway.port={free_port('127.0.0.1')}")
        process = UpProcess(tmp_path, ROOT / "cluster.yaml", *arguments)
        until(lambda: "ray::NodeActor" in commands(processes), "nodes are being started", _UP_S)
        process.send(signal.SIGINT)
        assert process.wait(_DOWN_S) == 130, process.log
        assert "Traceback" not in process.errors


def whole(case: ReferenceCase) -> int:
    return NUM_OUTPUT_TOKENS


def ask_a_question(url: str) -> None:
    """With a client that our users have."""
    with openai.OpenAI(base_url=url, api_key="not needed") as client:
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "The capital of France is Paris."


def check_handoffs(statuses: list[NodeStatus]) -> None:
    """Two nodes of each kind, and every prompt came to a decode node through a hand-off."""
    assert sorted(status.role for status in statuses) == [Role.DECODE] * 2 + [Role.PREFILL] * 2
    for role in (Role.PREFILL, Role.DECODE):
        mine = [status for status in statuses if status.role is role]
        assert sum(s.transfers.committed for s in mine) == len(CASES) + 1  # and the question
    decode = [status for status in statuses if status.role is Role.DECODE]
    assert sum(s.num_prompt_tokens_computed for s in decode) == 0
