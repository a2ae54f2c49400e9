"""A node that others call over sockets: right tokens, and whoever goes leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from cluster.connected_node import ConnectedNode, connect_node
from cluster.keepalive import KeepaliveConfig
from cluster.node_handshake import NodeRefused
from cluster.node_service import NodeService
from cluster.service_config import ServiceConfig
from protocol import (
    DecodeNode,
    NodeDraining,
    NodeInfo,
    NodeLost,
    NodeStatus,
    OutputBatch,
    PauseMode,
    PrefillJob,
    PrefillNode,
    PromptTooLong,
    Role,
    WrongRole,
)
from tests.hash_model import expected_tokens, prompt_of
from tests.service_node import (
    TOKEN,
    build_node,
    connected,
    decode_job,
    only,
    prefill_job,
    service_process,
    serving,
    tokens_of,
)

SCHEMES = ["unix", "tcp"]
QUICK = KeepaliveConfig(ping_s=0.2, silence_s=2.0)
PATIENCE_S = 15.0  # far more than anything here takes


async def is_so(node: DecodeNode, what: Callable[[NodeStatus], bool]) -> None:
    """Wait until the node's status is like that."""
    deadline = time.monotonic() + PATIENCE_S
    while not what(await node.status()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def is_free(status: NodeStatus) -> bool:
    return not (status.num_running or status.num_waiting or status.blocks.used)


def is_busy(status: NodeStatus) -> bool:
    return status.num_running > 0


async def last_of(outputs: AsyncIterator[OutputBatch]) -> None:
    async for _ in outputs:
        pass


@pytest.mark.parametrize("scheme", SCHEMES)
class TestACaller:
    """What the protocol asks of a node, over each kind of socket."""

    async def test_gets_the_tokens_of_an_undisturbed_run(self, scheme: str) -> None:
        jobs = [decode_job(prompt_of(length)) for length in (1, 16, 33, 150)]
        async with serving() as (_, service), connected(only(service.info, scheme)) as node:
            as_protocol: tuple[PrefillNode, DecodeNode] = (node, node)
            assert as_protocol[0].info == only(service.info, scheme)
            for job in jobs:
                outputs = node.outputs("test")
                await node.decode(job)
                expected = expected_tokens(job.request.prompt_token_ids, job.request.sampling)
                assert await tokens_of(outputs, 20) == expected
            assert is_free(await node.status())

    async def test_calls_everything_else(self, scheme: str) -> None:
        async with serving() as (_, service), connected(only(service.info, scheme)) as node:
            outputs = node.outputs("test")
            await node.decode(decode_job(prompt_of(40), 4))
            await tokens_of(outputs, 4)
            assert len((await node.snapshot()).hashes) == 2
            assert await node.reset_prefix_cache() is True
            assert (await node.snapshot()).hashes == ()
            await node.pause(PauseMode.KEEP)
            assert (await node.status()).paused is PauseMode.KEEP
            await node.resume()
            await node.drain(1.0)
            with pytest.raises(NodeDraining):
                await node.decode(decode_job([5]))
            await node.undrain()
            await node.decode(decode_job([5]))

    async def test_is_told_errors_as_what_they_are(self, scheme: str) -> None:
        async with serving() as (_, service), connected(only(service.info, scheme)) as node:
            with pytest.raises(PromptTooLong, match="2000 tokens") as caught:
                await node.decode(decode_job(prompt_of(2000)))
            assert (caught.value.field, caught.value.num_tokens) == ("prompt", 2000)
            with pytest.raises(WrongRole, match="unified"):
                await node.prefill(prefill_job([5]))

    async def test_leaves_nothing_behind(self, scheme: str) -> None:
        async with serving(step_s=0.02) as (local, service):
            async with connected(only(service.info, scheme)) as node:
                outputs = node.outputs("test")
                await node.decode(decode_job(prompt_of(100), 400))
                await anext(outputs)
            await is_so(local, is_free)
            assert (await local.status()).num_generated_tokens < 400

    async def test_learns_that_the_node_has_gone(self, scheme: str) -> None:
        async with (
            serving(step_s=0.02) as (local, service),
            connected(only(service.info, scheme)) as node,
        ):
            outputs = node.outputs("test")
            await node.decode(decode_job(prompt_of(100), 400))
            await anext(outputs)
            draining = asyncio.create_task(node.drain())
            await is_so(local, lambda status: status.draining)
            async with asyncio.timeout(PATIENCE_S):
                await service.stop()
                assert await node.wait_lost() == "it closed the connection"
                await last_of(outputs)
                with pytest.raises(NodeLost, match="unified-0 is down: it closed"):
                    await draining
            with pytest.raises(NodeLost):
                await node.status()
            assert await anext(node.outputs("later"), None) is None
            await is_so(local, is_free)


class TestCallers:
    async def test_have_their_own_jobs_and_streams(self) -> None:
        prompts = [prompt_of(30, seed) for seed in range(6)]

        async def ask(node: ConnectedNode, caller: str, prompt: list[int]) -> None:
            job = decode_job(prompt, 30, caller)
            outputs = node.outputs(caller)
            await node.decode(job)
            assert await tokens_of(outputs, 30) == expected_tokens(prompt, job.request.sampling)

        async with (
            serving() as (_, service),
            connected(service.info) as one,
            connected(only(service.info, "tcp")) as two,
            asyncio.timeout(PATIENCE_S),
        ):
            await asyncio.gather(
                *(ask(one, f"one-{i}", prompt) for i, prompt in enumerate(prompts)),
                *(ask(two, f"two-{i}", prompt) for i, prompt in enumerate(prompts)),
            )

    async def test_one_that_goes_takes_nothing_of_another(self) -> None:
        async with serving(step_s=0.005) as (local, service), connected(service.info) as stays:
            job = decode_job(prompt_of(20), 60, "stays")
            outputs = stays.outputs("stays")
            await stays.decode(job)
            async with connected(service.info) as goes:
                going = goes.outputs("goes")
                await goes.decode(decode_job(prompt_of(20, 1), 400, "goes"))
                await anext(going)
            assert await tokens_of(outputs, 60) == expected_tokens(
                job.request.prompt_token_ids, job.request.sampling
            )
            await is_so(local, is_free)

    async def test_one_that_comes_back_takes_its_jobs_up(self) -> None:
        """The second stream of a caller ends the first, on whatever connection that was."""
        async with (
            serving(step_s=0.01) as (local, service),
            connected(service.info) as old,
            connected(service.info) as new,
        ):
            first = old.outputs("test")
            await old.decode(decode_job(prompt_of(20), 400))
            await anext(first)
            second = new.outputs("test")
            async with asyncio.timeout(PATIENCE_S):
                await last_of(first)
                await old.close()
                assert len(await tokens_of(second, 50)) >= 50
            assert (await local.status()).num_running == 1

    @pytest.mark.parametrize("has_come_back", [False, True])
    async def test_one_that_never_opened_a_stream(self, has_come_back: bool) -> None:
        async with serving() as (local, service), connected(service.info) as other:
            await local.pause(PauseMode.KEEP)  # so no step finds that nobody listens
            async with connected(service.info) as node:
                await node.decode(decode_job(prompt_of(20)))
                await is_so(local, lambda status: status.num_waiting == 1)
                outputs = other.outputs("test" if has_come_back else "another")
                await other.status()  # by now the node has the stream
            if has_come_back:
                await local.resume()
                async with asyncio.timeout(PATIENCE_S):
                    assert len(await tokens_of(outputs, 20)) == 20
            else:
                await is_so(local, is_free)


class TestARoleChange:
    async def test_of_a_caller_is_told_to_all(self) -> None:
        heard: list[NodeInfo] = []
        node = build_node()
        node.start()
        service = NodeService(node, TOKEN, on_new_info=heard.append)
        await service.start()
        try:
            old = service.info
            one, two = await connect_node(old, TOKEN), await connect_node(old, TOKEN)
            info = await one.change_role(Role.PREFILL)
            async with asyncio.timeout(PATIENCE_S):
                assert {await one.wait_lost(), await two.wait_lost()} == {
                    "it closed the connection"
                }
            await one.close()
            await two.close()
            assert info == service.info == heard[-1]
            assert (info.role, info.generation) == (Role.PREFILL, old.generation + 1)
            await self.is_a_prefill_node(info)
            with pytest.raises(NodeRefused, match=r"this is unified-0 of generation 8, not .* 7"):
                await connect_node(old, TOKEN)
        finally:
            await service.stop()
            await asyncio.to_thread(node.stop)

    async def is_a_prefill_node(self, info: NodeInfo) -> None:
        async with connected(info) as node:
            outputs = node.outputs("test")
            job = prefill_job(prompt_of(40))
            await node.prefill(job)
            assert await tokens_of(outputs, 1) == expected_tokens(
                job.request.prompt_token_ids, job.request.sampling
            )

    async def test_of_the_owner_ends_connections(self) -> None:
        async with serving() as (_, service), connected(service.info) as node:
            assert await service.change_role(Role.UNIFIED) == service.info  # it is that already
            await node.status()
            info = await service.change_role(Role.PREFILL)
            async with asyncio.timeout(PATIENCE_S):
                await node.wait_lost()
            await self.is_a_prefill_node(info)


class TestProcesses:
    """The service, or a caller, is a real process; it is killed or stopped."""

    async def test_prefill_and_decode_make_the_right_tokens(self) -> None:
        with (
            service_process("prefill", "0", "2", "10") as p,
            service_process("decode", "0", "2", "10") as d,
        ):
            infos = [msgspec.json.decode(await x.answer(), type=NodeInfo) for x in (p, d)]
            async with connected(infos[0]) as prefill, connected(infos[1]) as decode:
                job = decode_job(prompt_of(150), 40)
                firsts, rest = prefill.outputs("test"), decode.outputs("test")
                await decode.decode(
                    msgspec.structs.replace(job, prefill_endpoint=infos[0].endpoint)
                )
                await prefill.prefill(
                    PrefillJob(
                        request=job.request, caller="test", decode_endpoint=infos[1].endpoint
                    )
                )
                async with asyncio.timeout(PATIENCE_S):
                    tokens = await tokens_of(firsts, 1) + await tokens_of(rest, 39)
        assert tokens == expected_tokens(job.request.prompt_token_ids, job.request.sampling)

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
    async def test_a_node_that_goes(self, how: signal.Signals, scheme: str) -> None:
        with service_process("unified", "0.02", "0.2", "2") as process:
            info = msgspec.json.decode(await process.answer(), type=NodeInfo)
            async with connected(only(info, scheme), QUICK) as node:
                outputs = node.outputs("test")
                await node.decode(decode_job(prompt_of(20), 400))
                await anext(outputs)
                os.kill(process.pid, how)
                async with asyncio.timeout(PATIENCE_S):
                    with pytest.raises(NodeLost, match="unified-0 is down"):
                        await asyncio.gather(node.drain(), last_of(outputs))
                    await last_of(outputs)
                assert node.loss == (
                    "it closed the connection"
                    if how is signal.SIGKILL
                    else "it has said nothing for 2 s"
                )

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
    async def test_a_caller_that_goes(self, how: signal.Signals, scheme: str) -> None:
        config = ServiceConfig(keepalive=QUICK)
        async with serving(step_s=0.02, config=config) as (local, service):
            with service_process("caller", "0.2", "2") as process:
                process.say(msgspec.json.encode(only(service.info, scheme)))
                await process.answer()
                await is_so(local, is_busy)
                os.kill(process.pid, how)
                await is_so(local, is_free)
                assert (await local.status()).num_generated_tokens < 400

    async def test_an_idle_connection_stays(self) -> None:
        with service_process("unified", "0", "0.2", "2") as process:
            info = msgspec.json.decode(await process.answer(), type=NodeInfo)
            async with connected(info, QUICK) as node:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(3.0):
                        await node.wait_lost()
                await node.status()
