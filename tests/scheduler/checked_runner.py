"""A runner and a connector without a model, whose KV can be checked slot by slot.

A slot of the cache holds one number, its content: it names the adapter and all tokens up to the
slot's own, which is what real KV depends on. The runner knows only what a `SchedulerOutput` says,
computes steps in the order in which they were planned, and before it computes a token it looks
whether all slots in front of it hold what they should. So a hit on blocks that nobody computed, a
block with two owners, a table that is out of date or a wrong count is noticed at once.

The token that is sampled depends on the request's seed and the position only: a request's output
must be the same whatever befalls it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol import KVConnectorOutput, RequestView, SamplingParams, StepView
from scheduler import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    Request,
    RequestStatus,
    SchedulerOutput,
)

Content = int
EOS, STOP = 2, 3
_GARBAGE: Content = -1


def token_at(seed: int, position: int) -> int:
    """Output token number `position`. One in 25 is an eos, one in 25 a stop token."""
    drawn = zlib.crc32(f"{seed}/{position}".encode())
    return {0: EOS, 1: STOP}.get(drawn % 25, 10 + drawn % 997)


def contents(lora_name: str | None, token_ids: Iterable[int]) -> list[Content]:
    """One for each token."""
    content, found = zlib.crc32(repr(lora_name).encode()), []
    for token_id in token_ids:
        content = hash((content, token_id))
        found.append(content)
    return found


@dataclass
class KvSlots:
    """The memory behind the block ids."""

    block_size: int
    _slots: dict[tuple[int, int], Content] = field(default_factory=dict)

    def read(self, table: Sequence[int], position: int) -> Content:
        return self._slots.get(self._place(table, position), _GARBAGE)

    def write(self, table: Sequence[int], position: int, content: Content) -> None:
        self._slots[self._place(table, position)] = content

    def _place(self, table: Sequence[int], position: int) -> tuple[int, int]:
        block_id = table[position // self.block_size]
        assert block_id > 0, "the null block is nobody's"
        return block_id, position % self.block_size


@dataclass
class Load:
    """KV that comes from elsewhere: tokens from `start` to `end`."""

    request_id: str
    seed: int
    table: tuple[int, ...]
    contents: list[Content]
    start: int
    num_output: int
    is_async: bool
    ticks: int  # steps until it has ended
    with_token: bool
    failing: frozenset[int]  # blocks of it that will not be there
    offer: Offer
    waits: int = 0  # steps until it begins
    asked_back: bool = False  # which comes to something only if it has not begun
    wanted: bool = True

    def write(self, kv: KvSlots, *, done: bool) -> None:
        for position in range(self.start, len(self.contents)):
            there = done and self.table[position // kv.block_size] not in self.failing
            kv.write(self.table, position, self.contents[position] if there else _GARBAGE)


@dataclass
class Offer:
    """What the connector has for a request."""

    is_async: bool
    num_tokens: int  # at most
    num_later: int = 0  # times that it does not know yet
    with_token: bool = False
    fails: bool = False
    ticks: int = 1
    times: int = 1
    waits: int = 0  # steps until it begins


@dataclass
class Pin:
    """Blocks of an ended request that somebody still reads."""

    table: tuple[int, ...]
    contents: list[Content]
    ticks: int
    revocable: bool


@dataclass
class CheckedConnector:
    """Loads what was offered, keeps blocks of some requests that ended."""

    rng: random.Random
    block_size: int
    offers: dict[str, Offer] = field(default_factory=dict)
    keep: dict[str, bool] = field(default_factory=dict)  # whether it can be revoked
    pins: dict[str, Pin] = field(default_factory=dict)
    loading: dict[str, Load] = field(default_factory=dict)  # asynchronous ones under way
    num_asked: int = 0
    num_given_back: int = 0
    _local: dict[str, int] = field(default_factory=dict)
    _orders: list[Load] = field(default_factory=list)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.num_asked += 1
        offer = self.offers.get(request.request_id)
        if offer is None:
            return 0, False
        if offer.num_later:
            offer.num_later -= 1
            return None, False
        self._local[request.request_id] = num_computed_tokens
        most = request.num_tokens - num_computed_tokens - (not offer.is_async)
        number = min(offer.num_tokens, most)
        return number, offer.is_async and number > 0

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        assert isinstance(request, Request)
        offer = self.offers[request.request_id]
        offer.times -= 1
        if not offer.times:
            del self.offers[request.request_id]
        start = self._local[request.request_id]
        end = start + num_external_tokens
        loaded = block_ids[start // self.block_size : -(-end // self.block_size)]
        bad = [b for b in loaded if offer.fails and self.rng.random() < 0.5]
        load = Load(
            request_id=request.request_id,
            seed=request.sampling.seed,
            table=tuple(block_ids),
            contents=contents(request.lora_name, request.all_token_ids[:end]),
            start=start,
            num_output=len(request.output_token_ids),
            is_async=offer.is_async,
            ticks=offer.ticks,
            with_token=offer.with_token and end == request.num_tokens,
            failing=frozenset(bad),
            offer=offer,
            waits=offer.waits if offer.is_async else 0,
        )
        self._orders.append(load)
        if load.is_async:
            assert request.request_id not in self.loading, "loaded twice at once"
            self.loading[request.request_id] = load

    def build_connector_meta(self, step: StepView) -> object:
        orders, self._orders = self._orders, []
        return orders

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving:
            del self.loading[request_id]
        for request_id in output.revoked_recving:
            load = self.loading.pop(request_id)
            self.num_given_back += 1
            if load.wanted:  # it is offered again
                load.offer.times += 1
                self.offers[request_id] = load.offer

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        assert isinstance(request, Request)
        self.offers.pop(request.request_id, None)
        if request.request_id in self.loading:
            self.loading[request.request_id].wanted = False
        revocable = self.keep.pop(request.request_id, None)
        if revocable is None or not block_ids:
            return False
        well = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        # The newest token was sampled, not computed; a load that failed may end with its token.
        num_held = min(request.num_tokens - 1, request.num_computed_tokens) if well else 0
        known = request.all_token_ids[:num_held]
        self.pins[request.request_id] = Pin(
            tuple(block_ids),
            contents(request.lora_name, known),
            self.rng.randint(1, 6),
            revocable,
        )
        return True

    def revoke_pin(self) -> str | None:
        revocable = [request_id for request_id, pin in self.pins.items() if pin.revocable]
        if not revocable:
            return None
        del self.pins[revocable[-1]]
        return revocable[-1]

    def revoke_reservation(self, request_id: str) -> bool:
        load = self.loading.get(request_id)
        if load is None or not load.waits:
            return False
        load.asked_back = True
        return True


@dataclass
class _Known:
    """A request as the runner was told of it."""

    sampling: SamplingParams
    num_prompt_tokens: int
    contents: list[Content]
    table: list[int]
    num_computed: int
    # Number of tokens before each step in which it was computed, by the number of the step.


class CheckedRunner:
    """Computes steps, and loads what the connector ordered with them."""

    def __init__(
        self, block_size: int, num_lookahead_tokens: int = 0, steps_in_flight: int = 1
    ) -> None:
        self.kv = KvSlots(block_size)
        self._steps_in_flight = steps_in_flight
        self._num_lookahead = num_lookahead_tokens
        self._requests: dict[str, _Known] = {}
        self._number = 0
        self._invalid: dict[int, frozenset[int]] = {}  # reported with a step, by its number
        self._loads: list[Load] = []  # asynchronous ones under way

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._number += 1
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._requests.pop(request_id, None)
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            assert new.request_id not in self._requests, "told as new, but it is known"
            self._requests[new.request_id] = self._known(new)
        for diff in step.scheduled_cached_reqs:
            self._continue(diff)
        transfers = self._load(step.kv_connector_metadata)
        sampled = {}
        for request_id, num_new in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_tokens.get(request_id, ())
            tokens = self._compute(self._requests[request_id], num_new, drafts)
            if tokens:
                sampled[request_id] = tokens
        return ModelRunnerOutput(sampled, transfers or None)

    def _known(self, new: NewRequestData) -> _Known:
        return _Known(
            sampling=new.sampling,
            num_prompt_tokens=new.num_prompt_tokens,
            contents=contents(new.lora_name, new.token_ids),
            table=list(new.block_ids),
            num_computed=new.num_computed_tokens,
        )

    def _continue(self, diff: CachedRequestData) -> None:
        known = self._requests[diff.request_id]
        known.table.extend(diff.new_block_ids)
        if diff.num_tokens < len(known.contents):
            reports = self._invalid.values()
            assert any(not blocks.isdisjoint(known.table) for blocks in reports), "nothing failed"
            del known.contents[diff.num_tokens :]
        assert diff.num_tokens == len(known.contents), "has other tokens"
        assert diff.num_computed_tokens <= known.num_computed
        known.num_computed = diff.num_computed_tokens

    def _load(self, orders: object) -> KVConnectorOutput:
        assert isinstance(orders, list | None)
        invalid: set[int] = set()
        for load in orders or ():
            if not load.waits:
                load.write(self.kv, done=not load.is_async)
            if load.is_async:
                self._loads.append(load)
            else:
                invalid |= load.failing
        if invalid:
            self._invalid[self._number] = frozenset(invalid)
        recving: dict[str, tuple[int, ...]] = {}
        revoked: list[str] = []
        for load in list(self._loads):
            if load.waits:
                if self._gives_back(load):
                    self._loads.remove(load)
                    revoked.append(load.request_id)
                continue
            load.ticks -= 1
            load.write(self.kv, done=load.ticks <= 0)
            if load.ticks <= 0:
                self._loads.remove(load)
                tokens = (token_at(load.seed, load.num_output),) if load.with_token else ()
                recving[load.request_id] = tokens
                invalid |= load.failing
        return KVConnectorOutput(
            finished_recving=recving,
            invalid_block_ids=frozenset(invalid),
            revoked_recving=tuple(revoked),
        )

    @staticmethod
    def _gives_back(load: Load) -> bool:
        """One step of a load that has not begun: it is given back, begins after all, or waits."""
        if load.asked_back and load.waits % 2:
            return True
        load.waits = 0 if load.asked_back else load.waits - 1
        return False

    def _is_excused(self, known: _Known) -> bool:
        """Whether it relies on a load whose failure nobody knew of when the step was planned."""
        first = self._number - self._steps_in_flight + 1
        reports = [blocks for number, blocks in self._invalid.items() if number >= first]
        return any(not blocks.isdisjoint(known.table) for blocks in reports)

    def _compute(self, known: _Known, num_new: int, drafts: Sequence[int]) -> list[int]:
        start, end = known.num_computed, known.num_computed + num_new
        assert end <= len(known.table) * self.kv.block_size, "has no slots for its tokens"
        wrong = [p for p in range(start) if self.kv.read(known.table, p) != known.contents[p]]
        assert not wrong or self._is_excused(known), (
            f"seed {known.sampling.seed}: slots {wrong} do not hold its tokens"
        )
        num_known = len(known.contents)
        assert end <= num_known + len(drafts), "computes tokens that there are not"
        assert not drafts or end == num_known + len(drafts)
        # Drafts are whatever they are: those that are right are followed by what is right.
        position, tokens = num_known - known.num_prompt_tokens, []
        for number in range(len(drafts) + 1) if end >= num_known else ():
            tokens.append(token_at(known.sampling.seed, position + number))
            if number == len(drafts) or tokens[-1] != drafts[number]:
                break
        for token in tokens:
            known.contents.append(hash((known.contents[-1], token)))
        num_right = min(end, len(known.contents) - 1) if tokens else end
        for p in range(start, end):
            right = p < num_right and not wrong
            self.kv.write(known.table, p, known.contents[p] if right else _GARBAGE)
        # A draft model writes beyond the tokens that there are.
        last = min(end + self._num_lookahead, len(known.table) * self.kv.block_size)
        for p in range(max(end, num_known), last):
            self.kv.write(known.table, p, _GARBAGE)
        known.num_computed = num_right
        return tokens
