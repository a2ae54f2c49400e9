"""`kvrelay verify`: a model of the user's own, computed in all ways, bit for bit."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from cluster.exactness import ExactnessConfig, Verification, WayResult
from engine.weights import ModelFiles, ModelStore
from kvrelay.progress import ProgressBars
from kvrelay.stop_signals import ignore_stop_signals
from kvrelay.verify_table import describe_result, ways_table

_INTERRUPTED = 130
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class VerifyCommand:
    """All that the user asked for, valid on its own."""

    model: str
    cache_dir: Path
    config: ExactnessConfig
    console: Console

    def run(self) -> int:
        """The exit status: 0 if every way was taken, and all of them gave the same bits.

        Raises:
            ConfigError: a setting does not go with this machine or this model.
            ModelError: the model is unknown or broken.
        """
        began = time.monotonic()
        files = self._files()
        verification = Verification(files, self.config)
        self.console.print(f"[bold]model[/bold] {files.name}: {verification.describe()}")
        try:
            results = asyncio.run(self._take_all(verification))
        except asyncio.CancelledError:
            ignore_stop_signals()
            return _INTERRUPTED
        took = time.monotonic() - began
        self.console.print(describe_result(results, took), soft_wrap=True)
        return 0 if all(result.passed for result in results) else 1

    def _files(self) -> ModelFiles:
        with ProgressBars(self.console) as progress:
            return ModelStore(self.cache_dir).resolve(self.model, progress=progress)

    async def _take_all(self, verification: Verification) -> Sequence[WayResult]:
        """Raises CancelledError at a signal, when nothing of a cluster is left."""
        results: list[WayResult] = []
        names = verification.names
        with (
            _signals_cancel(),
            Live(console=self.console, auto_refresh=False, transient=True) as live,
        ):
            live.update(ways_table(results, names), refresh=True)
            async for result in verification.run():
                results.append(result)
                live.update(ways_table(results, names), refresh=True)
        self.console.print(ways_table(results, names))
        return results


@contextmanager
def _signals_cancel() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the task that this is entered in; more of them change nothing."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, _cancel_once, task)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _cancel_once(task: asyncio.Task[object]) -> None:
    if not task.cancelling():  # else it is on its way out, which takes a moment
        task.cancel()
