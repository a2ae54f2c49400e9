"""The runner alone, with steps made by hand, against the recorded output of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model_runner import ModelRunner
from engine.runner_factory import load_model_runner
from engine.weights import ModelStore
from tests.engine.batches import Drive, blocks, generate, step
from tests.reference.cases import MODEL, ReferenceCase, reference_cases

pytestmark = pytest.mark.real_model

BLOCK_SIZE = 16
NUM_TOKENS = 12  # of 48: this test is to be quick


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)
    runner = load_model_runner(files.directory, num_blocks=160, block_size=BLOCK_SIZE)
    runner.kv_cache.tensor.fill_(torch.nan)  # reading what was not written shows
    return runner


@pytest.fixture(scope="module")
def cases() -> dict[str, ReferenceCase]:
    return {case.name: case for case in reference_cases()}


def drive_for(case: ReferenceCase, block_ids: list[int], num_computed: int = 0) -> Drive:
    return Drive(case.name, list(case.prompt_token_ids), block_ids, num_computed=num_computed)


def test_a_ragged_batch(runner: ModelRunner, cases: dict[str, ReferenceCase]) -> None:
    """Chunks of different prompts and decodes in the same steps, at odd boundaries."""
    names = ("text_1", "text_15", "text_16", "text_17", "random_48", "random_129", "chat_5")
    drives = [
        drive_for(cases[name], blocks(10, 1 + 10 * index)) for index, name in enumerate(names)
    ]
    generate(runner, drives, NUM_TOKENS, chunk=37)
    for drive in drives:
        cases[drive.request_id].check(drive.output)


def test_a_prefix_hit(runner: ModelRunner, cases: dict[str, ReferenceCase]) -> None:
    """The second chat computes only what it does not share with the first one's blocks.

    The last of those are computed in the very step that reads them.
    """
    first, second = cases["shop_hours"], cases["shop_price"]
    shared = next(
        index
        for index, (a, b) in enumerate(
            zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
        )
        if a != b
    )
    num_shared_blocks = shared // BLOCK_SIZE
    assert num_shared_blocks > 20
    drives = [
        drive_for(first, blocks(30)),
        drive_for(
            second,
            [*blocks(num_shared_blocks), *blocks(10, 100)],
            num_computed=num_shared_blocks * BLOCK_SIZE,
        ),
    ]
    step(runner, [(drives[0], 200)])
    generate(runner, drives, NUM_TOKENS)
    for drive in drives:
        cases[drive.request_id].check(drive.output)
