"""A runner from a model directory: what a node calls once at its start."""

from __future__ import annotations

from pathlib import Path

from engine.core_share import CoreShare
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.model_runner import ModelRunner
from engine.models import CausalLM, load_model


def make_model_runner(
    model: CausalLM,
    *,
    num_blocks: int,
    block_size: int,
    cores: CoreShare | None = None,
    memory: memoryview | None = None,
) -> ModelRunner:
    """A runner with a KV cache of its own. Nodes of one process pass the same model and cores.

    `memory`: where the KV cache lies, if not in memory of its own.
    """
    config = KVCacheConfig.for_model(model.config, num_blocks=num_blocks, block_size=block_size)
    return ModelRunner(model, KVCache(config, memory), cores)


def load_model_runner(directory: Path, *, num_blocks: int, block_size: int) -> ModelRunner:
    """A runner for the Hugging Face directory (`ModelFiles.directory`).

    `num_blocks` includes the null block; `engine.blocks_within` turns a memory budget into it.
    Raises ModelError: a file missing or broken, or a model that the engine cannot run.
    """
    return make_model_runner(load_model(directory), num_blocks=num_blocks, block_size=block_size)
