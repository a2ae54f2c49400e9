"""A run of a scenario as tables in a terminal.

Few requests get a column each; if they would not leave room for the notes, a step tells in words
who got what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrelay.step_cell import Cell, CellState, remarks, some
from scheduler.scenario import Outcome, RequestResult, ScenarioRun, ScenarioStep

_NOTE_WIDTH = 20  # columns that the notes need to be readable
_GAP = 2  # between two columns
_MOST_SHARES = 8  # requests that a step names with their tokens; the rest is a number

_STYLES = {
    CellState.PREFILL: "bold blue",
    CellState.DECODE: "green",
    CellState.RECOMPUTE: "bold magenta",
    CellState.WAIT: "yellow",
    CellState.PREEMPTED: "bold red",
    CellState.IDLE: "dim",
    CellState.ABORTED: "red",
    CellState.REFUSED: "red",
    CellState.ABSENT: "",
}
_MARKS = {
    CellState.PREFILL: "P",
    CellState.DECODE: "D",
    CellState.RECOMPUTE: "R",
    CellState.WAIT: "wait",
    CellState.PREEMPTED: "out",
    CellState.IDLE: "idle",
    CellState.ABORTED: "abort",
    CellState.REFUSED: "no",
    CellState.ABSENT: "",
}
_TOTAL_MEANINGS = {
    "tokens": "given out in the step / its budget",
    "seats": "running requests / max_num_seqs",
    "KV": "blocks that running requests hold / all blocks",
    "cached": "blocks that nobody holds, but a prompt could hit",
}
_SHORTEST_ID = 7  # columns
_SUMMARY_COLUMNS = ("arrival", "cached", "first", "ttft", "last", "output", "out", "again")
_SUMMARY_MEANINGS = (
    "first, last: the steps of its first and its last token; ttft: steps from its arrival to the "
    "first; cached: tokens that it hit; out: preemptions; again: tokens computed once more"
)
_LAST_STYLE = "bold reverse"
_OUTCOME_STYLES = {
    Outcome.FINISHED: "green",
    Outcome.ABORTED: "red",
    Outcome.REFUSED: "red",
    Outcome.UNFINISHED: "yellow",
}


@dataclass(frozen=True)
class ScheduleTables:
    """What is printed of a run."""

    run: ScenarioRun
    width: int  # of the terminal, in columns

    def print_on(self, console: Console) -> None:
        cells = self._cells()
        grid = self._grid(cells)
        console.print(grid if grid is not None else self._list(cells))
        console.print()
        console.print(self._legend({cell.state for row in cells for cell in row}))
        console.print()
        console.print(_summary(self.run))
        console.print()
        console.print(_SUMMARY_MEANINGS)
        console.print()

    def _cells(self) -> list[list[Cell]]:
        return [[Cell.of(step, i) for i in self.run.results] for step in self.run.steps]

    # ------------------------------------------------------------------ one column a request

    def _grid(self, cells: Sequence[Sequence[Cell]]) -> Table | None:
        """None: too wide."""
        ids = list(self.run.results)
        table = _table()
        table.add_column("step", justify="right")
        for request_id in ids:
            table.add_column(Text(request_id), no_wrap=True)
        self._add_totals(table)
        table.add_column("note", overflow="fold")
        texts = [[_cell_text(cell) for cell in row] for row in cells]
        width = _GAP + cell_len("step") + _NOTE_WIDTH
        for index, request_id in enumerate(ids):
            column = [request_id, *(row[index].plain for row in texts)]
            width += _GAP + max(map(cell_len, column))
        for name, values in self._totals():
            width += _GAP + max(map(cell_len, [name, *values]))
        if width > self.width:
            return None
        for step, row, totals in zip(self.run.steps, texts, self._total_rows(), strict=True):
            table.add_row(str(step.number), *row, *totals, _notes(step))
        return table

    # ------------------------------------------------------------------ one text a step

    def _list(self, cells: Sequence[Sequence[Cell]]) -> Table:
        table = _table()
        table.add_column("step", justify="right")
        table.add_column("computed", overflow="fold", ratio=1)
        table.add_column("note", overflow="fold", ratio=1)
        self._add_totals(table)
        for step, row, totals in zip(self.run.steps, cells, self._total_rows(), strict=True):
            by_id = dict(zip(self.run.results, row, strict=True))
            table.add_row(
                str(step.number), _computed(step, by_id), _notes(step, with_ends=True), *totals
            )
        return table

    # ------------------------------------------------------------------ columns of both

    def _add_totals(self, table: Table) -> None:
        for name, _ in self._totals():
            table.add_column(name, justify="right", no_wrap=True)

    def _total_rows(self) -> Iterator[tuple[str, ...]]:
        yield from zip(*(values for _, values in self._totals()), strict=True)

    def _totals(self) -> list[tuple[str, list[str]]]:
        steps = self.run.steps
        totals = [
            ("tokens", [f"{step.num_tokens}/{step.budget}" for step in steps]),
            ("seats", [f"{step.num_running}/{step.seats}" for step in steps]),
            ("KV", [f"{step.blocks.used}/{step.blocks.total}" for step in steps]),
        ]
        if any(step.blocks.cached for step in steps):
            totals.append(("cached", [str(step.blocks.cached) for step in steps]))
        return totals

    def _legend(self, shown: Iterable[CellState]) -> Table:
        """Of the marks and columns that were printed."""
        legend = Table.grid(padding=(0, _GAP))
        for state in sorted(set(shown), key=list(CellState).index):
            mark = _MARKS[state]
            name = "" if mark == state else f"{state}: "
            if mark:
                legend.add_row(Text(mark, _STYLES[state]), f"{name}{state.meaning}")
        legend.add_row(Text("*", _LAST_STYLE), "finished with this step")
        for name, _ in self._totals():
            legend.add_row(name, _TOTAL_MEANINGS[name])
        return legend


def _table() -> Table:
    return Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
        header_style="bold",
    )


def _cell_text(cell: Cell) -> Text:
    mark = _MARKS[cell.state]
    text = Text(f"{mark} {cell.num_tokens}" if cell.num_tokens else mark, _STYLES[cell.state])
    if cell.is_last:
        text.append("*", _LAST_STYLE)
    return text


def _computed(step: ScenarioStep, cells: dict[str, Cell]) -> Text:
    """Those that got tokens, by what for: a decode is always one token, so its id is enough."""
    lines = []
    for state in (CellState.DECODE, CellState.PREFILL, CellState.RECOMPUTE):
        ids = [request_id for request_id in step.shares if cells[request_id].state is state]
        if not ids:
            continue
        if state is CellState.DECODE:
            what = f"{len(ids)} x 1: {some(ids, _MOST_SHARES)}"
        else:
            what = some([f"{i} {cells[i].num_tokens}" for i in ids], _MOST_SHARES, ", ")
        lines.append(Text(f"{_MARKS[state]} {what}", _STYLES[state]))
    return Text("\n").join(lines)


def _notes(step: ScenarioStep, *, with_ends: bool = False) -> Text:
    found = list(remarks(step, with_ends=with_ends))
    styled = [Text(r.text, _STYLES[r.state] if r.state is not None else "") for r in found]
    return Text("; ").join(styled)


def _summary(run: ScenarioRun) -> Table:
    table = _table()
    table.add_column("request", overflow="fold", min_width=_SHORTEST_ID)
    for name in _SUMMARY_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for request_id, result in run.results.items():
        end = Text(result.outcome, _OUTCOME_STYLES[result.outcome])
        table.add_row(Text(request_id), *_summary_cells(result), end)
    return table


def _summary_cells(result: RequestResult) -> Iterator[str]:
    """In the order of _SUMMARY_COLUMNS."""
    yield str(result.request.arrival)
    yield _or_dash(result.num_cached_tokens)
    yield _or_dash(result.first_token_step, zero=True)
    yield _or_dash(result.steps_to_first_token)
    yield _or_dash(result.end_step, zero=True)
    yield f"{result.num_output_tokens}/{result.request.output}"
    yield _or_dash(result.num_preemptions)
    yield _or_dash(result.num_again)


def _or_dash(number: int | None, *, zero: bool = False) -> str:
    return str(number) if number or (zero and number == 0) else "-"
