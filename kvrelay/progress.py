"""Progress of fetching and converting a model, as bars in the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.sizes import format_size
from engine.weights import Stage

_TITLES = {
    Stage.WAIT: "waiting for another process that prepares the model",
    Stage.DOWNLOAD: "downloading the model",
    Stage.CONVERT: "converting the weights",
}


class ProgressBars:
    """A `ProgressSink` that draws one bar a stage, while its `with` block runs."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[Stage, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tasks:  # stopping what never started would print an empty line
            self._progress.stop()

    def update(self, stage: Stage, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._progress.start()  # not before: most of the time there is nothing to show
            self._tasks[stage] = self._progress.add_task(_TITLES[stage], amount="")
        self._progress.update(
            self._tasks[stage],
            completed=done,
            total=total or None,
            amount=_amount(stage, done, total),
        )


def _amount(stage: Stage, done: int, total: int) -> str:
    match stage:
        case Stage.WAIT:
            return ""
        case Stage.DOWNLOAD:
            return f"{format_size(done)} of {format_size(total)}"
        case Stage.CONVERT:
            return f"{done} of {total} tensors"
