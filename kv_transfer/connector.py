"""A KV connector has two sides: the scheduler's (`protocol.SchedulerConnector`) and the worker's.

The scheduler side decides and only keeps books. The worker side moves bytes: it is given the
orders that go with a step, and says what has ended. Around step n, with n + 1 planned meanwhile:

    engine's thread  start_load_kv(n) │ plan n+1 ...........  │ wait_for_save() │ start_load_kv(n+1)
    runner's thread                   │ compute n:            │                 │
                                      │ save_kv_layer(0), ... │                 │

    then, while n + 1 is computed     get_finished(), and what came of n

So nothing is computed in `start_load_kv` and `wait_for_save`: blocks are written in the first, and
what a step has written can be read in the second, whoever owns the blocks by then. At any other
time only blocks may be touched that are kept for the connector: those of a load under way, and
those of a request for which `request_finished` said True. (A device with a queue may compute n + 1
while these two are called, if the connector allows it: `steps_may_overlap`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.layout import BlockPoolMemory
from protocol import KVConnectorOutput, RequestView, SchedulerConnector, StepView


class KVConnector(SchedulerConnector, Protocol):
    """Both sides; a node has one object for them.

    All but `save_kv_layer` is called by the engine's thread, and by no two threads at once.
    """

    @property
    def saves_layers(self) -> bool:
        """Whether `save_kv_layer` is to be called. Asked once, when the engine is made."""

    @property
    def steps_may_overlap(self) -> bool:
        """Whether a device may go on to the next step before this one is saved. Asked once.

        True: nothing of a step is read in `wait_for_save`, and nothing loaded in `start_load_kv`
        is there for the same step. Then a step may be computed while these two are called, unless
        it preempts a request. False is always right.
        """

    def register_kv_caches(self, pool: BlockPoolMemory, on_activity: Callable[[], None], /) -> None:
        """This pool is read from and written to from now on.

        `on_activity` may be called by any thread, to have the engine's thread call `poll`.
        """

    def start_load_kv(self, meta: object) -> None:
        """Carry out the orders of a step, without waiting, before the step is computed.

        All earlier steps have been computed. Only from here on may a peer write to blocks that were
        reserved while this step was planned: until then an earlier step may have written to them.
        A load that was not promised as asynchronous has ended when this returns.
        """

    def save_kv_layer(self, layer: int) -> None:
        """The keys and values of this layer are in the pool, for all tokens of the step.

        Called by the runner's thread, once per layer and step, in order. It must only note that
        and return. A runner that does not compute layer by layer does not call it, so all layers
        are there at the latest in `wait_for_save`.
        """

    def wait_for_save(self) -> None:
        """A step has been computed, and the next one has not begun.

        Returns when everything has been read that must be, before blocks of the step may be given
        to somebody else. Blocks that are kept for the connector can be read later as well.
        """

    def poll(self) -> None:
        """Move on whatever can move on, without waiting. Also called while a step is computed."""

    def get_finished(self) -> KVConnectorOutput:
        """The loads and sends that have ended since the last call."""

    def shutdown(self) -> None:
        """Stop all transfers; returns when nobody touches the pool any more."""


class BaseConnector:
    """A `KVConnector` that loads nothing and saves nothing: override what is to be done."""

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, step: StepView) -> object:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        return False

    def revoke_pin(self) -> str | None:
        return None

    def revoke_reservation(self, request_id: str) -> bool:
        return False

    @property
    def saves_layers(self) -> bool:
        """If a subclass overrides `save_kv_layer`, it wants to be called."""
        return type(self).save_kv_layer is not BaseConnector.save_kv_layer

    @property
    def steps_may_overlap(self) -> bool:
        """Unless a subclass does something between two steps, of which nobody knows what."""
        own = type(self)
        return not self.saves_layers and (
            (own.start_load_kv, own.wait_for_save)
            == (BaseConnector.start_load_kv, BaseConnector.wait_for_save)
        )

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None, /
    ) -> None:
        pass

    def start_load_kv(self, meta: object) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def poll(self) -> None:
        pass

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def shutdown(self) -> None:
        pass
