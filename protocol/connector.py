"""What a scheduler asks of a KV connector, and with which types.

`kv_transfer` provides the connectors and `scheduler` calls them; neither knows the other. The
scheduler side is pure bookkeeping in the engine's thread; bytes move on the worker side.

    schedule()            get_num_new_matched_tokens → update_state_after_alloc
                          build_connector_meta → (worker) start_load_kv
    update_from_output()  update_connector_output ← (worker) get_finished
    a request ends        request_finished → may its blocks be freed, or is somebody reading them?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.block_hash import BlockHash
from protocol.messages import FinishReason


class RequestView(Protocol):
    """What a connector may know of a scheduler's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One for each `hash_block_size` tokens, the prompt's and the output's; see block_hash."""

    @property
    def hash_block_size(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None:
        """None while the request has not ended."""


class StepView(Protocol):
    """What a connector may know of a step: who computes, from where, into which blocks."""

    @property
    def scheduled_req_ids(self) -> Iterable[str]: ...

    @property
    def preempted_req_ids(self) -> Sequence[str]: ...

    def block_table(self, request_id: str) -> Sequence[int]:
        """Whole block table of a scheduled request, those of this step included."""

    def computed_before(self, request_id: str) -> int:
        """Tokens of a scheduled request whose KV is in its blocks before this step.

        For one that starts with this step they count what it hit or loads, which may be computed
        or loaded in this very step: it is there after the step.
        """

    def computed_after(self, request_id: str) -> int:
        """The same, once the step has been computed."""


@dataclass(frozen=True)
class KVConnectorOutput:
    """What the worker side of a connector found out during a step.

    `finished_recving` maps a request whose load has ended to the tokens that came with it (the
    first token of a hand-off, or none). It also tells that the blocks of an aborted load can be
    written to no more. `revoked_recving`: loads that had not begun and will not, for now; their
    blocks are the scheduler's again, and the requests wait once more.
    """

    finished_recving: dict[str, tuple[int, ...]] = field(default_factory=dict)
    finished_sending: tuple[str, ...] = ()
    invalid_block_ids: frozenset[int] = frozenset()
    revoked_recving: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.finished_recving
            or self.finished_sending
            or self.invalid_block_ids
            or self.revoked_recving
        )


class SchedulerConnector(Protocol):
    """The scheduler side of a KV connector."""

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be loaded, and whether that is async.

        None instead of a number: not known yet, ask again in a later step.
        """

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request got blocks: its whole block table, of which the last part is to be loaded."""

    def build_connector_meta(self, step: StepView) -> object:
        """The orders for the worker side that go with this step."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the worker side reported, before the scheduler acts on it."""

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        """The request ended. True: keep its blocks until it is in `finished_sending`."""

    def revoke_pin(self) -> str | None:
        """Give up the youngest kept request that no peer has reserved blocks for.

        The scheduler asks when a request lacks blocks, and frees the blocks of the id returned.
        """

    def revoke_reservation(self, request_id: str) -> bool:
        """Ask for the blocks that are reserved for the load of this request, if it has not begun.

        False: it has begun, there is no such load, or it cannot be put off. True: `revoked_recving`
        names the request as soon as the blocks are the scheduler's again, if the load does not
        begin meanwhile. Asking again is harmless.
        """
