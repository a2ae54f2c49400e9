"""A whole output, sampled with all that clients may ask for, against transformers' logits."""

from __future__ import annotations

import random

import pytest
import torch

from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.runner_factory import make_model_runner
from protocol import SamplingParams
from tests.engine.batches import Drive, blocks, generate
from tests.engine.conftest import Reference
from tests.engine.sampling.reference import params, reference_adjusted, reference_sample
from tests.engine.tiny import VOCAB_SIZE

NUM_TOKENS = 12
SAMPLINGS = [
    params(temperature=0.0),
    params(temperature=0.0, repetition_penalty=1.8),
    params(temperature=0.0, presence_penalty=1.5, logprobs=2),
    params(temperature=0.0, frequency_penalty=2.0),
    params(temperature=0.0, frequency_penalty=-2.0, logprobs=0),
    params(temperature=0.8, seed=1, min_p=0.3),
    params(temperature=1.2, seed=2, top_k=9, repetition_penalty=0.7),
    params(temperature=0.0, logit_bias=((7, 50.0), (8, -100.0)), min_tokens=3, eos_token_ids=(7,)),
    params(temperature=1.0, seed=3, logit_bias=tuple((t, 100.0) for t in range(40, 45))),
    params(temperature=1.5, seed=4, top_p=0.7, presence_penalty=-2.0, logprobs=20),
]


@pytest.fixture
def runner(tiny_model: CausalLM) -> ModelRunner:
    return make_model_runner(tiny_model, num_blocks=200, block_size=4)


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=5 + seed)


def expected_output(reference: Reference, p: SamplingParams, prompt: list[int]) -> list[int]:
    """By the slow sampler. Logits differ by 1e-5, so a token may only if another is as close."""
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        logits = reference([*prompt, *output])[-1].tolist()
        adjusted = reference_adjusted(logits, p, prompt, output)
        output.append(reference_sample(adjusted, p, len(output)))
    return output


@pytest.mark.parametrize("chunk", [3, 100])
def test_every_request_of_a_batch_gets_its_own_sampling(
    runner: ModelRunner, reference: Reference, chunk: int
) -> None:
    drives = [
        Drive(f"r{n}", prompt(n), blocks(10, 1 + 10 * n), sampling)
        for n, sampling in enumerate(SAMPLINGS)
    ]
    expected = [expected_output(reference, d.sampling, list(d.token_ids)) for d in drives]
    generate(runner, drives, num_tokens=NUM_TOKENS, chunk=chunk)
    assert [drive.output for drive in drives] == expected
    plain = expected_output(reference, params(temperature=0.0), prompt(1))
    assert expected[1] != plain  # the options do something


@pytest.mark.parametrize("num_forced", [1, 5, NUM_TOKENS - 1])
def test_output_from_elsewhere_counts_as_output(
    runner: ModelRunner, reference: Reference, num_forced: int
) -> None:
    """A request that goes on here gets the tokens that it would have got there."""
    expected = [expected_output(reference, p, prompt(n)) for n, p in enumerate(SAMPLINGS)]
    drives = [
        Drive(
            f"r{n}",
            [*prompt(n), *output[:num_forced]],
            blocks(10, 1 + 10 * n),
            SAMPLINGS[n],
            num_prompt_tokens=len(prompt(n)),
        )
        for n, output in enumerate(expected)
    ]
    generate(runner, drives, num_tokens=NUM_TOKENS - num_forced)
    assert [drive.output for drive in drives] == [output[num_forced:] for output in expected]


def test_logprobs_are_those_of_transformers(runner: ModelRunner, reference: Reference) -> None:
    """Of the model's own logits, whatever was done to them before the token was chosen."""
    drives = [
        Drive(f"r{n}", prompt(n), blocks(10, 1 + 10 * n), sampling)
        for n, sampling in enumerate(SAMPLINGS)
    ]
    generate(runner, drives, num_tokens=NUM_TOKENS)
    for drive, sampling in zip(drives, SAMPLINGS, strict=True):
        if sampling.logprobs is None:
            assert drive.logprobs == []
            continue
        assert len(drive.logprobs) == NUM_TOKENS
        logits = reference(drive.token_ids)[-NUM_TOKENS - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1)
        for row, token, told in zip(expected, drive.output, drive.logprobs, strict=True):
            assert told.logprob == pytest.approx(row[token].item(), abs=1e-3)
            likeliest = row.topk(sampling.logprobs)
            assert list(told.top_logprobs) == pytest.approx(likeliest.values.tolist(), abs=1e-3)
            of_those = [row[other].item() for other in told.top_token_ids]
            assert of_those == pytest.approx(likeliest.values.tolist(), abs=1e-3)
