"""What the parts of the scheduler share, and what may befall a request in any of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from protocol import SchedulerConnector
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import RequestUpdate
from scheduler.queue import RequestQueue, SkippedQueue, Wait, make_queue
from scheduler.request import Request, RequestStatus
from scheduler.stats import SchedulerStats
from scheduler.step import Step


class PauseState(enum.Enum):
    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()  # nobody is admitted; running requests go on
    PAUSED_ALL = enum.auto()  # nothing is computed


class Hold(enum.Flag):
    """Why an ended request keeps its blocks."""

    NOTHING = 0
    LOADING = enum.auto()  # a peer may still write into them
    SENDING = enum.auto()  # the connector still reads them


class SchedulerState:
    """Requests, queues and blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        connector: SchedulerConnector | None,
    ) -> None:
        self.config = config
        self.connector = connector
        # A request that would fill the whole pool ends there: alone, it would wait for ever.
        self.max_len = min(config.max_model_len, cache_config.num_usable_tokens)
        self.kv = KVCacheManager(
            cache_config, self.max_len, drop_last_hit=config.spec_method == "eagle"
        )
        self.stats = SchedulerStats()
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}  # ended ones too, while their blocks are held
        self.running: list[Request] = []
        self.waiting: RequestQueue = make_queue(config.policy)
        self.skipped_waiting = SkippedQueue(config.policy)
        self.finished_req_ids: list[str] = []  # that the runner was not told of yet
        self.parked: dict[str, int] = {}  # blocks that are being loaded, by request id
        self.failed_loads: set[str] = set()  # of `parked`: only a part will be there
        self._loaded: set[Request] = set()
        self._holds: dict[str, Hold] = {}

    def reconfigure(self, config: SchedulerConfig) -> None:
        assert not list(self.queued()), "a request is queued by the order of another policy"
        self.config = config
        self.waiting = make_queue(config.policy)
        self.skipped_waiting = SkippedQueue(config.policy)

    # ------------------------------------------------------------------ making room

    def preempt(self, victim: Request, step: Step) -> None:
        """Take the blocks of a request that runs, or that is loaded and waits.

        It keeps its tokens, and starts over when there is room.
        """
        if step.withdraw(victim):
            # Its blocks were made hittable for tokens that will not be computed now.
            self.kv.forget_uncomputed(victim, victim.num_computed_tokens)
        self.start_over(victim)
        step.preempted.append(victim.request_id)

    def start_over(self, request: Request) -> None:
        """The request loses what it has computed or loaded and goes in front of the queue."""
        self.leave_queue(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = ()
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.put_back(request)

    def end_load(self, request: Request) -> None:
        """The load of a waiting request is over; it holds its blocks until it is admitted."""
        self._loaded.add(request)
        self.skipped_waiting.put(request, Wait.TURN)

    def free_loaded(self, request: Request) -> None:
        """Take back the blocks of a load of which nothing came."""
        self._loaded.remove(request)
        self.kv.free(request)

    def loaded(self) -> list[Request]:
        """Waiting requests that hold blocks, because their load has ended; in their order.

        They may have been passed over since, for an adapter or for a limit of partial prefills.
        """
        return self.skipped_waiting.in_order(self._loaded)

    def revoke_pin(self) -> bool:
        """Free the blocks of an ended request that are only kept because nobody took them yet."""
        request_id = self.connector.revoke_pin() if self.connector is not None else None
        if request_id is None:
            return False
        self.stats.num_revoked_pins += 1
        self.release(request_id, Hold.SENDING)
        return True

    def ask_back(self, requester: Request) -> None:
        """Ask for blocks that wait for the KV of a younger request, which has not begun to come.

        The youngest gives way, and only to an older one: so the oldest keeps what it has, and two
        requests that are both half-way here and half-way at a peer cannot wait for each other.
        """
        if self.connector is None or not self.parked:
            return
        parked = self.skipped_waiting.waiting_for(Wait.REMOTE_KVS)
        younger = [r for r in parked if r.urgency > requester.urgency]
        for request in sorted(younger, key=lambda r: r.urgency, reverse=True):
            if self.connector.revoke_reservation(request.request_id):
                return

    def unpark(self, request_id: str) -> None:
        """The load of this request has not begun, and its blocks are not reserved any more."""
        num_blocks = self.parked.pop(request_id)
        request = self.requests[request_id]
        if request.status.finished:
            self.release(request_id, Hold.LOADING)
            return
        num_local = (len(request.block_ids) - num_blocks) * self.kv.config.block_size
        self.stats.prompt_loaded -= request.num_computed_tokens - num_local
        self.stats.num_revoked_reservations += 1
        self.leave_queue(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
        self.waiting.add(request)  # behind the one that it made way for

    # ------------------------------------------------------------------ endings

    def leave_queue(self, request: Request) -> None:
        self._loaded.discard(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.skipped_waiting:
            self.skipped_waiting.remove(request)
        else:
            self.waiting.remove(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request that is in no queue any more."""
        request.status = status
        request.spec_token_ids = ()
        request_id = request.request_id
        self.failed_loads.discard(request_id)
        self.finished_req_ids.append(request_id)
        # A load that is under way may still write into the blocks.
        hold = Hold.LOADING if request_id in self.parked else Hold.NOTHING
        if self.connector is not None and self.connector.request_finished(
            request, request.block_ids
        ):
            hold |= Hold.SENDING
        if hold:
            self._holds[request_id] = hold
        else:
            self._forget(request)

    def release(self, request_id: str, hold: Hold) -> None:
        """One reason less to keep the blocks of an ended request."""
        left = self._holds.pop(request_id) & ~hold
        if left:
            self._holds[request_id] = left
        else:
            self._forget(self.requests[request_id])

    def held(self) -> list[Request]:
        """Ended requests whose blocks are kept."""
        return [self.requests[request_id] for request_id in self._holds]

    def is_held(self, request_id: str) -> bool:
        return request_id in self._holds

    def _forget(self, request: Request) -> None:
        self.kv.free(request)
        del self.requests[request.request_id]

    def num_quarantined(self) -> int:
        """Blocks of ended requests into which a peer may still write."""
        return sum(
            count
            for request_id, count in self.parked.items()
            if self.requests[request_id].status.finished
        )

    def end_with_error(self, request: Request) -> RequestUpdate:
        self.leave_queue(request)
        self.finish(request, RequestStatus.FINISHED_ERROR)
        return RequestUpdate(request, (), len(request.output_token_ids), True)

    def queued(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting
        yield from self.skipped_waiting
