"""An end in a process of its own, to which orders are sent over pipes.

The parent names the factory of its transport as `module:function`, a `MakeParts`. Each process has
one end at a time; `finish` closes it, and tells what it has left behind.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast, get_type_hints

import msgspec

from kv_transfer import PeerRefused, PeerUnreachable
from tests.kv_transfer.conformance_end import End, EndSpec, LocalEnd, MakeParts, usage
from tests.kv_transfer.pools import TIMEOUT_S

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = TIMEOUT_S + 20.0  # for a child that starts beside other work
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (PeerRefused, PeerUnreachable, AssertionError)
}


class _Order(msgspec.Struct, frozen=True):
    name: str
    arguments: list[Any]


class _Answer(msgspec.Struct, frozen=True):
    result: Any = None
    error: tuple[str, str] | None = None  # class, message


def _send(pipe: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> bytes:
    """Raises EOFError."""
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError("the other process has ended")
    return pipe.read(int.from_bytes(header, "big"))


class RemoteEnd:
    """All methods of End, and what can be done to a process. One caller at a time."""

    def __init__(self, factory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", __name__, factory],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        self._hints: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the end in the other process."""
        method = getattr(End, name)
        if name not in self._hints:
            self._hints[name] = get_type_hints(method)["return"]
        return lambda *arguments: self.call(name, self._hints[name], *arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, name: str, kind: Any, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        _send(cast(BinaryIO, self._process.stdin), _Order(name, list(arguments)))
        answer = self._answer()
        if answer.error is not None:
            error, message = answer.error
            raise _ERRORS[error](message)
        return msgspec.convert(answer.result, kind, builtin_types=(bytes,))

    def _answer(self) -> _Answer:
        pipe = self._process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            assert selector.select(_PATIENCE_S), "the other process does not answer"
        return msgspec.msgpack.decode(_receive(cast(BinaryIO, pipe)), type=_Answer)

    def make(self, spec: EndSpec) -> None:
        self.call("make", None, spec)

    def finish(self) -> list[str]:
        """Close the end; what is left of it."""
        return self.call("finish", list[str])

    def kill(self) -> None:
        """Returns when it has ended."""
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def discard(self) -> None:
        if self.alive:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class RemoteEnds:
    """Processes that are used again for the next test, if this one has not killed them."""

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._idle: list[RemoteEnd] = []
        self._busy: list[RemoteEnd] = []

    def make(self, spec: EndSpec) -> RemoteEnd:
        end = self._idle.pop() if self._idle else RemoteEnd(self._factory)
        self._busy.append(end)
        end.make(spec)
        return end

    def finish_all(self) -> list[str]:
        """What the ends of a test have left in processes that still live."""
        left = []
        while self._busy:
            end = self._busy.pop()
            if end.alive:
                left += end.finish()
                self._idle.append(end)
            else:
                end.discard()
        return left

    def discard_all(self) -> None:
        for end in (*self._busy, *self._idle):
            end.discard()


class _Server:
    """In the child: one end, and what there was before it."""

    def __init__(self, make_parts: MakeParts) -> None:
        self._make_parts = make_parts
        self._end: LocalEnd | None = None
        self._before = usage()

    def make(self, spec: EndSpec) -> None:
        self._before = usage()
        self._end = LocalEnd(self._make_parts, spec)

    def finish(self) -> list[str]:
        if self._end is not None:
            self._end.close()
        self._end = None
        after = usage()
        return _surplus(after.threads, self._before.threads) + _surplus(
            after.descriptors, self._before.descriptors
        )

    def carry_out(self, order: _Order) -> Any:
        owner = self if order.name in ("make", "finish") else self._end
        method = getattr(owner, order.name)
        hints = get_type_hints(method)
        names = inspect.signature(method).parameters
        return method(
            *(
                msgspec.convert(argument, hints[name], builtin_types=(bytes,))
                for name, argument in zip(names, order.arguments, strict=True)
            )
        )


def _surplus(after: list[str], before: list[str]) -> list[str]:
    rest = list(after)
    for item in before:
        if item in rest:
            rest.remove(item)
    return rest


def _serve(factory: str) -> None:
    module, _, function = factory.partition(":")
    # What the code under test prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders = sys.stdin.buffer
    server = _Server(getattr(importlib.import_module(module), function))
    while True:
        try:
            order = msgspec.msgpack.decode(_receive(orders), type=_Order)
        except EOFError:
            break
        try:
            answer = _Answer(result=server.carry_out(order))
        except (PeerUnreachable, AssertionError) as error:
            answer = _Answer(error=(type(error).__name__, str(error)))
        _send(answers, answer)
    assert threading.current_thread() is threading.main_thread()
    os._exit(0)  # without the parent there is nobody to close for


if __name__ == "__main__":
    _serve(sys.argv[1])
