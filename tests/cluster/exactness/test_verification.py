"""All ways give the same bits; and if one does not, or is not taken, that is found."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import LocalCluster, LocalConfig, TransportChoice
from cluster.eventually import eventually
from cluster.exactness import ExactnessConfig, MakeCompute, Verification, WayResult
from engine import EngineConfig, KernelsChoice, Quantization
from engine.weights import ModelFiles, ModelStore
from protocol import ConfigError
from router import RouterConfig
from tests.cluster.exactness.faulty_model import ForgetfulModel, spoiled
from tests.cluster.exactness.taken_ways import Verify, model_dir, take_all

# What is only there with an extra.
OPTIONAL = {"handed off by nixl"}


def check(results: dict[str, WayResult]) -> None:
    for name, result in results.items():
        assert result.passed, result
        if result.skipped is not None:
            assert name in OPTIONAL
            continue
        assert result.num_equal == result.num_compared, result
        assert result.difference is None
        assert result.other_tokens == ()


async def test_all_ways_give_the_same_bits(verify: Verify) -> None:
    config = ExactnessConfig()
    results = await verify(config)
    check(results)
    assert len(results) >= 18
    whole = config.prompts * config.max_tokens
    assert all(r.num_compared >= whole for r in results.values() if r.skipped is None)
    assert results["migrated"].num_compared > whole, "nothing was computed again"


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(quantization=Quantization.INT8),
        EngineConfig(kv_cache_dtype="bfloat16"),
    ],
    ids=["int8 weights", "bfloat16 KV"],
)
async def test_other_numbers(files: ModelFiles, engine: EngineConfig) -> None:
    check(await take_all(files, ExactnessConfig(engine=engine)))


async def test_few_prompts_on_one_thread(files: ModelFiles) -> None:
    check(await take_all(files, ExactnessConfig(prompts=8, max_tokens=8, threads=1)))


async def test_a_model_for_few_tokens(tmp_path: Path) -> None:
    files = model_dir(tmp_path, max_position_embeddings=64)
    results = await take_all(files, ExactnessConfig(max_tokens=20))
    check(results)
    with pytest.raises(ConfigError, match=r"max_tokens: must be at most 56.* 64 tokens"):
        Verification(files, ExactnessConfig(max_tokens=57))


async def test_one_ulp_in_one_logit_is_found(
    files: ModelFiles, verify: Verify, make_compute: MakeCompute
) -> None:
    wrong = spoiled(make_compute, lambda config: config.transfer.layerwise)
    results = await verify(make_compute=wrong, only=("batched", "layer by layer"))
    assert results["reference"].passed
    assert results["batched"].passed
    found = results["layer by layer"]
    assert not found.passed
    # Each of the two nodes does it once.
    assert found.num_equal == found.num_compared - 2
    assert found.evidence.happened
    assert found.difference is not None
    assert found.difference.num_logits == 1
    assert found.difference.num_all == files.config.vocab_size
    assert 0 < found.difference.largest < 1e-5
    assert found.difference.position == 0
    number = int(found.difference.prompt.removeprefix("prompt-"))
    prompts = Verification(files, ExactnessConfig(), make_compute).prompts
    assert found.difference.num_prompt_tokens == len(prompts[number].token_ids)


async def test_other_tokens_are_found(verify: Verify, make_compute: MakeCompute) -> None:
    def has_async_scheduling(config: LocalConfig) -> bool:
        return config.scheduler.async_scheduling is True

    wrong = spoiled(make_compute, has_async_scheduling, ForgetfulModel)
    results = await verify(make_compute=wrong, only=("async scheduling",))
    found = results["async scheduling"]
    assert not found.passed
    assert found.num_equal < found.num_compared
    assert found.other_tokens
    assert found.difference is not None
    assert found.difference.num_logits > 1
    assert not math.isnan(found.difference.largest)


async def test_a_reference_that_changes_is_found(verify: Verify, make_compute: MakeCompute) -> None:
    """The second run is not the first one."""
    runs: list[LocalConfig] = []

    def second(config: LocalConfig) -> bool:
        runs.append(config)
        return len(runs) == 2

    results = await verify(make_compute=spoiled(make_compute, second), only=("batched",))
    assert not results["reference"].passed
    assert results["reference"].difference is not None
    assert results["batched"].passed


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("batched", "reference"),
        ("chunks of 16", "reference"),
        ("async scheduling", "batched"),
        ("prefix cache", "batched"),
        ("preempted", "batched"),
        ("all preempted at once", "preempted"),
        ("1 thread", "batched"),
        ("blocks of 64", "batched"),
        ("handed off", "batched"),
        ("handed off by shm", "handed off"),
        ("layer by layer", "handed off"),
        ("to other blocks", "handed off"),
        ("handed off, preempted", "handed off"),
        ("migrated", "handed off"),
        ("2 P and 2 D, all at once", "handed off"),
    ],
)
async def test_a_way_that_is_not_taken_is_found(
    files: ModelFiles, make_compute: MakeCompute, name: str, instead: str
) -> None:
    """The cluster of one way, asked in its manner, is no evidence of another one."""
    verification = Verification(files, ExactnessConfig(), make_compute)
    ways = {way.name: way for way in verification.all_ways}
    verification.ways = [replace(ways[instead], name=name, find_evidence=ways[name].find_evidence)]
    *_, result = [result async for result in verification.run()]
    assert result.name == name
    assert result.num_equal == result.num_compared > 0
    assert not result.evidence.happened
    assert not result.passed


async def test_what_cannot_be_tried_is_told(files: ModelFiles, make_compute: MakeCompute) -> None:
    """A way whose requests are refused has failed; one that needs what is not here is no fault."""
    verification = Verification(files, ExactnessConfig(), make_compute)
    batched, shm = (
        next(way for way in verification.ways if way.name == name)
        for name in ("batched", "handed off by shm")
    )
    busy = replace(batched.config, router=RouterConfig(max_inflight_requests=1))
    verification.ways = [
        replace(batched, config=busy),
        replace(shm, config=_without_an_address(shm.config), optional=True),
    ]
    _, refused, skipped = [result async for result in verification.run()]
    assert not refused.passed
    assert refused.error is not None
    assert "1" in refused.error
    assert skipped.passed
    assert skipped.skipped is not None
    verification.ways = [replace(way, optional=False) for way in verification.ways]
    with pytest.raises(ConfigError):
        [result async for result in verification.run()]


def _without_an_address(config: LocalConfig) -> LocalConfig:
    """NIXL cannot start, whether or not it is installed."""
    transfer = replace(config.transfer, transport=TransportChoice.NIXL, bind="auto")
    return replace(config, transfer=transfer)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prompts": 7}, "prompts"),
        ({"max_tokens": 7}, "max_tokens"),
        ({"max_tokens": 1025}, "max_tokens"),
        ({"threads": 0}, "threads"),
        ({"engine": EngineConfig(device="cuda")}, "device"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExactnessConfig(**settings)  # type: ignore[arg-type]
    assert error.value.field == field


def test_plain_torch_is_refused(files: ModelFiles) -> None:
    config = ExactnessConfig(engine=EngineConfig(kernels=KernelsChoice.TORCH))
    with pytest.raises(ConfigError, match="batch_invariant: needs the compiled kernels"):
        Verification(files, config)


@pytest.mark.parametrize("after", [0, 2, 9])
async def test_nothing_is_left_when_it_is_cancelled(
    files: ModelFiles, make_compute: MakeCompute, after: int
) -> None:
    """Amid any way, and while one stops."""
    before = set(threading.enumerate())
    verification = Verification(files, ExactnessConfig(max_tokens=32), make_compute)
    num_results = 0

    async def run() -> None:
        nonlocal num_results
        async for _ in verification.run():
            num_results += 1

    running = asyncio.create_task(run())

    def is_amid() -> bool:
        return num_results >= after and bool(_nodes(before))

    assert await eventually(is_amid, within_s=60, every_s=0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _nodes(before)


async def test_nothing_is_left_when_it_is_cancelled_while_it_stops(
    files: ModelFiles, make_compute: MakeCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    stop = LocalCluster.stop

    async def stop_and_hear_a_signal(cluster: LocalCluster) -> None:
        running.cancel()
        await asyncio.sleep(0.01)
        await stop(cluster)

    monkeypatch.setattr(LocalCluster, "stop", stop_and_hear_a_signal)
    verification = Verification(files, ExactnessConfig(), make_compute)
    running = asyncio.create_task(_first_of(verification))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not _nodes(before)


async def _first_of(verification: Verification) -> WayResult:
    return await anext(aiter(verification.run()))


def _nodes(before: set[threading.Thread]) -> set[str]:
    """Names of threads that nodes have started since."""
    return {t.name for t in set(threading.enumerate()) - before if not t.name.startswith("asyncio")}


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_real_model() -> None:
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve("smollm2-135m")
    check(await take_all(files))
