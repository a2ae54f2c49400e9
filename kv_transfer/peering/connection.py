"""One socket to a peer: what waits to be sent, and what has come in."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

from kv_transfer.peering.frames import Frames, frame
from kv_transfer.peering.handshake import MAX_HANDSHAKE_BYTES, Handshake, Met, Say
from kv_transfer.transport import PeerRefused, PeerUnreachable

_CHUNK_BYTES = 256 << 10
_MAX_DESCRIPTORS = 16  # that are taken, to be closed if they are not those that were announced
_DESCRIPTOR_BYTES = array.array("i").itemsize


class Connection:
    """Begins with a handshake, which `deadline` ends; from then on it carries messages one way.

    Used by one thread at a time. Errors of the socket come as PeerUnreachable.
    """

    def __init__(
        self,
        opened: socket.socket,
        handshake: Handshake,
        *,
        peer: str | None,
        deadline: float,
        takes_descriptors: bool,
        descriptors: Sequence[int] = (),
    ) -> None:
        self.peer = peer  # endpoint; a stranger has none yet
        self.dialled = peer is not None
        self.deadline: float | None = deadline  # None: the peer is known
        self.connecting = False
        self.paused = False  # nothing is read until there is room for it
        self.met: Met | None = None
        self.socket = opened
        self._handshake = handshake
        self._takes_descriptors = takes_descriptors
        self._to_give = descriptors
        self._taken: list[int] = []
        self._frames = Frames(MAX_HANDSHAKE_BYTES)
        self._outgoing = bytearray()
        self._postponed = bytearray()  # until the handshake is over

    def fileno(self) -> int:
        """-1 once closed."""
        return self.socket.fileno()

    @property
    def closed(self) -> bool:
        return self.fileno() < 0

    def is_watched(self) -> bool:
        return not self.closed and not self.paused

    @property
    def unsent_bytes(self) -> int:
        return len(self._outgoing) + len(self._postponed)

    @property
    def wants_to_write(self) -> bool:
        return self.connecting or bool(self._outgoing)

    # ------------------------------------------------------------------ out

    def begin(self) -> None:
        """Say the first word of the handshake, if it is ours to say."""
        self.connecting = False
        self._say(next(self._handshake))

    def check_connected(self) -> None:
        """Raise OSError if the attempt to connect has failed."""
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def send(self, message: bytes) -> None:
        """As soon as the peer is known."""
        if self.deadline is None:
            self._outgoing += frame(message)
            self.flush()
        else:
            self._postponed += frame(message)

    def flush(self) -> None:
        """As much as the socket takes now."""
        try:
            while self._outgoing:
                self._send_some()
        except BlockingIOError:
            return
        except OSError as error:
            raise _broken(error) from error

    def _send_some(self) -> None:
        with memoryview(self._outgoing) as outgoing:
            sent = self.socket.send(outgoing[:_CHUNK_BYTES])
        del self._outgoing[:sent]

    def _say(self, said: Say) -> None:
        self._frames.limit = said.answer_limit
        self._outgoing += said.data
        self.flush()

    # ------------------------------------------------------------------ in

    def read(self) -> bool:
        """Take what is there. False: nothing is. Raises PeerUnreachable at the end."""
        try:
            data = self._recv()
        except BlockingIOError:
            return False
        except OSError as error:
            raise _broken(error) from error
        if not data:
            raise PeerUnreachable("the connection was closed")
        self._frames.add(data)
        return True

    def next_message(self) -> bytes | None:
        return self._frames.next()

    def _recv(self) -> bytes:
        # Where none are expected, the kernel drops any that come.
        if not self._takes_descriptors or self.deadline is None:
            return self.socket.recv(MAX_HANDSHAKE_BYTES if self.met is None else _CHUNK_BYTES)
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        data, ancillary, _, _ = self.socket.recvmsg(
            MAX_HANDSHAKE_BYTES, room, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(payload) - len(payload) % _DESCRIPTOR_BYTES
                self._taken += array.array("i", payload[:whole])
        if len(self._taken) > _MAX_DESCRIPTORS:
            raise PeerRefused(f"the peer sent more than {_MAX_DESCRIPTORS} descriptors")
        return data

    # ------------------------------------------------------------------ the handshake

    def hear(self, message: bytes, message_limit: int) -> Met | None:
        """Go on with the handshake; the peer, when that is over. Raises as the handshake does."""
        try:
            said = self._handshake.send(message)
        except StopIteration as end:
            return self._finish(end.value, message_limit)
        self._say(said)
        return None

    def _finish(self, met: Met, message_limit: int) -> Met:
        if self._takes_descriptors and len(self._taken) != met.passport.num_descriptors:
            raise PeerRefused(
                f"{met.passport.num_descriptors} descriptors were announced, "
                f"but {len(self._taken)} came"
            )
        self.met = met
        self.peer = met.passport.endpoint
        self.deadline = None
        self._frames.limit = message_limit
        return met

    def welcome(self) -> None:
        """Tell the peer that it is known; from now on it may have what the descriptors lead to."""
        assert self.met is not None
        if self.met.welcome and self._to_give:
            self._give_descriptors(self.met.welcome)
        else:
            self._outgoing += self.met.welcome
        self._outgoing += self._postponed
        self._postponed = bytearray()
        self.flush()

    def _give_descriptors(self, welcome: bytes) -> None:
        # Nothing waits in front of it, and so little fits into any socket that was just opened.
        rights = array.array("i", self._to_give)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            sent = self.socket.sendmsg([welcome], ancillary)
        except OSError as error:
            raise _broken(error) from error
        self._outgoing += welcome[sent:]

    def take_descriptors(self) -> tuple[int, ...]:
        taken, self._taken = self._taken, []
        return tuple(taken)

    def refuse(self, refusal: bytes) -> None:
        """Say why, if that can be said at once."""
        self._outgoing += refusal
        try:
            self.flush()
        except PeerUnreachable:
            return

    def close(self) -> None:
        for fd in self.take_descriptors():
            os.close(fd)
        self._handshake.close()
        self.socket.close()


def _broken(error: OSError) -> PeerUnreachable:
    return PeerUnreachable(f"the connection is broken: {error.strerror}")
