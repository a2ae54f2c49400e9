"""A disaggregated cluster and a unified one of the real model, to be measured in turns."""

import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cluster import LocalCluster, LocalConfig, Topology
from cluster.torch_compute import torch_compute
from engine.weights import ModelFiles, ModelStore
from protocol import GenerationRequest, SamplingParams, TokenStream
from router import Dispatcher

_numbers = itertools.count()


def model_files() -> ModelFiles:
    return ModelStore(Path.home() / ".cache" / "kvrelay").resolve("smollm2-135m")


@asynccontextmanager
async def both_topologies() -> AsyncIterator[tuple[LocalCluster, LocalCluster]]:
    """Started; the disaggregated one first."""
    files = model_files()
    clusters = []
    for topology in (Topology.DISAGGREGATED, Topology.UNIFIED):
        config = LocalConfig(topology=topology, max_model_len=2048)
        clusters.append(LocalCluster(config, files, torch_compute(files, config)))
    for cluster in clusters:
        await cluster.start()
    yield clusters[0], clusters[1]
    for cluster in clusters:
        await cluster.stop()


async def submit(dispatcher: Dispatcher, prompt_tokens: int, max_tokens: int) -> TokenStream:
    """A greedy request with a prompt that nobody has cached."""
    number = next(_numbers)
    prompt = random.Random(number).choices(range(100, 40_000), k=prompt_tokens)
    return await dispatcher.submit(
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
            arrival_time=time.time(),
        )
    )
