"""Several connectors on one node: the first that has something loads it, all of them save.

question or order              who gets it
---------------------------    ------------------------------------------------------------
how much can be loaded?        in order, up to the first that has something or does not know
blocks are allocated           all; only the one that loads hears of tokens to load
orders of a step, its layers   each its own orders; all
a request has ended            all; its blocks are kept until the last that wants them has sent
a load failed                  all hear of the blocks: who was to read them must not
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kv_transfer.connector import KVConnector
from kv_transfer.layout import BlockPoolMemory
from protocol import KVConnectorOutput, RequestView, StepView


class MultiConnector:
    """Passes on to its children what a `KVConnector` is told, in their order."""

    def __init__(self, children: Sequence[KVConnector]) -> None:
        self.children = tuple(children)
        self.saves_layers = any(child.saves_layers for child in children)
        self.steps_may_overlap = all(child.steps_may_overlap for child in children)
        self._layerwise = tuple(child for child in children if child.saves_layers)
        # Children by their number.
        self._loader: dict[str, int] = {}  # who has something for a request, until it is admitted
        self._readers: dict[str, set[int]] = {}  # who still reads the blocks of an ended request
        self._reports: tuple[KVConnectorOutput, ...] = ()  # of each child, until it is told of them

    # ------------------------------------------------------------------ the scheduler's side

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        for number, child in enumerate(self.children):
            num_tokens, is_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False  # it goes first, so it is open whether another one may load
            if num_tokens > 0:
                self._loader[request.request_id] = number
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        loader = self._loader.pop(request.request_id, None)
        assert loader is not None or num_external_tokens == 0, "nobody has offered them"
        for number, child in enumerate(self.children):
            num_tokens = num_external_tokens if number == loader else 0
            child.update_state_after_alloc(request, block_ids, num_tokens)

    def build_connector_meta(self, step: StepView) -> tuple[object, ...]:
        return tuple(child.build_connector_meta(step) for child in self.children)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Each child hears of what it said itself, and of all blocks that could not be loaded."""
        reports, self._reports = self._reports, ()
        for child, report in zip(self.children, reports, strict=True):
            child.update_connector_output(
                replace(report, invalid_block_ids=output.invalid_block_ids)
            )

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        self._loader.pop(request.request_id, None)
        wanted = [child.request_finished(request, block_ids) for child in self.children]
        readers = {number for number, wants in enumerate(wanted) if wants}
        if readers:
            self._readers[request.request_id] = readers
        return bool(readers)

    def revoke_pin(self) -> str | None:
        """A pin that another child shares frees nothing yet, so one more has to be given up."""
        for number, child in enumerate(self.children):
            while (request_id := child.revoke_pin()) is not None:
                if self._was_last(number, request_id):
                    return request_id
        return None

    def revoke_reservation(self, request_id: str) -> bool:
        return any(child.revoke_reservation(request_id) for child in self.children)

    def _was_last(self, number: int, request_id: str) -> bool:
        """Whether nobody reads the request's blocks any more, now that this child does not."""
        readers = self._readers[request_id]
        readers.remove(number)
        if readers:
            return False
        del self._readers[request_id]
        return True

    # ------------------------------------------------------------------ the worker's side

    def register_kv_caches(
        self, pool: BlockPoolMemory, on_activity: Callable[[], None] = lambda: None, /
    ) -> None:
        for child in self.children:
            child.register_kv_caches(pool, on_activity)

    def start_load_kv(self, meta: object) -> None:
        assert isinstance(meta, tuple)
        for child, its_meta in zip(self.children, meta, strict=True):
            child.start_load_kv(its_meta)

    def save_kv_layer(self, layer: int) -> None:
        for child in self._layerwise:
            child.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        for child in self.children:
            child.wait_for_save()

    def poll(self) -> None:
        for child in self.children:
            child.poll()

    def get_finished(self) -> KVConnectorOutput:
        self._reports = tuple(child.get_finished() for child in self.children)
        recving: dict[str, tuple[int, ...]] = {}
        sent: list[str] = []
        revoked: list[str] = []
        for number, report in enumerate(self._reports):
            recving |= report.finished_recving
            revoked += report.revoked_recving
            sent += [i for i in report.finished_sending if self._was_last(number, i)]
        invalid = frozenset().union(*(report.invalid_block_ids for report in self._reports))
        return KVConnectorOutput(recving, tuple(sent), invalid, tuple(revoked))

    def shutdown(self) -> None:
        """Of all children, in their order, also if one raises; that is raised at the end."""
        with ExitStack() as stack:
            for child in reversed(self.children):
                stack.callback(child.shutdown)
