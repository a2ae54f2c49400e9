"""The runner over a stand-in for the device: its tokens are those of the plain runner."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch

from engine import Engine, PipelinedEngine
from engine.cuda.kv_writer import KVWriter
from engine.cuda.runner import CudaRunner, CudaRunnerConfig
from engine.loop import LaunchingRunner, LayeredRunner, StepRunner
from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.runner_factory import make_model_runner
from kv_transfer import BaseConnector
from protocol import ConfigError, SamplingParams, TokenLogprobs
from scheduler import CacheConfig, Request, Scheduler, SchedulerConfig, SchedulerOutput
from scheduler.output import CachedRequestData
from tests.engine.batches import Drive, _new, blocks, generate, step
from tests.engine.cuda.deferred_stream import TIMEOUT_S, DeferredStream
from tests.engine.cuda.runners import KINDS, MAX_MODEL_LEN, make_runner
from tests.engine.tiny import VOCAB_SIZE

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.3, seed=5, top_p=0.9, max_tokens=14),
    SamplingParams(temperature=0.8, seed=6, top_k=12, min_p=0.01, max_tokens=9),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=13),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=7),
    SamplingParams(
        temperature=1.0, seed=9, logit_bias=((7, 4.0), (11, -3.0)), min_tokens=6, max_tokens=10
    ),
)

Outputs = dict[str, list[int]]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def requests(samplings: Sequence[SamplingParams] = SAMPLINGS) -> list[Request]:
    return [
        Request(f"r{n}", prompt(n, 3 + 7 * n), sampling, hash_block_size=BLOCK_SIZE)
        for n, sampling in enumerate(samplings)
    ]


def make_scheduler(
    num_blocks: int = 200, connector: BaseConnector | None = None, chunk: int = 16
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=MAX_MODEL_LEN
    )
    cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)
    return Scheduler(config, cache, connector)


def run(engine: Engine, wanted: Sequence[Request]) -> Outputs:
    """All requests to their ends; what each has generated."""
    for request in wanted:
        engine.scheduler.add_request(request)
    outputs: Outputs = {request.request_id: [] for request in wanted}
    while engine.scheduler.has_requests():
        for update in engine.step().updates:
            outputs[update.request.request_id] += update.new_token_ids
    engine.close()
    return outputs


def plain(model: CausalLM, wanted: Sequence[Request], num_blocks: int = 200) -> Outputs:
    runner = make_model_runner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return run(Engine(make_scheduler(num_blocks), runner), wanted)


def test_it_is_what_the_loop_asks_for(tiny_model: CausalLM, stream: DeferredStream) -> None:
    runner = make_runner(tiny_model, stream)
    assert isinstance(runner, LaunchingRunner)
    assert isinstance(runner, LayeredRunner)
    plain_runner: StepRunner = ModelRunner(tiny_model, runner.kv_cache)
    assert not isinstance(plain_runner, LaunchingRunner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("max_graph_seqs", [0, 4, 8])
def test_the_tokens_are_those_of_the_plain_runner(
    tiny_model: CausalLM,
    stream: DeferredStream,
    kind: str,
    pipelined: bool,
    max_graph_seqs: int,
) -> None:
    expected = plain(tiny_model, requests())
    runner = make_runner(tiny_model, stream, kind, max_graph_seqs=max_graph_seqs)
    make = PipelinedEngine if pipelined else Engine
    assert run(make(make_scheduler(), runner), requests()) == expected
    assert any(graph.num_replays for graph in stream.graphs) == bool(max_graph_seqs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipelined", [False, True])
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    tiny_model: CausalLM, stream: DeferredStream, kind: str, pipelined: bool
) -> None:
    few = 17
    expected = plain(tiny_model, requests())
    runner = make_runner(tiny_model, stream, kind, num_blocks=few)
    scheduler = make_scheduler(few)
    planned: list[SchedulerOutput] = []

    class Watched(PipelinedEngine if pipelined else Engine):  # type: ignore[misc]
        def _begin(self, scheduled: SchedulerOutput, *rest: object) -> None:
            planned.append(scheduled)
            super()._begin(scheduled, *rest)

    assert run(Watched(scheduler, runner), requests()) == expected
    assert any(scheduled.preempted_req_ids for scheduled in planned)


def test_a_step_is_launched_before_the_host_has_the_tokens_of_the_one_before(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    drives = [Drive(f"r{n}", prompt(n, 3 + n), blocks(9, 1 + 9 * n)) for n in range(3)]
    expected = [Drive(f"r{n}", prompt(n, 3 + n), blocks(9, 1 + 9 * n)) for n in range(3)]
    generate(make_model_runner(tiny_model, num_blocks=200, block_size=4), expected, num_tokens=3)
    runner = make_runner(tiny_model, stream)
    first = step_of(drives, new=True)
    second = step_of(drives, computed=1)
    with stream.hold():
        one = runner.launch(first)
        two = runner.launch(second)
        assert not one.computed
    three = runner.launch(step_of(drives, computed=2))
    for handle, position in ((one, 0), (two, 1), (three, 2)):
        tokens = handle.result().sampled_token_ids
        assert tokens == {d.request_id: (d.output[position],) for d in expected}


def step_of(drives: Sequence[Drive], *, new: bool = False, computed: int = 0) -> SchedulerOutput:
    """The whole prompts, or one token each after `computed` that were generated."""
    output = SchedulerOutput()
    for drive in drives:
        length = len(drive.token_ids)
        output.num_scheduled_tokens[drive.request_id] = length if new else 1
        if new:
            output.scheduled_new_reqs.append(_new(drive))
        else:
            before = length + computed - 1
            diff = CachedRequestData(drive.request_id, (), before, before + 1)
            output.scheduled_cached_reqs.append(diff)
    return output


def test_a_request_that_is_penalized_waits_for_its_tokens(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    runner = make_runner(tiny_model, stream)
    penalized = SamplingParams(temperature=0.0, presence_penalty=0.5, max_tokens=5)
    drive = Drive("a", prompt(3, 5), blocks(9), penalized)
    one = runner.launch(step_of([drive], new=True))
    two = runner.launch(step_of([drive], computed=1))
    assert one.computed  # to choose the second token the host has to count the first one
    expected = Drive("a", prompt(3, 5), blocks(9), penalized)
    generate(make_model_runner(tiny_model, num_blocks=99, block_size=4), [expected], num_tokens=2)
    got = [*one.result().sampled_token_ids["a"], *two.result().sampled_token_ids["a"]]
    assert got == expected.output


def test_tokens_that_do_not_count_after_all(tiny_model: CausalLM, stream: DeferredStream) -> None:
    """Their KV had not been loaded: what was sampled is forgotten, also if it comes later."""
    drive = Drive("a", prompt(5, 14), blocks(6))
    plain_drive = Drive("a", prompt(5, 14), blocks(6))
    generate(make_model_runner(tiny_model, num_blocks=99, block_size=4), [plain_drive], 3)
    runner = make_runner(tiny_model, stream)
    with stream.hold():
        runner.launch(step_of([drive], new=True))
        again = cached(drive, computed=8, known=14, tokens=6)
        handle = runner.launch(again)
    last = runner.launch(step_of([drive], computed=1))
    assert handle.result().sampled_token_ids["a"] == (plain_drive.output[0],)
    assert last.result().sampled_token_ids["a"] == (plain_drive.output[1],)


def cached(drive: Drive, *, computed: int, known: int, tokens: int) -> SchedulerOutput:
    diff = CachedRequestData(drive.request_id, (), computed, known)
    return SchedulerOutput(
        scheduled_cached_reqs=[diff], num_scheduled_tokens={drive.request_id: tokens}
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 8])
def test_a_graph_gives_what_the_same_kernels_give_without_it(
    tiny_model: CausalLM, stream: DeferredStream, kind: str, num_seqs: int
) -> None:
    def outputs(captured: bool) -> list[list[int]]:
        runner = make_runner(
            tiny_model, stream, kind, max_graph_seqs=8, captured=captured, num_blocks=120
        )
        sizes = runner.decodes.sizes
        assert runner.decodes.num_captured == (len(sizes) if captured else 0)
        drives = [Drive(f"r{n}", prompt(n, 4 + n), blocks(9, 1 + 9 * n)) for n in range(num_seqs)]
        generate(runner, drives, num_tokens=6)
        kv.append(runner.kv_cache.tensor[1:].nan_to_num(7.0))
        return [drive.output for drive in drives]

    kv: list[torch.Tensor] = []
    assert outputs(True) == outputs(False)
    assert torch.equal(kv[0], kv[1])


def test_padding_touches_no_block_but_the_null_block(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    runner = make_runner(tiny_model, stream)
    drives = [Drive(f"r{n}", prompt(n, 4), blocks(3, 1 + 3 * n)) for n in range(3)]
    generate(runner, drives, num_tokens=3)  # as a batch of 4
    used = {block for drive in drives for block in drive.block_ids}
    rest = [b for b in range(1, runner.kv_cache.num_blocks) if b not in used]
    assert runner.kv_cache.tensor[rest].isnan().all()


@pytest.mark.parametrize("pipelined", [False, True])
def test_layers_are_told_in_order_before_the_step_is_saved(
    tiny_model: CausalLM, stream: DeferredStream, pipelined: bool
) -> None:
    class Layers(BaseConnector):
        def save_kv_layer(self, layer: int) -> None:
            told.append(layer)

        def wait_for_save(self) -> None:
            told.append(-1)

    told: list[int] = []
    runner = make_runner(tiny_model, stream, max_graph_seqs=1)
    layers = list(range(runner.kv_cache.config.num_layers))
    connector = Layers()
    make = PipelinedEngine if pipelined else Engine
    run(make(make_scheduler(connector=connector), runner, connector), requests()[:3])
    marks = [index for index, layer in enumerate(told) if layer < 0]
    steps = [told[start + 1 : end] for start, end in zip([-1, *marks], marks, strict=False)]
    with_tokens = [step for step in steps if step]
    assert with_tokens == [layers] * len(with_tokens)
    assert len(with_tokens) >= 12


def test_a_layer_is_told_when_it_is_written_and_not_at_the_end(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    runner = make_runner(tiny_model, stream)
    told: list[tuple[int, list[bool]]] = []
    pool, heard = runner.kv_cache.tensor, [threading.Event() for _ in range(3)]

    def on_layer(layer: int) -> None:
        """The device does not begin the next layer before this one was heard of."""
        told.append((layer, [bool(pool[1, n, :, :3].isfinite().all()) for n in range(3)]))
        heard[layer].set()

    write = KVWriter.write

    def slowly(writer: KVWriter, layer: int, *key_value: torch.Tensor) -> None:
        assert layer == 0 or heard[layer - 1].wait(TIMEOUT_S)
        write(writer, layer, *key_value)

    runner.on_layer = on_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVWriter, "write", slowly)
        runner.execute(step_of([Drive("a", prompt(1, 3), blocks(2))], new=True))
    assert told == [(layer, [n <= layer for n in range(3)]) for layer in range(3)]


def test_an_empty_step_only_keeps_the_books(tiny_model: CausalLM, stream: DeferredStream) -> None:
    runner = make_runner(tiny_model, stream)
    drive = Drive("a", prompt(1, 3), blocks(2))
    step(runner, [(drive, 3)])
    output = runner.execute(SchedulerOutput(finished_req_ids=["a", "never seen"]))
    assert output.sampled_token_ids == {}
    with pytest.raises(KeyError):
        step(runner, [(drive, 1)])


def test_seats_are_used_again(tiny_model: CausalLM, stream: DeferredStream) -> None:
    runner = make_runner(tiny_model, stream, max_num_seqs=2)
    for n in range(6):
        drive = Drive(f"r{n}", prompt(n, 5), blocks(3))
        expected = Drive(f"r{n}", prompt(n, 5), blocks(3))
        generate(runner, [drive], num_tokens=4)
        generate(make_model_runner(tiny_model, num_blocks=9, block_size=4), [expected], 4)
        assert drive.output == expected.output
        runner.execute(SchedulerOutput(finished_req_ids=[f"r{n}"]))


def test_logprobs_are_those_of_the_plain_runner(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    def told(runner: StepRunner) -> TokenLogprobs:
        sampling = SamplingParams(temperature=0.0, logprobs=4, max_tokens=5)
        asks, other = Drive("a", prompt(1, 6), blocks(3), sampling), Drive("b", [5], blocks(3, 9))
        output = runner.execute(step_of([asks, other], new=True))
        assert set(output.logprobs) == {"a"}
        (its,) = output.logprobs["a"]
        return its

    plain_runner = make_model_runner(tiny_model, num_blocks=99, block_size=4)
    mine, theirs = told(make_runner(tiny_model, stream)), told(plain_runner)
    assert mine.top_token_ids == theirs.top_token_ids
    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_model_len", 0)],
)
def test_impossible_settings_name_their_field(field: str, value: int) -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    with pytest.raises(ConfigError) as caught:
        CudaRunnerConfig(**settings | {field: value})
    assert caught.value.field == field


def test_a_model_that_breaks_is_noticed_by_who_reads(
    tiny_model: CausalLM, stream: DeferredStream
) -> None:
    runner: CudaRunner = make_runner(tiny_model, stream)

    class Broken:
        config = tiny_model.config

        def forward(self, *_: object) -> torch.Tensor:
            raise RuntimeError("broken")

    runner.model = Broken()  # type: ignore[assignment]
    handle = runner.launch(step_of([Drive("a", prompt(1, 3), blocks(2))], new=True))
    with pytest.raises(RuntimeError, match="broken"):
        handle.result()
    stream._error = None
