"""What `kvrelay verify` shows: a row for each way, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cluster.exactness import Difference, WayResult


def ways_table(results: Sequence[WayResult], names: Sequence[str]) -> Table:
    """`names`: of all ways; those that have no result yet are still to come."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column("way", no_wrap=True)
    for name in ("logits", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what happened", overflow="fold", ratio=1)
    table.add_column("s", justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    for number, name in enumerate(names[len(results) :]):
        table.add_row(Text(name, "dim"), "", "", Text("…" if number == 0 else "", "dim"), "")
    return table


def describe_result(results: Sequence[WayResult], seconds: float) -> Text:
    failed = [result.name for result in results if not result.passed]
    skipped = [result.name for result in results if result.skipped is not None]
    took = f"after {seconds:.0f} s"
    if failed:
        text = Text(f"{len(failed)} of {len(results)} ways failed ({took}): ", "bold red")
        return text.append(", ".join(failed))
    text = Text(f"bit for bit the same in {len(results) - len(skipped)} ways", "bold green")
    text.append(f" ({took})", "default")
    return text.append(f"; skipped: {', '.join(skipped)}" if skipped else "", "yellow")


def describe_difference(difference: Difference) -> str:
    found = difference
    return (
        f"first difference: {found.prompt} ({found.num_prompt_tokens} tokens), output position "
        f"{found.position}: {found.num_logits} of {found.num_all} logits, by up to "
        f"{found.largest:.3g}"
    )


def _cells(result: WayResult) -> Iterator[Text]:
    style = "yellow" if result.skipped else "green" if result.passed else "bold red"
    yield Text(result.name, style)
    all_equal = 0 < result.num_compared == result.num_equal
    compared = result.skipped is None and result.error is None
    yield Text(f"{result.num_compared}" if compared else "")
    yield Text(f"{result.num_equal}" if compared else "", "green" if all_equal else "bold red")
    yield Text("\n").join(_remarks(result))
    yield Text(f"{result.seconds:.1f}")


def _remarks(result: WayResult) -> Iterator[Text]:
    if result.skipped is not None:
        yield Text(f"skipped: {result.skipped}", "yellow")
    elif result.error is not None:
        yield Text(f"failed: {result.error}", "red")
    elif not result.evidence.happened:
        yield Text(f"did not happen: {result.evidence.text}", "red")
    else:
        yield Text(result.evidence.text)
    if result.difference is not None:
        yield Text(describe_difference(result.difference), "red")
    if result.other_tokens:
        number = len(result.other_tokens)
        yield Text(f"other tokens in {number} outputs, such as {result.other_tokens[0]}", "red")
