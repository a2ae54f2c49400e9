"""Who is let in by a node that listens, who is told what, and what strangers may cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.channel import MAX_FRAME_BYTES, VERSION, Channel
from cluster.connected_node import connect_node
from cluster.frame_stream import FrameStream
from cluster.keepalive import KeepaliveConfig
from cluster.node_endpoints import Dialler
from cluster.node_handshake import (
    Handshake,
    NodeRefused,
    RefusalReason,
    Wanted,
    call_at,
    envelopes_of_handshake,
)
from cluster.node_messages import (
    AskStatus,
    Call,
    OpenStream,
    StartNode,
    Stop,
    envelopes_from_service,
)
from cluster.node_service import NodeService
from cluster.service_config import ServiceConfig
from kv_transfer.peering import ClusterToken
from protocol import ConfigError, NodeInfo, NodeLost
from tests.service_node import TOKEN, built_node, connected, only, serving

SCHEMES = ["unix", "tcp"]
PATIENCE_S = 15.0


async def dialled(info: NodeInfo, scheme: str = "unix") -> FrameStream:
    """A connection on which nothing was said yet."""
    return await FrameStream.open(await Dialler().connect(only(info, scheme).service))


async def hear_end(stream: FrameStream) -> bytes:
    """All that the node says until it closes the connection."""
    said = b""
    async with asyncio.timeout(PATIENCE_S):
        while (frame := await stream.read(lambda _: None)) is not None:
            said += frame
    await stream.close()
    return said


@contextlib.asynccontextmanager
async def let_in(info: NodeInfo, scheme: str = "unix") -> AsyncIterator[Channel[Any]]:
    """An authenticated connection whose caller is none of ours."""
    stream = await dialled(info, scheme)
    wanted = Wanted(only(info, scheme).service, info.node_id, info.generation)
    await call_at(Channel(stream, envelopes_of_handshake), TOKEN, wanted)
    try:
        yield Channel(stream, envelopes_from_service)
    finally:
        stream.abort()
        await stream.close()


async def call_for_ever(channel: Channel[Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await channel.send(Call(1, AskStatus()))
            await asyncio.sleep(0.001)  # not so many that this is why it is cut off


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


@pytest.mark.parametrize("scheme", SCHEMES)
class TestWhoIsRefused:
    async def test_has_another_token(self, scheme: str) -> None:
        async with serving() as (_, service):
            with pytest.raises(NodeRefused, match=r"node unified-0: refused: .* another cluster"):
                await connect_node(only(service.info, scheme), ClusterToken("another"))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"node_id": "decode-9"}, "not decode-9 of generation 7"),
            ({"generation": 6}, "this is unified-0 of generation 7, not unified-0 of generation 6"),
        ],
        ids=["id", "generation"],
    )
    async def test_means_another_node(self, scheme: str, change: dict[str, Any], said: str) -> None:
        async with serving() as (_, service):
            info = msgspec.structs.replace(only(service.info, scheme), **change)
            with pytest.raises(NodeRefused, match=said) as caught:
                await connect_node(info, TOKEN)
            assert caught.value.reason is RefusalReason.OTHER_NODE

    async def test_means_one_that_had_this_address(self, scheme: str) -> None:
        async with serving() as (_, service):
            stream = await dialled(service.info, scheme)
            wanted = Wanted("tcp:127.0.0.1:1/of-old", "unified-0", 7)
            with pytest.raises(NodeRefused, match="of-old"):
                await call_at(Channel(stream, envelopes_of_handshake), TOKEN, wanted)
            await stream.close()

    async def test_is_one_too_many(self, scheme: str) -> None:
        async with serving(config=ServiceConfig(max_connections=1)) as (_, service):
            info = only(service.info, scheme)
            async with connected(info):
                with pytest.raises(NodeRefused, match="unified-0 has 1 callers") as caught:
                    await connect_node(info, TOKEN)
                assert caught.value.reason is RefusalReason.FULL
            async with asyncio.timeout(PATIENCE_S):
                await self.room_again(info)

    async def room_again(self, info: NodeInfo) -> None:
        while True:
            try:
                async with connected(info) as node:
                    await node.status()
                    return
            except NodeRefused:
                await asyncio.sleep(0.01)

    async def test_speaks_another_version(self, scheme: str) -> None:
        async with serving() as (_, service):
            stream = await dialled(service.info, scheme)
            stream.write(msgspec.msgpack.encode([VERSION + 1, {"type": "hello", "new": 1}]))
            said = await hear_end(stream)
            assert f"the peer speaks version {VERSION + 1}, this node version {VERSION}" in str(
                said
            )

    async def test_says_a_proof_that_was_heard_before(self, scheme: str) -> None:
        """All that an honest caller has said, once more."""
        said: list[Any] = []

        class Overheard(Channel[Handshake]):
            def post(self, message: object) -> None:
                said.append(message)
                super().post(message)

        async with serving() as (_, service):
            stream = await dialled(service.info, scheme)
            endpoint = only(service.info, scheme).service
            wanted = Wanted(endpoint, "unified-0", service.info.generation)
            await call_at(Overheard(stream, envelopes_of_handshake), TOKEN, wanted)
            stream.abort()
            await stream.close()
            thief = await dialled(service.info, scheme)
            assert len(said) == 2
            for message in said:
                thief.write(envelopes_of_handshake.encode(message))
            assert b"another cluster token" in await hear_end(thief)


class TestWhoIsNotThere:
    async def test_nobody(self) -> None:
        async with serving() as (_, service):
            info = service.info
        with pytest.raises(NodeLost, match=r"cannot be reached: .* refused; .* refused"):
            await connect_node(info, TOKEN)

    @pytest.mark.parametrize(
        ("service", "said"),
        [
            ("", "'' is not an endpoint of a node"),
            ("smoke:signals/3", "is not an endpoint of a node"),
            ("unix:0123456789ab/name", "on another host"),
            ("tcp:localhost:1/name", "is not an endpoint of tcp"),
        ],
    )
    async def test_an_endpoint_that_leads_nowhere(self, service: str, said: str) -> None:
        async with serving() as (_, served):
            info = msgspec.structs.replace(served.info, service=service)
        with pytest.raises(NodeLost, match=said):
            await connect_node(info, TOKEN)

    async def test_one_that_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent, built_node() as node:
            port = silent.getsockname()[1]
            info = msgspec.structs.replace(node.info, service=f"tcp:127.0.0.1:{port}/x")
            with pytest.raises(NodeLost, match=r"did not answer within 0\.2 s"):
                await connect_node(info, TOKEN, timeout_s=0.2)

    async def test_somebody_who_does_not_know_the_token(self) -> None:
        """It has the node's address, and says yes to everything."""
        async with serving() as (_, service):
            info = only(service.info, "tcp")

        async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for answer in (
                {"type": "challenge", "nonce": b"n" * 32},
                {"type": "welcome", "proof": b"p" * 32},
            ):
                length = struct.unpack("<I", await reader.readexactly(4))[0]
                await reader.readexactly(length)
                writer.write(frame(msgspec.msgpack.encode([VERSION, answer])))
            await reader.read()
            writer.close()

        async with await asyncio.start_server(pretend, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            fake = msgspec.structs.replace(info, service=f"tcp:127.0.0.1:{port}/x")
            with pytest.raises(NodeRefused, match="another cluster token") as caught:
                await connect_node(fake, TOKEN)
            assert caught.value.reason is RefusalReason.TOKEN

    async def test_the_next_endpoint_is_tried(self) -> None:
        async with serving() as (_, service):
            tcp = only(service.info, "tcp")
            dead = f"{only(service.info, 'unix').service}-no-more"
            info = msgspec.structs.replace(tcp, service=f"{dead}+{tcp.service}")
            with pytest.raises(NodeRefused, match="not unified-0 of generation 8"):
                await connect_node(msgspec.structs.replace(info, generation=8), TOKEN)
            async with connected(info) as node:
                await node.status()


SPEECHES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=5000).map(frame),
    st.integers(0, 2**32 - 1).map(lambda n: struct.pack("<I", n)),
    st.binary(max_size=60).map(lambda said: frame(msgspec.msgpack.encode([VERSION, said]))),
    st.dictionaries(
        st.sampled_from(["type", "number", "question", "stream", "caller", "nonce", "wanted"]),
        st.sampled_from(["call", "open", "close", "hello", "introduction", 1, -1, b"x" * 32, {}]),
    ).map(lambda said: frame(msgspec.msgpack.encode([VERSION, said]))),
)


async def say_and_leave(
    info: NodeInfo, scheme: str, said: bytes, is_cut: bool, is_known: bool
) -> None:
    stream = await dialled(info, scheme)
    if is_known:
        wanted = Wanted(only(info, scheme).service, info.node_id, info.generation)
        await call_at(Channel(stream, envelopes_of_handshake), TOKEN, wanted)
    stream.transport.write(said[: len(said) // 2] if is_cut else said)
    stream.transport.write_eof()
    assert b"welcome" not in await hear_end(stream)
    async with connected(only(info, scheme)) as node:
        await node.status()


class TestStrangers:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_whatever_they_say(self, scheme: str) -> None:
        """Those who know the token, too, may say anything."""
        with asyncio.Runner() as runner:
            serves = serving()
            _, service = runner.run(serves.__aenter__())

            @settings(max_examples=150, deadline=None)
            @given(said=SPEECHES, is_cut=st.booleans(), is_known=st.booleans())
            def say(said: bytes, is_cut: bool, is_known: bool) -> None:
                runner.run(say_and_leave(service.info, scheme, said, is_cut, is_known))

            say()
            runner.run(serves.__aexit__(None, None, None))

    @pytest.mark.parametrize("scheme", SCHEMES)
    async def test_announce_more_than_is_read(self, scheme: str) -> None:
        async with serving() as (_, service):
            stream = await dialled(service.info, scheme)
            stream.transport.write(struct.pack("<I", 4097))
            assert b"something else" in await hear_end(stream)

    @pytest.mark.parametrize("scheme", SCHEMES)
    async def test_that_say_nothing_are_few_and_not_for_long(self, scheme: str) -> None:
        config = ServiceConfig(max_strangers=4, handshake_timeout_s=2.0)
        async with serving(config=config) as (_, service):
            strangers = [await dialled(service.info, scheme) for _ in range(12)]
            async with connected(only(service.info, scheme)) as node:  # which pushes one out
                assert len(service._strangers) <= 4
                for stranger in strangers:
                    await hear_end(stranger)
                assert not service._strangers
                await node.status()


class TestACallerThatMisbehaves:
    @pytest.mark.parametrize(
        "message",
        [StartNode(1), Stop(), {"type": "setup"}, {"type": "call", "number": 1}, "nothing"],
        ids=str,
    )
    async def test_loses_its_own_connection_only(
        self, message: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as (_, service), connected(service.info) as other:
            async with let_in(service.info) as channel:
                channel.post(message)
                async with asyncio.timeout(PATIENCE_S):
                    assert await channel.receive() is None
            assert "unified-0 ends a connection: not a message" in caplog.text
            assert (await other.status()).healthy

    async def test_opens_a_stream_twice(self) -> None:
        async with serving() as (_, service), let_in(service.info) as channel:
            channel.post(OpenStream(1, "a"))
            channel.post(OpenStream(1, "b"))
            async with asyncio.timeout(PATIENCE_S):
                assert await channel.receive() is None

    async def test_announces_a_frame_beyond_the_bound(self) -> None:
        async with serving() as (_, service), let_in(service.info) as channel:
            channel._stream.transport.write(struct.pack("<I", MAX_FRAME_BYTES + 1))
            async with asyncio.timeout(PATIENCE_S):
                assert await channel.receive() is None

    async def test_does_not_read(self, caplog: pytest.LogCaptureFixture) -> None:
        """It lives and calls, but takes no answers: it costs what the socket holds, for a while."""
        quick = KeepaliveConfig(ping_s=0.1, silence_s=3.0)
        async with serving(config=ServiceConfig(keepalive=quick)) as (_, service):
            often = KeepaliveConfig(ping_s=0.1)
            async with connected(service.info, often) as other, let_in(service.info) as channel:
                channel._stream.transport.pause_reading()
                with pytest.raises(ConnectionError):
                    await call_for_ever(channel)
                assert "unified-0 ends a connection: it has read nothing for 3 s" in caplog.text
                assert (await other.status()).healthy


class TestSettings:
    @pytest.mark.parametrize(
        ("settings_", "field"),
        [
            ({"bind": "localhost"}, "bind"),
            ({"bind": "0.0.0.0"}, "advertise"),
            ({"advertise": "here"}, "advertise"),
        ],
        ids=str,
    )
    async def test_addresses_that_are_none(self, settings_: dict[str, Any], field: str) -> None:
        with built_node() as node, pytest.raises(ConfigError) as caught:
            NodeService(node, TOKEN, **settings_)
        assert caught.value.field == field

    async def test_a_port_that_is_taken(self) -> None:
        async with serving() as (node, service):
            port = int(service.endpoint.rpartition("/")[0].rpartition(":")[2])
            second = NodeService(node, TOKEN, port=port)
            with pytest.raises(ConfigError, match=r"cannot listen at .*in use") as caught:
                await second.start()
            assert caught.value.field == "bind"

    @pytest.mark.parametrize(
        "make",
        [
            lambda: KeepaliveConfig(ping_s=0),
            lambda: KeepaliveConfig(ping_s=6.0),
            lambda: ServiceConfig(max_connections=0),
            lambda: ServiceConfig(max_strangers=0),
            lambda: ServiceConfig(handshake_timeout_s=0),
        ],
    )
    def test_numbers_out_of_range(self, make: Callable[[], object]) -> None:
        with pytest.raises(ConfigError):
            make()

    async def test_the_token_is_not_shown(self) -> None:
        with built_node() as node:
            service = NodeService(node, ClusterToken("a-secret"))
            assert "a-secret" not in f"{vars(service)}"
