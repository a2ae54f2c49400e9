"""The nixl transport between real processes: over TCP alone, and by whatever UCX prefers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kv_transfer import BlockPoolMemory, PeerRefused
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import NixlConfig
from kv_transfer.transports.nixl_frames import Knock
from protocol import ConfigError, HandoffTicket
from tests.kv_transfer.conformance_end import EndSpec, LocalEnd, MakeParts, Rows
from tests.kv_transfer.nixl_end import TOKEN, make_tcp_parts
from tests.kv_transfer.pools import LAYOUT, TIMEOUT_S, GatedPool, make_pool
from tests.kv_transfer.remote_end import RemoteEnd
from tests.kv_transfer.transport_conformance import (
    OTHER,
    TICKET,
    UNTOUCHED,
    ProcessConformance,
    blocks,
)

MANY = 1 << 18  # blocks, of 128 MiB: a write of them can be caught in the middle
ALL: Rows = [(LAYOUT.bytes_per_block, LAYOUT.bytes_per_block, (MANY - 1) * LAYOUT.bytes_per_block)]
LATER = HandoffTicket("later", 0)
OVER_TCP = "tests.kv_transfer.nixl_end:make_tcp_parts"
ELSEWHERE = "tests.kv_transfer.nixl_end:make_parts_elsewhere"
QUIET_S = 0.3  # in which nothing may land
ROOT = Path(__file__).parents[2]


class TestNixlTransport(ProcessConformance):
    has_gates = False
    factory = "tests.kv_transfer.nixl_end:make_parts"


class TestNixlTransportOverTcp(ProcessConformance):
    has_gates = False
    factory = OVER_TCP


# ---------------------------------------------------------------------- in the middle of a write


class Here(LocalEnd):
    """The end in this process, whose memory can be watched while it is written to."""

    def __init__(self, make_parts: MakeParts, spec: EndSpec) -> None:
        parts = make_parts(spec)
        assert isinstance(parts.transport, NixlTransport)
        self.transport = parts.transport
        self.pool: GatedPool = parts.pool
        self.bytes = parts.pool.bytes
        super().__init__(lambda _: parts, spec)

    def being_written(self) -> None:
        """Wait for the first byte, which tells nobody that it has come."""
        until(lambda: self.bytes[1, 0] != UNTOUCHED)

    def check_quiet(self) -> None:
        """Nothing lands any more."""
        self.bytes[:] = UNTOUCHED
        time.sleep(QUIET_S)
        assert (self.bytes == UNTOUCHED).all()


def wait_for(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture
def here() -> Iterator[Here]:
    here = Here(make_tcp_parts, EndSpec("here", fill=UNTOUCHED, num_blocks=MANY))
    yield here
    here.close()


@pytest.fixture
def there(here: Here) -> Iterator[RemoteEnd]:
    """Another process; connected, so that what is tested is not the way to there."""
    yield from connected_end(here, OVER_TCP)


@pytest.fixture
def elsewhere(here: Here) -> Iterator[RemoteEnd]:
    yield from connected_end(here, ELSEWHERE)


def connected_end(here: Here, factory: str) -> Iterator[RemoteEnd]:
    end = RemoteEnd(factory)
    end.make(EndSpec("there", fill=1, num_blocks=MANY))
    assert end.ended(end.write(here.endpoint(), TICKET, [])) == "DONE"
    assert here.ended(here.write(end.endpoint(), TICKET, [])) == "DONE"
    yield end
    end.discard()


def test_all_of_it_arrives_and_messages_do_not_wait_for_it(here: Here, there: RemoteEnd) -> None:
    write = there.write(here.endpoint(), TICKET, ALL)
    there.notify(here.endpoint(), b"meanwhile")
    assert [message.data for message in here.received(1)] == [b"meanwhile"]
    assert there.ended(write) == "DONE"
    assert (here.bytes[1:] == 1).all()
    assert (here.bytes[0] == UNTOUCHED).all()


def test_a_fence_waits_for_the_end_of_the_writer(here: Here, there: RemoteEnd) -> None:
    here.open(TICKET, there.endpoint(), [1])
    there.write(here.endpoint(), TICKET, ALL)
    here.being_written()
    there.stop()
    assert not here.fence(TICKET)
    time.sleep(QUIET_S)
    assert not here.fence(TICKET)
    there.kill()
    here.fenced(TICKET)
    here.check_quiet()
    assert here.fence(TICKET)


def test_the_end_of_the_writer_is_no_fence_before_its_agent_is_closed(
    here: Here, there: RemoteEnd
) -> None:
    """What it has left in the kernels would still land."""
    endpoint, busy_elsewhere = there.endpoint(), threading.Event()
    here.open(TICKET, endpoint, [1])
    there.write(here.endpoint(), TICKET, ALL)
    here.being_written()
    here.transport._do(partial(wait_for, busy_elsewhere))
    there.kill()
    until(lambda: here.transport._network.has_exited(endpoint))
    assert not here.fence(TICKET)
    busy_elsewhere.set()
    here.fenced(TICKET)
    here.check_quiet()


def test_a_fence_holds_for_a_lost_node_of_another_host(here: Here, elsewhere: RemoteEnd) -> None:
    """It is not dead, and comes back with what it still had to write."""
    here.open(TICKET, elsewhere.endpoint(), [1])
    write = elsewhere.write(here.endpoint(), TICKET, ALL)
    here.being_written()
    elsewhere.stop()
    assert not here.fence(TICKET)
    cut_connections(here)
    here.fenced(TICKET)
    here.bytes[:] = UNTOUCHED
    elsewhere.go_on()
    assert elsewhere.ended(write) == "FAILED"
    time.sleep(1.1)  # sooner nobody dials again
    here.open(LATER, elsewhere.endpoint(), [1])
    again = elsewhere.write(here.endpoint(), TICKET, blocks((1, 1)))
    assert elsewhere.ended(again) == "FAILED"
    assert (here.bytes == UNTOUCHED).all()
    assert elsewhere.ended(elsewhere.write(here.endpoint(), LATER, blocks((1, 1)))) == "DONE"
    assert (here.bytes[1] == 1).all()


def test_a_write_to_a_stopped_node_is_pending(here: Here, there: RemoteEnd) -> None:
    endpoint = there.endpoint()
    there.stop()
    write = here.write(endpoint, TICKET, ALL)
    time.sleep(QUIET_S)  # until the kernels are full
    before = time.process_time()
    time.sleep(1.0)
    assert here.state(write) == "PENDING"
    assert time.process_time() - before < 0.25  # it is looked after, but at leisure
    there.go_on()
    assert here.ended(write) == "DONE"


def test_a_write_to_a_killed_node_fails(here: Here, there: RemoteEnd) -> None:
    endpoint = there.endpoint()
    there.stop()
    write = here.write(endpoint, TICKET, ALL)
    there.kill()
    assert here.ended(write) == "FAILED"


def test_a_write_to_a_node_without_power_fails(here: Here, there: RemoteEnd) -> None:
    """Nobody closes its agent, and the kernel would go on trying for minutes."""
    endpoint = there.endpoint()
    there.stop()
    write = here.write(endpoint, TICKET, ALL)
    time.sleep(QUIET_S)
    assert here.state(write) == "PENDING"
    cut_connections(here)
    assert here.ended(write) == "FAILED"
    there.go_on()
    time.sleep(1.1)  # sooner nobody dials again
    assert here.ended(here.write(endpoint, TICKET, ALL)) == "DONE"


def test_a_write_that_has_not_begun_fails_with_its_peer(here: Here) -> None:
    there = RemoteEnd(OVER_TCP)
    there.make(EndSpec("there"))
    endpoint = there.endpoint()
    here.connected(endpoint)
    there.stop()
    write = here.write(endpoint, TICKET, blocks((1, 1)))
    time.sleep(QUIET_S)
    assert here.state(write) == "PENDING"
    there.discard()
    assert here.ended(write) == "FAILED"


def test_close_in_the_middle_of_a_write(here: Here, there: RemoteEnd) -> None:
    """Nothing of it lands after what the other end hears of that."""
    endpoint = there.endpoint()
    there.stop()
    write = here.write(endpoint, TICKET, ALL)
    here.close()
    assert here.state(write) == "FAILED"
    there.go_on()
    assert there.lost()[0] == here.endpoint()
    before = there.read()
    time.sleep(QUIET_S)
    assert there.read() == before
    assert before.endswith(bytes([1]) * LAYOUT.bytes_per_block)  # it was in the middle


def test_the_target_closes_in_the_middle_of_a_write(here: Here, there: RemoteEnd) -> None:
    write = there.write(here.endpoint(), TICKET, ALL)
    here.being_written()
    there.stop()
    here.close()
    here.bytes[:] = UNTOUCHED
    there.go_on()
    assert there.ended(write) == "FAILED"
    assert (here.bytes == UNTOUCHED).all()


def test_writes_both_ways(here: Here, there: RemoteEnd) -> None:
    here.open(TICKET, there.endpoint(), [1])
    half = [(0, (MANY // 2) * LAYOUT.bytes_per_block, (MANY // 2) * LAYOUT.bytes_per_block)]
    theirs = there.write(here.endpoint(), TICKET, half)
    ours = here.write(there.endpoint(), OTHER, blocks((1, 1)))
    assert here.ended(ours) == "DONE"
    assert there.ended(theirs) == "DONE"
    assert (here.bytes[MANY // 2 :] == 1).all()
    assert (here.bytes[: MANY // 2] == UNTOUCHED).all()


@pytest.mark.parametrize("pair", [(1, MANY), (MANY, 1), (-1, 1), (1, -1)])
def test_what_lies_outside_of_a_pool_is_not_copied(
    here: Here, there: RemoteEnd, pair: tuple[int, int]
) -> None:
    assert there.ended(there.write(here.endpoint(), TICKET, blocks(pair))) == "FAILED"
    assert there.ended(there.write(here.endpoint(), TICKET, blocks((1, 1)))) == "DONE"


def test_who_cannot_be_let_in_is_shut_out_until_it_asks_again(here: Here, there: RemoteEnd) -> None:
    endpoint = there.endpoint()
    here.transport._send(endpoint, Knock(1, (("nowhere", 1),)))
    states = [here.ended(here.write(endpoint, TICKET, ALL)) for _ in range(3)]
    assert states[0] == "FAILED"  # perhaps twice: it hears in pieces that its agent is gone
    assert states[2] == "DONE"


def test_a_process_may_end_without_closing() -> None:
    """NIXL must not be at work when the interpreter goes."""
    program = (
        "from tests.kv_transfer.conformance_end import EndSpec, LocalEnd\n"
        "from tests.kv_transfer.nixl_end import make_parts\n"
        "from tests.kv_transfer.transport_conformance import TICKET, blocks\n"
        "p, d = (LocalEnd(make_parts, EndSpec(name)) for name in 'pd')\n"
        "assert p.ended(p.write(d.endpoint(), TICKET, blocks((1, 1)))) == 'DONE'\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S + 20,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


# ---------------------------------------------------------------------- good errors


def test_a_device_that_is_not_there_leaves_nothing_behind() -> None:
    transport = NixlTransport("d", TOKEN, NixlConfig(device="nosuch", transports="tcp"))
    with pytest.raises(ConfigError, match="nixl_device"):
        transport.register(make_pool(), lambda: None)
    transport.close()


def test_a_pool_on_a_device_that_nixl_does_not_know() -> None:
    transport = NixlTransport("d", TOKEN)
    with pytest.raises(PeerRefused, match="tpu:0"):
        transport.register(BlockPoolMemory(LAYOUT, 0, 1, device="tpu:0"), lambda: None)
    transport.close()


def test_without_nixl_the_extra_is_named() -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['nixl_cu12', 'nixl_cu13', 'nixl']))\n"
        "from tests.kv_transfer.nixl_end import make_parts, EndSpec\n"
        "from protocol import ConfigError\n"
        "try:\n"
        "    make_parts(EndSpec('d'))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "transport: nixl is not installed; pip install 'kvrelay[nixl]'\n"


def cut_connections(end: Here) -> None:
    """As by a network that fails: both ends notice, and neither has done anything."""
    network = end.transport._network
    with network._lock:
        for peer in network._peers:
            for connection in (peer.incoming, peer.outgoing):
                if connection is not None:
                    with socket.socket(fileno=os.dup(connection.fileno())) as same:
                        same.shutdown(socket.SHUT_RDWR)
