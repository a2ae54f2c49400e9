"""Runners that compute at the same time divide the cores; who computes alone has them all."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.core_share import Cores, CoreShare, FixedCores
from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.runner_factory import make_model_runner
from tests.engine.batches import Drive, blocks, step


class Clock:
    """The time, to be set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    num_threads = torch.get_num_threads()
    yield Clock()
    torch.set_num_threads(num_threads)


def in_thread(share: Cores) -> int:
    """The share of another thread that makes a step now."""
    shares: list[int] = []

    def compute() -> None:
        with share.step() as cores:
            torch.randn(100_000).exp()  # a thread's first parallel operation
            assert torch.get_num_threads() == cores
            shares.append(cores)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return shares[0]


def test_alone_it_gets_all(clock: Clock) -> None:
    share = CoreShare(6, clock)
    for _ in range(3):
        with share.step() as cores:
            assert cores == torch.get_num_threads() == 6


def test_together_they_divide(clock: Clock) -> None:
    share = CoreShare(6, clock)
    with share.step() as first:
        assert (first, in_thread(share)) == (6, 3)
        assert torch.get_num_threads() == 6  # the share lasts for the step
    with share.step() as cores:
        assert cores == 3


def test_the_share_comes_back_when_the_other_one_is_done(clock: Clock) -> None:
    share = CoreShare(6, clock)
    in_thread(share)
    clock.now += 0.01  # it may just be scheduling its next step
    with share.step() as cores:
        assert cores == 3
    clock.now += 1.0
    with share.step() as cores:
        assert cores == 6


def test_nobody_gets_nothing(clock: Clock) -> None:
    share = CoreShare(1, clock)
    with share.step():
        assert in_thread(share) == 1


def test_a_step_that_fails_gives_its_share_back(clock: Clock) -> None:
    share = CoreShare(2, clock)
    with pytest.raises(ZeroDivisionError), share.step():
        _ = 1 / 0
    clock.now += 1.0
    assert in_thread(share) == 2


class TestFixedCores:
    def test_always_as_many(self, clock: Clock) -> None:
        cores = FixedCores(3)
        for _ in range(2):
            with cores.step() as count:
                assert count == torch.get_num_threads() == 3

    def test_however_many_others_compute(self, clock: Clock) -> None:
        mine, other, share = FixedCores(3), FixedCores(2), CoreShare(6, clock)
        with mine.step() as count:
            assert (count, in_thread(mine), in_thread(other)) == (3, 3, 2)
            assert in_thread(share) == 6  # who has cores of its own takes no part in the sharing
            assert torch.get_num_threads() == 3

    def test_a_runner_computes_with_them(self, clock: Clock, tiny_model: CausalLM) -> None:
        runner = make_model_runner(tiny_model, num_blocks=9, block_size=4, cores=FixedCores(5))
        seen: list[int] = []
        runner.on_layer = lambda layer: seen.append(torch.get_num_threads())
        torch.set_num_threads(1)
        step(runner, [(Drive("a", [1, 2, 3], blocks(2)), 3)])
        assert seen
        assert set(seen) == {5}


def test_runners_in_two_threads_compute_the_same_as_alone(tiny_model: CausalLM) -> None:
    """They share the weights; each has its own pool."""

    def tokens(runner: ModelRunner, results: list[list[int]]) -> None:
        drive = Drive("a", list(range(20, 45)), blocks(20))
        step(runner, [(drive, 25)])
        while len(drive.output) < 12:
            step(runner, [(drive, 1)])
        results.append(drive.output)

    share = CoreShare(2)
    runners = [
        make_model_runner(tiny_model, num_blocks=24, block_size=4, cores=share) for _ in range(2)
    ]
    results: list[list[int]] = []
    threads = [threading.Thread(target=tokens, args=(r, results)) for r in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens(make_model_runner(tiny_model, num_blocks=24, block_size=4), results)
    assert len(results[0]) == 12
    assert results[0] == results[1] == results[2]
