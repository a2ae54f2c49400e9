"""A runner on a CUDA device from a model directory: what a node calls once at its start."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.cuda.backends import AttentionChoice, choose_backend
from engine.cuda.runner import CudaRunner, CudaRunnerConfig
from engine.cuda.stream import CudaStream
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.models import CausalLM, load_model


def load_cuda_runner(
    directory: Path,
    config: CudaRunnerConfig,
    *,
    num_blocks: int,
    block_size: int,
    device: str = "cuda",
    dtype: str = "bfloat16",
    attention: AttentionChoice = AttentionChoice.AUTO,
    batch_invariant: bool = False,
) -> CudaRunner:
    """A runner for the Hugging Face directory (`ModelFiles.directory`), its graphs captured.

    `dtype` is that of the weights, the hidden states and the KV cache. `num_blocks` includes the
    null block. `batch_invariant` concerns attention only: the kernels of the matrix products are
    chosen by cuBLAS, which looks at the size of the batch.

    Raises:
        ConfigError: no such device, or nothing that computes attention there.
        ModelError: a file missing or broken, or a model that the engine cannot run.
    """
    stream = CudaStream(device)
    return make_cuda_runner(
        load_cuda_model(directory, stream, dtype),
        stream,
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        attention=attention,
        batch_invariant=batch_invariant,
    )


def load_cuda_model(directory: Path, stream: CudaStream, dtype: str) -> CausalLM:
    """The model on the stream's device. Raises ModelError, as `load_cuda_runner`."""
    model = load_model(directory, device=str(stream.device), dtype=getattr(torch, dtype))
    torch.cuda.synchronize(stream.device)  # the weights have come by another stream
    return model


def make_cuda_runner(
    model: CausalLM,
    stream: CudaStream,
    config: CudaRunnerConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: str = "bfloat16",
    attention: AttentionChoice = AttentionChoice.AUTO,
    batch_invariant: bool = False,
) -> CudaRunner:
    """A runner with a KV cache of its own. Nodes of one process pass the same model, which is on
    the stream's device in `dtype`. Raises ConfigError, as `load_cuda_runner`."""
    shape = KVCacheConfig.for_model(
        model.config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        device=str(stream.device),
    )
    kv_cache = KVCache(shape)
    backend = choose_backend(
        attention,
        stream,
        kv_cache,
        model.config,
        config.max_model_len,
        batch_invariant=batch_invariant,
    )
    runner = CudaRunner(model, kv_cache, stream, backend, config)
    runner.capture()
    return runner
