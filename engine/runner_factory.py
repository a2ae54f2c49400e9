"""A runner from a model directory: what a node calls once at its start."""

from __future__ import annotations

from pathlib import Path

from engine.core_share import Cores
from engine.engine_config import EngineConfig
from engine.kernels import Kernels, choose_kernels
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.model_runner import ModelRunner
from engine.models import CausalLM, load_model


def load_model_runner(
    directory: Path, *, num_blocks: int, block_size: int, config: EngineConfig | None = None
) -> ModelRunner:
    """A runner for the Hugging Face directory (`ModelFiles.directory`), on a CPU.

    `num_blocks` includes the null block; `engine.blocks_within` turns a memory budget into it.

    Raises:
        ConfigError: the kernels that are asked for cannot be had.
        ModelError: a file missing or broken, or a model that the engine cannot run.
    """
    config = config or EngineConfig()
    kernels = choose_kernels(config)
    return make_model_runner(
        load_model(directory, kernels, quantization=config.quantization),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_cache_dtype=config.cache_dtype,
        kernels=kernels,
    )


def make_model_runner(
    model: CausalLM,
    *,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "float32",
    kernels: Kernels | None = None,
    cores: Cores | None = None,
    memory: memoryview | None = None,
) -> ModelRunner:
    """A runner with a KV cache of its own. Nodes of one process pass the same model and cores.

    `kernels`: those that the model was loaded with; by default plain torch. `memory`: where the KV
    cache lies, if not in memory of its own.
    """
    shape = KVCacheConfig.for_model(
        model.config, num_blocks=num_blocks, block_size=block_size, dtype=kv_cache_dtype
    )
    return ModelRunner(model, KVCache(shape, memory), cores, kernels)
