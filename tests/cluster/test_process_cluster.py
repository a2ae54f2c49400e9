"""Nodes in processes of their own: right tokens, and whatever dies, nothing hangs or is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster import LocalConfig, NodeCores, ProcessCluster, Topology
from cluster.remote_node import RemoteNode
from protocol import (
    DecodeJob,
    GenerationRequest,
    ModelError,
    NodeLost,
    OutputBatch,
    Overloaded,
    PauseMode,
    PromptTooLong,
    SamplingParams,
)
from tests.hash_model import expected_tokens, hash_files, prompt_of
from tests.process_cluster import (
    at_rest,
    generate,
    has_exited,
    process_config,
    running,
    submit,
)

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 16, 17, 33, 64, 150, 300)
SHAPES: list[dict[str, Any]] = [{"unified": True}, {}, {"prefill": 2, "decode": 2}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_tokens_are_those_of_an_undisturbed_run(shape: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=20)
    prompts = [prompt_of(length) for length in LENGTHS]
    async with running(process_config(**shape)) as cluster:
        answers = await asyncio.gather(*(generate(cluster, p, sampling) for p in prompts))
        statuses = await at_rest(cluster)
    assert answers == [expected_tokens(prompt, sampling) for prompt in prompts]
    computed = sum(status.num_prompt_tokens_computed for status in statuses[-1:])
    assert computed == (sum(LENGTHS) if "unified" in shape else 0)


class TestANode:
    """What the protocol asks of a node, across the process boundary."""

    async def test_errors_arrive_as_what_they_are(self) -> None:
        async with running(process_config(unified=True)) as cluster:
            (node,) = cluster.nodes
            with pytest.raises(PromptTooLong, match="2000 tokens") as caught:
                await node.decode(job(prompt_of(2000)))
            assert (caught.value.field, caught.value.num_tokens) == ("prompt", 2000)
            await node.drain()
            with pytest.raises(Overloaded, match="draining") as full:
                await node.decode(job(prompt_of(3)))
            assert full.value.retry_after_s == 1.0

    async def test_it_can_be_looked_at_and_paused(self) -> None:
        sampling = SamplingParams(max_tokens=4)
        async with running(process_config(unified=True)) as cluster:
            (node,) = cluster.nodes
            await generate(cluster, prompt_of(40), sampling)
            assert len((await node.snapshot()).hashes) == 2
            assert (await node.status()).num_prompt_tokens_computed == 40
            assert await node.reset_prefix_cache() is True
            assert (await node.snapshot()).hashes == ()
            await node.pause(PauseMode.KEEP)
            assert (await node.status()).paused is PauseMode.KEEP
            waiting = asyncio.create_task(generate(cluster, prompt_of(5), sampling))
            await asyncio.sleep(0)
            await node.resume()
            assert await waiting == expected_tokens(prompt_of(5), sampling)

    async def test_the_directory_hears_of_statuses_and_blocks(self) -> None:
        shared, sampling = prompt_of(160), SamplingParams(max_tokens=2)
        async with running(process_config(unified=True, decode=2)) as cluster:
            await generate(cluster, shared, sampling)
            holder = [s.node_id for s in await at_rest(cluster) if s.num_prompt_tokens_computed]
            stream = await submit(cluster, [*shared, 5], sampling)
            assert [token async for chunk in stream for token in chunk.token_ids]
            assert stream.num_cached_tokens == 160  # the router knew where they are
            assert len(holder) == 1

    async def test_a_client_that_leaves_frees_what_it_had(self) -> None:
        async with running(process_config(unified=True), "slow_hash_compute") as cluster:
            stream = await submit(cluster, prompt_of(100), SamplingParams(max_tokens=300))
            async for _ in stream:
                break
            await stream.aclose()
            (status,) = await at_rest(cluster)
        assert status.num_generated_tokens < 300


class TestAProcessThatIsKilled:
    async def test_its_handle_says_so_and_nothing_waits_for_it(self) -> None:
        config = process_config(unified=True, decode=2)
        async with running(config, "slow_hash_compute") as cluster:
            dead, alive = cluster.nodes
            outputs = dead.outputs("test")
            await dead.decode(job(prompt_of(5)))
            await anext(outputs)
            reading = asyncio.create_task(last_of(outputs))
            draining = asyncio.create_task(dead.drain())
            await dead.status()  # it has been asked by now
            os.kill(dead.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                await reading  # the stream ended
                with pytest.raises(NodeLost, match=dead.node_id):
                    await draining
            for call in calls_of(dead):
                with pytest.raises(NodeLost, match=dead.node_id):
                    await call
            assert await anext(dead.outputs("later"), None) is None
            assert (await alive.status()).healthy

    async def test_its_requests_go_on_elsewhere(self) -> None:
        sampling, prompts = SamplingParams(max_tokens=40), [prompt_of(30, i) for i in range(4)]
        config = process_config(unified=True, decode=2)
        async with running(config, "slow_hash_compute") as cluster:
            streams = [await submit(cluster, prompt, sampling) for prompt in prompts]
            answers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            victim, other = cluster.nodes
            while not (await victim.status()).num_running:
                assert not all(answer.done() for answer in answers)
            os.kill(victim.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                assert await asyncio.gather(*answers) == [
                    expected_tokens(prompt, sampling) for prompt in prompts
                ]
            status = await cluster.dispatcher.status()
        reports = {report.info.node_id: report.status for report in status.nodes}
        assert reports[victim.node_id] is None
        assert reports[other.node_id] is not None
        assert status.retries == {"node_lost": status.retries["node_lost"]}

    async def test_it_is_stopped_for_longer_than_anybody_waits(self) -> None:
        async with running(process_config(unified=True)) as cluster:
            (node,) = cluster.nodes
            os.kill(node.pid, signal.SIGSTOP)
            try:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await node.status()
            finally:
                os.kill(node.pid, signal.SIGCONT)
            assert (await node.status()).healthy

    async def test_one_that_does_not_make_sense_is_killed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with running(process_config(unified=True), "babbling_compute") as cluster:
            (node,) = cluster.nodes
            async with asyncio.timeout(10):
                with pytest.raises(NodeLost):
                    await ask_again_and_again(node)
                assert await last_of(node.outputs("test")) is None
        assert "node unified-0 is killed: a message of 4294967295 bytes" in caplog.text


class TestAtTheStart:
    @pytest.mark.parametrize("shape", [{"unified": True}, {"unified": True, "decode": 2}], ids=str)
    async def test_a_node_that_cannot_start_says_why(
        self, shape: dict[str, Any], capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(ModelError, match=r"^hash is broken$") as caught:
            async with running(process_config(**shape), "broken_compute"):
                pass
        assert caught.value.path == "nowhere"
        named = r" WARNING unified-\d tests\.hash_compute: about to fail\n"
        assert re.search(named, capfd.readouterr().err)
        no_child_is_left()

    async def test_one_that_dies_without_a_word(self) -> None:
        with pytest.raises(NodeLost, match=r"unified-0 ended with status 7 before it was ready"):
            async with running(process_config(unified=True), "dying_compute"):
                pass
        no_child_is_left()

    async def test_one_that_takes_too_long(self) -> None:
        cluster = ProcessCluster(
            process_config(unified=True),
            hash_files(),
            "tests.hash_compute:endless_compute",
            start_timeout_s=0.5,
        )
        with pytest.raises(NodeLost, match=r"unified-0 did not start within 0\.5 s"):
            await cluster.start()
        no_child_is_left()

    async def test_a_start_that_is_given_up(self) -> None:
        cluster = cluster_of("endless_compute")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await cluster.start()
        no_child_is_left()

    @pytest.mark.parametrize(
        ("cores", "said"),
        [
            (NodeCores(), r"\d+ threads on \[.*\]"),
            (NodeCores(threads=3), r"3 threads on \[.*\]"),
            (NodeCores(cpus=(0,)), r"1 threads on \[0\]"),
        ],
        ids=str,
    )
    async def test_the_cores_that_it_uses(self, cores: NodeCores, said: str) -> None:
        with pytest.raises(ModelError, match=f"^{said}$"):
            await cluster_of("cores_told_compute", decode_cores=cores).start()


async def test_the_token_is_seen_nowhere() -> None:
    token = "a-secret-of-the-cluster"
    async with running(process_config(unified=True), token=token) as cluster:
        (node,) = cluster.nodes
        assert token not in told_by_proc(node.pid)
        assert token not in f"{vars(cluster)}{vars(node)}"


def test_children_end_with_their_parent() -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.process_cluster import process_config, running\n"
        "async def main():\n"
        "    async with running(process_config(unified=True, decode=2)) as cluster:\n"
        "        print(*(node.pid for node in cluster.nodes), flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        pidfds = [os.pidfd_open(int(pid)) for pid in pids]
        assert len(pidfds) == 2
        os.kill(int(pids[1]), signal.SIGSTOP)  # it cannot do anything about it
        parent.kill()
    try:
        assert all(has_exited(pidfd, timeout_s=5.0) for pidfd in pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def job(prompt: list[int], caller: str = "test") -> DecodeJob:
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=400),
        arrival_time=0.0,
    )
    return DecodeJob(request=request, caller=caller)


def calls_of(node: RemoteNode) -> list[Any]:
    return [
        node.decode(job(prompt_of(3))),
        node.cancel("a"),
        node.status(),
        node.drain(),
        node.snapshot(),
        node.pause(PauseMode.WAIT),
        node.resume(),
        node.reset_prefix_cache(),
    ]


def cluster_of(compute: str, **fields: Any) -> ProcessCluster:
    config = LocalConfig(
        topology=Topology.UNIFIED, processes=True, num_blocks=64, max_model_len=512, **fields
    )
    return ProcessCluster(config, hash_files(), f"tests.hash_compute:{compute}")


async def ask_again_and_again(node: RemoteNode) -> None:
    while True:
        await node.status()


async def last_of(batches: AsyncIterator[OutputBatch]) -> OutputBatch | None:
    last = None
    async for batch in batches:
        last = batch
    return last


async def tokens_of(stream: Any) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


def told_by_proc(pid: int) -> str:
    """What everybody may read of a process, and its owner."""
    places = (Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ"))
    return "".join(place.read_text() for place in places)


def no_child_is_left() -> None:
    """All that this process started has been waited for."""
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
