"""What a client sees, and what is left behind, whatever nodes do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

import router.orders
from protocol import (
    DecodeJob,
    KvrelayError,
    NodeLost,
    NoHealthyNode,
    Overloaded,
    PauseMode,
    PrefillJob,
    PromptTooLong,
    RequestAborted,
    RequestFailed,
    TokenChunk,
    TokenStream,
    TransferFailed,
)
from tests.router.nodes import make_status
from tests.router.scripted_nodes import (
    OUTPUT,
    PROMPT,
    ScriptedCluster,
    ScriptedNode,
    make_request,
    until,
)


async def read(stream: TokenStream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


class Reader:
    """Reads a stream in the background; `tokens` is what the client has by now."""

    def __init__(self, stream: TokenStream) -> None:
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: TokenStream) -> list[int]:
        async for chunk in stream:
            self.tokens.extend(chunk.token_ids)
        return self.tokens

    async def has(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count or self.task.done())
        assert self.tokens == list(OUTPUT[:count])


async def finish(cluster: ScriptedCluster, attempt: int) -> tuple[ScriptedNode, ScriptedNode]:
    """Let this attempt go well, from the first token to the last."""
    p, d = await cluster.pair(attempt)
    num_emitted = len(p.job.emitted)
    p.tokens()
    p.hand_off()
    d.finish(start=num_emitted + 1)
    return p, d


# ---------------------------------------------------------------------- the ordinary way


async def test_both_nodes_get_their_jobs_and_both_are_heard() -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        assert isinstance(p.job, PrefillJob)
        assert isinstance(d.job, DecodeJob)
        assert p.job.decode_endpoint == d.info.endpoint
        assert d.job.prefill_endpoint == p.info.endpoint
        assert p.job.emitted == d.job.emitted == ()
        assert p.job.caller != d.job.caller  # each node has a stream of its own
        reader = Reader(stream)
        p.tokens()
        await reader.has(1)
        p.hand_off()
        d.tokens(2, start=1)
        await reader.has(3)
        d.finish(start=3)
        assert await reader.task == list(OUTPUT)
        assert p.cancelled == d.cancelled == []
        assert stream.num_cached_tokens == 16
        instants = stream.timeline
        assert instants.prefill_queued == 2.0
        assert None not in (instants.admitted, instants.routed, instants.finished)
        assert instants.first_token is not None
        assert instants.last_token is not None
        assert instants.first_token < instants.last_token


async def test_deltas_overtake_each_other_and_the_calls() -> None:
    """D may be heard before P, and both before `submit` has returned."""
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        p.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(d.jobs))
        job = d.job
        d.finish(start=1)
        d.tokens(3, start=1, job=job)  # a second time
        p.answers.set()
        reader = Reader(await submitting)
        assert reader.tokens == []
        at_p = p.job
        p.tokens()
        assert await reader.task == list(OUTPUT)
        p.tokens(job=at_p)  # long known
        p.hand_off(at_p)
        await until(lambda: cluster.is_at_rest)


async def test_one_token_is_asked_of_one_node() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request(max_tokens=1))
        (p,), (d,) = cluster.prefill, cluster.decode
        assert isinstance(p.job, PrefillJob)
        assert p.job.decode_endpoint is None
        assert not d.asked.is_set()
        p.finish(start=0, end=1)
        assert await read(stream) == list(OUTPUT[:1])


async def test_a_unified_node_gets_a_job_of_its_own() -> None:
    async with ScriptedCluster(0, 0, unified=1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        (u,) = cluster.decode
        assert isinstance(u.job, DecodeJob)
        assert u.job.prefill_endpoint is None
        u.tokens(3)
        u.finish(start=3)
        assert await read(stream) == list(OUTPUT)


async def test_requests_do_not_mix() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        streams = [await cluster.dispatcher.submit(make_request(f"r{n}")) for n in range(4)]
        for job in list(p.jobs):
            p.tokens(job=job)
            p.hand_off(job)
        for job in reversed(list(d.jobs)):
            d.finish(start=1, job=job)
        assert await asyncio.gather(*map(read, streams)) == [list(OUTPUT)] * 4


async def test_what_the_status_tells() -> None:
    async with ScriptedCluster(1, 2).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        status = await cluster.dispatcher.status()
        assert status.num_requests == 1
        assert status.decisions == {"disaggregated": 1}
        assert status.retries == status.rejected == {}
        assert {report.info.node_id for report in status.nodes} == {"p0", "d0", "d1"}
        assert all(report.status is not None for report in status.nodes)
        _, d = await cluster.pair()
        d.fail("transfer_failed")
        await finish(cluster, attempt=1)
        await read(stream)
        await until(lambda: cluster.is_at_rest)
        status = await cluster.dispatcher.status()
        assert status.num_requests == 0
        assert status.retries == {"transfer_failed": 1}


# ---------------------------------------------------------------------- an attempt fails


async def test_p_fails_before_its_token() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        cluster.tell(d, num_running=30)  # the other one has less to do
        p.fail()
        other, d2 = await cluster.pair(attempt=1)
        assert d2 is d
        assert d.cancelled == []  # so that it keeps what it has reserved
        assert other is not p
        assert other.job.emitted == ()
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


async def test_p_fails_between_its_token_and_the_commit() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        await reader.has(1)
        p.fail("transfer_failed")
        p2, d2 = await cluster.pair(attempt=1)
        assert p2.job.emitted == d2.job.emitted == OUTPUT[:1]
        assert p2 is not p
        assert d.cancelled == ["r"]
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


async def test_d_fails_in_the_middle() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        d.tokens(4, start=1)
        await reader.has(5)
        old = d.job
        d.fail()
        p2, d2 = await cluster.pair(attempt=1)
        assert p2.job.emitted == d2.job.emitted == OUTPUT[:5]
        assert p2.job.request.prompt_token_ids == PROMPT
        assert d2 is not d
        d.say(d._delta(old, 5, (666, 667)))  # it is not dead after all, but nobody listens
        d.fail(job=old)
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        status = await cluster.dispatcher.status()
        assert status.retries == {"node_lost": 1}


async def test_tokens_that_came_too_early_are_not_emitted() -> None:
    """D's tokens wait for P's, which never comes: another attempt makes all of them."""
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        d.say(d._delta(d.job, 1, (666, 667)))
        p.fail()
        p2, _ = await cluster.pair(attempt=1)
        assert p2.job.emitted == ()
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


async def test_one_failure_that_both_nodes_report() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        jobs = p.job, d.job
        d.fail("transfer_failed", job=jobs[1])
        p.fail("transfer_failed", job=jobs[0])
        await cluster.pair(attempt=1)
        d.fail("transfer_failed", job=jobs[1])  # and again
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        status = await cluster.dispatcher.status()
        assert status.retries == {"transfer_failed": 1}
        assert status.decisions == {"disaggregated": 2}


async def test_only_one_token_is_left_to_make() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        d.tokens(len(OUTPUT) - 2, start=1)
        await reader.has(len(OUTPUT) - 1)
        d.fail()
        await until(lambda: any(node.jobs for node in cluster.nodes))
        (p2,) = cluster.holders(cluster.nodes)
        assert isinstance(p2.job, PrefillJob)
        assert p2.job.decode_endpoint is None
        p2.finish(start=len(OUTPUT) - 1)
        assert await reader.task == list(OUTPUT)


async def test_what_cannot_be_tried_again() -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.tokens()
        p.fail("layout_mismatch", retryable=False)
        chunks = aiter(stream)
        assert (await anext(chunks)).token_ids == OUTPUT[:1]
        with pytest.raises(RequestFailed, match=f"{p.info.node_id} failed"):
            await anext(chunks)
        await until(lambda: d.cancelled == ["r"])
        assert (await cluster.dispatcher.status()).retries == {}


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_failed_hand_off_is_not_tried_again_if_it_is_to_fail(failing: str) -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        node = p if failing == "prefill" else d
        node.fail("transfer_failed", retryable=False)
        with pytest.raises(TransferFailed, match=f"{node.info.node_id} failed"):
            await read(stream)
        await until(lambda: cluster.is_at_rest)
        assert (await cluster.dispatcher.status()).retries == {}


@pytest.mark.parametrize(
    ("label", "error"),
    [
        ("transfer_failed", TransferFailed),
        ("node_lost", NodeLost),
        ("layout_mismatch", RequestFailed),
    ],
)
async def test_the_last_error_keeps_its_label(label: str, error: type[RequestFailed]) -> None:
    async with ScriptedCluster(max_attempts=2, max_lost_attempts=2).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        for attempt in range(2):
            _, d = await cluster.pair(attempt)
            d.fail(label)
        with pytest.raises(RequestFailed, match=r"d\d failed") as caught:
            await read(stream)
        assert type(caught.value) is error
        assert (await cluster.dispatcher.status()).retries == {label: 1}


@pytest.mark.parametrize("num_attempts", [1, 2, 3])
@pytest.mark.parametrize(
    ("label", "limit"),
    [
        ("transfer_failed", "max_attempts"),
        ("node_lost", "max_lost_attempts"),
        ("overloaded", "max_lost_attempts"),
    ],
)
async def test_there_are_so_many_attempts_and_no_more(
    label: str, limit: str, num_attempts: int
) -> None:
    async with ScriptedCluster(4, 4, **{limit: num_attempts}).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        seen = set()
        for attempt in range(num_attempts):
            p, d = await cluster.pair(attempt)
            seen |= {p.info.node_id, d.info.node_id}
            d.fail(label) if attempt % 2 else p.fail(label)
        with pytest.raises(RequestFailed, match=r"[pd]\d failed"):
            await read(stream)
        status = await cluster.dispatcher.status()
        assert status.retries == ({label: num_attempts - 1} if num_attempts > 1 else {})
        assert len(seen) > num_attempts  # each attempt avoided the node that had failed


async def test_attempts_that_brought_a_token_are_not_counted() -> None:
    """A request that gets on is not given up, however many restarts there are."""
    async with ScriptedCluster(max_attempts=1, max_lost_attempts=2).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        for attempt in range(6):
            p, _ = await cluster.pair(attempt)
            p.tokens()
            await reader.has(attempt + 1)
            p.fail()
        await finish(cluster, attempt=6)
        assert await reader.task == list(OUTPUT)


async def test_attempts_are_spaced() -> None:
    async with ScriptedCluster(4, 4, retry_backoff_s=0.04).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        loop = asyncio.get_running_loop()
        waited = []
        for attempt in range(2):
            p, _ = await cluster.pair(attempt)
            began = loop.time()
            p.fail()
            await cluster.pair(attempt + 1)
            waited.append(loop.time() - began)
        assert waited[0] >= 0.04
        assert waited[1] >= 0.08
        await finish(cluster, attempt=2)
        assert await reader.task == list(OUTPUT)


async def test_the_only_nodes_are_tried_again() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, _ = await cluster.pair()
        p.fail()
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


# ---------------------------------------------------------------------- a node is lost


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_is_lost(role: str) -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        d.tokens(2, start=1)
        await reader.has(3)
        lost, other = (p, d) if role == "prefill" else (d, p)
        lost.lose()
        p2, d2 = await cluster.pair(attempt=1)
        assert lost not in (p2, d2)
        assert p2.job.emitted == OUTPUT[:3]
        assert other.cancelled == ([] if other is d2 else ["r"])
        assert (other is d2) == (role == "prefill")
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {"node_lost": 1}


async def test_a_node_is_lost_that_had_done_its_part() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        await reader.has(1)
        p.lose()
        d.finish(start=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {}


async def test_the_decode_node_goes_on_without_a_lost_prefill_node() -> None:
    """It notices, computes the prompt itself, and makes the first token as well."""
    async with ScriptedCluster(decode_recomputes=True).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.lose()
        await until(lambda: p.info.node_id not in cluster.dispatcher.node_ids)
        d.tokens(2, start=0)
        await reader.has(2)
        d.finish(start=2)
        assert await reader.task == list(OUTPUT)
        assert d.cancelled == []
        status = await cluster.dispatcher.status()
        assert status.retries == {}
        assert status.decisions == {"disaggregated": 1}


async def test_the_decode_node_cannot_go_on_without_the_prefill_node() -> None:
    """It says so with the reason. It is not to blame, and has what was cached: it is kept."""
    async with ScriptedCluster(decode_recomputes=True).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.tokens()
        await reader.has(1)
        p.lose()
        await until(lambda: p.info.node_id not in cluster.dispatcher.node_ids)
        d.fail("transfer_failed")
        p2, d2 = await cluster.pair(attempt=1)
        assert p2 is not p
        assert d2 is d
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {"transfer_failed": 1}


async def test_both_nodes_are_lost_one_after_the_other() -> None:
    """Nobody is left to compute the prompt."""
    async with ScriptedCluster(decode_recomputes=True).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.lose()
        await until(lambda: p.info.node_id not in cluster.dispatcher.node_ids)
        d.lose()
        p2, d2 = await cluster.pair(attempt=1)
        assert p2 is not p
        assert d2 is not d
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {"node_lost": 1}


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_decode_node_that_recomputes_does_not_help_everybody(lost: str) -> None:
    """Not a request of one token, which it knows nothing of, nor if it is lost itself."""
    async with ScriptedCluster(decode_recomputes=True).running() as cluster:
        max_tokens = 1 if lost == "prefill" else len(OUTPUT)
        reader = Reader(await cluster.dispatcher.submit(make_request(max_tokens=max_tokens)))
        (node,) = cluster.holders(cluster.prefill if lost == "prefill" else cluster.decode)
        node.lose()
        await until(lambda: any(job.attempt == 1 for n in cluster.nodes for job in n.jobs))
        if lost == "prefill":
            (p2,) = cluster.holders(cluster.prefill)
            p2.finish(start=0, end=1)
        else:
            await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT[:max_tokens])
        assert (await cluster.dispatcher.status()).retries == {"node_lost": 1}


async def test_both_nodes_are_lost() -> None:
    async with ScriptedCluster().running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        p.lose()
        d.lose()
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        assert (await cluster.dispatcher.status()).retries == {"node_lost": 1}


async def test_a_retry_that_a_node_refuses_goes_elsewhere() -> None:
    """What refuses an attempt is avoided like what failed one."""
    async with ScriptedCluster(3, 3).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        others = [node for node in cluster.prefill if node is not p]
        likely = min(others, key=lambda node: node.info.node_id)
        likely.refuse = Overloaded("full", 1.0)
        p.fail()
        p2, d2 = await cluster.pair(attempt=2)
        assert p2 not in (p, likely)
        assert d2 is d
        assert d.cancelled == []  # neither for the first attempt nor for the refused one
        await finish(cluster, attempt=2)
        assert await reader.task == list(OUTPUT)


async def test_all_nodes_are_lost() -> None:
    async with ScriptedCluster(2, 2, recovery_timeout_s=0.02).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        await cluster.pair()
        for node in cluster.nodes:
            node.lose()
        with pytest.raises(NoHealthyNode):
            await read(stream)
        with pytest.raises(NoHealthyNode):
            await cluster.dispatcher.submit(make_request("later"))


async def test_a_lost_node_gets_no_more_jobs() -> None:
    """The directory may take a while to notice, and nobody would hear the node's answer."""
    async with ScriptedCluster(2, 2).running() as cluster:
        cluster.prefill[0].lose()
        cluster.decode[0].lose()
        await until(lambda: len(cluster.dispatcher.node_ids) == 2)
        for n in range(3):
            stream = await cluster.dispatcher.submit(make_request(f"r{n}"))
            p, d = await finish(cluster, attempt=0)
            assert (p, d) == (cluster.prefill[1], cluster.decode[1])
            assert await read(stream) == list(OUTPUT)
            await until(lambda: not cluster.dispatcher._flights)


async def test_a_node_with_blocks_in_quarantine_is_avoided() -> None:
    async with ScriptedCluster(2, 2).running() as cluster:
        full, other = cluster.decode
        cluster.directory.heartbeat(make_status(full.info, admitting=False), generation=0)
        for n in range(3):
            stream = await cluster.dispatcher.submit(make_request(f"r{n}"))
            _, d = await finish(cluster, attempt=0)
            assert d is other
            assert await read(stream) == list(OUTPUT)
            await until(lambda: not cluster.dispatcher._flights)
        cluster.directory.heartbeat(make_status(other.info, admitting=False), generation=0)
        with pytest.raises(NoHealthyNode, match="too many KV blocks in quarantine"):
            await cluster.dispatcher.submit(make_request())


async def test_no_node_is_healthy_for_a_while() -> None:
    async with ScriptedCluster(1, 1, recovery_timeout_s=10.0).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        p, d = await cluster.pair()
        sick = make_status(d.info, healthy=False)
        cluster.directory.heartbeat(sick, generation=0)
        p.fail()
        retries = cluster.dispatcher._attempts.retries
        await until(lambda: retries["no_healthy_node"] == 1)
        cluster.directory.heartbeat(make_status(d.info), generation=0)
        await until(lambda: bool(cluster.holders(cluster.prefill)))
        await finish(cluster, attempt=d.job.attempt)
        assert await reader.task == list(OUTPUT)


async def test_no_node_is_healthy_any_more() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        cluster.directory.heartbeat(make_status(d.info, healthy=False), generation=0)
        p.fail()
        with pytest.raises(NoHealthyNode, match="decode"):
            await read(stream)


# ---------------------------------------------------------------------- submit


@pytest.mark.parametrize("refusing", ["prefill", "decode", "both"])
@pytest.mark.parametrize("error", [Overloaded("full", 1.0), NodeLost("down")], ids=["full", "down"])
async def test_a_node_refuses(refusing: str, error: KvrelayError) -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        p.refuse = error if refusing != "decode" else None
        d.refuse = error if refusing != "prefill" else None
        with pytest.raises(type(error), match=str(error)):
            await cluster.dispatcher.submit(make_request())
        await until(lambda: cluster.is_at_rest)
        status = await cluster.dispatcher.status()
        assert status.rejected == {error.label: 1}
        assert status.retries == {}
        p.refuse = d.refuse = None
        stream = await cluster.dispatcher.submit(make_request())
        await finish(cluster, attempt=0)
        assert await read(stream) == list(OUTPUT)


async def test_a_node_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.orders, "CALL_TIMEOUT_S", 0.03)
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        d.answers.clear()
        with pytest.raises(NodeLost, match="node d0 did not answer"):
            await cluster.dispatcher.submit(make_request())
        await until(lambda: cluster.is_at_rest)
        assert p.cancelled == ["r"]
        d.answers.set()


@pytest.mark.parametrize("taken", [True, False])
async def test_whoever_submits_is_cancelled(taken: bool) -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        d.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await d.asked.wait()
        await until(lambda: bool(p.jobs))
        if taken:
            p.tokens()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        d.answers.set()
        await until(lambda: cluster.is_at_rest)
        assert p.cancelled == ["r"]
        assert (await cluster.dispatcher.status()).rejected == {}


async def test_a_failure_comes_while_a_cancelled_submit_is_cleaned_up() -> None:
    """There must be no second attempt that nobody reads."""
    async with ScriptedCluster(2, 2).running() as cluster:
        for node in cluster.decode:
            node.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(cluster.holders(cluster.prefill)))
        (p,) = cluster.holders(cluster.prefill)
        p.fail()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        for node in cluster.decode:
            node.answers.set()
        await until(lambda: cluster.is_at_rest)
        assert (await cluster.dispatcher.status()).num_requests == 0


async def test_a_failure_comes_while_a_refusal_is_cleaned_up() -> None:
    """D refuses; before P hears that its job is cancelled, P says that it failed."""
    async with ScriptedCluster(2, 2).running() as cluster:
        for node in cluster.decode:
            node.refuse = NodeLost("down")
            node.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(cluster.holders(cluster.prefill)))
        (p,) = cluster.holders(cluster.prefill)
        p.cancels.clear()
        for node in cluster.decode:
            node.answers.set()
        flight = cluster.dispatcher._flights["r"]
        await until(lambda: flight.attempt > 0 or flight.ended)
        p.fail()
        for _ in range(20):
            await asyncio.sleep(0)
        p.cancels.set()
        with pytest.raises(NodeLost, match="down"):
            await submitting
        await until(lambda: cluster.is_at_rest)
        # The refusal, which the other decode node repeated; not the failure.
        assert (await cluster.dispatcher.status()).retries == {"node_lost": 1}


async def test_p_fails_and_then_d_refuses() -> None:
    """The failure came first, so it is retried, and the refusal is of an attempt that is over."""
    async with ScriptedCluster(2, 2).running() as cluster:
        for node in cluster.decode:
            node.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(cluster.holders(cluster.prefill)))
        (p,) = cluster.holders(cluster.prefill)
        (asked,) = [node for node in cluster.decode if node.asked.is_set()]
        p.fail()
        await until(lambda: cluster.dispatcher._flights["r"].attempt == 1)
        asked.refuse = NodeLost("down")
        for node in cluster.decode:
            node.answers.set()
        reader = Reader(await submitting)
        _, d2 = await cluster.pair(attempt=1)
        assert d2 is not asked
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)
        status = await cluster.dispatcher.status()
        assert status.retries == {"node_lost": 1}
        assert status.rejected == {}


async def test_p_fails_before_d_has_its_job() -> None:
    """D's job of the first attempt comes after its cancellation, and must go all the same."""
    async with ScriptedCluster(2, 1).running() as cluster:
        (d,) = cluster.decode
        d.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(cluster.holders(cluster.prefill)))
        (p,) = cluster.holders(cluster.prefill)
        p.fail()
        await until(lambda: cluster.dispatcher._flights["r"].attempt == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        d.answers.set()
        reader = Reader(await submitting)
        _, d2 = await cluster.pair(attempt=1)
        assert [job.attempt for job in d2.jobs] == [1]
        await finish(cluster, attempt=1)
        assert await reader.task == list(OUTPUT)


async def test_p_ends_the_request_before_d_has_its_job() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        d.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await until(lambda: bool(p.jobs))
        p.finish(start=0, end=1)  # a stop token
        await until(lambda: not cluster.dispatcher._flights)
        d.answers.set()
        assert await read(await submitting) == list(OUTPUT[:1])
        await until(lambda: cluster.is_at_rest)
        assert d.jobs == []


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        (lambda: ScriptedCluster(0, 1), NoHealthyNode),
        (lambda: ScriptedCluster(1, 0), NoHealthyNode),
        (lambda: ScriptedCluster(max_inflight_requests=1), Overloaded),
        (lambda: ScriptedCluster(max_queued_tokens=100), Overloaded),
        (lambda: ScriptedCluster(max_predicted_ttft_s=0.001), Overloaded),
    ],
    ids=["no prefill", "no decode", "in flight", "queued tokens", "slo"],
)
async def test_what_is_not_admitted(
    cluster: Callable[[], ScriptedCluster], error: type[KvrelayError]
) -> None:
    async with cluster().running() as made:
        submitted = await asyncio.gather(
            *(made.dispatcher.submit(make_request(f"r{n}")) for n in range(2)),
            return_exceptions=True,
        )
        refused = [result for result in submitted if isinstance(result, KvrelayError)]
        assert {type(result) for result in refused} == {error}
        assert (await made.dispatcher.status()).rejected == {error.label: len(refused)}
        for stream in submitted:
            if not isinstance(stream, BaseException):
                await stream.aclose()


async def test_a_prompt_that_fits_nowhere() -> None:
    async with ScriptedCluster().running() as cluster:
        request = make_request()
        too_long = type(request)(
            request_id="long",
            prompt_token_ids=tuple(range(8192)),
            sampling=request.sampling,
            arrival_time=1.0,
        )
        with pytest.raises(PromptTooLong):
            await cluster.dispatcher.submit(too_long)
        assert not any(node.asked.is_set() for node in cluster.nodes)


# ---------------------------------------------------------------------- the client leaves


async def test_the_client_leaves_in_the_middle() -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.tokens()
        reader = Reader(stream)
        await reader.has(1)
        await stream.aclose()
        assert p.cancelled == d.cancelled == ["r"]
        assert cluster.is_at_rest
        with pytest.raises(RequestAborted):
            await reader.task
        await stream.aclose()
        assert p.cancelled == ["r"]
        assert stream.timeline.finished is not None


async def test_the_client_leaves_after_p_has_done_its_part() -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        await Reader(stream).has(1)
        await until(lambda: p.info.node_id not in cluster.dispatcher._flights["r"].open_nodes)
        await stream.aclose()
        assert d.cancelled == ["r"]
        assert p.cancelled == []


async def test_the_client_leaves_after_the_end() -> None:
    async with ScriptedCluster().running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await finish(cluster, attempt=0)
        assert await read(stream) == list(OUTPUT)
        await stream.aclose()
        assert p.cancelled == d.cancelled == []


async def test_the_client_leaves_between_two_attempts() -> None:
    async with ScriptedCluster(retry_backoff_s=0.05).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, _ = await cluster.pair()
        p.fail()
        await until(lambda: cluster.dispatcher._flights["r"].attempt == 1)
        for node in cluster.nodes:
            node.asked.clear()
        await stream.aclose()
        await until(lambda: cluster.is_at_rest)  # the pause is over by then
        assert not any(node.asked.is_set() for node in cluster.nodes)


async def test_the_client_leaves_while_the_second_attempt_starts() -> None:
    async with ScriptedCluster(2, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.fail()
        d.asked.clear()
        d.answers.clear()
        await d.asked.wait()
        leaving = asyncio.create_task(stream.aclose())
        await until(lambda: not cluster.dispatcher._flights)
        d.answers.set()
        await leaving
        await until(lambda: cluster.is_at_rest)


async def test_the_client_is_cancelled_while_it_leaves() -> None:
    """It cannot wait for the nodes' answers; they hear of it all the same."""
    async with ScriptedCluster(1, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.cancels.clear()
        d.cancels.clear()
        leaving = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        p.cancels.set()
        d.cancels.set()
        await until(lambda: p.cancelled == d.cancelled == ["r"])


async def test_a_node_does_not_answer_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.orders, "CALL_TIMEOUT_S", 0.03)
    async with ScriptedCluster(1, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        d.cancels.clear()
        await stream.aclose()
        assert p.cancelled == ["r"]
        assert cluster.dispatcher._flights == {}
        d.jobs.clear()


async def test_a_slow_reader_gets_more_at_once() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.tokens()
        p.hand_off()
        job = d.job
        for start in range(1, len(OUTPUT) - 1):
            d.tokens(start=start, job=job)
        d.finish(start=len(OUTPUT) - 1)
        await until(lambda: cluster.is_at_rest)
        chunks: list[TokenChunk] = [chunk async for chunk in stream]
        assert [chunk.token_ids for chunk in chunks] == [OUTPUT]


async def test_no_token_comes_for_too_long() -> None:
    async with ScriptedCluster(1, 1, stall_timeout_s=0.05).running() as cluster:
        stream = await cluster.dispatcher.submit(make_request())
        p, d = await cluster.pair()
        p.tokens()
        with pytest.raises(RequestFailed, match=r"no token for 0\.05 s"):
            await read(stream)
        assert p.cancelled == d.cancelled == ["r"]
        assert cluster.is_at_rest


# ---------------------------------------------------------------------- stop


async def test_stop_ends_what_is_under_way() -> None:
    cluster = ScriptedCluster(2, 2, retry_backoff_s=30.0)
    async with cluster.running():
        readers = []
        for name in ("fresh", "running", "between attempts"):
            stream = await cluster.dispatcher.submit(make_request(name))
            readers.append(Reader(stream))
        for node in cluster.prefill:
            for job in list(node.jobs):
                if job.request.request_id == "running":
                    node.tokens(job=job)
                if job.request.request_id == "between attempts":
                    node.fail(job=job)
        await until(lambda: cluster.dispatcher._attempts.retries["node_lost"] == 1)
        await readers[1].has(1)
        await asyncio.wait_for(cluster.dispatcher.stop(), 5)
        for reader in readers:
            with pytest.raises(RequestAborted):
                await reader.task
        assert len(cluster.dispatcher._background) == 0
        await until(lambda: cluster.is_at_rest)


async def test_stop_while_a_job_is_on_its_way() -> None:
    async with ScriptedCluster(1, 1).running() as cluster:
        (d,) = cluster.decode
        d.answers.clear()
        submitting = asyncio.create_task(cluster.dispatcher.submit(make_request()))
        await d.asked.wait()
        stopping = asyncio.create_task(cluster.dispatcher.stop())
        await until(lambda: not cluster.dispatcher._flights)
        d.answers.set()
        await stopping
        with pytest.raises(RequestAborted):
            await read(await submitting)
        await until(lambda: cluster.is_at_rest)


async def test_stop_is_not_held_up_by_nodes_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are asked at once, so it takes as long as one of them."""
    monkeypatch.setattr(router.orders, "CALL_TIMEOUT_S", 0.2)
    async with ScriptedCluster(1, 1).running() as cluster:
        for n in range(20):
            await cluster.dispatcher.submit(make_request(f"r{n}"))
        for node in cluster.nodes:
            node.cancels.clear()
        await asyncio.wait_for(cluster.dispatcher.stop(), 2)
        for node in cluster.nodes:
            node.jobs.clear()


# ---------------------------------------------------------------------- what the router knows


async def test_a_snapshot_that_failed_is_asked_for_again() -> None:
    cluster = ScriptedCluster(1, 1)
    (p,) = cluster.prefill
    snapshot, asked = p.snapshot, 0

    async def fails_once() -> object:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise NodeLost("not now")
        return await snapshot()

    p.snapshot = fails_once  # type: ignore[method-assign, assignment]
    async with cluster.running():
        index = cluster.dispatcher._cluster.index
        await until(lambda: index.needs_snapshot() == {"p0"} and asked == 1)
        await until(lambda: not cluster.dispatcher._snapshots._under_way)
        stream = await cluster.dispatcher.submit(make_request())
        await until(lambda: index.needs_snapshot() == frozenset())
        assert asked == 2
        await stream.aclose()


# ---------------------------------------------------------------------- random life


class RandomNode(ScriptedNode):
    """Works off its jobs by itself, and now and then fails one."""

    chance = random.Random(0)
    failure_rate = 0.0

    async def _take(self, job: object) -> None:
        await super()._take(job)  # type: ignore[arg-type]
        self._work = asyncio.create_task(self._work_off(job))  # type: ignore[arg-type]

    async def _work_off(self, job: PrefillJob | DecodeJob) -> None:
        position = len(job.emitted)
        end = len(OUTPUT)
        if isinstance(job, PrefillJob):
            end = position + 1
        elif job.prefill_endpoint is not None:
            position += 1
        while job in self.jobs:
            for _ in range(self.chance.randrange(4)):
                await asyncio.sleep(0)
            if job not in self.jobs:
                return
            if self.chance.random() < self.failure_rate:
                self.fail(job=job)
            elif position < end:
                count = min(self.chance.randint(1, 3), end - position)
                last = isinstance(job, DecodeJob) or job.decode_endpoint is None
                if last and position + count == len(OUTPUT):
                    self.finish(start=position, job=job)
                else:
                    self.tokens(count, start=position, job=job)
                position += count
            elif isinstance(job, PrefillJob):
                self.hand_off(job)


@pytest.mark.parametrize("seed", range(3))
async def test_random_failures_leave_right_tokens_and_nothing_else(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.router.scripted_nodes.ScriptedNode", RandomNode)
    chance = random.Random(seed)
    monkeypatch.setattr(RandomNode, "chance", chance)
    monkeypatch.setattr(RandomNode, "failure_rate", 0.03)
    outcomes: list[str] = []

    async def live(cluster: ScriptedCluster, name: str, patience: int) -> None:
        stream = await cluster.dispatcher.submit(make_request(name))
        tokens: list[int] = []
        try:
            async for chunk in stream:
                tokens.extend(chunk.token_ids)
                patience -= 1
                if patience == 0:
                    break
        except RequestFailed:
            outcomes.append("failed")
        else:
            outcomes.append("left" if patience == 0 else "done")
            assert patience == 0 or tokens == list(OUTPUT)
        finally:
            await stream.aclose()
        assert tokens == list(OUTPUT[: len(tokens)])

    async with ScriptedCluster(3, 3, retry_backoff_s=0.0).running() as cluster:
        for batch in range(10):
            await asyncio.gather(
                *(live(cluster, f"{batch}/{n}", chance.choice((0, 1, 2, 99))) for n in range(30))
            )
            if batch == 5:
                cluster.prefill[0].lose()
                gone = cluster.prefill[0]
                cluster.directory.deregister(gone.info.node_id, generation=0)
    assert outcomes.count("done") > 100
    assert (await cluster.dispatcher.status()).retries["node_lost"] > 20
    assert "left" in outcomes


async def test_orders_to_all_nodes_say_who_is_lost() -> None:
    async with ScriptedCluster().running() as cluster:
        nodes = [*cluster.prefill, *cluster.decode]
        nodes[0].lose()
        for give in (
            cluster.dispatcher.pause(PauseMode.WAIT),
            cluster.dispatcher.resume(),
            cluster.dispatcher.reset_prefix_cache(reset_running_requests=True),
        ):
            answers = await give
            assert answers == {n.info.node_id: n is not nodes[0] for n in nodes}
        assert nodes[1].orders == ["pause wait", "resume", "reset True"]


@pytest.mark.parametrize("reporter", ["prefill", "decode"])
async def test_a_failed_hand_off_is_tried_again_with_another_prefill_node(reporter: str) -> None:
    """Also if only one decode node is there, and it is the one that noticed."""
    async with ScriptedCluster(2, 1, max_attempts=2).running() as cluster:
        reader = Reader(await cluster.dispatcher.submit(make_request()))
        first, d = await cluster.pair()
        (first if reporter == "prefill" else d).fail("transfer_failed")
        second, d = await cluster.pair(1)
        assert second is not first
        second.tokens()
        d.finish(start=1)
        assert await reader.task == list(OUTPUT)
