"""The runner against a greedy loop over transformers' logits, with steps made by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.runner_factory import load_model_runner, make_model_runner
from protocol import SamplingParams
from scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.engine.batches import GREEDY, Drive, blocks, generate, step
from tests.engine.conftest import Reference
from tests.engine.tiny import VOCAB_SIZE

BLOCK_SIZE = 4


@pytest.fixture
def runner(tiny_model: CausalLM) -> ModelRunner:
    runner = make_model_runner(tiny_model, num_blocks=200, block_size=BLOCK_SIZE)
    runner.kv_cache.tensor.fill_(torch.nan)  # reading what was not written shows
    return runner


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def greedy(reference: Reference, token_ids: list[int], count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(int(reference(tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_greedy_output(runner: ModelRunner, reference: Reference, chunk: int) -> None:
    drives = [
        Drive(f"r{n}", prompt(n, n), blocks(12, 1 + 12 * index))
        for index, n in enumerate((1, 4, 5, 17, 30))
    ]
    expected = [greedy(reference, drive.token_ids, 8) for drive in drives]
    generate(runner, drives, num_tokens=8, chunk=chunk)
    assert [drive.output for drive in drives] == expected


def test_each_layer_is_told_when_its_keys_and_values_are_written(runner: ModelRunner) -> None:
    first, second = Drive("a", prompt(1, 5), blocks(3)), Drive("b", prompt(2, 3), blocks(3, 20))
    tokens = {1: 4, 2: 1, 20: 3}
    told: list[tuple[int, list[bool]]] = []

    def on_layer(layer: int) -> None:
        """Who is told sees that this layer, and none after it, is there."""
        pool = runner.kv_cache.tensor
        written = [
            all(
                bool(pool[block, number, :, :size].isfinite().all())
                for block, size in tokens.items()
            )
            for number in range(pool.shape[1])
        ]
        told.append((layer, written))

    runner.on_layer = on_layer
    step(runner, [(first, 5), (second, 3)])
    num_layers = runner.kv_cache.config.num_layers
    assert num_layers > 1
    assert told == [
        (layer, [number <= layer for number in range(num_layers)]) for layer in range(num_layers)
    ]


def test_nothing_is_sampled_in_the_middle_of_a_prompt(runner: ModelRunner) -> None:
    first, second = Drive("a", prompt(1, 9), blocks(9)), Drive("b", prompt(2, 3), blocks(9, 20))
    assert set(step(runner, [(first, 5), (second, 3)])) == {"b"}
    assert set(step(runner, [(first, 4), (second, 1)])) == {"a", "b"}


def test_sampled_tokens_are_plain_integers(runner: ModelRunner) -> None:
    (tokens,) = step(runner, [(Drive("a", prompt(1, 3), blocks(2)), 3)]).values()
    assert [type(token) for token in tokens] == [int]


def test_an_empty_step_only_keeps_the_books(runner: ModelRunner) -> None:
    drive = Drive("a", prompt(1, 3), blocks(2))
    step(runner, [(drive, 3)])
    output = runner.execute(SchedulerOutput(finished_req_ids=["a", "never seen"]))
    assert output.sampled_token_ids == {}
    assert output.kv_connector_output is None
    with pytest.raises(KeyError):
        step(runner, [(drive, 1)])


def test_blocks_are_added_as_the_sequence_grows(runner: ModelRunner, reference: Reference) -> None:
    tokens = prompt(3, 4)
    expected = greedy(reference, tokens, 3)
    new = NewRequestData("a", tokens, 4, GREEDY, [7], 0)
    output = SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 4})
    sampled = [*runner.execute(output).sampled_token_ids["a"]]
    for num_computed, new_blocks in ((4, [3]), (5, [])):
        cached = CachedRequestData("a", new_blocks, num_computed, num_computed + 1)
        output = SchedulerOutput(scheduled_cached_reqs=[cached], num_scheduled_tokens={"a": 1})
        sampled += runner.execute(output).sampled_token_ids["a"]
    assert sampled == expected


def test_tokens_that_do_not_count_after_all(runner: ModelRunner, reference: Reference) -> None:
    """Their KV had not been loaded: the end of the prompt is computed again, and what follows."""
    drive = Drive("a", prompt(5, 14), blocks(5))
    expected = greedy(reference, drive.token_ids, 4)
    generate(runner, [drive], num_tokens=2)
    assert drive.output == expected[:2]
    del drive.token_ids[14:], drive.output[:]
    drive.num_computed = 8
    generate(runner, [drive], num_tokens=4)
    assert drive.output == expected


def test_preemption_and_resumption(runner: ModelRunner, reference: Reference) -> None:
    drive = Drive("a", prompt(4, 6), blocks(5))
    expected = greedy(reference, drive.token_ids, 6)
    generate(runner, [drive], num_tokens=3)
    runner.execute(SchedulerOutput(preempted_req_ids=["a"]))
    resumed = NewRequestData("a", drive.token_ids, 6, GREEDY, blocks(5, 50), 0)
    output = SchedulerOutput(scheduled_resumed_reqs=[resumed], num_scheduled_tokens={"a": 9})
    drive.output += runner.execute(output).sampled_token_ids["a"]
    drive.token_ids.append(drive.output[-1])
    drive.num_computed = 9
    generate(runner, [drive], num_tokens=6)
    assert drive.output == expected


def test_preempted_and_scheduled_again_in_one_step(runner: ModelRunner) -> None:
    drive = Drive("a", prompt(5, 5), blocks(5))
    step(runner, [(drive, 5)])
    new = NewRequestData("a", prompt(5, 5), 5, GREEDY, blocks(5, 50), 0)
    output = SchedulerOutput(
        preempted_req_ids=["a"], scheduled_resumed_reqs=[new], num_scheduled_tokens={"a": 5}
    )
    assert list(runner.execute(output).sampled_token_ids["a"]) == drive.output


def test_forced_output_counts_for_the_position_of_the_next_token(runner: ModelRunner) -> None:
    """A request that is resumed elsewhere goes on as if nothing had happened."""
    sampling = SamplingParams(temperature=1.5, seed=11, top_p=0.95, max_tokens=100)
    whole = Drive("a", prompt(6, 7), blocks(10), sampling)
    generate(runner, [whole], num_tokens=12)
    tokens = prompt(6, 7) + whole.output[:5]
    rest = Drive("b", tokens, blocks(10, 50), sampling, num_prompt_tokens=7)
    generate(runner, [rest], num_tokens=7)
    assert rest.output == whole.output[5:]


def test_prefix_hit(runner: ModelRunner, reference: Reference) -> None:
    first = Drive("a", prompt(7, 13), blocks(8))
    second = Drive("b", [*prompt(7, 12), *prompt(8, 6)], [1, 2, 3, *blocks(5, 90)], num_computed=12)
    expected = greedy(reference, second.token_ids, 5)
    step(runner, [(first, 13)])
    generate(runner, [second], num_tokens=5)
    assert second.output == expected


def test_a_runner_from_a_directory(tiny_dir: Path, reference: Reference) -> None:
    runner = load_model_runner(tiny_dir, num_blocks=20, block_size=16)
    drive = Drive("a", prompt(9, 20), blocks(3))
    generate(runner, [drive], num_tokens=4)
    assert drive.output == greedy(reference, prompt(9, 20), 4)
