"""Random workloads over all features: whatever happens, every request gets its own tokens.

The lives are made from a seed; `Life` holds what must be true at each moment, and the runner that
it uses looks into the KV of every token that it relies on.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import ConfigError
from scheduler import Policy, SchedulerConfig
from scheduler.config import SpecMethod
from tests.scheduler.random_life import Life, World

_MAX_MODEL_LEN = 64


def random_world(seed: int, *, in_flight: int) -> World:
    """Any settings that may go together."""
    rng = random.Random(seed)
    while True:
        try:
            config = _random_config(rng, in_flight=in_flight)
        except ConfigError:
            continue
        break
    connector = rng.random() < 0.6
    return World(
        seed=seed,
        config=config,
        num_blocks=rng.randint(5, 24),
        blocks_per_block=rng.choice((1, 1, 1, 2)),
        caching=rng.random() < 0.8,
        connector=connector,
        num_adapters=rng.choice((0, 0, 3)),
        grammars=rng.random() < 0.3,
        load_failures=connector and rng.random() < 0.4,
        disturbances=rng.random() < 0.8,
        steps_in_flight=in_flight,
    )


def _random_config(rng: random.Random, *, in_flight: int) -> SchedulerConfig:
    chunked = rng.random() < 0.8
    max_num_seqs = rng.randint(1, 5)
    budget = rng.randint(max_num_seqs, 24) if chunked else _MAX_MODEL_LEN + rng.randint(0, 20)
    methods: list[SpecMethod | None] = [None, None, "ngram", "draft_model", "eagle"]
    method = rng.choice(methods) if in_flight == 1 else None
    limits = rng.random() < 0.3
    policies: list[Policy] = ["fcfs", "priority"]
    policy = rng.choice(policies)
    return SchedulerConfig(
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_scheduled_tokens=rng.choice((None, None, rng.randint(1, budget))),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((0, 0, rng.randint(1, 20))),
        max_num_partial_prefills=rng.choice((None, 1, 2, 3)) if limits else None,
        max_long_partial_prefills=rng.choice((None, 1, 2)) if limits else None,
        policy=policy,
        waiting_preempts_running=policy == "priority" and rng.random() < 0.5,
        scheduler_reserve_full_isl=rng.random() < 0.6,
        max_parked_blocks=rng.choice((None, None, rng.randint(1, 10))),
        kv_load_failure_policy=rng.choice(("recompute", "recompute", "fail")),
        max_loras=rng.choice((None, 1, 2)),
        spec_method=method,
        num_speculative_tokens=rng.randint(1, 4) if method is not None else 0,
        async_scheduling=in_flight > 1,
    )


SEEDS = st.integers(0, 2**32)
lives = settings(max_examples=160, deadline=None, derandomize=True)


@lives
@given(seed=SEEDS)
def test_one_step_after_the_other(seed: int) -> None:
    Life(random_world(seed, in_flight=1)).live()


@lives
@given(seed=SEEDS)
def test_a_step_is_planned_while_another_runs(seed: int) -> None:
    Life(random_world(seed, in_flight=2)).live()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_the_tokens_do_not_depend_on_how_many_steps_are_in_flight(seed: int) -> None:
    ahead = replace(random_world(seed, in_flight=2), disturbances=False)
    recompute = replace(ahead.config, kv_load_failure_policy="recompute")
    ahead = replace(ahead, config=recompute)
    in_turn = replace(ahead, config=replace(recompute, async_scheduling=False), steps_in_flight=1)
    lives = [Life(ahead), Life(in_turn)]
    for life in lives:
        life.live()
    assert lives[0].outputs == lives[1].outputs
    assert lives[0].ended == lives[1].ended


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=SEEDS, in_flight=st.integers(1, 2))
def test_nobody_overtakes_who_came_first(seed: int, in_flight: int) -> None:
    """Under fcfs, if nobody has to wait for something of its own."""
    world = random_world(seed, in_flight=in_flight)
    config = replace(
        world.config,
        policy="fcfs",
        waiting_preempts_running=False,
        max_loras=None,
        max_num_partial_prefills=None,
        max_long_partial_prefills=None,
    )
    life = Life(
        replace(
            world,
            config=config,
            connector=False,
            load_failures=False,
            grammars=False,
            disturbances=False,
        )
    )
    life.live()
    assert life.admitted == sorted(life.admitted)
    assert len(life.admitted) == len(life.born)
