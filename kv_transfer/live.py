"""Hand-offs under way, as people look at them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from kv_transfer.sink import HandoffSink
from kv_transfer.source import HandoffSource
from protocol import LiveTransfer, TransferDirection

MAX_SHOWN = 64  # of each node


def live_transfers(
    sources: Iterable[HandoffSource], sinks: Iterable[HandoffSink], now: float
) -> tuple[LiveTransfer, ...]:
    """The oldest first, at most MAX_SHOWN."""
    shown = chain((_of_source(s, now) for s in sources), (_of_sink(s, now) for s in sinks))
    return tuple(islice(shown, MAX_SHOWN))


def _of_source(source: HandoffSource, now: float) -> LiveTransfer:
    return LiveTransfer(
        ticket=str(source.ticket),
        direction=TransferDirection.PUSH,
        peer=source.peer,
        state=source.state,
        reason=source.reason,
        tokens=source.num_tokens,
        tokens_moved=source.pushed,
        bytes=source.num_bytes,
        age_s=now - source.started_at,
        deadline_s=source.deadline - now,
    )


def _of_sink(sink: HandoffSink, now: float) -> LiveTransfer:
    return LiveTransfer(
        ticket=str(sink.ticket),
        direction=TransferDirection.RECEIVE,
        peer=sink.peer,
        state=sink.state,
        reason=sink.reason,
        tokens=sink.num_tokens,
        blocks=len(sink.block_ids),
        quarantined=sink.released and not sink.fenced and bool(sink.block_ids),
        age_s=now - sink.started_at,
        deadline_s=sink.deadline - now,
    )
