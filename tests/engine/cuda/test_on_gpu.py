"""On a real device: kernels against plain torch, graphs against kernels, P and D over nixl."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks._random_model import write_random_model
from benchmarks.gpu import hand_off
from engine.cuda import (
    AttentionChoice,
    CudaBlockCopier,
    CudaRunner,
    CudaRunnerConfig,
    CudaStream,
    choose_backend,
)
from engine.cuda.kv_writer import KVWriter
from engine.cuda.staging import StagingRing
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.models import CausalLM, load_model
from engine.runner_factory import make_model_runner
from kv_transfer import BlockLayout, BlockPoolMemory, Extents
from kv_transfer.digest import bytes_of, digest_of, pool_digest
from protocol import SamplingParams
from scheduler import CachedRequestData, SchedulerOutput
from tests.engine.batches import Drive, _new, blocks, generate
from tests.engine.cuda import test_attention as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

BLOCK_SIZE = 256
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
CHOICES = [
    AttentionChoice.VARLEN,
    pytest.param(
        AttentionChoice.FLASHINFER,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
        ),
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), SIZES)


@pytest.fixture(scope="module")
def device_stream() -> Iterator[CudaStream]:
    yield CudaStream()
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def model(directory: Path, device_stream: CudaStream) -> CausalLM:
    made = load_model(directory, device=str(device_stream.device), dtype=torch.bfloat16)
    torch.cuda.synchronize()
    return made


def make_runner(
    model: CausalLM,
    stream: CudaStream,
    choice: AttentionChoice,
    *,
    graphs: bool,
    batch_invariant: bool = False,
) -> CudaRunner:
    config = CudaRunnerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=1024)
    shape = KVCacheConfig.for_model(
        model.config,
        num_blocks=65,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        device=str(stream.device),
    )
    cache = KVCache(shape)
    cache.tensor.zero_()
    backend = choose_backend(
        choice, stream, cache, model.config, 1024, batch_invariant=batch_invariant
    )
    torch.cuda.synchronize()
    runner = CudaRunner(model, cache, stream, backend, config)
    if graphs:
        runner.capture()
    return runner


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, 1024), k=length)


def drives(count: int) -> list[Drive]:
    return [
        Drive(f"r{n}", prompt(n, 40 + 90 * n), blocks(4, 1 + 4 * n), sampling(n))
        for n in range(count)
    ]


def sampling(number: int) -> SamplingParams:
    if number % 3 == 2:
        return SamplingParams(temperature=0.9, top_p=0.9, seed=number, max_tokens=100)
    return SamplingParams(temperature=0.0, max_tokens=100)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("window", [None, 5, 300])
def test_attention_is_that_of_plain_torch(
    device_stream: CudaStream, model: CausalLM, choice: AttentionChoice, window: int | None
) -> None:
    """In float32 on the CPU, over the numbers that bfloat16 holds."""
    lengths = ((5, 0), (1, 700), (130, 400), (1, 255), (256, 0), (1, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "BLOCK_SIZE", BLOCK_SIZE)
        patch.setattr(cases, "HEAD_DIM", 64)
        patch.setattr(cases, "NUM_HEADS", 8)
        patch.setattr(cases, "MAX_LEN", 1024)
        case = cases.Case(lengths)
        packed = case.packed()
    case.caches[0].tensor.copy_(case.filled.bfloat16().float())
    case.qkv = tuple(t.bfloat16().float() for t in case.qkv)
    device = str(device_stream.device)
    cache = KVCache(KVCacheConfig(90, BLOCK_SIZE, 2, 2, 64, "bfloat16", device))
    cache.tensor.copy_(case.filled)
    sliding = {"sliding_window": window, "sliding_layers": (0, 1, 2, 3)} if window else {}
    config = msgspec.structs.replace(model.config, **sliding)
    backend = choose_backend(choice, device_stream, cache, config, 1024)
    qkv = [t.to(device, torch.bfloat16) for t in case.qkv]
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    ring = StagingRing(device_stream, 1 << 20)
    with ring.stage({**packed.inputs(cache), **backend.arrays(packed)}) as staged:

        def work() -> None:
            attention = backend.ragged(packed, staged, KVWriter(cache, staged.device))
            results.append(device_stream.fetch(attention(0, *qkv, window=window)))

        device_stream.submit(work)
    device_stream.record().synchronize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "BLOCK_SIZE", BLOCK_SIZE)
        expected = case.expected(0, window)
    torch.testing.assert_close(results[0].float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(cache.tensor.float().cpu(), case.caches[0].tensor)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_gives_bitwise_what_its_kernels_give(
    device_stream: CudaStream, model: CausalLM, choice: AttentionChoice
) -> None:
    outputs, pools = [], []
    for graphs in (True, False):
        runner = make_runner(model, device_stream, choice, graphs=graphs)
        mine = drives(7)
        generate(runner, mine, num_tokens=24)
        outputs.append([drive.output for drive in mine])
        pools.append(runner.kv_cache.tensor[1:].clone())
    torch.cuda.synchronize()
    assert outputs[0] == outputs[1]
    assert torch.equal(pools[0], pools[1])


@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_are_those_of_the_cpu_but_for_near_ties(
    device_stream: CudaStream, model: CausalLM, directory: Path, choice: AttentionChoice
) -> None:
    """bfloat16 against float32 over the same weights: the CPU's best logit is as good as."""
    runner = make_runner(model, device_stream, choice, graphs=True)
    on_cpu = load_model(directory)
    for number in range(4):
        greedy = SamplingParams(temperature=0.0, max_tokens=100)
        drive = Drive(f"r{number}", prompt(number, 60 + 150 * number), blocks(4), greedy)
        generate(runner, [drive], num_tokens=12)
        told = SamplingParams(temperature=0.0, max_tokens=2, logprobs=8)
        for place in range(12):
            before = prompt(number, 60 + 150 * number) + drive.output[:place]
            plain = make_model_runner(on_cpu, num_blocks=9, block_size=BLOCK_SIZE)
            step = SchedulerOutput()
            again = Drive("a", before, blocks(4), told)
            step.num_scheduled_tokens["a"] = len(before)
            step.scheduled_new_reqs.append(_new(again))
            (its,) = plain.execute(step).logprobs["a"]
            best = dict(zip(its.top_token_ids, its.top_logprobs, strict=True))
            assert drive.output[place] in best, (number, place)
            assert max(best.values()) - best[drive.output[place]] < 0.25
        runner.execute(SchedulerOutput(finished_req_ids=[drive.request_id]))


@pytest.mark.parametrize("choice", CHOICES)
def test_steps_are_launched_without_waiting_for_the_device(
    device_stream: CudaStream, model: CausalLM, choice: AttentionChoice
) -> None:
    """torch raises if anything synchronizes: decodes of all kinds, with logprobs."""
    runner = make_runner(model, device_stream, choice, graphs=True)
    mine = [*drives(6), Drive("bias", prompt(9, 20), blocks(4, 50), _BIASED)]
    generate(runner, mine, num_tokens=3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = SchedulerOutput()
        for drive in mine:
            step.scheduled_cached_reqs.append(
                CachedRequestData(drive.request_id, (), drive.num_computed, len(drive.token_ids))
            )
            step.num_scheduled_tokens[drive.request_id] = 1
        handle = runner.launch(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(handle.result().sampled_token_ids) == {drive.request_id for drive in mine}


_BIASED = SamplingParams(
    temperature=0.7, seed=3, logit_bias=((5, 2.0),), min_tokens=50, logprobs=2, max_tokens=90
)


def test_a_copier_reads_and_copies_memory_of_the_device(device_stream: CudaStream) -> None:
    device = device_stream.device
    numbers = torch.arange(8 * 512, dtype=torch.int32).to(torch.uint8).view(8, 512)
    ours, theirs = numbers.to(device), torch.zeros_like(numbers, device=device)
    torch.cuda.synchronize()
    copier = CudaBlockCopier(device)
    copier.enter_thread()
    layout = BlockLayout(
        fingerprint="f",
        dtype="float32",
        block_size=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        bytes_per_block=512,
    )
    pool = BlockPoolMemory(layout, ours.data_ptr(), 8, ours, device=str(device), copier=copier)
    host = BlockPoolMemory(layout, numbers.data_ptr(), 8, numbers)
    runs = [(700, 100), (3, 5), (512, 512)]
    assert pool_digest(pool, runs) == digest_of(bytes_of(host), runs)
    pairs = Extents.of_blocks([(1, 5), (2, 6), (7, 1)], 512)
    copier.copy(pairs, ours.data_ptr(), theirs.data_ptr())
    assert torch.equal(theirs[[5, 6, 1]].cpu(), numbers[[1, 2, 7]])
    assert not theirs[[0, 2, 3, 4, 7]].any()


def test_p_and_d_on_one_gpu_by_nixl(
    device_stream: CudaStream, model: CausalLM, directory: Path
) -> None:
    pytest.importorskip("nixl_cu12")
    prompts = [prompt(n, length) for n, length in enumerate((40, 256, 700))]
    expected = []
    for wanted in prompts:
        runner = make_runner(model, device_stream, AttentionChoice.AUTO, graphs=True)
        drive = Drive("a", list(wanted), blocks(4))
        generate(runner, [drive], num_tokens=12)
        expected.append(drive.output)
    prefill, decode = hand_off(directory, prompts, 12, block_size=BLOCK_SIZE)
    assert prefill.tokens == [tokens[:1] for tokens in expected]
    assert decode.tokens == [tokens[1:] for tokens in expected]
    assert decode.num_loaded == sum(map(len, prompts))
