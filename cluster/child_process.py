"""A process that we start, with one end of a socket pair, and wait for without a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ChildProcess:
    """Runs until it ends by itself or is killed. Belongs to the event loop that it is made in."""

    def __init__(self, module: str) -> None:
        """Starts `python -m module --fd N`; `end` is our end of the socket. Raises OSError."""
        self.end, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(self.end.close)
            self._process = _start(module, theirs.fileno())
            on_failure.pop_all()
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Now, wherever it is. Harmless when it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Its exit status; below zero, the signal that killed it."""
        return await asyncio.shield(self._exited)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set_result(self._process.wait())


def _start(module: str, fd: int) -> subprocess.Popen[bytes]:
    """With signals blocked, that Ctrl-C does not end it before it can ignore that.

    `-P`: whatever lies in the working directory is none of our modules.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--fd", str(fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):  # a number without a name
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
