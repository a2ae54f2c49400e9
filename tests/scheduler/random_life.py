"""Lives of requests with everything that can happen to them, and what must hold at each moment."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from protocol import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    KVConnectorOutput,
    SamplingParams,
)
from scheduler import (
    CacheConfig,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    RequestUpdate,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Wait,
)
from tests.scheduler.checked_runner import (
    EOS,
    STOP,
    CheckedConnector,
    CheckedRunner,
    Offer,
    token_at,
)

BLOCK = 4
_MAX_TURNS = 3000
_CALM_AFTER = 300  # turns; with too many disturbances a slow request never gets to its end
_MAX_IDLE = 6  # steps in which nothing happens although nothing is under way


@dataclass(frozen=True, kw_only=True)
class World:
    """What a life is lived with."""

    seed: int
    config: SchedulerConfig
    num_blocks: int
    blocks_per_block: int = 1  # hash blocks in a block of the pool
    caching: bool = True
    connector: bool = False
    num_requests: int = 14
    num_adapters: int = 0
    grammars: bool = False
    load_failures: bool = False
    disturbances: bool = True  # aborts, pauses, resets
    steps_in_flight: int = 1


@dataclass
class Expected:
    """What must come out of a request if nobody ends it."""

    output: list[int]
    status: RequestStatus


def undisturbed(request: Request, max_len: int) -> Expected:
    """Computed by nothing but the rules for endings."""
    sampling = request.sampling
    output = list(request.output_token_ids)
    while True:
        token = token_at(sampling.seed, len(output))
        output.append(token)
        if len(output) < sampling.min_tokens:
            continue
        if token in (*sampling.eos_token_ids, *sampling.stop_token_ids):
            return Expected(output, RequestStatus.FINISHED_STOPPED)
        if len(output) >= sampling.max_tokens or request.num_prompt_tokens + len(output) >= max_len:
            return Expected(output, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class _Step:
    scheduled: SchedulerOutput
    computed: ModelRunnerOutput | None = None


@dataclass
class Life:
    """One scheduler from the first request to the last."""

    world: World
    ended: dict[int, RequestStatus] = field(default_factory=dict)  # by seed of the request
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self.rng = random.Random(world.seed)
        cache = CacheConfig(
            num_blocks=world.num_blocks + 1,
            block_size=BLOCK * world.blocks_per_block,
            hash_block_size=BLOCK,
            enable_prefix_caching=world.caching,
        )
        self.connector = (
            CheckedConnector(random.Random(world.seed + 1), cache.block_size)
            if world.connector
            else None
        )
        self.scheduler = Scheduler(world.config, cache, self.connector)
        self.runner = CheckedRunner(
            cache.block_size, world.config.num_lookahead_tokens, world.steps_in_flight
        )
        self.max_len = min(world.config.max_model_len, cache.num_usable_tokens)
        self.in_flight: deque[_Step] = deque()
        self.expected: dict[int, Expected] = {}
        self.born: list[Request] = []
        self.told_ended: Counter[str] = Counter()
        self.to_be_told: Counter[str] = Counter()
        self.may_fail: set[Request] = set()
        self.hittable: dict[bytes, bytes | None] = {}
        self.num_turns = self.num_idle = 0
        self.admitted: list[int] = []  # seeds of the requests, in the order of their first steps
        self.prefixes = [
            [self.rng.randrange(10, 1000) for _ in range(self.max_len)] for _ in range(3)
        ]

    # ------------------------------------------------------------------ the whole life

    def live(self) -> None:
        while len(self.born) < self.world.num_requests or not self._is_over():
            requests = list(self.scheduler.requests.values())
            assert self.num_turns < _MAX_TURNS, f"never ends: {requests}"
            self.num_turns += 1
            if self.num_turns == _CALM_AFTER:
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
            self._disturb()
            self._move()
        assert self.scheduler.kv.pool.num_used == 0
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(2):
            self._schedule()
            self._finish_step()
        assert self.told_ended == self.to_be_told
        assert set(self.ended) == {request.sampling.seed for request in self.born}
        assert not self.scheduler._state.parked
        assert not self.scheduler._state.failed_loads

    def _is_over(self) -> bool:
        return not self.scheduler.has_requests() and not self.in_flight

    def _move(self) -> None:
        """Plan a step, or process the oldest one; the runner may be ahead of that."""
        if len(self.in_flight) < self.world.steps_in_flight and (
            not self.in_flight or self.rng.random() < 0.7
        ):
            self._schedule()
            return
        if self.rng.random() < 0.5:
            self._compute(self.in_flight)
        self._finish_step()

    # ------------------------------------------------------------------ what happens to them

    def _disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        while len(self.born) < self.world.num_requests and rng.random() < 0.4:
            self._bear()
        for request in [r for r in self.born[-40:] if not r.status.finished]:
            awaits = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if awaits and rng.random() < 0.3:
                scheduler.grammar_ready(request.request_id)
        if self.world.disturbances and self.num_turns < _CALM_AFTER:
            if rng.random() < 0.04:
                self._abort(rng.choice(self.born or [None]))
            drawn = rng.random()
            if drawn < 0.02:
                scheduler.set_pause_state(rng.choice(list(PauseState)))
            elif drawn < 0.12:
                scheduler.set_pause_state(PauseState.UNPAUSED)
            if rng.random() < 0.03:
                self._reset(running=rng.random() < 0.7)
        self._check()

    def _bear(self) -> None:
        """The same requests are born in all lives of one seed, whatever happens to them."""
        number = len(self.born)
        rng = random.Random(f"{self.world.seed}/{number}")
        request = self._make_request(rng, number)
        if self.connector is not None:
            self._make_offer(self.connector, rng, request.request_id)
        self.expected[number] = undisturbed(request, self.max_len)
        self.born.append(request)
        self.scheduler.add_request(request)

    def _make_offer(self, connector: CheckedConnector, rng: random.Random, request_id: str) -> None:
        if rng.random() < 0.6:
            connector.offers[request_id] = Offer(
                is_async=rng.random() < 0.6,
                num_tokens=1000 if rng.random() < 0.6 else rng.randint(1, 20),
                num_later=rng.choice((0, 0, 0, 1, 3)),
                with_token=rng.random() < 0.6,
                fails=self.world.load_failures and rng.random() < 0.6,
                ticks=rng.randint(1, 4),
                times=rng.choice((1, 1, 2)),
                waits=rng.choice((0, 0, 2, 3, 9)),
            )
        if rng.random() < 0.3:
            connector.keep[request_id] = rng.random() < 0.5

    def _make_request(self, rng: random.Random, number: int) -> Request:
        longest = self.max_len - 1 if rng.random() < 0.1 else min(self.max_len - 1, 40)
        length = rng.randint(1, longest)
        prompt = list(rng.choice(self.prefixes)[:length])
        num_shared = rng.randint(0, length) if rng.random() < 0.7 else length
        prompt[num_shared:] = [rng.randrange(10, 1000) for _ in prompt[num_shared:]]
        if self.born and rng.random() < 0.3:  # a conversation goes on
            older = rng.choice(self.born)
            said = list(older.all_token_ids[: older.num_prompt_tokens])
            said = [*said, *self.expected[older.sampling.seed].output]
            prompt = [*said, *prompt[:4]][: self.max_len - 1]
            length = len(prompt)
        num_forced = 0
        if rng.random() < 0.2 and length + 3 < self.max_len:
            num_forced = next((n for n in (2, 1) if self._may_force(number, n)), 0)
        max_tokens = rng.randint(num_forced + 1, num_forced + 12)
        min_tokens = rng.choice((0, 0, 0, rng.randint(0, max_tokens + 2)))
        sampling = SamplingParams(
            seed=number,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, self.max_len - length),
            stop_token_ids=(STOP,) if rng.random() < 0.7 else (),
            eos_token_ids=(EOS,) if rng.random() < 0.7 else (),
        )
        with_adapter = self.world.num_adapters and rng.random() < 0.7
        return Request(
            self._free_id(number),
            prompt,
            sampling,
            arrival_time=float(number // 2),
            priority=rng.randint(0, 2),
            forced_token_ids=[token_at(number, n) for n in range(num_forced)],
            lora_name=f"lora-{rng.randrange(self.world.num_adapters)}" if with_adapter else None,
            cache_salt="salt" if rng.random() < 0.1 else None,
            hash_block_size=BLOCK,
            awaits_grammar=self.world.grammars and rng.random() < 0.4,
        )

    def _may_force(self, number: int, num_tokens: int) -> bool:
        return not {token_at(number, n) for n in range(num_tokens)} & {EOS, STOP}

    def _free_id(self, number: int) -> str:
        """Often an id that was used before, as soon as the scheduler knows it no longer."""
        used = [r.request_id for r in self.born if r.request_id not in self.scheduler.requests]
        if used and self.rng.random() < 0.3:
            return self.rng.choice(used)
        return f"r{number}"

    def _abort(self, request: Request | None) -> None:
        if request is None:
            return
        live = self.scheduler.requests.get(request.request_id)
        status = RequestStatus.FINISHED_ABORTED
        ended = self.scheduler.finish_requests([request.request_id, "nobody"], status)
        assert ended == [r for r in [live] if r is not None and r in ended]
        for victim in ended:
            self._note_end(victim)

    def _reset(self, *, running: bool) -> None:
        scheduler = self.scheduler
        done = scheduler.reset_prefix_cache(reset_running_requests=running)
        if done:
            assert scheduler.kv.pool.num_cached == 0
        if running:
            assert not scheduler.running
            held = [r for r in scheduler.requests.values() if r.block_ids]
            loading = set(scheduler.skipped_waiting.waiting_for(Wait.REMOTE_KVS))
            assert all(r.status.finished or r in loading for r in held)

    # ------------------------------------------------------------------ steps

    def _schedule(self) -> None:
        before = set(self.scheduler.running)
        scheduled = self.scheduler.schedule()
        self.in_flight.append(_Step(scheduled))
        self.told_ended.update(scheduled.finished_req_ids)
        assert self.told_ended == self.to_be_told
        self._check_step(scheduled, before)
        self._check()

    def _compute(self, steps: Iterable[_Step]) -> None:
        for step in steps:
            if step.computed is None:
                step.computed = self.runner.execute(step.scheduled)

    def _finish_step(self) -> None:
        scheduler = self.scheduler
        self._compute([self.in_flight[0]])
        step = self.in_flight.popleft()
        computed = step.computed
        assert computed is not None
        transfers = computed.kv_connector_output
        invalid = transfers.invalid_block_ids if transfers is not None else frozenset()
        self.may_fail |= {
            r for r in scheduler.requests.values() if not invalid.isdisjoint(r.block_ids)
        }
        if self.connector is not None:
            computed = self._with_sent(computed)
        updates = scheduler.update_from_output(step.scheduled, computed)
        for update in updates:
            self._take(update)
        self._check()
        if self.world.config.spec_method is not None:
            self._give_drafts()
        self._note_progress(step.scheduled, updates)

    def _with_sent(self, computed: ModelRunnerOutput) -> ModelRunnerOutput:
        assert self.connector is not None
        transfers = computed.kv_connector_output
        sent = []
        for request_id, pin in list(self.connector.pins.items()):
            pin.ticks -= 1
            if pin.ticks <= 0:
                del self.connector.pins[request_id]
                sent.append(request_id)
                held = [self.runner.kv.read(pin.table, p) for p in range(len(pin.contents))]
                assert held == pin.contents, f"kept blocks of {request_id} have changed"
        if not sent:
            return computed
        transfers = replace(transfers or KVConnectorOutput(), finished_sending=tuple(sent))
        return ModelRunnerOutput(computed.sampled_token_ids, transfers)

    def _give_drafts(self) -> None:
        number = self.world.config.num_speculative_tokens
        drafts: dict[str, Sequence[int]] = {}
        for request in self.scheduler.requests.values():
            if request.status.finished or self.rng.random() < 0.2:
                continue
            seed, position = request.sampling.seed, len(request.output_token_ids)
            right = self.rng.random()
            drafts[request.request_id] = [
                token_at(seed, position + n) if self.rng.random() < right else 9
                for n in range(self.rng.randint(0, number))
            ]
        self.scheduler.update_draft_token_ids(drafts)
        self._check()

    def _take(self, update: RequestUpdate) -> None:
        request = update.request
        new = list(update.new_token_ids)
        assert request.output_token_ids[update.position : update.position + len(new)] == new
        assert update.position + len(new) == len(request.output_token_ids)
        assert update.finished == request.status.finished
        if update.finished:
            self._note_end(request)

    def _note_end(self, request: Request) -> None:
        seed = request.sampling.seed
        assert seed not in self.ended, "ends twice"
        self.ended[seed] = request.status
        self.outputs[seed] = request.output_token_ids
        self.to_be_told[request.request_id] += 1
        expected = self.expected[seed]
        number = len(request.output_token_ids)
        if request.status is RequestStatus.FINISHED_ERROR:
            assert self.world.config.kv_load_failure_policy == "fail"
            assert request in self.may_fail
        elif request.status is not RequestStatus.FINISHED_ABORTED:
            assert request.status is expected.status
            assert number == len(expected.output)
        assert request.output_token_ids == expected.output[:number]

    # ------------------------------------------------------------------ what must hold

    def _check(self) -> None:
        self.scheduler.check_integrity()
        self._check_tables()
        self._check_events()
        config, parked = self.world.config, self.scheduler._state.parked
        if config.max_parked_blocks is not None and len(parked) > 1:
            assert sum(parked.values()) <= config.max_parked_blocks

    def _check_tables(self) -> None:
        """A block in two tables is part of a prefix that both have."""
        owner: dict[int, tuple[int, bytes | None]] = {}
        each = self.world.blocks_per_block
        for request in self.scheduler.requests.values():
            for index, block_id in enumerate(request.block_ids):
                last = (index + 1) * each - 1
                known = request.block_hashes[last] if last < len(request.block_hashes) else None
                if block_id in owner:
                    assert known is not None
                assert owner.setdefault(block_id, (index, known)) == (index, known)

    def _check_events(self) -> None:
        """Whoever hears of all changes knows what can be hit."""
        for event in self.scheduler.kv.pool.take_events():
            if isinstance(event, BlockStored):
                parent = event.parent
                for block_hash in event.hashes:
                    assert block_hash not in self.hittable
                    self.hittable[block_hash] = parent
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.hashes:
                    del self.hittable[block_hash]
            elif isinstance(event, CacheCleared):
                self.hittable.clear()
        assert self.hittable == dict(self.scheduler.kv.pool.cached_chain())
        if not self.world.load_failures:
            assert all(p is None or p in self.hittable for p in self.hittable.values())

    def _check_step(self, scheduled: SchedulerOutput, before: set[Request]) -> None:
        config, requests = self.world.config, self.scheduler.requests
        counts = scheduled.num_scheduled_tokens
        assert sum(counts.values()) <= config.token_budget
        assert all(count > 0 for count in counts.values())
        if config.prefill_threshold:
            assert all(count <= config.prefill_threshold for count in counts.values())
        told = [*scheduled.scheduled_new_reqs, *scheduled.scheduled_resumed_reqs]
        told_ids = Counter(data.request_id for data in told)
        told_ids.update(data.request_id for data in scheduled.scheduled_cached_reqs)
        assert told_ids == Counter(counts.keys())
        assert scheduled.scheduled_spec_tokens.keys() <= counts.keys()
        running = {r.request_id for r in self.scheduler.running}
        assert running >= counts.keys()
        stopped = {r.request_id for r in before} - running
        assert stopped <= set(scheduled.preempted_req_ids)
        adapters = {requests[i].lora_name for i in counts} - {None}
        assert config.max_loras is None or len(adapters) <= config.max_loras
        if self.scheduler.pause_state is PauseState.PAUSED_ALL:
            assert not counts
        if self.scheduler.pause_state is not PauseState.UNPAUSED:
            assert not told
        self.admitted += [data.sampling.seed for data in scheduled.scheduled_new_reqs]
        if not self.world.load_failures:
            self._check_partial_prefills(counts)

    def _check_partial_prefills(self, counts: dict[str, int]) -> None:
        config = self.world.config
        requests = [self.scheduler.requests[i] for i in counts]
        partial = [r for r in requests if r.num_computed_tokens < r.num_prefill_tokens]
        left = [
            r.num_prefill_tokens - r.num_computed_tokens + counts[r.request_id] for r in partial
        ]
        if config.max_num_partial_prefills is not None:
            assert len(partial) <= config.max_num_partial_prefills
        if config.max_long_partial_prefills is not None:
            long = [number for number in left if number > config.prefill_threshold]
            assert len(long) <= config.max_long_partial_prefills

    def _note_progress(self, scheduled: SchedulerOutput, updates: Sequence[RequestUpdate]) -> None:
        """Nobody waits for ever: if nothing is under way, something moves."""
        scheduler, connector = self.scheduler, self.connector
        moves = bool(scheduled.num_scheduled_tokens or updates)
        awaited = any(
            request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            for request in scheduler.requests.values()
        )
        if connector is not None:
            awaited |= bool(connector.loading or connector.pins)
            awaited |= any(offer.num_later for offer in connector.offers.values())
        paused = scheduler.pause_state is not PauseState.UNPAUSED
        if moves or awaited or paused or not scheduler.has_requests():
            self.num_idle = 0
        else:
            self.num_idle += 1
            assert self.num_idle <= _MAX_IDLE, f"stuck: {list(scheduler.requests.values())}"
